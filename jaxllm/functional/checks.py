"""What the pure functions are given: verified where values are known, outside of a caller's `jax.jit`."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.interpreters import batching, mlir

from jaxllm.errors import ConfigError, RequestError, WeightsError, shown
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.config import check_model_config
from jaxllm.models.layers import Edit
from jaxllm.models.registry import abstract_params
from jaxllm.pallas_kernels import REFERENCE
from jaxllm.pallas_kernels.api import settle_implementation
from jaxllm.pallas_kernels.kv_layout import KVLayout, layout_of

Params = Mapping[str, jax.Array]
_R = TypeVar("_R")


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Verify numbers, where they are known."""
    if isinstance(value, jax.core.Tracer):
        return
    try:
        is_inside = bool(np.all((np.asarray(value) >= low) & (np.asarray(value) <= high)))
    except (TypeError, ValueError):  # no numbers
        is_inside = False
    if not is_inside:
        raise RequestError(f"{name}={shown(value)} must be from {low:g} to {high:g}")


def is_known(*values: Any) -> bool:
    """Whether these are values and not what a program is traced with."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def check_sizes(config: ModelConfig, **sizes: int) -> None:
    """Verify a configuration, and that sizes are positive integers."""
    check_model_config(config)
    for name, size in sizes.items():
        if export.is_symbolic_dim(size):
            continue
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size < 2**31:
            raise ConfigError(f"{name}={shown(size)} must be an integer of at least 1")


def checked_params(params: Params, config: ModelConfig) -> Params:
    """Weights by name, as JAX's arrays, once they are known to be that, with a configuration."""
    check_sizes(config)
    if not isinstance(params, Mapping) or not params or not all(isinstance(name, str) for name in params):
        raise ConfigError(
            "params must be weights by name, as jaxllm.loading.load_params returns, not "
            f"{shown(list(params)[:3]) if isinstance(params, Mapping) else type(params).__name__}"
        )
    for name, weight in params.items():
        if not _is_array(weight):
            raise ConfigError(
                f"params[{name!r}] is {shown(weight, 60)}, and must be an array, as load_params(folder, "
                "config) returns; where some are trained apart, join them before: {**frozen, **trained}"
            )
        check_sharding(f"params[{name!r}]", weight)
    if lacking := sorted(_names(config) - params.keys()):
        raise WeightsError(
            f"params lack {', '.join(lacking[:8])}{', ...' if len(lacking) > 8 else ''} of the "
            f"{config.architecture} configuration: pass all that load_params(folder, config) returns"
        )
    if any(isinstance(weight, np.ndarray) for weight in params.values()):
        return {name: jnp.asarray(weight) for name, weight in params.items()}
    return params


def check_sharding(name: str, array: Any) -> None:
    """Refuse arrays whose type says how they lie on a mesh: operations here do not say how results are to."""
    spec = jax.typeof(array).sharding.spec if isinstance(array, jax.Array) else ()
    if any(axes is not None for axes in spec):
        raise ConfigError(
            f"{name} is sharded by {spec} over axes of type Explicit: call the function inside "
            "jax.sharding.auto_axes(..., out_sharding=...) or jax.shard_map, or use a mesh of AxisType.Auto"
        )


def _is_array(weight: Any) -> bool:
    """Whether it has a shape, and a dtype that JAX knows, which torch's are not."""
    try:
        jnp.dtype(weight.dtype)
    except (AttributeError, TypeError):
        return False
    return hasattr(weight, "shape")


@functools.lru_cache(maxsize=16)
def _names(config: ModelConfig) -> frozenset[str]:
    return frozenset(abstract_params(config, "float32"))


def checked_edit(edit: Edit | None) -> Edit | None:
    """An edit of activations whose results are known to be like what it is given.

    Raises:
        RequestError: it is no function; or, by the function returned, its result is none or of another shape.
    """
    if edit is None:
        return None
    if not callable(edit):
        raise RequestError(f"edit={shown(edit)} must be a function of a layer's number and its activations")
    try:
        inspect.signature(edit).bind(0, None)
    except TypeError as error:
        raise RequestError(
            f"edit{inspect.signature(edit)} cannot be called with a layer's number and its activations "
            f"({error}): it must be such as lambda layer, x: x"
        ) from error
    except ValueError:  # of a compiled module, which has no signature
        pass

    def verified(layer: int, x: jax.Array) -> jax.Array:
        changed = edit(layer, x)
        if getattr(changed, "shape", None) != x.shape:
            got = (
                "nothing" if changed is None else f"shape {getattr(changed, 'shape', type(changed).__name__)}"
            )
            raise RequestError(f"edit returns {got} for layer {layer}: it must return an array {x.shape}")
        return jnp.asarray(changed, x.dtype)

    return verified


