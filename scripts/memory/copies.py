"""Times copies of one sequence's KV between device and pinned host memory, and its prefill."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm import functional
from jaxllm.errors import ConfigError
from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.predictors.link import LinkCosts, LinkSample
from jaxllm.types import host_blocks_of, piece_sizes
from memory.block_size import LAYOUTS

DIRECTIONS = ("out", "in")
_WARM_UPS = 2  # the first call compiles
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class KVShape:
    """Sizes of a model's KV, in elements."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def block(self, block_size: int) -> tuple[int, ...]:
        """Of one block of the engine's pool."""
        return self.num_layers, 2, self.num_kv_heads, block_size, self.head_dim

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block."""
        return int(np.prod(self.block(block_size))) * jnp.dtype(self.dtype).itemsize


def copy_rows(
    kv: KVShape, block_sizes: Sequence[int], tokens: Sequence[int], repetitions: int, seed: int
) -> Iterator[Row]:
    """Seconds of copies by block size, tokens, layout and direction; those of a block size alternate.

    The engine's are `BlockSwapper`'s, with reading blocks out of the pool and writing them into it. vLLM's
    pieces are arrays of their own already, so that a copy of them is nothing else.
    """
    for block_size in block_sizes:
        calls: dict[tuple[int, str], Callable[[], Iterator[float]]] = {}
        pool = _Pool(kv, block_size, -(-max(tokens) // block_size), seed)
        for length in tokens:
            num_blocks = -(-length // block_size)
            calls[length, "engine"] = functools.partial(pool.copy, num_blocks)
            calls[length, "vllm"] = _apart_copies(kv, block_size, num_blocks, seed)
        seconds: dict[tuple[int, str], list[tuple[float, ...]]] = {key: [] for key in calls}
        for repetition in range(_WARM_UPS + repetitions):
            for key, call in calls.items():
                times = tuple(call())
                if repetition >= _WARM_UPS:
                    seconds[key].append(times)
        for (length, layout), (place, direction) in itertools.product(calls, enumerate(DIRECTIONS)):
            num_blocks = -(-length // block_size)
            apart = 2 * kv.num_layers * num_blocks
            yield {
                "layout": layout,
                "direction": direction,
                "block_size": block_size,
                "tokens": length,
                "num_pieces": len(piece_sizes(num_blocks)) if layout == "engine" else apart,
                "num_bytes": num_blocks * kv.block_bytes(block_size),
                "seconds": spread([times[place] for times in seconds[length, layout]]),
            }


def recompute_rows(
    model: Path,
    dtype: str,
    block_size: int,
    tokens: Sequence[int],
    repetitions: int,
    seed: int,
) -> tuple[KVShape, list[Row]]:
    """Seconds of one prefill by tokens, compiled for just these, and the model's KV.

    Raises:
        ConfigError: the model has no positions for so many tokens.
    """
    config = config_from_dict(read_hf_config(model))
    if max(tokens) > config.max_model_len:
        raise ConfigError(f"{max(tokens)} tokens are more than the model's {config.max_model_len} positions")
    params = load_params(model, config, dtype)
    kv = KVShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    rng, rows = np.random.default_rng(seed), []
    prefill = jax.jit(functools.partial(_prefill, config), donate_argnums=1)
    for length in tokens:
        cache = functional.init_cache(config, 1, length, block_size, jnp.dtype(dtype))
        prompt = jnp.asarray(rng.integers(1, config.vocab_size, (1, length)), jnp.int32)
        lengths, seconds = jnp.full(1, length, jnp.int32), []
        for repetition in range(_WARM_UPS + repetitions):
            started = time.perf_counter()
            cache, _ = jax.block_until_ready(prefill(params, cache, prompt, lengths))
            if repetition >= _WARM_UPS:
                seconds.append(time.perf_counter() - started)
        rows.append({"tokens": length, "block_size": block_size, "seconds": spread(seconds)})
    return kv, rows


def measured_rows(copies: Sequence[Row], prefills: Sequence[Row]) -> list[Row]:
    """Swaps (the medians out and in together) beside prefills, as `block_size_rows` has them."""
    recompute = {row["tokens"]: row["seconds"] for row in prefills}
    swaps = {
        (row["layout"], row["tokens"], row["block_size"], row["direction"]): row["seconds"] for row in copies
    }
    block_sizes = sorted({row["block_size"] for row in copies})
    rows = []
    for layout, length, block_size in itertools.product(LAYOUTS, recompute, block_sizes):
        both = [swaps[layout, length, block_size, direction] for direction in DIRECTIONS]
        rows.append(
            {
                "source": "measured",
                "layout": layout,
                "tokens": length,
                "block_size": block_size,
                "swap_seconds": sum(one["median"] for one in both),
                "swap_range": [sum(one[end] for one in both) for end in ("min", "max")],
                "recompute_seconds": recompute[length]["median"],
                "recompute_range": [recompute[length][end] for end in ("min", "max")],
            }
        )
    return rows


def fit_rows(copies: Sequence[Row]) -> list[Row]:
    """Constants of the link by direction and layout, and of both layouts together, with their errors.

    `median_error` is that of the samples of the fit; `held_out_error` that of each block size when the fit
    is made of the others, None where there is one block size.
    """
    rows = []
    for direction, layout in itertools.product(DIRECTIONS, (*LAYOUTS, "both")):
        found = [row for row in copies if row["direction"] == direction and layout in (row["layout"], "both")]
        costs = LinkCosts.fit([_sample(row) for row in found])
        held_out: list[float] = []
        for block_size in {row["block_size"] for row in found}:
            others = [_sample(row) for row in found if row["block_size"] != block_size]
            if others:
                other_costs = LinkCosts.fit(others)
                mine = (row for row in found if row["block_size"] == block_size)
                held_out += [other_costs.median_error([_sample(row)]) for row in mine]
        rate = costs.bytes_per_second
        rows.append(
            {
                "direction": direction,
                "layout": layout,
                "latency_seconds": costs.latency_seconds,
                "piece_seconds": costs.piece_seconds,
                "bytes_per_second": rate if np.isfinite(rate) else None,
                "num_samples": len(found),
                "median_error": costs.median_error([_sample(row) for row in found]),
                "held_out_error": statistics.median(held_out) if held_out else None,
            }
        )
    return rows


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and both ends."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _sample(row: Row) -> LinkSample:
    return LinkSample(row["num_bytes"], row["num_pieces"], row["seconds"]["median"])


class _Pool:
    """A pool of twice as many blocks as are copied at most, and the engine's own swapper."""

    def __init__(self, kv: KVShape, block_size: int, max_blocks: int, seed: int) -> None:
        device = jax.devices()[0]
        self._swapper = BlockSwapper(device, max_blocks)
        shape = (2 * max_blocks, *kv.block(block_size))
        self._pool = jax.device_put(jax.random.normal(jax.random.key(seed), shape, kv.dtype), device)
        self._rng = np.random.default_rng(seed)

    def copy(self, num_blocks: int) -> Iterator[float]:
        """Swap random blocks out, and into others; yields the seconds of each."""
        out, back = (self._rng.permutation(len(self._pool))[:num_blocks].tolist() for _ in DIRECTIONS)
        jax.block_until_ready(self._pool)
        started = time.perf_counter()
        self._swapper.swap_out(self._pool, 0, out)
        self._swapper.wait(0)
        yield time.perf_counter() - started
        started = time.perf_counter()
        blocks = host_blocks_of(0, num_blocks)
        self._pool = jax.block_until_ready(self._swapper.swap_in(self._pool, back, blocks))
        yield time.perf_counter() - started
        self._swapper.drop_all(0)


def _apart_copies(kv: KVShape, block_size: int, num_blocks: int, seed: int) -> Callable[[], Iterator[float]]:
    """Copies an array for every block, layer and K or V, all of them sent together."""
    device = jax.devices()[0]
    on_device = SingleDeviceSharding(device)
    on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    shape = (kv.num_kv_heads, block_size, kv.head_dim)
    values = np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(kv.dtype))
    pieces = [jax.device_put(values, on_device) for _ in range(2 * kv.num_layers * num_blocks)]
    jax.block_until_ready(pieces)

    def run() -> Iterator[float]:
        started = time.perf_counter()
        copied = jax.block_until_ready(jax.device_put(pieces, on_host))
        yield time.perf_counter() - started
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(copied, on_device))
        yield time.perf_counter() - started

    return run


def _prefill(
    config: Any, params: Any, cache: functional.KVCache, tokens: jax.Array, lengths: jax.Array
) -> tuple[functional.KVCache, jax.Array]:
    return functional.prefill(params, config, cache, tokens, lengths)
