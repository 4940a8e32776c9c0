"""Drafts that stay on the device until somebody looks at them: they are verified before anybody waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.programs import PackedStep


class DraftBatch:
    """What one program drafted.

    Args:
        tokens: [most, requests] int32, on the device; below 0 where nothing was finite.
    """

    def __init__(self, tokens: jax.Array) -> None:
        self.tokens = tokens
        self._read: np.ndarray | None = None
        tokens.copy_to_host_async()

    def read(self) -> np.ndarray:
        """All of them, once they are computed; any token where nothing was finite."""
        if self._read is None:
            self._read = np.maximum(np.asarray(self.tokens), 0)
        return self._read


class Drafted(Sequence[int]):
    """The first drafts of a request, of one column of a batch; who reads one waits for the program."""

    __slots__ = ("_count", "batch", "column")

    def __init__(self, batch: DraftBatch, column: int, count: int) -> None:
        self.batch, self.column, self._count = batch, column, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self.batch.read()[: self._count, self.column].tolist())

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        """One of them; the first ones stay where they are."""
        if isinstance(place, slice) and place.indices(self._count)[::2] == (0, 1):
            return Drafted(self.batch, self.column, len(range(self._count)[place]))
        return list(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Drafted({self._count} of column {self.column})"


class DraftPlaces:
    """Where in a step's inputs drafts belong that are on the device."""

    def __init__(self) -> None:
        self._batch: DraftBatch | None = None
        self._places: list[tuple[int, int, int]] = []

    def take(self, drafts: Sequence[int], first: int) -> Sequence[int]:
        """What to put into the inputs from place `first` on: drafts, or room for those on the device."""
        if not isinstance(drafts, Drafted) or drafts.batch is not (self._batch or drafts.batch):
            return drafts
        self._batch = drafts.batch
        self._places += [(number, drafts.column, first + number) for number in range(len(drafts))]
        return [0] * len(drafts)

    def fill(self, packed: np.ndarray) -> np.ndarray | jax.Array:
        """The inputs with all of them."""
        if self._batch is None:
            return packed
        tokens = self._batch.tokens
        places = np.full(tokens.shape, len(packed), np.int32)
        numbers, columns, found = zip(*self._places, strict=True)
        places[list(numbers), list(columns)] = found
        return _filled(packed, tokens, places)


def warm_up_filling(config: ExecutorConfig, most: int, device: jax.Device) -> None:
    """Compile what puts drafts of a `DraftBatch`, at most `most` of a request, into the inputs of steps."""
    tokens = jax.device_put(np.zeros((most, config.buckets.decode[-1]), np.int32), device)
    for size in config.buckets.sizes:
        places = DraftPlaces()
        places.take(Drafted(DraftBatch(tokens), 0, 1), 0)
        places.fill(PackedStep(config.draft_key(size), config.max_num_seqs, config.block_size).array)


@jax.jit
def _filled(packed: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    return packed.at[places].set(jnp.maximum(tokens, 0), mode="drop")
