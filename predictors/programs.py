"""Costs of steps that run in programs of a few sizes: whatever they hold, all rows are computed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostKind, CostModel
from jaxllm.predictors.table import Array, ask_many


class ProgramSizes:
    """The programs that steps run in.

    Decodes alone run in the smallest of `decode` that holds them, a step with prompts in the smallest of
    `rows` that holds its decodes and prompt tokens, and has room for as many prompts.

    Args:
        decode: of programs that only decode, in sequences, increasing.
        rows: of programs with prompts, in rows, increasing.
        chunks: most prompts of each of these.
        padding_share: what a row of padding takes of the time of a token, from 0 to 1. Matrix products
            compute both, unless they are told how many rows count; attention only the token.

    Raises:
        ConfigError: there is no size, they do not increase from 1 or more, or the share is out of range.
    """

    def __init__(
        self, decode: Sequence[int], rows: Sequence[int], chunks: Sequence[int], padding_share: float = 1.0
    ) -> None:
        if not 0 <= padding_share <= 1:
            raise ConfigError(f"padding_share is {padding_share}: expected 0 to 1")
        self._decode = _smallest("decode", decode)
        self._rows = _smallest("rows", rows)
        self._chunks = dict(zip(rows, chunks, strict=True))
        self.padding_share = padding_share

    def padded(self, batch: int, prompt_tokens: int, num_prompts: int) -> tuple[int, int]:
        """Decodes and prompt tokens of a step that uses every row, and takes as long as one of these.

        Steps larger than every program are left as they are.
        """
        if prompt_tokens <= 0 or num_prompts <= 0:
            size = self._decode[batch] if 0 < batch < len(self._decode) else batch
            return batch + round(self.padding_share * (size - batch)), 0
        num_rows, rows = batch + prompt_tokens, self._rows
        if num_rows >= len(rows):
            return batch, prompt_tokens
        size = rows[num_rows]
        while self._chunks[size] < num_prompts and size + 1 < len(rows):
            size = rows[size + 1]
        return batch, prompt_tokens + round(self.padding_share * (size - num_rows))

    def nearest(self, batch: int, prompt_tokens: int) -> int:
        """The number of prompt tokens nearest above that `padded` may return for so many decodes."""
        num_rows, rows = batch + prompt_tokens, self._rows
        if num_rows >= len(rows):
            return prompt_tokens
        size = rows[num_rows]
        fewest = max(1, bisect_left(rows, size) - batch)
        return max(prompt_tokens, fewest + round(self.padding_share * (size - batch - fewest)))


class ProgramCosts:
    """A `CostModel` of what programs compute for a step, the rows of padding included.

    So a few more prompt tokens cost nothing while the program stays the same, and much where it does not.

    Args:
        costs: seconds by rows that are computed.
        sizes: of the programs.
        max_model_len: most tokens of a sequence.
    """

    def __init__(self, costs: CostModel, sizes: ProgramSizes, max_model_len: float = math.inf) -> None:
        self.costs, self.sizes, self._max_model_len = costs, sizes, max_model_len

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """See `CostModel.step_seconds`."""
        batch, prompt_tokens = self.sizes.padded(batch, prompt_tokens, num_prompts)
        return self.costs.step_seconds(batch, context_tokens, prompt_tokens, num_prompts, prompt_context)

    def seconds_many(self, kind: CostKind, work: Array) -> Array:
        """See `BatchCostModel.seconds_many`.

        Rows are those that `ProgramSizes.padded` returns. What cannot happen is asked as the nearest that
        can: a size between those of two programs as the larger, and a context longer than the sequences may
        be as the longest. A fit knows nothing of either, and a table that never falls would carry what it
        says over to larger work.
        """
        work, longest = work.copy(), self._max_model_len
        for row in work:
            if kind == "decode":
                row[0], _ = self.sizes.padded(int(row[0]), 0, 0)
                row[1] = min(row[1], row[0] * longest)
            elif kind == "prefill":
                row[0] = self.sizes.nearest(0, int(row[0]))
                row[2] = min(row[2], row[1] * longest)
            elif kind == "mixed":
                row[2] = self.sizes.nearest(int(row[0]), int(row[2]))
                row[1] = min(row[1], row[0] * longest)
        return ask_many(self.costs, kind, work)

    def swap_out_seconds(self, num_blocks: int) -> float:
        """See `CostModel.swap_out_seconds`."""
        return self.costs.swap_out_seconds(num_blocks)

    def swap_in_seconds(self, num_blocks: int) -> float:
        """See `CostModel.swap_in_seconds`."""
        return self.costs.swap_in_seconds(num_blocks)


def _smallest(name: str, sizes: Sequence[int]) -> list[int]:
    """By number of rows in use, from 0, the smallest size that holds them."""
    found = [0]
    for size in sizes:
        if size < len(found):
            raise ConfigError(f"{name} must increase from 1 or more, got {list(sizes)}")
        found += [size] * (size + 1 - len(found))
    if len(found) == 1:
        raise ConfigError(f"{name} must hold at least one size")
    return found