def _array(name: str, value: Any) -> Any:
    """One of JAX's or NumPy's as it is, what NumPy can make one of as that."""
    check_sharding(name, value)
    if isinstance(value, jax.Array | np.ndarray):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:  # rows of several lengths
        raise RequestError(f"{name} must be an array: pad rows to one length ({error})") from error


def checked_mask(mask: Any, shape: tuple[Any, ...]) -> jax.Array:
    """How much each token of so many counts, float32."""
    found = _array("mask", mask)
    if found.shape != shape:
        raise RequestError(f"mask {found.shape} must be of the shape of tokens, {shape}")
    check_range("mask", found, 0, float(np.finfo(np.float32).max))
    return jnp.asarray(found, jnp.float32)


def integers(name: str, value: Any, num_dims: int) -> Any:
    """As an array of that many dimensions."""
    found = _array(name, value)
    if not hasattr(value, "dtype") and not found.size:
        found = found.astype(np.int32)
    if found.ndim != num_dims or not jnp.issubdtype(found.dtype, jnp.integer):
        raise RequestError(
            f"{name} of shape {found.shape} and dtype {found.dtype} must be "
            f"{'[B, L]' if num_dims == 2 else '[B]'}, integers"
        )
    return found


def checked_prompts(config: ModelConfig, tokens: Any, lengths: Any) -> tuple[jax.Array, jax.Array]:
    """Prompts [B, L] and their lengths [B], as arrays; padding may be anything."""
    tokens, lengths = integers("tokens", tokens, 2), integers("lengths", lengths, 1)
    if lengths.shape != tokens.shape[:1] or 0 in tokens.shape:
        raise RequestError(f"tokens {tokens.shape} must be [B, L] and lengths {lengths.shape} [B], not empty")
    check_range("lengths", lengths, 1, tokens.shape[1])
    if is_known(tokens, lengths):
        is_token = np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]
        check_range("tokens", np.asarray(tokens)[is_token], 0, config.vocab_size - 1)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def parts_of(cache: Any) -> tuple[jax.Array, jax.Array]:
    """The pool and the block tables of a cache."""
    pool, tables = getattr(cache, "pool", None), getattr(cache, "block_tables", None)
    if pool is None or tables is None:
        raise ConfigError(
            f"cache={shown(cache, 60)} must be a KVCache, with a pool and block_tables: make it with "
            "init_cache(config, batch_size, max_len)"
        )
    check_sharding("cache.pool", pool)
    return pool, tables


def check_cache(config: ModelConfig, cache: Any, lengths: jax.Array) -> None:
    """Verify that a cache is of the model, and has room for rows of these lengths."""
    pool, tables = parts_of(cache)
    tables = integers("block_tables", tables, 2)
    block_size = pool.shape[4] if pool.ndim == 6 else 0
    width = KVLayout(layout_of(pool).dtype, config.head_dim).width if pool.ndim == 6 else 0
    expected = config.num_layers, 2, config.num_kv_heads, block_size, width
    if pool.ndim != 6 or pool.shape[1:] != expected or tables.shape[:1] != lengths.shape:
        raise ConfigError(
            f"a cache of shape {pool.shape} with block tables {tables.shape} is not of this model and "
            f"{lengths.shape[0]} rows: make it with init_cache(config, {lengths.shape[0]}, max_len)"
        )
    check_range("lengths (of a cache with so much room)", lengths, 0, tables.shape[1] * block_size)
    if is_known(tables, lengths):
        is_used = np.arange(tables.shape[1]) * block_size < np.asarray(lengths)[:, None]
        check_range("block_tables", np.asarray(tables)[is_used], 0, pool.shape[0] - 1)


