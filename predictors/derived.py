"""What the engine makes of work: features that explain costs better than the counts they follow from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from jaxllm.types import piece_sizes

Array = NDArray[np.float64]


def derived_features(columns: Mapping[str, Array]) -> Array:
    """Pieces and bytes of copies; what steps multiply and read.

    Args:
        columns: `[n]` for each of the features of one kind, by the names of `regression.FEATURE_NAMES`.

    Returns:
        `[n, 2]`; of a copy the pieces it is made in (`types.piece_sizes`) and its bytes; of a step layers x
        hidden size squared x new tokens, and layers x hidden size x tokens of context, in proportion to the
        flops of its linear layers and to the KV it reads.
    """
    if "num_blocks" in columns:
        pieces = [float(len(piece_sizes(round(count)))) for count in columns["num_blocks"]]
        return np.stack([np.array(pieces), columns["block_bytes"] * columns["num_blocks"]], axis=1)
    width = columns["num_layers"] * columns["hidden_size"]
    nothing = np.zeros_like(width)
    tokens = columns.get("batch", nothing) + columns.get("num_tokens", nothing)
    context = columns.get("context_tokens", nothing) + columns.get("prompt_context", nothing)
    return np.stack([width * columns["hidden_size"] * tokens, width * context], axis=1)
