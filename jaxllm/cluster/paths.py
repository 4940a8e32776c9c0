"""Settings that name files, for processes with another working folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_NAMES = ("model", "tokenizer", "download_dir", "prefix_cache_dir")


def with_absolute_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that mean the same in workers, which have another working folder."""
    found = dict(settings)
    for name in _NAMES:
        value = found.get(name)
        if value is not None and os.path.exists(value):  # else it is the id of a model
            found[name] = os.path.abspath(value)
    return found