def check_positions(config: ModelConfig, length: Any) -> None:
    """Verify that a model has positions for sequences of a length, which need not be known."""
    if isinstance(length, int) and length > config.max_model_len:
        raise RequestError(
            f"sequences of {length} tokens exceed the model's {config.max_model_len} positions; shorten them"
        )
    rope = getattr(config, "rope", None)
    if rope is not None and rope.depends_on_length and rope.max_model_len is None:
        raise ConfigError(
            f"rope type {rope.rope_type!r} needs the longest sequence its frequencies are to be made for; "
            f"pass config.with_max_model_len({length}), or the engine's max_model_len for its tokens"
        )


def check_lengths(config: ModelConfig, lengths: jax.Array) -> None:
    """Verify that a model has positions for rows of these lengths, where they are known."""
    if is_known(lengths) and lengths.size:
        check_positions(config, int(np.asarray(lengths).max()))


def _lower(context: mlir.LoweringRuleContext, x: Any) -> list[Any]:
    parameters = getattr(context.module_context, "lowering_parameters", None)
    if getattr(parameters, "for_export", False):
        raise ConfigError(
            "attention implementation 'native' cannot be exported, which is the default on this CPU: pass "
            f"implementation='xla', or {REFERENCE!r}, which has gradients as well"
        )
    return [x]


_not_exported = jax.extend.core.Primitive("jaxllm_not_exported")
"""Its argument, but not in programs that are exported."""
_not_exported.def_impl(lambda x: x)
_not_exported.def_abstract_eval(lambda x: x)
batching.defvectorized(_not_exported)
mlir.register_lowering(_not_exported, _lower)


def transformable(
    function: Callable[..., _R],
    implementation: str | None,
    config: ModelConfig,
    block_size: int,
    edit: Edit | None,
) -> Callable[..., _R]:
    """A function of weights and arrays that says what to pass where its kernels cannot be transformed.

    They have no gradients, native ones cannot be exported, and most need to know all sizes.

    Args:
        function: of an edit, which may close over what is transformed, and then of weights and arrays.
        implementation: of attention.
        config: the model's configuration.
        block_size: tokens per KV block.
        edit: what `function` is given.
    """
    if implementation == REFERENCE:
        return functools.partial(function, edit)
    if implementation is None:
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        implementation, _ = settle_implementation(*heads, block_size)

    @jax.custom_jvp
    def constant(tree: Any) -> Any:
        return tree

    @constant.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise ConfigError(
            f"attention implementation {implementation!r} has no gradients; pass "
            f"implementation={REFERENCE!r}, or use functional.logits or functional.loss, which need no cache"
        )

    edited = None if edit is None else lambda layer, x: constant(edit(layer, x))

    def checked(params: Params, *arrays: Any) -> _R:
        _check_symbolic(implementation, arrays)
        params, (first, *rest) = constant((params, arrays))
        if implementation == "native":
            first = _not_exported.bind(first)
        return function(edited, params, first, *rest)

    return checked


def _check_symbolic(implementation: str, arrays: Sequence[Any]) -> None:
    """Refuse sizes that a program is exported without knowing, where kernels are made for sizes."""
    first = 1 if implementation == "xla" else 0
    sizes = {size: None for array in arrays for size in jnp.shape(array)[first:]}
    if unknown := [str(size) for size in sizes if export.is_symbolic_dim(size)]:
        raise ConfigError(
            f"attention implementation {implementation!r} needs to know sizes, and {', '.join(unknown)} is "
            f"symbolic: pass implementation={REFERENCE!r}, or 'xla' where nothing but the batch is"
        )


def check_key(key: Any) -> None:
    """Verify a PRNG key, typed or raw."""
    is_typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_raw = getattr(key, "dtype", None) == np.uint32 and key.shape == _raw_shape(_generator(jax.config))
    if not (is_typed and key.ndim == 0) and not is_raw:
        raise RequestError(f"key={shown(key)} must be a PRNG key: jax.random.key(0)")


_generator = operator.attrgetter("jax_default_prng_impl")


@functools.lru_cache(maxsize=8)
def _raw_shape(implementation: str) -> tuple[int, ...]:
    """Of the raw keys of a generator."""
    return jax.eval_shape(lambda: jax.random.PRNGKey(0, impl=implementation)).shape
