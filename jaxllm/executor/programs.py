"""The programs of steps: their static shapes, how their inputs are packed, and what they need."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.executor.sampler import Sampling, SlotParams
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
    """What is static of a step: rows, and the most prompt chunks among them; 0 for one that only decodes.

    With `max_decode_steps` of more than one it is a program of up to so many decode iterations. `sampling` is
    all that requests may ask of it.
    """

    rows: int
    max_chunks: int = 0
    max_decode_steps: int = 1
    sampling: Sampling = Sampling.GREEDY

    @property
    def name(self) -> str:
        """What the program computes."""
        sampling = "".join(f", {str(flag.name).lower().replace('_', ' ')}" for flag in self.sampling)
        if self.max_chunks:
            return f"step of {self.rows} tokens, up to {self.max_chunks} prompts{sampling}"
        steps = f", up to {self.max_decode_steps} steps" if self.max_decode_steps > 1 else ""
        return f"decode of {self.rows}{steps}{sampling}"

    def num_decodes(self, max_num_seqs: int) -> int:
        """Most requests that it decodes."""
        return min(self.rows, max_num_seqs)

    def packed_shape(self, max_num_seqs: int, max_blocks: int) -> tuple[int, ...]:
        """Of its packed inputs."""
        if self.max_chunks:
            return (sum(_sizes(self, max_num_seqs, max_blocks)),)
        return self.rows, 3 + max_blocks


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """What a program took to compile and needs to run. Bytes; None where the device does not tell.

    `aliased_bytes` of the arguments are updated in place; the others are only read. `implementation` is of
    its attention, and `fallback` why it is not the device's default one, where that does not cover the model.
    """

    key: ProgramKey
    implementation: str
    fallback: str | None
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
    packs_weights: bool = False,
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """A step's program, which updates the device's state in place, and its arguments, from shapes alone.

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
    packed = jax.ShapeDtypeStruct(key.packed_shape(max_num_seqs, max_blocks), jnp.int32)
    step = functools.partial(_packed_step, model_config, key, max_num_seqs, max_blocks, implementation)
    params = abstract_params(model_config, dtype, is_packed=packs_weights)
    return jax.jit(step, donate_argnums=(1,)), (params, state, slot_params, packed)


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


class PackedStep:
    """The inputs of a step with prompts: views of parts of one flat int32 array, uploaded at once.

    `tokens`, `targets` [R]; `starts` [P + 1]; `lengths`, `slots` [P]; `num_seqs` [1]; `sampled` [3, S];
    `tables` [P, M]; `decode_slots`, `decode_lengths` [B]; `decode_tables` [B, M]; see `step.PrefillInputs`.
    Everything is padding at first.
    """

    def __init__(self, key: ProgramKey, max_num_seqs: int, max_blocks: int) -> None:
        self.array = np.zeros(key.packed_shape(max_num_seqs, max_blocks), np.int32)
        parts = _split(self.array, key, max_num_seqs, max_blocks)
        self.tokens, self.targets, self.starts, self.lengths, self.slots, self.num_seqs = parts[:6]
        self.sampled, self.tables, self.decode_slots, self.decode_lengths, self.decode_tables = parts[6:]
        self.sampled[1] = -1


def _sizes(key: ProgramKey, max_num_seqs: int, max_blocks: int) -> tuple[int, ...]:
    rows, chunks = key.rows, key.max_chunks
    decodes = key.num_decodes(max_num_seqs)
    prompts = (rows, rows, chunks + 1, chunks, chunks, 1, 3 * decodes, chunks * max_blocks)
    return (*prompts, decodes, decodes, decodes * max_blocks)


def _split(packed: Any, key: ProgramKey, max_num_seqs: int, max_blocks: int) -> list[Any]:
    """The parts of a packed array, of numpy's or JAX's."""
    sizes = _sizes(key, max_num_seqs, max_blocks)
    ends = np.cumsum(sizes)
    parts = [packed[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]
    parts[6] = parts[6].reshape(3, -1)
    parts[7] = parts[7].reshape(-1, max_blocks)
    parts[10] = parts[10].reshape(-1, max_blocks)
    return parts


def _packed_step(
    model_config: AnyConfig,
    key: ProgramKey,
    max_num_seqs: int,
    max_blocks: int,
    implementation: str | None,
    params: Params,
    state: DeviceState,
    slot_params: SlotParams,
    packed: jax.Array,
) -> tuple[DeviceState, StepOutputs]:
    one_step = functools.partial(
        run_step,
        model_config,
        params,
        state,
        slot_params,
        sampling=key.sampling,
        implementation=implementation,
    )
    if key.max_chunks:
        parts = _split(packed, key, max_num_seqs, max_blocks)
        return one_step(DecodeInputs(*parts[8:]), PrefillInputs(*parts[:8]))
    decode = DecodeInputs(packed[:, 0], packed[:, 1], packed[:, 3:])
    if key.max_decode_steps == 1:
        return one_step(decode, None)
    return run_decode_steps(
        model_config,
        params,
        state,
        slot_params,
        decode,
        packed[0, 2],
        max_steps=key.max_decode_steps,
        sampling=key.sampling,
        implementation=implementation,
    )
