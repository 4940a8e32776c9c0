"""Blocks of keys and values, by name and on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass


MAX_STAGED_BLOCKS = 32
"""Blocks of device memory beside the pool that copies under way may take, in each direction."""


MAX_PIECE_BLOCKS = 16
"""Most blocks that one program gathers for a copy, or scatters."""


def piece_sizes(num_blocks: int) -> list[int]:
    """The pieces that so many blocks are copied in: powers of two, the largest first.

    On their way to the host the last piece goes first. Then all but `MAX_STAGED_BLOCKS` of a long copy have
    left as soon as they can, for what is beyond a multiple of `MAX_PIECE_BLOCKS` is not behind large pieces.
    """
    num_largest, rest = divmod(num_blocks, MAX_PIECE_BLOCKS)
    small = [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    return [MAX_PIECE_BLOCKS] * num_largest + small


class BlockName(NamedTuple):
    """Of a full block: a digest of it and all before it, its tokens, int32 one after another, and its place.

    `number` blocks come before it.
    """

    digest: bytes
    tokens: bytes
    number: int = 0


class HostPiece(NamedTuple):
    """Blocks that are one array in host memory: the `number`-th of the `piece_sizes` of the copy `handle`."""

    handle: int
    number: int


class HostBlock(NamedTuple):
    """A block in host memory: the `row`-th of a piece."""

    handle: int
    number: int
    row: int

    @property
    def piece(self) -> HostPiece:
        """The piece it is of."""
        return HostPiece(self.handle, self.number)


def host_blocks_of(handle: int, num_blocks: int) -> list[HostBlock]:
    """Where so many blocks go that are copied to the host together, in their order."""
    sizes = enumerate(piece_sizes(num_blocks))
    return [HostBlock(handle, number, row) for number, size in sizes for row in range(size)]
