"""Swapping against recomputing by block size (vLLM, Kwon et al. 2023, Fig. 19), simulated. Imports no JAX."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.predictors.base import model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import DEFAULT_PIECE_SECONDS, RooflineCostModel

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
TOKENS = (64, 256, 1024)
LAYOUTS = {"engine": "blocks in one piece", "vllm": "K and V of each layer apart"}
"""The engine's pool, and vLLM's, in which every block, layer and K or V is copied by itself."""
Row = dict[str, Any]


def block_size_rows(
    *,
    model: str = "opt-13b",
    device: str = "A800-80GB-PCIe",
    block_sizes: Sequence[int] = BLOCK_SIZES,
    tokens: Sequence[int] = TOKENS,
    piece_seconds: float = DEFAULT_PIECE_SECONDS,
) -> list[Row]:
    """What a roofline says of one sequence, swapped out and in, or recomputed in one prefill.

    Args:
        model: a name of `MODEL_SHAPES`.
        device: a name of `DEVICES`.
        block_sizes: tokens of a block.
        tokens: lengths of the sequence.
        piece_seconds: fixed cost of each piece of vLLM's layout, an assumption.

    Returns:
        A row for each layout, length and block size, with `swap_seconds` and `recompute_seconds`.

    Raises:
        ConfigError: a name is unknown, or a number out of range.
    """
    shape, spec, rows = model_shape(model), device_spec(device), []
    for layout, length, block_size in itertools.product(LAYOUTS, tokens, block_sizes):
        pieces = 2 * shape.num_layers if layout == "vllm" else 0
        costs = RooflineCostModel(
            shape, spec, block_size=block_size, pieces_per_block=pieces, piece_seconds=piece_seconds
        )
        num_blocks = -(-length // block_size)
        rows.append(
            {
                "source": "simulated",
                "layout": layout,
                "tokens": length,
                "block_size": block_size,
                "swap_seconds": costs.swap_out_seconds(num_blocks) + costs.swap_in_seconds(num_blocks),
                "recompute_seconds": costs.step_seconds(0, 0, length, 1),
            }
        )
    return rows


def lines_of(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, int], list[Mapping[str, Any]]]:
    """Rows by source, layout and tokens, each in order of block size."""
    found: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["block_size"]):
        found.setdefault((row["source"], row["layout"], row["tokens"]), []).append(row)
    return {key: found[key] for key in sorted(found, key=lambda key: (key[0] != "simulated", *key))}


def crossover(line: Sequence[Mapping[str, Any]]) -> str:
    """From and up to which of its block sizes swapping takes less time than recomputing, in words."""
    faster = [row["swap_seconds"] < row["recompute_seconds"] for row in line]
    if all(faster):
        return "swap at every size"
    if not any(faster):
        return "recompute at every size"
    sizes = [row["block_size"] for row, is_faster in zip(line, faster, strict=True) if is_faster]
    if faster[-1] and len(sizes) == len(faster) - faster.index(True):
        return f"swap from {sizes[0]}"
    if faster[0] and len(sizes) == faster.index(False):
        return f"swap up to {sizes[-1]}"
    return "swap at " + ", ".join(map(str, sizes))
