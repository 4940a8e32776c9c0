"""LLM inference in JAX and Pallas: paged KV cache, continuous batching, policies as small classes."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.engine.beam_search import BeamSearchParams
    from jaxllm.engine.config import EngineConfig
    from jaxllm.engine.engine import Engine
    from jaxllm.engine.inputs import TextPrompt, TokensPrompt
    from jaxllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxllm.llm import LLM
    from jaxllm.sampling.param_checks import RequestOutputKind
    from jaxllm.sampling.params import SamplingParams
    from jaxllm.sampling.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

# Loaded on first use (PEP 562), so that the scheduler can be imported without JAX.
_HOMES = {
    "LLM": "jaxllm.llm",
    "BeamSearchParams": "jaxllm.engine.beam_search",
    "CompletionOutput": "jaxllm.engine.outputs",
    "Engine": "jaxllm.engine.engine",
    "EngineConfig": "jaxllm.engine.config",
    "Logprob": "jaxllm.engine.outputs",
    "RequestOutput": "jaxllm.engine.outputs",
    "RequestOutputKind": "jaxllm.sampling.params",
    "SamplingParams": "jaxllm.sampling.params",
    "StructuredOutputsParams": "jaxllm.sampling.structured_outputs",
    "TextPrompt": "jaxllm.engine.inputs",
    "TokensPrompt": "jaxllm.engine.inputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    waits = _HOMES[name] not in sys.modules and gc.isenabled()
    if waits:
        gc.disable()  # modules stay: full collections amid so many of them are a fifth of this import
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    finally:
        if waits:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
