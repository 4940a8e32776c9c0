"""What a figure needs: simulator, workloads, benchmarks, planning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.research.quality import compare_quality
    from jaxllm.research.shapes import load_shape
    from jaxllm.research.simulator.study import simulate

__all__ = ["compare_quality", "load_shape", "simulate"]

_HOMES = {
    "compare_quality": "jaxllm.research.quality",
    "load_shape": "jaxllm.research.shapes",
    "simulate": "jaxllm.research.simulator.study",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm.research' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
