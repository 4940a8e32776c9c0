"""From a configuration to a model whose weights live in a flat dictionary of arrays.

Jitted programs take that dictionary, `{"layers.0.self_attn.qkv_proj.weight": array, ...}`, and bind it to the
module while tracing, so a step never flattens an `nnx.State`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.errors import WeightsError
from jaxllm.models.architecture import ARCHITECTURES, CausalLM, ModelConfig
from jaxllm.models.layers import Linear
from jaxllm.pallas_kernels import native

Params = dict[str, jax.Array]


def _model(config: ModelConfig, dtype: str) -> CausalLM:
    return ARCHITECTURES[config.architecture].model(config, jnp.dtype(dtype))


@functools.lru_cache(maxsize=16)
def _structure(config: ModelConfig, dtype: str) -> tuple[nnx.GraphDef, dict[tuple, jax.ShapeDtypeStruct]]:
    model = nnx.eval_shape(lambda: _model(config, dtype))
    graphdef, state = nnx.split(model)
    flat = {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}
    return graphdef, flat


def _name(path: tuple) -> str:
    return ".".join(str(part) for part in path)


def abstract_params(
    config: ModelConfig, dtype: str, *, is_packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of every weight, by name; packed or not."""
    params = {_name(path): value for path, value in _structure(config, dtype)[1].items()}
    for name in _linear_weights(config) if is_packed else ():
        if native.packs(params[name]):
            shape = native.packed_shape(*params[name].shape)
            params[name] = jax.ShapeDtypeStruct(shape, params[name].dtype)
    return params


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all weights."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in abstract_params(config, dtype).values())


def bind(config: ModelConfig, params: Mapping[str, jax.Array]) -> CausalLM:
    """The model with `params` as its weights. Cheap enough for tracing, not for every step.

    Raises:
        WeightsError: a weight is missing, unknown or misshapen.
    """
    dtype = str(next(iter(params.values())).dtype) if params else "float32"
    graphdef, flat = _structure(config, dtype)
    expected = {_name(path): value.shape for path, value in flat.items()}
    wrong = sorted(
        name
        for name in expected.keys() | params.keys()
        if name not in params or name not in expected or not _fits(params[name].shape, expected[name])
    )
    if wrong:
        raise WeightsError(f"params do not match the {config.architecture} configuration: {', '.join(wrong)}")
    state = nnx.from_flat_state([(path, nnx.Param(params[_name(path)])) for path in flat])
    return nnx.merge(graphdef, state)


def pack_linear_weights(config: ModelConfig, params: Params) -> None:
    """Pack, one after the other and in place of it, every weight that native products take."""
    for name in _linear_weights(config):
        params[name] = packed(config, name, params[name])


def packed(config: ModelConfig, name: str, weight: jax.Array) -> jax.Array:
    """A weight, packed if it is one that native products take."""
    if name not in _linear_weights(config) or not native.packs(weight):
        return weight
    weight = jax.block_until_ready(native.pack(weight))
    native.use_huge_pages(weight)
    return weight


def unpacked(config: ModelConfig, params: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """The weights, those that are packed as checkpoints have them."""
    if all(weight.ndim < 3 for weight in params.values()):
        return params
    shapes = abstract_params(config, "float32")
    return {
        name: weight if weight.ndim < 3 else native.unpacked_rows(weight, jnp.arange(shapes[name].shape[0]))
        for name, weight in params.items()
    }


@functools.lru_cache(maxsize=16)
def _linear_weights(config: ModelConfig) -> list[str]:
    """Names of the weights that activations are multiplied by."""
    model: Any = nnx.eval_shape(lambda: _model(config, "float32"))
    found = [path for path, module in nnx.iter_modules(model) if isinstance(module, Linear)]
    names = [f"{_name(path)}.weight" for path in found]
    return [*names, "embed_tokens.weight"] if config.tie_word_embeddings else names


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a weight of one shape is, packed or not, what was expected."""
    return shape == expected or (len(expected) == 2 and shape == native.packed_shape(*expected))
