"""Times of single kernels between and beyond the points at which they were measured.

Everything is interpolated linearly in logarithms, of the time as of what it depends on: exact wherever a time
is a power of the work. Beyond the last point a time grows with the work.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.silicon_tables import DTYPES, KernelTable, Key, SiliconTables, load_tables

Source = Literal["measured", "interpolated", "scaled", "outside", "assumed"]
"""Where a time is from: a measured kernel (or between two sizes of it); between two measured shapes; from a
shape or a device near by, by the work; a roofline through the nearest measured point; or an assumption."""

_MICRO = 1e-6
_HAS_INTEGERS = "A100-80GB"
_Floats = npt.NDArray[np.float64]


class Rows:
    """Seconds as a function of one size, such as a product's rows.

    Args:
        points: ascending sizes, in any unit.
        seconds: at each of them.
        source: of all of them.
    """

    __slots__ = ("_last", "_log_points", "_log_seconds", "points", "source")

    def __init__(self, points: _Floats, seconds: _Floats, source: Source) -> None:
        self.points: list[float] = points.tolist()
        self._log_points: list[float] = np.log(points).tolist()
        self._log_seconds: list[float] = np.log(seconds).tolist()
        self._last = float(seconds[-1])
        self.source = source

    def seconds(self, size: float) -> float:
        """At `size`; as at the smallest point below that, and in proportion beyond the largest."""
        points, values = self.points, self._log_seconds
        place = bisect.bisect_right(points, size)
        if not place:
            return math.exp(values[0])
        if place == len(points):
            return self._last * size / points[-1]
        before, logs = place - 1, self._log_points
        share = (math.log(size) - logs[before]) / (logs[place] - logs[before])
        return math.exp(values[before] + share * (values[place] - values[before]))

    def source_at(self, size: float) -> Source:
        """Where the time at `size` is from."""
        return "outside" if size > self.points[-1] else self.source


class Grid:
    """Seconds as a function of two sizes, such as a batch and its tokens.

    Args:
        axes: ascending sizes of each.
        seconds: shaped as them; nan where nothing was measured.
        work: what a time grows with where nothing was measured, of both sizes.
    """

    def __init__(
        self, axes: Sequence[_Floats], seconds: _Floats, work: Callable[[float, float], float], scale: float
    ) -> None:
        self._axes: list[list[float]] = [axis.tolist() for axis in axes]
        self._logs: list[list[float]] = [np.log(axis).tolist() for axis in axes]
        self._work = work
        self.is_measured = np.isfinite(seconds)
        filled = _filled(axes, seconds * scale, work)
        self._values: list[list[float]] = np.log(filled).tolist()

    def seconds(self, first: float, second: float) -> float:
        """At two sizes; as at the smallest points below those, and as the work grows beyond the largest."""
        (tops, bottoms), factor = self._axes, 1.0
        if first > tops[-1] or second > bottoms[-1]:
            inside = min(first, tops[-1]), min(second, bottoms[-1])
            factor = self._work(first, second) / self._work(*inside)
            first, second = inside
        row, down = _between(tops, self._logs[0], first)
        column, right = _between(bottoms, self._logs[1], second)
        above, below = self._values[row], self._values[row + 1]
        left = above[column] + down * (below[column] - above[column])
        other = above[column + 1] + down * (below[column + 1] - above[column + 1])
        return factor * math.exp(left + right * (other - left))

    def source_at(self, first: float, second: float) -> Source:
        """Where the time at two sizes is from."""
        if first > self._axes[0][-1] or second > self._axes[1][-1]:
            return "outside"
        row, _ = _between(self._axes[0], self._logs[0], first)
        column, _ = _between(self._axes[1], self._logs[1], second)
        is_measured = self.is_measured[row : row + 2, column : column + 2].all()
        return "measured" if is_measured else "outside"


def _between(points: list[float], logs: list[float], size: float) -> tuple[int, float]:
    """The interval that holds `size`, and how far along it lies; the ends are those of the points."""
    if size <= points[0]:
        return 0, 0.0
    place = min(bisect.bisect_right(points, size), len(points) - 1) - 1
    share = (math.log(size) - logs[place]) / (logs[place + 1] - logs[place])
    return place, min(share, 1.0)


def _filled(axes: Sequence[_Floats], seconds: _Floats, work: Callable[[float, float], float]) -> _Floats:
    """Holes take the time of the nearest point that was measured, as the work grows; ever more, or ever
    less."""
    known = np.argwhere(np.isfinite(seconds))
    filled = seconds.copy()
    logs = [np.log(axis) for axis in axes]
    for row, column in np.argwhere(~np.isfinite(seconds)):
        distances = np.abs(logs[0][known[:, 0]] - logs[0][row]) + np.abs(
            logs[1][known[:, 1]] - logs[1][column]
        )
        near = known[np.argmin(distances)]
        ratio = work(axes[0][row], axes[1][column]) / work(axes[0][near[0]], axes[1][near[1]])
        filled[row, column] = seconds[tuple(near)] * ratio
    return filled


def _row(table: KernelTable, key: Key) -> _Floats:
    """A row without holes: between neighbours, and in proportion to the size beyond the last."""
    micros, points = table.rows[key], table.axes[0]
    known = np.isfinite(micros)
    logs = np.interp(np.log(points), np.log(points[known]), np.log(micros[known]))
    return np.exp(logs) * np.maximum(1.0, points / points[known][-1]) * _MICRO


def product(tables: SiliconTables, dtype: str, out_features: int, in_features: int) -> Rows:
    """A product `[rows, in] @ [in, out]`, by its rows.

    Float8 on devices that do not multiply it is as weights of int8. Where int8 was not measured it is as
    float8, which has as many bytes and the same peak rate. Other integer weights then are to 16-bit ones as
    on an A100, at rows that are as many times those from which on products compute more than they read.

    Raises:
        ConfigError: the device has no products of `dtype`.
    """
    table = tables["products"]
    number = DTYPES.index(dtype)
    known = {key[0] for key in table.rows}
    if number not in known and dtype.startswith("fp8") and "fp8" not in device_spec(tables.device).peak_flops:
        rows = product(tables, "int8_weight", out_features, in_features)  # as many bytes, and 16-bit products
        return Rows(np.array(rows.points), np.array([rows.seconds(one) for one in rows.points]), "scaled")
    if number not in known and dtype.endswith("_weight"):
        return _as_on_another(tables, dtype, out_features, in_features)
    if number not in known and dtype == "int8":
        rows = product(tables, "fp8", out_features, in_features)
        return Rows(np.array(rows.points), np.array([rows.seconds(one) for one in rows.points]), "scaled")
    if number not in known:
        raise ConfigError(f"no products of {dtype!r} were measured on {tables.device}; take another format")
    seconds, source = _shaped(table, number, out_features, in_features)
    if dtype == "fp8_block":
        plain, _ = _shaped(table, DTYPES.index("fp8"), out_features, in_features)
        seconds = np.minimum(seconds, plain)
    return Rows(table.axes[0], seconds, source)


def _as_on_another(tables: SiliconTables, dtype: str, out_features: int, in_features: int) -> Rows:
    other = load_tables(_HAS_INTEGERS)
    there, plain = (product(other, one, out_features, in_features) for one in (dtype, "bfloat16"))
    here = product(tables, "bfloat16", out_features, in_features)
    ridges = [
        spec.flops_for("bfloat16") / spec.memory_bandwidth
        for spec in map(device_spec, (other.device, tables.device))
    ]
    points = np.array(here.points)
    alike = points * ridges[0] / ridges[1]
    seconds = [
        here.seconds(point) * there.seconds(one) / plain.seconds(one)
        for point, one in zip(points.tolist(), alike.tolist(), strict=True)
    ]
    return Rows(points, np.array(seconds), "scaled")


def _shaped(table: KernelTable, number: int, out_features: int, in_features: int) -> tuple[_Floats, Source]:
    """A product's seconds: between measured outputs and inputs, or by its work from the nearest."""
    source: Source = "measured"
    sides = []
    for place, size in ((1, out_features), (2, in_features)):
        known = sorted({key[place] for key in table.rows if key[0] == number})
        low = max([one for one in known if one <= size], default=known[0])
        high = min([one for one in known if one >= size], default=known[-1])
        if low > size or high < size:
            source = "outside"
        elif low < size and source == "measured":
            source = "interpolated"
        sides.append((low, high, size))
    (low_n, high_n, n), (low_k, high_k, k) = sides
    total, weights = np.zeros(len(table.axes[0])), 0.0
    for out_corner in {low_n, high_n}:
        for in_corner in {low_k, high_k}:
            key = number, out_corner, in_corner
            if key not in table.rows or not np.isfinite(table.rows[key]).any():
                continue  # too large for the device
            weight = _weight(out_corner, low_n, high_n, n) * _weight(in_corner, low_k, high_k, k)
            total += weight * np.log(_row(table, key) / (out_corner * in_corner))
            weights += weight
    if not weights:
        raise ConfigError(f"no product near [{k}, {n}] was measured")
    # Interpolated is the time per weight: so corners that are missing take those of the others.
    return np.exp(total / weights) * n * k, source


