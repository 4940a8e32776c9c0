"""Pure functions for research code: whole sequences at once, or a paged KV cache, prefill and decode.

    from jaxllm import functional as F

    @jax.jit
    def answer(params, tokens, lengths, key):
        return F.generate(params, config, tokens, lengths, 64, key, temperature=0.8).tokens

    gradients = jax.grad(F.loss)(params, config, tokens)

Nothing here touches global state; every function may be called inside `jax.jit` with `config` closed over.
Parameters are a dictionary of arrays by name, as `jaxllm.loading.load_params` returns them.

`logits`, `loss`, `logprobs` and `trace` compute all positions of whole sequences without a cache; JAX can
transform them in every way. The steps of the others are the engine's own, so that greedy tokens are the
engine's; with `implementation="reference"` they can be transformed as well.
"""

from jaxllm.functional.dense import Activations, logits, logprobs, loss, trace
from jaxllm.functional.generation import Generated, generate
from jaxllm.functional.paged import KVCache, decode, fork, init_cache, init_pool, prefill

__all__ = [
    "Activations",
    "Generated",
    "KVCache",
    "decode",
    "fork",
    "generate",
    "init_cache",
    "init_pool",
    "logits",
    "logprobs",
    "loss",
    "prefill",
    "trace",
]
