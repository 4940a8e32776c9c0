"""Attention over a paged KV cache: one API, one back-end per file, one naive oracle."""

if __name__ == "pallas_kernels":  # found in the repository's folder
    raise ImportError("import jaxllm.pallas_kernels: this folder is that package, and not one of its own")

from jaxllm.pallas_kernels.api import (
    IMPLEMENTATIONS,
    REFERENCE,
    attend,
    decode_attention,
    default_implementation,
    prefill_attention,
    settle_implementation,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "REFERENCE",
    "attend",
    "decode_attention",
    "default_implementation",
    "prefill_attention",
    "settle_implementation",
    "write_kv",
]
