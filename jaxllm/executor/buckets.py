"""Static shapes: the sizes of decode batches and of steps with prompts that programs are compiled for.

The two ladders are compiled apart, so the number of programs is their sum, not their product: a step with
prompts has one number of rows, which decodes and prompt tokens share as they come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxllm.errors import ConfigError, EngineError
from jaxllm.predictors.programs import ProgramSizes
from jaxllm.types import MULTI_STEP_SEQS

_TOKENS_PER_CHUNK = 8  # a program of T rows takes up to T / 8 prompt chunks


def decode_ladder(limit: int, *, is_padding_cheap: bool = False) -> tuple[int, ...]:
    """Decode batch sizes up to `limit`: powers of two and, from 16 on, the values half way between.

    Where padding is cheap powers of two from 8 on.
    """
    sizes = {limit}
    size = 1
    while size < limit:
        sizes.add(size)
        if size >= 16 and size * 3 // 2 < limit and not is_padding_cheap:
            sizes.add(size * 3 // 2)
        size *= 8 if is_padding_cheap and size == 1 else 2
    return tuple(sorted(sizes))


def prefill_ladder(limit: int, *, is_padding_cheap: bool = False) -> tuple[int, ...]:
    """Numbers of rows of steps with prompts, up to `limit`: powers of two from 32 on, and values between.

    From 64 on one between two powers, from 2,048 on three. Where padding is cheap powers of four, and nothing
    between.
    """
    sizes = {limit}
    size = 32
    while size < limit:
        quarters = (4,) if is_padding_cheap or size < 64 else (4, 6) if size < 2048 else (4, 5, 6, 7)
        sizes.update(size * quarter // 4 for quarter in quarters if size * quarter // 4 < limit)
        size *= 4 if is_padding_cheap else 2
    return tuple(sorted(sizes))


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Decode batch sizes, and numbers of rows of steps with prompts, within `max_num_seqs` requests."""

    decode: tuple[int, ...]
    sizes: tuple[int, ...]
    max_num_seqs: int

    @classmethod
    def make(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_sizes: Sequence[int] | None = None,
        prefill_sizes: Sequence[int] | None = None,
        is_padding_cheap: bool = False,
    ) -> Buckets:
        """The default ladders, or the sizes given; the largest size is always the limit itself.

        Padding is cheap where only rows in use are multiplied with weights, as in native products.

        Raises:
            ConfigError: a size is not an integer in [1, limit].
        """
        decode_default = decode_ladder(max_num_seqs, is_padding_cheap=is_padding_cheap)
        decode = _sizes("decode_buckets", decode_sizes, max_num_seqs, decode_default)
        default = prefill_ladder(max_num_batched_tokens, is_padding_cheap=is_padding_cheap)
        sizes = _sizes("prefill_buckets", prefill_sizes, max_num_batched_tokens, default)
        return cls(decode, sizes, max_num_seqs)

    def up_to(self, num_rows: int) -> Buckets:
        """Without sizes that no step with prompts of at most so many rows needs."""
        least = min(size for size in self.sizes if size >= num_rows)
        return dataclasses.replace(self, sizes=tuple(size for size in self.sizes if size <= least))

    @property
    def max_prefill_seqs(self) -> int:
        """Most prompt chunks of one step."""
        return self.max_chunks(self.sizes[-1])

    def max_chunks(self, size: int) -> int:
        """Most prompt chunks of a step of `size` rows."""
        return min(self.max_num_seqs, max(1, size // _TOKENS_PER_CHUNK))

    def program_sizes(self, padding_share: float = 1.0) -> ProgramSizes:
        """For predictions of what they cost; see `ProgramSizes`."""
        chunks = [self.max_chunks(size) for size in self.sizes]
        return ProgramSizes(self.decode, self.sizes, chunks, padding_share)

    def multi_step_sizes(self) -> tuple[int, ...]:
        """Decode batches for which several iterations may be one program."""
        largest = self.decode_size(min(MULTI_STEP_SEQS, self.max_num_seqs))
        return tuple(size for size in self.decode if size <= largest)

    def decode_size(self, num_rows: int) -> int:
        """Smallest decode batch that holds `num_rows` requests.

        Raises:
            EngineError: there is none.
        """
        for size in self.decode:
            if size >= num_rows:
                return size
        raise EngineError(
            f"no program decodes {num_rows} requests at once; the largest one {self.decode[-1]}"
        )

    def size(self, num_decodes: int, num_tokens: int, num_chunks: int) -> int:
        """Rows of the smallest program with prompts that holds an iteration.

        Raises:
            EngineError: there is none.
        """
        for size in self.sizes:
            if size >= num_decodes + num_tokens and self.max_chunks(size) >= num_chunks:
                return size
        raise EngineError(
            f"no program computes {num_tokens} prompt tokens of {num_chunks} requests beside {num_decodes} "
            f"decodes; the largest one has {self.sizes[-1]} rows for up to {self.max_prefill_seqs} prompts"
        )


def _sizes(name: str, sizes: Sequence[int] | None, limit: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if sizes is None:
        return default
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= limit:
            raise ConfigError(f"{name} has {size!r}; each size must be an integer from 1 to {limit}")
    return tuple(sorted({*sizes, limit}))
