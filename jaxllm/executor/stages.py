"""A step's program in stages of layers, each on devices of its own (pipeline parallelism).

    first stage   inputs -> embeddings and its layers | output head, sampling, histories
                            |  x, delta, inputs       ^  x, delta
    next stage              v     its layers          |

Each part is a program of its own, compiled for its devices; between two the host moves what the layers give.
The rows of a step with prompts go through in micro-batches (GPipe, Huang et al. 2019), each of which is a
step of fewer rows: while a stage computes one, the next stage computes that before it.

    first stage   0 1 2 3
    next stage      0 1 2 3

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
    rows_in_use,
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
from jaxllm.types import num_micro_batches


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
    num_batches: Callable[[np.ndarray], int]
    parts: list[jax.stages.Lowered]

    def compile(self) -> StagedProgram:
        """All of them."""
        parts = [part.compile() for part in self.parts]
        return StagedProgram(self.placement, self.names, self.num_batches, parts)


class StagedProgram:
    """A step's program in stages, which takes and gives what one of a single device does.

    Args:
        placement: of the stages.
        names: of the weights of each stage.
        num_batches: in how many micro-batches, the first ones, the rows of a packed step are.
        parts: the program of inputs, that of each stage, and that which samples.
    """

    def __init__(
        self,
        placement: Placement,
        names: list[list[str]],
        num_batches: Callable[[np.ndarray], int],
        parts: list[jax.stages.Compiled],
    ) -> None:
        self._stages, self._names, self._num_batches = placement.stages, names, num_batches
        self._begin, *self._layers, self._end = parts
        self._parts = parts

    def __call__(
        self, params: Params, state: EngineState, slot_params: PackedSlotParams, packed: np.ndarray
    ) -> tuple[EngineState, StepOutputs]:
        """As a compiled `programs.step_program`; the host waits for no stage."""
        weights = [{name: params[name] for name in names} for names in self._names]
        pools, streams = self._split(state.pool), []
        history, tables, rows, batches = self._begin({}, state.history, state.tables, slot_params, packed)
        for batch in batches[: self._num_batches(packed)]:
            stream = None
            for place, stage in enumerate(self._stages):
                given = batch, stream
                given = given if place == 0 else jax.device_put(given, stage.sharding())
                pools[place], stream = self._layers[place](weights[place], pools[place], *given)
            streams.append(stream)
        streams += streams[:1] * (len(batches) - len(streams))  # of padding, which nobody reads
        streams = jax.device_put(streams, self._stages[0].sharding())
        history, outputs = self._end(weights[0], history, slot_params, rows, streams)
        return EngineState(self._joined(state.pool, pools), history, tables), outputs

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
    count = num_micro_batches(key.rows, len(stages)) if key.max_chunks else 1
    sizes: Any = {"max_num_seqs": max_num_seqs, "block_size": block_size, "num_batches": count}
    begin = functools.partial(_begin, key=key, **sizes)
    given: tuple[Any, ...] = state.history, state.tables, slot_params, packed
    *_, rows, batches = lower(0, begin, (each,) * 4, (each,) * 4, given, (1, 2), ())
    stream = None
    for place, own_layers in enumerate(placement.layers(model_config)):
        run = functools.partial(_layers, layers=own_layers)
        given = state.pool, batches[0], stream
        _, stream = lower(place, run, (pool, each, each), (pool, each), given, (1,), names[place])
    end = functools.partial(_end, config=own, sampling=key.sampling, processors=processors)
    given = state.history, slot_params, rows, [stream] * count
    lower(0, end, (each,) * 4, (each, output_specs(stages[0], model_config)), given, (1,), names[0])

    def num_batches(packed: np.ndarray) -> int:
        if count == 1:
            return 1
        used = rows_in_use(key, max_num_seqs, block_size, packed)
        return max(1, -(-used * count // key.rows))

    return LoweredStages(placement, names, num_batches, lowered)


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
    num_batches: int,
) -> tuple[jax.Array, jax.Array, Rows, list[Rows]]:
    """Unpack inputs; they come whole, and as micro-batches."""
    tables, decode, prefill, _ = unpacked(key, max_num_seqs, block_size, tables, packed)
    places, tokens, history = rows_of(history, decode, prefill, block_size)
    positions = jnp.maximum(places.positions, 0) + slot_params.unpack().first_position[places.slots]
    rows = Rows(decode, prefill, places, tokens, positions)
    return history, tables, rows, micro_batches(rows, num_batches)


def micro_batches(rows: Rows, count: int) -> list[Rows]:
    """The rows of a step in so many equal parts, each of which is a step: what is sampled of it is not."""
    if count == 1 or rows.prefill is None:
        return [rows]
    prefill, size = rows.prefill, len(rows.tokens) // count
    num_decodes, ends = min(len(rows.decode.lengths), size), prefill.query_starts[1:]
    found = []
    for start in range(0, count * size, size):
        part = slice(start, start + size)
        decode = DecodeInputs(
            *(_padded(array, count * size)[start : start + num_decodes] for array in rows.decode)
        )
        later = jnp.clip(ends - part.stop, 0, ends - prefill.query_starts[:-1])  # rows of each chunk
        prompts = prefill._replace(
            tokens=prefill.tokens[part],
            targets=prefill.targets[part],
            query_starts=jnp.clip(prefill.query_starts - start, 0, size),
            lengths=prefill.lengths - later,
        )
        places = Places(*(array[part] for array in rows.places))
        found.append(Rows(decode, prompts, places, rows.tokens[part], rows.positions[part]))
    return found


def _padded(array: jax.Array, length: int) -> jax.Array:
    """With zeros behind, to a length: decodes of length 0 are none."""
    return jnp.pad(array, [(0, max(0, length - len(array))), *[(0, 0)] * (array.ndim - 1)])


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
    streams: list[Stream],
    *,
    config: ModelConfig,
    sampling: Sampling,
    processors: tuple[LogitsProcessor, ...],
) -> tuple[jax.Array, StepOutputs]:
    """Sample of what the last layer gives."""
    model, implementation = bound(params)
    stream = (
        streams[0] if len(streams) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *streams)
    )
    attend = StageAttention(range(0), stream, None, rows, implementation)
    hidden = model(rows.tokens, rows.positions, attend)
    inputs = rows.places, rows.decode, rows.prefill
    history, _, outputs = sample_rows(
        model, config, hidden, history, None, slot_params.unpack(), *inputs, sampling, processors
    )
    return history, outputs
