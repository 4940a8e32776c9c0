"""A step's program in stages of layers, each on devices of its own (pipeline parallelism).

    first stage   inputs, embeddings and its layers | output head, sampling, histories
                            |  x, delta, inputs     ^  x, delta
    next stage              v     its layers        |

Each part is a program of its own, compiled for its devices; between two the host moves what the layers give.
The pool is one array, cut by layers, so that whoever copies blocks sees all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.executor.placement import BY_KV_HEADS, ON_EACH, Placement
from jaxllm.executor.programs import EngineState, PackedStep, ProgramKey, state_shapes, unpacked
from jaxllm.executor.sampler import PackedSlotParams, Sampling
from jaxllm.executor.step import (
    DecodeInputs,
    PagedAttention,
    Places,
    PrefillInputs,
    StepOutputs,
    rows_of,
    sample_rows,
)
from jaxllm.models.architecture import CausalLM, ModelConfig
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.registry import Params, abstract_params, bind
from jaxllm.sampling.logits_processors import LogitsProcessor


class Stream(NamedTuple):
    """What a layer is given: `x` [R, hidden_size], and what is yet to be added to it, if anything."""

    x: jax.Array
    delta: jax.Array | None


class Rows(NamedTuple):
    """Of what a step computes: inputs, places, and the position that the model sees of each row [R]."""

    decode: DecodeInputs
    prefill: PrefillInputs | None
    places: Places
    positions: jax.Array


class StageAttention(PagedAttention):
    """That of some layers, which take what those before them give; other layers do nothing."""

    def __init__(
        self, layers: range, stream: Stream | None, pool: Any, rows: Rows, implementation: str | None
    ) -> None:
        super().__init__(pool, rows.places.slot_mapping, rows.decode, rows.prefill, implementation)
        self._layers, self.stream = layers, stream

    def __call__(self, layer: int, *rest: Any) -> jax.Array:
        """See `Attend`; the pool has the stage's layers."""
        return super().__call__(layer - self._layers.start, *rest)

    def run(self, index: int, layer: Any, x: jax.Array, delta: jax.Array | None, *rest: Any) -> Any:
        """See `Attend`."""
        stream = Stream(x, delta) if self.stream is None else self.stream
        if index in self._layers:
            stream = Stream(*super().run(index, layer, *stream, *rest))
        self.stream = stream
        return stream


class LoweredStages(NamedTuple):
    """The parts of a step's program, to be compiled for their devices."""

    placement: Placement
    names: list[list[str]]
    parts: list[jax.stages.Lowered]

    def compile(self) -> StagedProgram:
        """All of them."""
        return StagedProgram(self.placement, self.names, [part.compile() for part in self.parts])


class StagedProgram:
    """A step's program in stages, which takes and gives what one of a single device does.

    Args:
        placement: of the stages.
        names: of the weights of each stage.
        parts: the program that each stage begins with, and at last that which samples.
    """

    def __init__(
        self, placement: Placement, names: list[list[str]], parts: list[jax.stages.Compiled]
    ) -> None:
        self._stages, self._names = placement.stages, names
        self._first, *self._others, self._last = parts
        self._parts = parts

    def __call__(
        self, params: Params, state: EngineState, slot_params: PackedSlotParams, packed: Any
    ) -> tuple[EngineState, StepOutputs]:
        """As a compiled `programs.step_program`; the host waits for no stage."""
        own, *others = ({name: params[name] for name in names} for names in self._names)
        pool, *pools = self._split(state.pool)
        history, tables = state.history, state.tables
        pool, history, tables, rows, stream = self._first(own, pool, history, tables, slot_params, packed)
        updated = [pool]
        for stage, program, weights, pool in zip(self._stages[1:], self._others, others, pools, strict=True):
            pool, stream = program(weights, pool, *jax.device_put((rows, stream), stage.sharding()))
            updated.append(pool)
        stream = jax.device_put(stream, self._stages[0].sharding())
        history, outputs = self._last(own, history, slot_params, rows, stream)
        return EngineState(self._joined(state.pool, updated), history, tables), outputs

    def memory_analysis(self) -> Any:
        """Bytes of all parts together, each on one of its devices."""
        found = [part.memory_analysis() for part in self._parts]
        if any(one is None for one in found):
            return None
        names = [f"{name}_size_in_bytes" for name in ("argument", "alias", "temp", "output")]
        return SimpleNamespace(**{name: sum(getattr(one, name) for one in found) for name in names})

    def _split(self, pool: jax.Array) -> list[jax.Array]:
        """Of the pool each stage's part, with the same memory."""
        of_device = {shard.device: shard.data for shard in pool.addressable_shards}
        shape = (pool.shape[0], pool.shape[1] // len(self._stages), *pool.shape[2:])
        return [
            jax.make_array_from_single_device_arrays(
                shape, stage.sharding(BY_KV_HEADS), [of_device[device] for device in stage.devices]
            )
            for stage in self._stages
        ]

    def _joined(self, pool: jax.Array, pools: list[jax.Array]) -> jax.Array:
        """The pool of all stages, like the one before."""
        arrays = [shard.data for one in pools for shard in one.addressable_shards]
        return jax.make_array_from_single_device_arrays(pool.shape, pool.sharding, arrays)


def lower_stages(
    model_config: ModelConfig,
    key: ProgramKey,
    *,
    dtype: str,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_dtype: str | None,
    implementation: str | None,
    formats: LinearFormats,
    processors: tuple[LogitsProcessor, ...],
    placement: Placement,
) -> LoweredStages:
    """A step's program in stages, from shapes alone; arguments as of `programs.step_program`."""
    own, stages = placement.share(model_config), placement.stages
    whole = abstract_params(own, dtype, formats)
    names: list[list[str]] = [[] for _ in stages]
    for name in whole:
        names[placement.stage_of(model_config, name)].append(name)
    state = state_shapes(
        placement.part(model_config),
        dtype=dtype,
        num_gpu_blocks=num_gpu_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_dtype=kv_dtype,
    )
    slot_params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PackedSlotParams.host_zeros(max_num_seqs)))
    packed = jax.eval_shape(lambda: jnp.asarray(PackedStep(key, max_num_seqs, block_size).array))
    bound = functools.partial(_bound, own, whole, implementation)
    layers = placement.layers(model_config)
    lowered = []

    def lower(
        place: int, run: Any, ins: tuple[Any, ...], outs: Any, given: tuple[Any, ...], donated: Any
    ) -> Any:
        """Add a part, of a stage; returns the shapes of what it gives."""
        stage = stages[place]
        specs = stage.weight_specs(model_config)
        ins = {name: specs[name] for name in names[place]}, *ins
        weights = {name: whole[name] for name in names[place]}
        jitted = stage.jit(functools.partial(run, bound), ins, outs, donated)
        arguments = stage.structs((weights, *given), ins)
        lowered.append(jitted.lower(*arguments))
        return jax.eval_shape(jitted, *arguments)

    each, pool = ON_EACH, BY_KV_HEADS
    begin = functools.partial(_begin, layers=layers[0], key=key, max_num_seqs=max_num_seqs)
    given: tuple[Any, ...] = state.pool, state.history, state.tables, slot_params, packed
    outs = pool, each, each, each, each
    *_, rows, stream = lower(0, begin, (pool, each, each, each, each), outs, given, (1, 2, 3))
    for place in range(1, len(stages)):
        go_on = functools.partial(_go_on, layers=layers[place])
        lower(place, go_on, (pool, each, each), (pool, each), (state.pool, rows, stream), (1,))
    end = functools.partial(_end, sampling=key.sampling, processors=processors)
    lower(0, end, (each, each, each, each), (each, each), (state.history, slot_params, rows, stream), (1,))
    return LoweredStages(placement, names, lowered)


