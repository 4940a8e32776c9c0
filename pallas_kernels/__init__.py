"""Attention over a paged KV cache: one API, one back-end per file, one naive oracle."""

from jaxllm.pallas_kernels.api import (
    IMPLEMENTATIONS,
    attend,
    decode_attention,
    default_implementation,
    prefill_attention,
    settle_implementation,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "attend",
    "decode_attention",
    "default_implementation",
    "prefill_attention",
    "settle_implementation",
    "write_kv",
]
