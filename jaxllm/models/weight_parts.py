"""Weights put together of others, and cut into parts for several devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.coded_weights import Coded, Int8
from jaxllm.models.linear_weights import Weight, for_cpu, product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fused(Weight):
    """Matrices of formats of their own, one above another, as those of a fused layer.

    Attributes:
        parts: arrays [out of it, in], or weights.
    """

    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Of the matrix."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """That the matrix stands for."""
        return str(jnp.dtype(self.parts[0].dtype))

    @property
    def is_native(self) -> bool:  # type: ignore[override]
        """Whether all products are native."""
        return all(isinstance(part, Weight) and part.is_native for part in self.parts)

    def multiply(
        self,
        x: jax.Array,
        num_rows: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        relu: bool = False,
        out_dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `Weight.multiply`."""
        y = jnp.concatenate([product(x, part, num_rows, out_dtype=out_dtype) for part in self.parts], axis=1)
        y = y if bias is None else y + bias
        return jax.nn.relu(y) if relu else y

    def for_cpu(self) -> Weight:
        """Each as native kernels take it, where they do."""
        return Fused(tuple(for_cpu(part) for part in self.parts))

    def portable(self) -> Weight:
        """Each as every device takes it."""
        return Fused(tuple(part.portable() if isinstance(part, Weight) else part for part in self.parts))


def stacked(weights: Sequence[Any]) -> Any:
    """Weights of one format above one another, as those of fused layers that share their inputs."""
    first = weights[0]
    if not isinstance(first, Coded):
        return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *weights)
    bare = [dataclasses.replace(one, order=None, inputs=None) for one in weights]
    whole = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *bare)
    return dataclasses.replace(whole, order=first.order, inputs=first.inputs)


def of_outputs(weight: Any, rows: np.ndarray) -> Any:
    """Some outputs of a weight [out, in], or of a bias [out]."""
    if not isinstance(weight, Coded):
        return jax.tree.map(lambda array: array[rows], weight)
    bare = dataclasses.replace(weight, order=None, inputs=None)
    taken = jax.tree.map(lambda array: array[rows], bare)
    return dataclasses.replace(taken, order=weight.order, inputs=weight.inputs)


def of_inputs(weight: Any, start: int, stop: int) -> Any:
    """Some inputs of a weight [out, in], one after another.

    Raises:
        ValueError: codes do not come apart there; says why.
    """
    if not isinstance(weight, Weight):
        return weight[:, start:stop]
    if isinstance(weight, Int8):
        return dataclasses.replace(weight, codes=weight.codes[:, start:stop])
    if not isinstance(weight, Coded) or weight.order is not None:
        raise ValueError("inputs are in an order of their own, or of several formats")
    width = weight.shape[1]

    def part(array: jax.Array) -> jax.Array:
        if array.shape[1] == 1:
            return array
        if start * array.shape[1] % width or stop * array.shape[1] % width:
            raise ValueError(f"{width // array.shape[1]} inputs belong together")
        return array[:, start * array.shape[1] // width : stop * array.shape[1] // width]

    offsets = None if weight.offsets is None else part(weight.offsets)
    return dataclasses.replace(weight, codes=part(weight.codes), scales=part(weight.scales), offsets=offsets)
