"""LLM inference in JAX and Pallas: paged KV cache, continuous batching, policies as small classes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.engine.engine import Engine
    from jaxllm.llm import LLM
    from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Engine", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams"]

# Loaded on first use (PEP 562), so that the scheduler can be imported without JAX.
_HOMES = {
    "LLM": "jaxllm.llm",
    "CompletionOutput": "jaxllm.outputs",
    "Engine": "jaxllm.engine.engine",
    "EngineConfig": "jaxllm.config",
    "Logprob": "jaxllm.outputs",
    "RequestOutput": "jaxllm.outputs",
    "SamplingParams": "jaxllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