def _bound(
    config: ModelConfig, whole: Mapping[str, Any], implementation: str | None, params: Params
) -> tuple[CausalLM, str | None]:
    """The model with a stage's weights. Others' are no numbers: what reads them all the same is found out."""

    def nothing(struct: jax.ShapeDtypeStruct) -> jax.Array:
        is_float = jnp.issubdtype(struct.dtype, jnp.floating)
        return jnp.full(struct.shape, jnp.nan if is_float else 0, struct.dtype)

    given = {
        name: params[name] if name in params else jax.tree.map(nothing, one) for name, one in whole.items()
    }
    return bind(config, given), implementation


def _begin(
    bound: Any,
    params: Params,
    pool: jax.Array,
    history: jax.Array,
    tables: jax.Array,
    slot_params: PackedSlotParams,
    packed: jax.Array,
    *,
    layers: range,
    key: ProgramKey,
    max_num_seqs: int,
) -> tuple[jax.Array, jax.Array, jax.Array, Rows, Stream]:
    """Unpack inputs, and compute the first layers."""
    model, implementation = bound(params)
    tables, decode, prefill, _ = unpacked(key, max_num_seqs, pool.shape[4], tables, packed)
    places, tokens, history = rows_of(history, decode, prefill, pool.shape[4])
    positions = jnp.maximum(places.positions, 0) + slot_params.unpack().first_position[places.slots]
    rows = Rows(decode, prefill, places, positions)
    attend = StageAttention(layers, None, pool, rows, implementation)
    model(tokens, positions, attend)
    assert attend.stream is not None
    return attend.pool, history, tables, rows, attend.stream


def _go_on(
    bound: Any, params: Params, pool: jax.Array, rows: Rows, stream: Stream, *, layers: range
) -> tuple[jax.Array, Stream]:
    """Compute further layers."""
    model, implementation = bound(params)
    attend = StageAttention(layers, stream, pool, rows, implementation)
    model(jnp.zeros_like(rows.positions), rows.positions, attend)
    assert attend.stream is not None
    return attend.pool, attend.stream


def _end(
    bound: Any,
    params: Params,
    history: jax.Array,
    slot_params: PackedSlotParams,
    rows: Rows,
    stream: Stream,
    *,
    sampling: Sampling,
    processors: tuple[LogitsProcessor, ...],
) -> tuple[jax.Array, StepOutputs]:
    """Sample of what the last layer gives."""
    model, implementation = bound(params)
    attend = StageAttention(range(0), stream, None, rows, implementation)
    hidden = model(jnp.zeros_like(rows.positions), rows.positions, attend)
    inputs = rows.places, rows.decode, rows.prefill
    history, _, outputs = sample_rows(
        model, hidden, history, None, slot_params.unpack(), *inputs, sampling, processors
    )
    return history, outputs
