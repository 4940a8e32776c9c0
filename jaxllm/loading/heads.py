"""Load heads that draft: few tensors, by the names that their configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import WeightsError
from jaxllm.loading.shards import list_tensors
from jaxllm.pallas_kernels.settings import under_jax_defaults


@under_jax_defaults
def load_heads(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    device: jax.Device,
    name_of: Callable[[str], str],
) -> dict[str, jax.Array]:
    """The tensors of a folder of safetensors.

    Args:
        folder: where they are.
        shapes: of all that are needed, by name.
        dtype: of the result; integers become int32.
        device: where they go.
        name_of: what a stored tensor is called here.

    Raises:
        WeightsError: some are missing or have another shape, or the files are corrupt.
    """
    stored = {name_of(name): tensor for name, tensor in list_tensors(folder).items()}
    wrong = [
        f"{name} {stored[name].shape if name in stored else 'is missing'}, to be {shape}"
        for name, shape in shapes.items()
        if name not in stored or stored[name].shape != shape
    ]
    if wrong:
        raise WeightsError(f"the heads of {str(folder)!r} do not match config.json: {'; '.join(wrong[:4])}")
    found = {}
    for name in shapes:
        array = stored[name].read()
        kind = jnp.int32 if np.issubdtype(array.dtype, np.integer) else jnp.dtype(dtype)
        found[name] = jax.device_put(array.astype(kind), device)
    return found
