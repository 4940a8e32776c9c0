"""Settings of engines, for workers in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError

_NAMES = ("model", "tokenizer", "download_dir", "prefix_cache_dir")


def for_workers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that mean the same in workers, which have another working folder.

    Raises:
        ConfigError: an engine would be of several processes, and a worker is one.
    """
    found = dict(settings)
    if found.get("nnodes", 1) != 1:
        raise ConfigError(
            f"nnodes={found['nnodes']} processes have one engine, and each worker of a cluster is an engine "
            "in one process: leave it out"
        )
    for name in _NAMES:
        value = found.get(name)
        if value is not None and os.path.exists(value):  # else it is the id of a model
            found[name] = os.path.abspath(value)
    return found
