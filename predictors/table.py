"""Cost tables: any cost model distilled into grids, and looked up in about a microsecond."""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostKind, CostModel, check_integer

Array = NDArray[np.float64]

_MAX_NODES = 4096
_MAX_COUNT = 2**40
_MAX_DENSE = 256  # counts up to which lookups are prepared
_USUAL_PROMPT = 128  # tokens of a prompt chunk, where mixed steps are distilled
# The grid of each kind of cost: its values' array, and its axes in the order of the dimensions.
_GRIDS: Mapping[CostKind, tuple[str, tuple[str, ...]]] = {
    "prefill": ("prefill_seconds", ("prefill_context", "prefill_tokens", "prefill_seqs")),
    "decode": ("decode_seconds", ("decode_batch", "decode_context")),
    "mixed": ("mixed_seconds", ("decode_context", "decode_batch", "prefill_tokens")),  # rows of both
    "swap_out": ("swap_out_seconds", ("swap_blocks",)),
    "swap_in": ("swap_in_seconds", ("swap_blocks",)),
}


@runtime_checkable
class BatchCostModel(CostModel, Protocol):
    """A cost model that answers many questions in one call, which is what a regression is good at."""

    def seconds_many(self, kind: CostKind, work: Array) -> Array:
        """Seconds for each row of `work`.

        Args:
            kind: what is done.
            work: `[n, number of counts]`, at least 1 but for tokens in the cache before a prefill: of a
                decode batch and context tokens, of a prefill tokens, sequences and context tokens, of a mixed
                step all five, of a swap blocks.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableAxes:
    """The nodes of a `TableCostModel`, in tokens, sequences and blocks; each axis strictly increases.

    `prefill_context` may hold 0, and may be `(0,)` where no prefill continues an earlier one.

    Raises:
        ConfigError: an axis is empty, too long, unsorted, or has a node below 1 (`prefill_context`: 0).
    """

    prefill_tokens: tuple[int, ...]
    prefill_seqs: tuple[int, ...]
    prefill_context: tuple[int, ...]
    decode_batch: tuple[int, ...]
    decode_context: tuple[int, ...]
    swap_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            axis: tuple[int, ...] = getattr(self, field.name)
            if not 1 <= len(axis) <= _MAX_NODES:
                raise ConfigError(f"axis {field.name} must have 1 to {_MAX_NODES} nodes, got {len(axis)}")
            lowest = 0 if field.name == "prefill_context" else 1
            for node in axis:
                check_integer(f"a node of axis {field.name}", node, lowest, _MAX_COUNT)
            if any(low >= high for low, high in itertools.pairwise(axis)):
                raise ConfigError(f"axis {field.name} must strictly increase, got {list(axis)}")

    @classmethod
    def geometric(
        cls,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_context_tokens: int,
        max_num_blocks: int,
        max_prefill_context_tokens: int = 0,
        nodes_per_octave: int = 2,
    ) -> TableAxes:
        """Axes from 1 up to each limit, evenly spaced on a logarithmic scale.

        Args:
            max_num_batched_tokens: new tokens of a prefill step.
            max_num_seqs: sequences of a step.
            max_context_tokens: tokens attended to by a decode step, summed over its batch.
            max_num_blocks: blocks of one swap.
            max_prefill_context_tokens: tokens in the cache before a prefill step; 0 for whole prompts only.
            nodes_per_octave: nodes between a number and its double.
        """
        check_integer("nodes_per_octave", nodes_per_octave, 1, 32)
        context = _geometric("max_prefill_context_tokens", max(max_prefill_context_tokens, 1), 1)
        return cls(
            prefill_tokens=_geometric("max_num_batched_tokens", max_num_batched_tokens, nodes_per_octave),
            prefill_seqs=_geometric("max_num_seqs", max_num_seqs, nodes_per_octave),
            prefill_context=(0, *context) if max_prefill_context_tokens > 0 else (0,),
            decode_batch=_geometric("max_num_seqs", max_num_seqs, nodes_per_octave),
            decode_context=_geometric("max_context_tokens", max_context_tokens, nodes_per_octave),
            swap_blocks=_geometric("max_num_blocks", max_num_blocks, nodes_per_octave),
        )


class TableCostModel:
    """A `CostModel` that interpolates linearly between the nodes of a grid, in pure Python.

    Grids: prefill over (context, tokens, sequences), decode over (batch, context), swaps over blocks.
    Below its first node an axis is flat. Beyond its last one seconds grow in proportion: the value at the
    edge times the largest ratio by which an argument exceeds its axis. Predictions are never negative.

    Mixed steps have a grid of their own, over (context, batch, rows), rows being decodes and prompt tokens
    together, by which programs are chosen. It holds prompts of about 128 tokens without context; what others
    differ by is what they do without decodes beside them. A mixed step takes no less than the longer of its
    parts alone, and at most that and twice the shorter.

    Args:
        axes: the nodes.
        prefill_seconds: `[context, tokens, seqs]`.
        decode_seconds: `[batch, context]`.
        mixed_seconds: `[context, batch, rows]` at the nodes of `prefill_tokens`.
        swap_out_seconds: `[blocks]`.
        swap_in_seconds: `[blocks]`.
        padding_share: of the programs whose steps were measured; see `ProgramSizes`.

    Raises:
        ConfigError: an array's shape is not that of its axes, or a value is out of range or not finite.
    """

    def __init__(
        self,
        axes: TableAxes,
        *,
        prefill_seconds: Array,
        decode_seconds: Array,
        mixed_seconds: Array,
        swap_out_seconds: Array,
        swap_in_seconds: Array,
        padding_share: float = 1.0,
    ) -> None:
        if not 0 <= padding_share <= 1:
            raise ConfigError(f"padding_share is {padding_share}: expected 0 to 1")
        self.axes, self.padding_share = axes, float(padding_share)
        self._arrays = {
            name: np.array(values, dtype=np.float64)
            for name, values in {
                "prefill_seconds": prefill_seconds,
                "decode_seconds": decode_seconds,
                "mixed_seconds": mixed_seconds,
                "swap_out_seconds": swap_out_seconds,
                "swap_in_seconds": swap_in_seconds,
            }.items()
        }
        for name, axis_names in _GRIDS.values():
            expected = tuple(len(getattr(axes, axis)) for axis in axis_names)
            values = self._arrays[name]
            if values.shape != expected:
                raise ConfigError(
                    f"{name} has shape {values.shape}; its axes ({', '.join(axis_names)}) make {expected}"
                )
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ConfigError(f"{name} must hold finite seconds of at least 0")
        # Nested lists: an element of an array costs a call, and makes every sum a numpy scalar.
        self._prefill: list[list[list[float]]] = self._arrays["prefill_seconds"].tolist()
        self._decode: list[list[float]] = self._arrays["decode_seconds"].tolist()
        self._mixed: list[list[list[float]]] = self._arrays["mixed_seconds"].tolist()
        self._swap_out: list[float] = self._arrays["swap_out_seconds"].tolist()
        self._swap_in: list[float] = self._arrays["swap_in_seconds"].tolist()
        # What is asked for most, small counts, interpolated beforehand: by sequences (of a context plane, and
        # of decoding) and by blocks.
        planes = np.moveaxis(self._arrays["prefill_seconds"], 2, 0)  # [seqs, context, tokens]
        self._prefill_of = [plane.tolist() for plane in _between(axes.prefill_seqs, planes)]
        self._decode_of = _between(axes.decode_batch, self._arrays["decode_seconds"]).tolist()
        self._swap_out_of = _between(axes.swap_blocks, self._arrays["swap_out_seconds"]).tolist()
        self._swap_in_of = _between(axes.swap_blocks, self._arrays["swap_in_seconds"]).tolist()

    @classmethod
    def distil(
        cls, model: CostModel, axes: TableAxes, *, monotone: bool = True, padding_share: float = 1.0
    ) -> TableCostModel:
        """Ask `model` at every node.

        Nodes that cannot occur take the nearest possible work: no more sequences than prefill tokens, at
        least one token of context per decoding sequence, fewer decodes than rows in a mixed step.

        Args:
            model: any cost model; a `BatchCostModel` is asked about many nodes at once.
            axes: the nodes.
            monotone: raise each value to the largest at smaller work (tokens, context, batch, blocks; not
                sequences, of which a prefill may well profit, nor decodes in place of prompt tokens). It
                removes dips that noise or overfitting put into a fit, at the price of an upward bias as large
                as those dips.
            padding_share: see `ProgramSizes`.
        """
        grids: dict[str, Array] = {}
        for kind, (name, axis_names) in _GRIDS.items():
            nodes = [np.array(getattr(axes, axis), dtype=np.float64) for axis in axis_names]
            mesh = np.meshgrid(*nodes, indexing="ij")
            if kind == "prefill":
                context, tokens, seqs = mesh
                columns = [tokens, np.minimum(seqs, tokens), context]
            elif kind == "decode":
                batch, context = mesh
                columns = [batch, np.maximum(batch, context)]
            elif kind == "mixed":
                context, batch, rows = mesh
                batch = np.minimum(batch, np.maximum(1, np.minimum(rows, axes.decode_batch[-1]) - 1))
                tokens = np.maximum(1, rows - batch)  # a prompt has room, too
                seqs = np.maximum(1, np.minimum(tokens // _USUAL_PROMPT, axes.prefill_seqs[-1] - batch))
                columns = [batch, np.maximum(batch, context), tokens, seqs, np.zeros_like(tokens)]
            else:
                columns = list(mesh)
            work = np.stack([column.ravel() for column in columns], axis=1)
            values = ask_many(model, kind, work).reshape(mesh[0].shape)
            if monotone:
                for dimension, axis in enumerate(axis_names):
                    if axis != "prefill_seqs" and (kind, axis) != ("mixed", "decode_batch"):
                        values = np.maximum.accumulate(values, axis=dimension)
            grids[name] = values
        return cls(axes, **grids, padding_share=padding_share)

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Seconds of a step; see `CostModel.step_seconds`."""
        if prompt_tokens <= 0 or num_prompts <= 0:
            return self._decode_seconds(batch, context_tokens)
        prefill = self._prefill_seconds(prompt_tokens, num_prompts, prompt_context)
        if batch <= 0:
            return prefill
        axes = self.axes
        num_rows = batch + prompt_tokens
        low, high, weight, scale = _locate(axes.decode_context, context_tokens)
        seconds = _bilinear(self._mixed[low], axes.decode_batch, axes.prefill_tokens, batch, num_rows, scale)
        if weight:
            above = _bilinear(self._mixed[high], axes.decode_batch, axes.prefill_tokens, batch, num_rows)
            seconds += weight * (above - seconds)
        usual = self._prefill_seconds(prompt_tokens, max(1, prompt_tokens // _USUAL_PROMPT))
        decode = self._decode_seconds(batch, context_tokens)
        shorter, longer = (decode, prefill) if decode < prefill else (prefill, decode)
        return min(max(seconds + prefill - usual, longer), longer + 2 * shorter)

    def _prefill_seconds(self, num_tokens: int, num_seqs: int, context_tokens: int = 0) -> float:
        axes = self.axes
        tokens = axes.prefill_tokens
        if num_seqs < len(self._prefill_of):
            by_context = self._prefill_of[num_seqs]
            if context_tokens <= 0:
                return _linear(tokens, by_context[0], num_tokens)
            low, high, weight, scale = _locate(axes.prefill_context, context_tokens)
            seconds = _linear(tokens, by_context[low], num_tokens, scale)
            if weight:
                seconds += weight * (_linear(tokens, by_context[high], num_tokens) - seconds)
            return seconds
        seqs, planes = axes.prefill_seqs, self._prefill
        if context_tokens <= 0:
            return _bilinear(planes[0], tokens, seqs, num_tokens, num_seqs)
        low, high, weight, scale = _locate(axes.prefill_context, context_tokens)
        seconds = _bilinear(planes[low], tokens, seqs, num_tokens, num_seqs, scale)
        if weight:
            seconds += weight * (_bilinear(planes[high], tokens, seqs, num_tokens, num_seqs) - seconds)
        return seconds

    def _decode_seconds(self, batch: int, context_tokens: int) -> float:
        if batch <= 0:
            return 0.0
        axes = self.axes
        if batch < len(self._decode_of):
            return _linear(axes.decode_context, self._decode_of[batch], context_tokens)
        return _bilinear(self._decode, axes.decode_batch, axes.decode_context, batch, context_tokens)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the host; see `CostModel.swap_out_seconds`."""
        if 0 <= num_blocks < len(self._swap_out_of):
            return self._swap_out_of[num_blocks]
        return _linear(self.axes.swap_blocks, self._swap_out, num_blocks) if num_blocks > 0 else 0.0

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Seconds to copy blocks to the device; see `CostModel.swap_in_seconds`."""
        if 0 <= num_blocks < len(self._swap_in_of):
            return self._swap_in_of[num_blocks]
        return _linear(self.axes.swap_blocks, self._swap_in, num_blocks) if num_blocks > 0 else 0.0

    def seconds_of(self, kind: CostKind, counts: Sequence[int]) -> float:
        """Seconds of work of a kind; the counts are those of `BatchCostModel.seconds_many`."""
        return _seconds(self, kind, *counts)

    def to_arrays(self) -> dict[str, NDArray[np.generic]]:
        """Copies of everything: axes as int64 vectors under their names, grids as float64."""
        arrays: dict[str, NDArray[np.generic]] = {
            field.name: np.array(getattr(self.axes, field.name), dtype=np.int64)
            for field in dataclasses.fields(TableAxes)
        }
        return arrays | {name: values.copy() for name, values in self._arrays.items()}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[np.generic]], padding_share: float = 1.0
    ) -> TableCostModel:
        """The table that `to_arrays` described, and its `padding_share`.

        Raises:
            ConfigError: an array is missing, unknown, or has a wrong type, rank, shape or value; the message
                names it.
        """
        axis_names = [field.name for field in dataclasses.fields(TableAxes)]
        dtypes = dict.fromkeys(axis_names, np.int64) | {name: np.float64 for name, _ in _GRIDS.values()}
        if dtypes.keys() != arrays.keys():
            missing, unknown = sorted(dtypes.keys() - arrays.keys()), sorted(arrays.keys() - dtypes.keys())
            raise ConfigError(
                f"a cost table's arrays are {list(dtypes)}; missing {missing}, unknown {unknown}"
            )
        for name, dtype in dtypes.items():
            if arrays[name].dtype != dtype:
                raise ConfigError(f"{name} must be an array of {dtype.__name__}, got {arrays[name].dtype}")
        for name in axis_names:
            if arrays[name].ndim != 1:
                raise ConfigError(f"axis {name} must be a vector, got shape {arrays[name].shape}")
        axes = TableAxes(**{name: tuple(arrays[name].tolist()) for name in axis_names})
        grids = {name: np.asarray(arrays[name], dtype=np.float64) for name, _ in _GRIDS.values()}
        return cls(axes, **grids, padding_share=padding_share)


