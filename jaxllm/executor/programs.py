"""The programs of steps: their static shapes, how their inputs are packed, and what they need."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.executor.decode_steps import Drafting, Lookup, run_decode_steps
from jaxllm.executor.placement import ANYWHERE, BY_KV_HEADS, ON_EACH, Placement
from jaxllm.executor.slot_params import PackedSlotParams, Sampling
from jaxllm.executor.step import DeviceState, StepOutputs, run_step
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.registry import PLAIN, Params, abstract_params
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.sampling.logits_processors import LogitsProcessor

_NOWHERE = np.iinfo(np.int32).max
_CHAINED = 8
"""Iterations that follow one another, of which the first one's inputs have room for all new blocks."""


class ProgramKey(NamedTuple):
    """What is static of a step: rows, and the most prompt chunks among them; 0 for one that only decodes.

    With `max_decode_steps` of more than one it is a program of up to so many decode iterations. `sampling` is
    what it can do of `Sampling.IN_STEPS` and, if it only decodes, of `Sampling.FILTERED`. `max_samples` are
    rows that it samples, if these are more than one of each request. With `num_lookups` each iteration drafts
    so many tokens of each request at most, or if it is a single one these are given.
    """

    rows: int
    max_chunks: int = 0
    max_decode_steps: int = 1
    sampling: Sampling = Sampling.GREEDY
    max_samples: int = 0
    num_lookups: int = 0

    @property
    def name(self) -> str:
        """What the program computes."""
        if self.max_chunks:
            return f"step of {self.rows} tokens, up to {self.max_chunks} prompts{self.sampling.words}"
        steps = f", up to {self.max_decode_steps} steps" if self.max_decode_steps > 1 else ""
        lookups = f", up to {self.num_lookups} drafts each" if self.num_lookups else ""
        return f"decode of {self.rows}{steps}{lookups}{self.sampling.words}"

    def covers(self, other: ProgramKey) -> bool:
        """Whether it computes whatever the other one does, with more padding."""
        is_alike = bool(self.max_chunks) == bool(other.max_chunks) and other.sampling in self.sampling
        is_alike &= self.max_samples >= other.max_samples and self.num_lookups == other.num_lookups
        return is_alike and all(mine >= its for mine, its in zip(self[:3], other[:3], strict=True))

    @property
    def is_loop(self) -> bool:
        """Whether it is one of `decode_steps`."""
        return not self.max_chunks and (self.max_decode_steps > 1 or self.num_lookups > 0)

    @property
    def takes_drafts(self) -> bool:
        """Whether it verifies drafts that another program has put among its inputs."""
        return self.num_lookups > 0 and self.max_decode_steps == 1

    def num_decodes(self, max_num_seqs: int) -> int:
        """Most requests that it decodes."""
        return min(self.rows, max_num_seqs)

    def new_blocks(self, block_size: int) -> int:
        """Most blocks of a request that are new to it, if it only decodes with drafts."""
        num_steps = _CHAINED if self.takes_drafts else self.max_decode_steps
        return num_steps * (self.num_lookups + 1) // block_size + 2

    def inputs(self, max_num_seqs: int, block_size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its inputs; see `PackedStep`."""
        rows, chunks, decodes = self.rows, self.max_chunks, self.num_decodes(max_num_seqs)
        shapes: dict[str, tuple[int, ...]] = {"decode_slots": (decodes,), "decode_lengths": (decodes,)}
        if self.num_lookups:
            shapes |= {"limits": (decodes,), "num_drafts": (1,)}
            if self.takes_drafts:
                shapes["drafts"] = self.num_lookups, decodes
            return {**shapes, "num_steps": (1,), "new_blocks": (2, decodes * self.new_blocks(block_size))}
        if not chunks:
            return {**shapes, "num_steps": (1,), "new_blocks": (2, decodes)}
        shapes |= {"tokens": (rows,), "targets": (rows,), "query_starts": (chunks + 1,)}
        shapes |= {"lengths": (chunks,), "slots": (chunks,), "num_seqs": (1,)}
        shapes["sampled"] = 3, self.max_samples or decodes
        return {**shapes, "new_blocks": (2, decodes + chunks + rows // block_size)}


class EngineState(NamedTuple):
    """What the steps of an engine carry on the device, donated from one to the next.

    `tables` are the block tables of the slots, [num_slots + 1, max_blocks] int32, the last row belonging to
    padding; all else is that of `step.DeviceState`.
    """

    pool: jax.Array
    history: jax.Array
    tables: jax.Array
    hidden: jax.Array | None = None
    layers: jax.Array | None = None


STATE_SPECS = EngineState(BY_KV_HEADS, *[ON_EACH] * 4)  # type: ignore[arg-type]
"""How it lies on several devices."""


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
    model_config: ModelConfig,
    key: ProgramKey,
    *,
    dtype: str,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_dtype: str | None = None,
    implementation: str | None = None,
    formats: LinearFormats = PLAIN,
    processors: tuple[LogitsProcessor, ...] = (),
    num_hidden: int = 0,
    kept_layers: tuple[int, ...] = (),
    lookup: Lookup | None = None,
    placement: Placement = ANYWHERE,
) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """A step's program, which updates the device's state in place, and its arguments, from shapes alone.

    Lowered with them and compiled it tells the memory it needs. The second argument is the `EngineState`.
    """
    own = placement.share(model_config)
    state = state_shapes(
        placement.part(model_config),
        dtype=dtype,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_dtype=kv_dtype,
        num_hidden=num_hidden,
        num_kept_layers=len(kept_layers),
    )
    slot_params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PackedSlotParams.host_zeros(max_num_seqs)))
    _, num_inputs = _layout(key, max_num_seqs, block_size)
    packed = jax.ShapeDtypeStruct((num_inputs,), jnp.int32)
    options: dict[str, Any] = {"implementation": implementation, "processors": processors}
    options["kept_layers"] = kept_layers
    if key.num_lookups:
        options["lookup"] = lookup
    if key.max_chunks:
        options["num_contexts"] = placement.num_contexts
    step = functools.partial(_packed_step, own, key, max_num_seqs, options)
    params = abstract_params(own, dtype, formats)
    specs = placement.weight_specs(model_config), STATE_SPECS, ON_EACH, ON_EACH
    outs = STATE_SPECS, output_specs(placement, model_config)
    jitted = placement.jit(step, specs, outs, donate_argnums=(1,))
    return jitted, placement.structs((params, state, slot_params, packed), specs)


def output_specs(placement: Placement, model_config: ModelConfig) -> StepOutputs:
    """How what a step gives lies on several devices."""
    logits = placement.logits_spec(model_config)
    return StepOutputs(ON_EACH, ON_EACH, logits, ON_EACH)  # type: ignore[arg-type]


def state_shapes(
    model: ModelConfig,
    *,
    dtype: str,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_dtype: str | None = None,
    num_hidden: int = 0,
    num_kept_layers: int = 0,
) -> EngineState:
    """The shapes and dtypes of the KV pool, the tokens' history and the block tables.

    `kv_dtype` is one of `KV_DTYPES`; None is `dtype`. With `num_hidden` so many hidden states of each slot
    are kept, and of each token what `num_kept_layers` were given.
    """
    layout = KVLayout(kv_dtype or dtype, model.head_dim)
    pool = (num_gpu_blocks, model.num_layers, 2, model.num_kv_heads, block_size, layout.width)
    history = (max_num_seqs + 1, max_model_len + 1)
    tables = (max_num_seqs + 1, -(-max_model_len // block_size))
    hidden = layers = None
    if num_kept_layers:
        kept = (num_gpu_blocks, block_size, num_kept_layers * model.hidden_size)
        layers = jax.ShapeDtypeStruct(kept, jnp.dtype(dtype))
    if num_hidden:
        kept = (max_num_seqs + 1, num_hidden, model.num_features)
        hidden = jax.ShapeDtypeStruct(kept, jnp.dtype(dtype))
    return EngineState(
        jax.ShapeDtypeStruct(pool, layout.array_dtype),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct(history, jnp.int32),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct(tables, jnp.int32),  # type: ignore[arg-type]
        hidden,  # type: ignore[arg-type]
        layers,  # type: ignore[arg-type]
    )


class PackedStep:
    """The inputs of a step: views of parts of one flat int32 array, uploaded at once; padding at first.

    `decode_slots`, `decode_lengths` [B] are those of `step_rows.DecodeInputs`, and `num_steps` [1] how many
    iterations to compute; `limits` [B], `num_drafts` [1] and `drafts` [K, B], which whoever drafts fills in,
    those of `decode_steps.Drafting`; `tokens`, `targets`, `query_starts`, `lengths`, `slots`, `num_seqs` and
    `sampled` those of `step_rows.PrefillInputs`, if there are prompts. `new_blocks` [2, U] are
    changes of the block tables, which stay on the device: places in the flat tables, beyond their end in
    padding, and the block there.
    """

    decode_slots: np.ndarray
    decode_lengths: np.ndarray
    num_steps: np.ndarray
    limits: np.ndarray
    num_drafts: np.ndarray
    drafts: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray
    query_starts: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    num_seqs: np.ndarray
    sampled: np.ndarray
    new_blocks: np.ndarray

    def __init__(self, key: ProgramKey, max_num_seqs: int, block_size: int) -> None:
        shapes, size = _layout(key, max_num_seqs, block_size)
        self.array = np.zeros(size, np.int32)
        vars(self).update(_split(self.array, shapes))
        self.new_blocks[0] = _NOWHERE
        if key.max_chunks:
            self.sampled[1] = -1

    @property
    def first_token(self) -> int:
        """Where `tokens` begin in the array."""
        return self.decode_slots.size + self.decode_lengths.size


@functools.lru_cache(maxsize=1024)
def _layout(key: ProgramKey, max_num_seqs: int, block_size: int) -> tuple[dict[str, tuple[int, ...]], int]:
    """Shapes of a program's inputs, and how many numbers they are."""
    shapes = key.inputs(max_num_seqs, block_size)
    return shapes, sum(map(math.prod, shapes.values()))


def _split(packed: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The parts of a packed array, of numpy's or JAX's, by name."""
    parts, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape)
        parts[name] = packed[start:end].reshape(shape)
    return parts


def unpacked(
    key: ProgramKey, max_num_seqs: int, block_size: int, tables: jax.Array, packed: jax.Array
) -> tuple[jax.Array, DecodeInputs, PrefillInputs | None, dict[str, jax.Array]]:
    """The block tables as they are now, what a step decodes and computes of prompts, and all its inputs."""
    parts = _split(packed, _layout(key, max_num_seqs, block_size)[0])
    places, blocks = parts["new_blocks"]
    tables = tables.reshape(-1).at[places].set(blocks, mode="drop").reshape(tables.shape)
    slots = parts["decode_slots"]
    decode = DecodeInputs(slots, parts["decode_lengths"], tables[slots])
    prefill = None
    if key.max_chunks:
        prompts = {name: parts[name] for name in PrefillInputs._fields if name in parts}
        prefill = PrefillInputs(block_tables=tables[parts["slots"]], **prompts)
    return tables, decode, prefill, parts


def refilled(
    key: ProgramKey,
    max_num_seqs: int,
    block_size: int,
    packed: jax.Array,
    lengths: jax.Array,
    drafts: jax.Array,
) -> jax.Array:
    """The inputs of the next iteration of several: requests have other lengths [B], and drafts [K, B]."""
    shapes = _layout(key, max_num_seqs, block_size)[0]
    parts = _split(packed, shapes) | {"decode_lengths": lengths, "drafts": drafts}
    return jnp.concatenate([parts[name].reshape(-1) for name in shapes])


def _packed_step(
    model_config: ModelConfig,
    key: ProgramKey,
    max_num_seqs: int,
    options: dict[str, Any],
    params: Params,
    state: EngineState,
    slot_params: PackedSlotParams,
    packed: jax.Array,
) -> tuple[EngineState, StepOutputs]:
    tables, decode, prefill, parts = unpacked(key, max_num_seqs, state.pool.shape[4], state.tables, packed)
    carried = DeviceState(state.pool, state.history, state.hidden, state.layers)
    inputs = model_config, params, carried, slot_params.unpack(), decode
    options = {**options, "sampling": key.sampling}
    if key.is_loop:
        drafting = None
        if key.num_lookups:
            drafting = Drafting(parts["limits"], parts["num_drafts"][0], parts.get("drafts"))
        options["max_steps"] = key.max_decode_steps
        carried, outputs = run_decode_steps(*inputs, parts["num_steps"][0], drafting, **options)
    else:
        carried, outputs = run_step(*inputs, prefill, **options)
    return EngineState(carried.pool, carried.history, tables, carried.hidden, carried.layers), outputs