def _weight(corner: int, low: int, high: int, size: int) -> float:
    if low == high:
        return 1.0
    share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
    return share if corner == high else 1.0 - share


def reduction(tables: SiliconTables, gpus: int) -> Rows:
    """An all-reduce among some GPUs, by the 16-bit elements that each holds.

    Raises:
        ConfigError: so many were not measured.
    """
    table = tables["all_reduce"]
    if (gpus,) not in table.rows:
        known = ", ".join(str(number) for number in table.names(0))
        raise ConfigError(f"no all-reduces among {gpus} GPUs of {tables.device} were measured; use {known}")
    return Rows(table.axes[0], _row(table, (gpus,)), "measured")


def experts(
    tables: SiliconTables, dtype: str, hidden: int, inner: int, chosen: int, number: int, gpus: int
) -> Rows:
    """An MLP of experts, by its tokens: the measured one whose shape is nearest, by weights that it reads.

    Raises:
        ConfigError: the device has no experts of `dtype`.
    """
    table, place = tables["experts"], DTYPES.index(dtype)
    wanted = np.log([hidden, inner / gpus, chosen, number])
    best: tuple[float, Key] | None = None
    for key in table.rows:
        if key[0] == place:
            shape = np.log([key[1], key[2] / key[5], key[3], key[4]])
            distance = float(np.abs(shape - wanted).sum())
            best = min(best or (math.inf, key), (distance, key))
    if best is None:
        raise ConfigError(f"no experts of {dtype!r} were measured on {tables.device}; take another format")
    distance, key = best
    scale = hidden * inner / gpus * chosen / (key[1] * key[2] / key[5] * key[3])
    return Rows(table.axes[0], _row(table, key) * scale, "scaled" if distance else "measured")


