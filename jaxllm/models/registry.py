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
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.linear_weights import Table, Weight
from jaxllm.models.names import EMBEDDING, LM_HEAD
from jaxllm.pallas_kernels import native

Params = dict[str, Any]
"""By name arrays, or of linear weights what their `LinearFormat` makes."""
PLAIN = LinearFormats()


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


def abstract_params(config: ModelConfig, dtype: str, formats: LinearFormats = PLAIN) -> dict[str, Any]:
    """Shapes and dtypes of every weight, by name, those of linear layers in their formats."""
    params: dict[str, Any] = {_name(path): value for path, value in _structure(config, dtype)[1].items()}
    if formats == PLAIN:
        return params
    return {name: _struct(config, formats, name, one) for name, one in params.items()}


def _struct(config: ModelConfig, formats: LinearFormats, name: str, struct: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(lambda weight: _made(config, formats, name, weight), struct)


def _made(config: ModelConfig, formats: LinearFormats, name: str, weight: Any) -> Any:
    held = formats.of(name)
    if name in linear_weights(config):
        return held.make(weight)
    if name == EMBEDDING and held.stored and held.is_native:
        return Table(weight.astype(held.stored))
    return weight


def weight_bytes(config: ModelConfig, dtype: str, formats: LinearFormats = PLAIN) -> int:
    """Bytes of all weights."""
    arrays = jax.tree.leaves(abstract_params(config, dtype, formats))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


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
        if name not in params or name not in expected or tuple(params[name].shape) != expected[name]
    )
    if wrong:
        raise WeightsError(f"params do not match the {config.architecture} configuration: {', '.join(wrong)}")
    state = nnx.from_flat_state([(path, nnx.Param(params[_name(path)])) for path in flat])
    return nnx.merge(graphdef, state)


def in_format(config: ModelConfig, formats: LinearFormats, name: str, weight: Any) -> Any:
    """A weight as its format has it; `weight` itself if it is not of a linear layer."""
    made = _made(config, formats, name, weight)
    if made is not weight:
        made = jax.block_until_ready(made)
        for array in jax.tree.leaves(made) if formats.is_native else ():
            native.use_huge_pages(array)
    return made


def portable(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights, none of them for native products."""
    return {name: one.portable() if isinstance(one, Weight) else one for name, one in params.items()}


def head_name(config: ModelConfig) -> str:
    """Of the output head's weight."""
    return EMBEDDING if config.tie_word_embeddings else LM_HEAD


@functools.lru_cache(maxsize=16)
def num_summing_layers(config: ModelConfig) -> int:
    """Linear layers whose results are summed over devices."""
    model: Any = nnx.eval_shape(lambda: _model(config, "float32"))
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, Linear)]
    return sum(layer.axis is not None for layer in layers)


@functools.lru_cache(maxsize=16)
def linear_weights(config: ModelConfig) -> list[str]:
    """Names of the weights that activations are multiplied by."""
    model: Any = nnx.eval_shape(lambda: _model(config, "float32"))
    found = [path for path, module in nnx.iter_modules(model) if isinstance(module, Linear)]
    names = [f"{_name(path)}.weight" for path in found]
    return [*names, EMBEDDING] if config.tie_word_embeddings else names
