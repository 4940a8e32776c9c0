"""The programs of steps: their static shapes, how their inputs are packed, and what they need."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.executor.sampler import SlotParams
from jaxllm.executor.step import (
    DecodeInputs,
    DeviceState,
    PrefillInputs,
    StepOutputs,
    run_decode_steps,
    run_step,
)
from jaxllm.models.registry import AnyConfig, Params, abstract_params


class ProgramKey(NamedTuple):
    """Static shape of a step: decode rows, prefill tokens, prefill sequences; 0 where a slice is absent.

    With `max_decode_steps` of more than one it is a program of up to so many decode iterations.
    """

    decode_rows: int
    prefill_tokens: int
    prefill_seqs: int
    max_decode_steps: int = 1

    @property
    def name(self) -> str:
        """What the program computes."""
        if not self.decode_rows:
            return f"prefill of {self.prefill_tokens} tokens, {self.prefill_seqs} prompts"
        steps = f", up to {self.max_decode_steps} steps" if self.max_decode_steps > 1 else ""
        return f"decode of {self.decode_rows}{steps}"


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What a program took to compile and needs to run. Bytes; None where the device does not tell.

    `aliased_bytes` of the arguments are updated in place; the others are only read. `implementation` is of
    its attention.
    """

    key: ProgramKey
    implementation: str
    compile_seconds: float
    argument_bytes: int | None
    aliased_bytes: int | None
    temporary_bytes: int | None
    output_bytes: int | None

    @property
    def name(self) -> str:
        """What it computes."""
        return self.key.name


def step_program(
    model_config: AnyConfig,
    key: ProgramKey,
    *,
    dtype: str,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    implementation: str | None = None,
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """A step's program and its abstract arguments, from shapes alone.

    Lowered with them and compiled it tells the memory it needs. The second argument is the `DeviceState`.
    """
    max_blocks = -(-max_model_len // block_size)
    state = state_shapes(
        model_config,
        dtype=dtype,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    slot_params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, SlotParams.host_zeros(max_num_seqs)))
    decode = prefill = None
    if key.decode_rows:
        decode = jax.ShapeDtypeStruct((key.decode_rows, 3 + max_blocks), jnp.int32)
    if key.prefill_tokens:
        size = sum(_prefill_sizes(key.prefill_tokens, key.prefill_seqs, max_blocks))
        prefill = jax.ShapeDtypeStruct((size,), jnp.int32)
    jitted = jitted_step(model_config, key, max_blocks, implementation)
    return jitted, (abstract_params(model_config, dtype), state, slot_params, decode, prefill)


def state_shapes(
    model: AnyConfig,
    *,
    dtype: str,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> DeviceState:
    """The shapes and dtypes of the KV pool and the tokens' history."""
    pool = (num_gpu_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
    history = (max_num_seqs + 1, max_model_len + 1)
    return DeviceState(
        jax.ShapeDtypeStruct(pool, jnp.dtype(dtype)),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct(history, jnp.int32),  # type: ignore[arg-type]
    )


def jitted_step(
    model_config: AnyConfig, key: ProgramKey, max_blocks: int, implementation: str | None
) -> jax.stages.Wrapped:
    """A step's program, to be lowered; it updates the device's state in place."""
    step = functools.partial(_packed_step, model_config, key, max_blocks, implementation)
    return jax.jit(step, donate_argnums=(1,))


def _prefill_sizes(num_tokens: int, num_seqs: int, max_blocks: int) -> tuple[int, ...]:
    return (num_tokens, num_tokens, num_seqs + 1, num_seqs, num_seqs, num_seqs, 1, num_seqs * max_blocks)


def _unpack_prefill(packed: jax.Array, num_tokens: int, num_seqs: int, max_blocks: int) -> PrefillInputs:
    sizes = _prefill_sizes(num_tokens, num_seqs, max_blocks)
    ends = np.cumsum(sizes)
    parts = [packed[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]
    parts[-1] = parts[-1].reshape(num_seqs, max_blocks)
    return PrefillInputs(*parts)


def _packed_step(
    model_config: AnyConfig,
    key: ProgramKey,
    max_blocks: int,
    implementation: str | None,
    params: Params,
    state: DeviceState,
    slot_params: SlotParams,
    packed_decode: jax.Array | None,
    packed_prefill: jax.Array | None,
) -> tuple[DeviceState, StepOutputs]:
    decode = prefill = None
    if packed_decode is not None:
        decode = DecodeInputs(packed_decode[:, 0], packed_decode[:, 1], packed_decode[:, 3:])
        if key.max_decode_steps > 1:
            return run_decode_steps(
                model_config,
                params,
                state,
                slot_params,
                decode,
                packed_decode[0, 2],
                max_steps=key.max_decode_steps,
                implementation=implementation,
            )
    if packed_prefill is not None:
        prefill = _unpack_prefill(packed_prefill, key.prefill_tokens, key.prefill_seqs, max_blocks)
    return run_step(model_config, params, state, slot_params, decode, prefill, implementation=implementation)