class Attention:
    """Attention of one layer: decodes by batch and keys, prompts by chunks.

    Args:
        tables: measured kernels.
        heads: query heads, KV heads and `head_dim` of a device, and the number of KV's dtype in `DTYPES`.
        window: of sliding attention; 0 for none.
        share: of the bytes of such KV that are read: decodes take as long as over so many fewer tokens.

    Raises:
        ConfigError: KV of that dtype was not measured on the device.
    """

    def __init__(
        self, tables: SiliconTables, heads: tuple[int, int, int, int], window: int, share: float = 1.0
    ) -> None:
        num_heads, num_kv_heads, head_dim, dtype = heads
        self._window, self._share = window, share
        grids = {}
        for kind in ("decode", "prefill"):
            table = tables[kind]
            key, source = _nearest(table, num_heads, num_kv_heads, head_dim, dtype, window, tables.device)
            is_windowed = 0 < key[2] == window
            per_head = num_kv_heads if kind == "decode" else num_heads  # keys are read, or pairs computed
            measured = key[4] if kind == "decode" else key[3]
            batches = num_kv_heads / key[4]
            rest = per_head / measured / batches * head_dim / key[1]
            work = _work(kind, window if is_windowed else 0)
            grid = Grid(table.axes, table.rows[key] * _MICRO, work, rest)
            grids[kind] = grid, batches, is_windowed, source
        self._decode, self._decode_batches, self._decodes_windowed, self._decode_source = grids["decode"]
        self._prefill, self._prefill_batches, self._prefills_windowed, self._prefill_source = grids["prefill"]
        self._launch = self._prefill.seconds(0.0, 0.0)

    def decode(self, batch: float, length: float) -> float:
        """Seconds of one token each for `batch` sequences that see `length` tokens each, itself included."""
        if self._window and not self._decodes_windowed:
            length = min(length, self._window)
        return self._decode.seconds(batch * self._decode_batches, length * self._share)

    def prefill(self, batch: float, length: float, context: float) -> float:
        """Seconds of `batch` chunks of `length` tokens, each after `context` tokens in the cache."""
        equivalent = self._equivalent(length, context)
        seconds = self._prefill.seconds(batch * self._prefill_batches, equivalent)
        return max(seconds, self.decode(batch, length + context)) if context else seconds

    def beside(self, batch: float, seen: float, num_chunks: float, length: float, context: float) -> float:
        """Seconds that chunks add to `batch` decodes that see `seen` tokens each: all are in one launch.

        Its decodes and chunks read their keys together, and chunks compute their pairs meanwhile.
        """
        num_all = batch + num_chunks
        mean = (batch * seen + num_chunks * (length + context)) / num_all
        reading = self.decode(num_all, mean) - self.decode(batch, seen)
        equivalent = self._equivalent(length, context)
        computing = self._prefill.seconds(num_chunks * self._prefill_batches, equivalent) - self._launch
        return max(reading, computing, 0.0)

    def source_of_decode(self, batch: float, length: float) -> Source:
        """Where `decode` is from."""
        found = self._decode.source_at(batch * self._decode_batches, length * self._share)
        known = self._decode_source if self._share == 1 else "scaled"
        return known if found == "measured" else found

    def source_of_prefill(self, batch: float, length: float, context: float) -> Source:
        """Where `prefill` is from."""
        equivalent = self._equivalent(length, context)
        found = self._prefill.source_at(batch * self._prefill_batches, equivalent)
        return self._prefill_source if found == "measured" else found

    def _equivalent(self, length: float, context: float) -> float:
        """Tokens of a prompt with nothing before it that computes as many pairs of a query and a key."""
        window, pairs = self._window, length * (length + 2 * context)  # twice as many
        if not window:
            return math.sqrt(pairs)
        full = min(length, max(0.0, window - context))  # queries that see all there is
        pairs = full * (full + 2 * context) + 2 * (length - full) * window
        if not self._prefills_windowed or pairs <= window * window:
            return math.sqrt(pairs)
        return (pairs / window + window) / 2


