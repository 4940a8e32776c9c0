"""Whole sequences at once, without a cache or a loop: what JAX can transform in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from jaxllm.errors import RequestError
from jaxllm.functional.checks import (
    Params,
    check_positions,
    check_range,
    checked_edit,
    checked_mask,
    checked_params,
    integers,
    is_known,
)
from jaxllm.models.architecture import CausalLM, ModelConfig
from jaxllm.models.layers import Attend, Edit, whole
from jaxllm.models.registry import bind, portable
from jaxllm.pallas_kernels.dense import dense_attention
from jaxllm.pallas_kernels.heads import RopeTable, rotated_heads
from jaxllm.pallas_kernels.settings import under_jax_defaults


class Activations(NamedTuple):
    """What a pass computes on its way, layer by layer, for tokens [B, L].

    Attributes:
        logits: [B, L, vocab_size] float32.
        hidden: num_layers + 1 arrays [B, L, features]: the residual stream before each layer, after what
            `edit` did to it, and at last what the output head multiplies. transformers calls them
            `hidden_states`.
        queries: num_layers arrays [B, L, num_heads, head_dim], as they are scored: normed and rotated.
        keys: num_layers arrays [B, L, num_kv_heads, head_dim], likewise.
        values: like `keys`.
    """

    logits: jax.Array
    hidden: tuple[jax.Array, ...]
    queries: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


export.register_namedtuple_serialization(Activations, serialized_name="jaxllm.Activations")


@under_jax_defaults
def logits(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    *,
    edit: Edit | None = None,
    remat: bool = False,
) -> jax.Array:
    """Logits after every token of sequences.

    A token sees those before it alone, so that padding at the end of a row changes nothing before it.

    Args:
        params: weights by name.
        config: the model's configuration (static).
        tokens: [B, L] integers.
        edit: `edit(layer, x)` returns the residual stream `x` [B, L, hidden_size] before a layer, changed.
        remat: compute a layer's activations again for its gradient, rather than keep them (static).

    Returns:
        [B, L, vocab_size] float32.

    Raises:
        ConfigError, RequestError: shapes do not fit, or (outside of a caller's `jax.jit`, where values are
            known) tokens are out of range.
    """
    tokens = integers("tokens", tokens, 2)
    hidden, model, _ = _pass(params, config, tokens, edit, _remat if remat else _plainly)
    return _logits(model, hidden, tokens)


@under_jax_defaults
def logprobs(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    *,
    edit: Edit | None = None,
    remat: bool = False,
) -> jax.Array:
    """Log-probabilities [B, L - 1] float32 of each token but the first, given those before it.

    Arguments and errors are those of `logits`.
    """
    tokens = integers("tokens", tokens, 2)
    scores = logits(params, config, tokens, edit=edit, remat=remat)
    following = jnp.roll(jnp.asarray(tokens, jnp.int32), -1, axis=1)
    of_following = jnp.take_along_axis(scores, following[..., None], axis=2)[:, :-1, 0]
    return of_following - jax.nn.logsumexp(scores[:, :-1], axis=2)


@under_jax_defaults
def loss(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    mask: jax.Array | None = None,
    *,
    edit: Edit | None = None,
    remat: bool = False,
) -> jax.Array:
    """Mean cross entropy of each next token, in nats: a float32 scalar.

    Args:
        params: weights by name.
        config: the model's configuration (static).
        tokens: [B, L] integers, L at least 2.
        mask: [B, L], at least 0, how much each token counts as a target, such as 0 in padding and in prompts;
            those of first tokens are not used. All count alike if None.
        edit: as in `logits`.
        remat: as in `logits`.

    Raises:
        ConfigError, RequestError: as `logits`; or `mask` is not of the tokens' shape, or known and negative.
    """
    tokens = integers("tokens", tokens, 2)
    if isinstance(tokens.shape[1], int) and tokens.shape[1] < 2:
        raise RequestError(f"tokens {tokens.shape} have no next token to predict: give rows of 2 or more")
    weights = None if mask is None else checked_mask(mask, tokens.shape)[:, 1:]
    found = logprobs(params, config, tokens, edit=edit, remat=remat)
    if weights is None:
        return -jnp.mean(found)
    return -jnp.sum(found * weights) / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)


@under_jax_defaults
def trace(params: Params, config: ModelConfig, tokens: jax.Array, *, edit: Edit | None = None) -> Activations:
    """Logits and activations; arguments and errors are those of `logits`."""
    tokens = integers("tokens", tokens, 2)
    hidden, model, attend = _pass(params, config, tokens, edit, _plainly)
    shape = tokens.shape

    def by_row(arrays: list[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(array.reshape(*shape, -1) for array in arrays)

    heads = zip(*attend.heads, strict=True)
    return Activations(_logits(model, hidden, tokens), by_row([*attend.hidden, hidden]), *map(tuple, heads))


def _pass(
    params: Params, config: ModelConfig, tokens: jax.Array, edit: Edit | None, way: _Way
) -> tuple[jax.Array, CausalLM, _WholeSequences]:
    """Hidden states [B * L, features] of what the head multiplies, the model, and what it went through."""
    params, edit = checked_params(params, config), checked_edit(edit)
    if 0 in tokens.shape:
        raise RequestError(f"tokens {tokens.shape} must be [B, L], not empty")
    if is_known(tokens):
        check_range("tokens", tokens, 0, config.vocab_size - 1)
    check_positions(config, tokens.shape[1])
    model = bind(config, portable(params))
    attend = _WholeSequences(config, tokens.shape, edit, way)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    flat = jnp.asarray(tokens, jnp.int32).reshape(-1)
    return model(flat, positions.reshape(-1), attend), model, attend


def _logits(model: CausalLM, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    return model.logits(hidden).reshape(*tokens.shape, -1)


_Way = Callable[[Callable[..., Any]], Callable[..., Any]]


def _plainly(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


_remat: _Way = jax.checkpoint


class _WholeSequences(Attend):
    """Causal attention of each row of a batch over itself.

    Attributes:
        hidden: the residual stream [B * L, hidden_size] before each layer.
        heads: queries, keys and values of each layer, as they are scored.
    """

    def __init__(self, config: ModelConfig, shape: tuple[Any, ...], edit: Edit | None, way: _Way) -> None:
        self._config, self._shape, self._way = config, shape, way
        if edit is not None:
            self.edit = lambda layer, x: edit(layer, x.reshape(*shape, -1)).reshape(x.shape)
        self.hidden: list[jax.Array] = []
        self.heads: list[tuple[jax.Array, jax.Array, jax.Array]] = []

    def __call__(
        self,
        layer: int,
        qkv: jax.Array,
        rope: RopeTable | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        head_dim = self._config.head_dim
        flat = rotated_heads(whole(qkv, dtype), rope, self._config.num_kv_heads, head_dim)
        q, k, v = (part.reshape(*self._shape, -1, head_dim) for part in flat)
        if self._way is _plainly:  # else these are of a layer's own program
            self.heads.append((q, k, v))
        positions = jnp.broadcast_to(jnp.arange(self._shape[1], dtype=jnp.int32), self._shape)
        out = dense_attention(q, k, v, positions, scale=scale, window=window, soft_cap=soft_cap)
        return out.reshape(flat[0].shape)

    def run(
        self, index: int, layer: Callable[..., Any], x: jax.Array, delta: jax.Array | None, *rest: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """As the base class, remembering what goes in."""
        x = x if delta is None else x + whole(delta, x.dtype)
        if self.edit is not None:
            x = self.edit(index, x)
        self.hidden.append(x)
        call = self._way(lambda x, *rest: layer(x, None, *rest, self))
        found: tuple[jax.Array, jax.Array | None] = call(x, *rest)
        return found
