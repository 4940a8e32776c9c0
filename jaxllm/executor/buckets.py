"""Static shapes: the sizes of decode batches and of prefill slices that programs are compiled for.

The two ladders are compiled apart, so the number of programs is their sum, not their product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxllm.errors import ConfigError
from jaxllm.types import MULTI_STEP_SEQS

_TOKENS_PER_SEQ = 8  # a prefill program of T tokens takes up to T / 8 prompts


def decode_ladder(limit: int) -> tuple[int, ...]:
    """Decode batch sizes up to `limit`: powers of two and, from 16 on, the values half way between."""
    sizes = {limit}
    size = 1
    while size < limit:
        sizes.add(size)
        if size >= 16 and size * 3 // 2 < limit:
            sizes.add(size * 3 // 2)
        size *= 2
    return tuple(sorted(sizes))


def prefill_ladder(limit: int) -> tuple[int, ...]:
    """Prefill token counts up to `limit`: 32 and its multiples by powers of four; half of `limit`."""
    sizes = {limit}
    if limit >= 128:
        sizes.add(limit // 2)
    size = 32
    while size < limit // 2:
        sizes.add(size)
        size *= 4
    return tuple(sorted(sizes))


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Decode batch sizes (rows) and prefill sizes (tokens, with the most sequences each takes)."""

    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]

    @classmethod
    def make(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_sizes: Sequence[int] | None = None,
        prefill_sizes: Sequence[int] | None = None,
    ) -> Buckets:
        """The default ladders, or the sizes given; the largest size is always the limit itself.

        Raises:
            ConfigError: a size is not an integer in [1, limit].
        """
        decode = _sizes("decode_buckets", decode_sizes, max_num_seqs, decode_ladder)
        prefill = _sizes("prefill_buckets", prefill_sizes, max_num_batched_tokens, prefill_ladder)
        return cls(
            decode, tuple((size, min(max_num_seqs, max(1, size // _TOKENS_PER_SEQ))) for size in prefill)
        )

    @property
    def max_prefill_seqs(self) -> int:
        """Most prompts one prefill step takes."""
        return self.prefill[-1][1]

    def multi_step_sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """Decode batches for which several iterations may be one program."""
        largest = self.decode_size(min(MULTI_STEP_SEQS, max_num_seqs))
        return tuple(size for size in self.decode if size <= largest)

    def decode_size(self, num_rows: int) -> int:
        """Smallest decode batch that holds `num_rows` requests."""
        return next(size for size in self.decode if size >= num_rows)

    def prefill_size(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        """Smallest prefill slice, (tokens, sequences), that holds the chunks."""
        return next(size for size in self.prefill if size[0] >= num_tokens and size[1] >= num_seqs)


def _sizes(
    name: str, sizes: Sequence[int] | None, limit: int, default: Callable[[int], tuple[int, ...]]
) -> tuple[int, ...]:
    if sizes is None:
        return default(limit)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= limit:
            raise ConfigError(f"{name} has {size!r}; each size must be an integer from 1 to {limit}")
    return tuple(sorted({*sizes, limit}))