def ask_many(model: CostModel, kind: CostKind, work: Array) -> Array:
    """What `BatchCostModel.seconds_many` answers, of any model."""
    if isinstance(model, BatchCostModel):
        return model.seconds_many(kind, work)
    return np.array([_seconds(model, kind, *map(int, row)) for row in work], dtype=np.float64)


def _seconds(model: CostModel, kind: CostKind, *counts: int) -> float:
    if kind == "prefill":
        return model.step_seconds(0, 0, *counts)
    if kind == "swap_out":
        return model.swap_out_seconds(*counts)
    return model.swap_in_seconds(*counts) if kind == "swap_in" else model.step_seconds(*counts)


def _geometric(name: str, limit: int, per_octave: int) -> tuple[int, ...]:
    """Integers from 1 to `limit`, both included, `per_octave` to each doubling."""
    check_integer(name, limit, 1, _MAX_COUNT)
    num_steps = math.ceil(per_octave * math.log2(limit))
    nodes: Iterable[int] = (round(limit ** (step / max(num_steps, 1))) for step in range(num_steps))
    return tuple(sorted({*nodes, limit}))


def _locate(axis: Sequence[int], value: float) -> tuple[int, int, float, float]:
    """Where `value` lies: indices of the nodes around it, its weight on the upper one, its excess ratio."""
    high = bisect_left(axis, value)
    if high == 0:
        return 0, 0, 0.0, 1.0
    if high == len(axis):
        last = axis[-1]
        return high - 1, high - 1, 0.0, value / last if last else 1.0
    low_node = axis[high - 1]
    return high - 1, high, (value - low_node) / (axis[high] - low_node), 1.0


