"""A step's program in stages of layers, each on devices of its own (pipeline parallelism).

    first stage   inputs -> embeddings and its layers | output head, sampling, histories
                            |  x, delta, inputs       ^  x, delta
    next stage              v     its layers          |

Each part is a program of its own, compiled for its devices; between two the host moves what layers give.
What samples is sent to the first stage only once as many other steps have begun as there are stages beside
it: until then it computes these (`executor.parts` says of whom).

    first stage   0 1 (0) 2 (1) 3 (2)        of two stages, with what samples in parentheses
    next stage      0 1     2     3

The pool is one array, cut by layers, so that whoever copies blocks sees all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.executor.placement import BY_KV_HEADS, ON_EACH, Placement
from jaxllm.executor.programs import (
    EngineState,
    PackedStep,
    ProgramKey,
    output_specs,
    state_shapes,
    unpacked,
)
from jaxllm.executor.slot_params import PackedSlotParams, Sampling
from jaxllm.executor.step import PagedAttention, StepOutputs, rows_of, sample_rows
from jaxllm.executor.step_rows import DecodeInputs, Places, PrefillInputs
from jaxllm.models.architecture import CausalLM, ModelConfig
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.registry import Params, abstract_params, bind
from jaxllm.sampling.logits_processors import LogitsProcessor


class Stream(NamedTuple):
    """What a layer is given: `x` [R, hidden_size], and what is yet to be added to it, if anything."""

    x: jax.Array
    delta: jax.Array | None


class Rows(NamedTuple):
    """Of what is computed together: inputs, places, tokens and positions as the model sees them, [R] each."""

    decode: DecodeInputs
    prefill: PrefillInputs | None
    places: Places
    tokens: jax.Array
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


class BegunStep(NamedTuple):
    """A step that has gone through its layers, or will have, and is yet to be sampled.

    `slots` are those of the rows that it samples, and `then` is to be told what these are.
    """

    end: jax.stages.Compiled
    weights: Params
    slot_params: PackedSlotParams
    rows: Rows
    stream: Stream
    slots: frozenset[int]
    then: Callable[[StepOutputs], object]

    def sample(self, state: EngineState) -> tuple[EngineState, StepOutputs]:
        """Sample it; others may have begun since then, but none with a slot of its rows."""
        history, outputs = self.end(self.weights, state.history, self.slot_params, self.rows, self.stream)
        return state._replace(history=history), outputs


class StagedProgram:
    """A step's program in stages.

    Args:
        placement: of the stages.
        names: of the weights of each stage.
        parts: the program of inputs, that of each stage, and that which samples.
    """

    def __init__(
        self, placement: Placement, names: list[list[str]], parts: list[jax.stages.Compiled]
    ) -> None:
        self._stages, self._names, self._parts = placement.stages, names, parts
        self._begin, *self._layers, self._end = parts

    def __call__(
        self,
        params: Params,
        state: EngineState,
        slot_params: PackedSlotParams,
        packed: np.ndarray | jax.Array,
    ) -> tuple[EngineState, StepOutputs]:
        """As a compiled `programs.step_program`; the host waits for no stage."""
        state, step = self.begin(params, state, slot_params, packed, frozenset(), lambda outputs: None)
        return step.sample(state)

    def begin(
        self,
        params: Params,
        state: EngineState,
        slot_params: PackedSlotParams,
        packed: np.ndarray | jax.Array,
        slots: frozenset[int],
        then: Callable[[StepOutputs], object],
    ) -> tuple[EngineState, BegunStep]:
        """Send a step through the layers, with nothing sampled; see `BegunStep` for `slots` and `then`."""
        weights = [{name: params[name] for name in names} for names in self._names]
        pools, stream = self._split(state.pool), None
        history, tables, rows = self._begin({}, state.history, state.tables, slot_params, packed)
        for place, stage in enumerate(self._stages):
            given = rows, stream
            given = given if place == 0 else jax.device_put(given, stage.sharding())
            pools[place], stream = self._layers[place](weights[place], pools[place], *given)
        stream = jax.device_put(stream, self._stages[0].sharding())
        state = EngineState(self._joined(state.pool, pools), history, tables)
        return state, BegunStep(self._end, weights[0], slot_params, rows, stream, slots, then)

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
    lowered = []

    def lower(
        place: int, run: Any, ins: tuple[Any, ...], outs: Any, given: tuple[Any, ...], donated: Any, of: Any
    ) -> Any:
        """Add a part, of a stage, that reads the weights `of`; returns the shapes of what it gives."""
        stage = stages[place]
        specs = stage.weight_specs(model_config)
        ins = {name: specs[name] for name in of}, *ins
        jitted = stage.jit(functools.partial(run, bound), ins, outs, donated)
        arguments = stage.structs(({name: whole[name] for name in of}, *given), ins)
        lowered.append(jitted.lower(*arguments))
        return jax.eval_shape(jitted, *arguments)

    each, pool = ON_EACH, BY_KV_HEADS
    begin = functools.partial(_begin, key=key, max_num_seqs=max_num_seqs, block_size=block_size)
    given: tuple[Any, ...] = state.history, state.tables, slot_params, packed
    *_, rows = lower(0, begin, (each,) * 4, (each,) * 3, given, (1, 2), ())
    stream = None
    for place, own_layers in enumerate(placement.layers(model_config)):
        run = functools.partial(_layers, layers=own_layers)
        given = state.pool, rows, stream
        _, stream = lower(place, run, (pool, each, each), (pool, each), given, (1,), names[place])
    end = functools.partial(_end, config=own, sampling=key.sampling, processors=processors)
    given = state.history, slot_params, rows, stream
    lower(0, end, (each,) * 4, (each, output_specs(stages[0], model_config)), given, (1,), names[0])

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
    history: jax.Array,
    tables: jax.Array,
    slot_params: PackedSlotParams,
    packed: jax.Array,
    *,
    key: ProgramKey,
    max_num_seqs: int,
    block_size: int,
) -> tuple[jax.Array, jax.Array, Rows]:
    """Unpack inputs."""
    tables, decode, prefill, _ = unpacked(key, max_num_seqs, block_size, tables, packed)
    places, tokens, history = rows_of(history, decode, prefill, block_size)
    positions = jnp.maximum(places.positions, 0) + slot_params.unpack().first_position[places.slots]
    return history, tables, Rows(decode, prefill, places, tokens, positions)


def _layers(
    bound: Any, params: Params, pool: jax.Array, rows: Rows, stream: Stream | None, *, layers: range
) -> tuple[jax.Array, Stream]:
    """Compute layers of rows, the first ones of their embeddings."""
    model, implementation = bound(params)
    attend = StageAttention(layers, stream, pool, rows, implementation)
    model(rows.tokens, rows.positions, attend)
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
    config: ModelConfig,
    sampling: Sampling,
    processors: tuple[LogitsProcessor, ...],
) -> tuple[jax.Array, StepOutputs]:
    """Sample of what the last layer gives."""
    model, implementation = bound(params)
    attend = StageAttention(range(0), stream, None, rows, implementation)
    hidden = model(rows.tokens, rows.positions, attend)
    inputs = rows.places, rows.decode, rows.prefill
    history, _, outputs = sample_rows(
        model, config, hidden, history, None, slot_params.unpack(), *inputs, sampling, processors
    )
    return history, outputs