def _work(kind: str, window: int) -> Callable[[float, float], float]:
    """What a time grows with; no closure, so that costs can be sent to other processes."""
    return functools.partial(_keys_read if kind == "decode" else _pairs_computed, window)


def _keys_read(window: int, batch: float, length: float) -> float:
    return batch * (min(length, window) if window else length)


def _pairs_computed(window: int, batch: float, length: float) -> float:
    return batch * length * (min(length, 2 * window) if window else length)


def _nearest(
    table: KernelTable, num_heads: int, num_kv_heads: int, head_dim: int, dtype: int, window: int, device: str
) -> tuple[Key, Source]:
    """The measured row that is most alike: of as many queries a KV head, then of as many KV heads."""
    group, found = num_heads / num_kv_heads, []
    for key in table.rows:
        if key[0] != dtype or key[2] not in (0, window):
            continue
        differs = (
            abs(math.log(key[1] / head_dim)),
            abs(math.log(key[3] / key[4] / group)),
            float(key[2] != window),
            abs(math.log(key[4] / num_kv_heads)),
        )
        found.append((differs, key))
    if not found:
        raise ConfigError(f"no attention over {DTYPES[dtype]} KV was measured on {device}; use bfloat16")
    differs, key = min(found)
    return key, "measured" if not any(differs[:3]) else "scaled"