def _bilinear(
    grid: list[list[float]],
    rows: Sequence[int],
    columns: Sequence[int],
    row: float,
    column: float,
    scale: float = 1.0,
) -> float:
    """The interpolated value, times the largest of `scale` and both excess ratios; `_locate`, inlined."""
    upper = bisect_left(rows, row)
    if upper == len(rows):
        values = above = grid[-1]
        if row > scale * rows[-1]:
            scale = row / rows[-1]
    elif upper:
        values, above = grid[upper - 1], grid[upper]
    else:
        values = above = grid[0]
    right = bisect_left(columns, column)
    if right == len(columns):
        low, high = values[-1], above[-1]
        if column > scale * columns[-1]:
            scale = column / columns[-1]
    elif right:
        left = right - 1
        weight = (column - columns[left]) / (columns[right] - columns[left])
        low = values[left] + weight * (values[right] - values[left])
        high = above[left] + weight * (above[right] - above[left])
    else:
        low, high = values[0], above[0]
    if values is not above:
        low += (row - rows[upper - 1]) / (rows[upper] - rows[upper - 1]) * (high - low)
    return low * scale


def _linear(axis: Sequence[int], values: list[float], count: float, scale: float = 1.0) -> float:
    """The interpolated value, times the larger of `scale` and the excess ratio; `_locate`, inlined."""
    upper = bisect_left(axis, count)
    if upper == len(axis):
        return values[-1] * max(scale, count / axis[-1])
    if not upper:
        return values[0] * scale
    node, value = axis[upper - 1], values[upper - 1]
    return (value + (count - node) / (axis[upper] - node) * (values[upper] - value)) * scale


def _between(axis: Sequence[int], values: Array) -> Array:
    """Values at 0 (where they are 0), 1, 2, ... to the last node or `_MAX_DENSE`, along the first axis."""
    counts = np.arange(1, min(axis[-1], _MAX_DENSE) + 1)
    upper = np.clip(np.searchsorted(axis, counts), 1, max(1, len(axis) - 1))
    nodes = np.asarray(axis, np.float64)
    if len(axis) == 1:
        dense = np.repeat(values[:1], len(counts), axis=0)
    else:
        weights = np.clip((counts - nodes[upper - 1]) / (nodes[upper] - nodes[upper - 1]), 0.0, 1.0)
        weights = weights.reshape(-1, *(1,) * (values.ndim - 1))
        dense = values[upper - 1] + weights * (values[upper] - values[upper - 1])
    return np.concatenate([np.zeros_like(dense[:1]), dense])
