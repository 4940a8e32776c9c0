"""What a KV block holds, as a name: equal prefixes of tokens have blocks of equal names.

A name is of the tokens of a full block and of all before it, since these are what its keys and values depend
on. Names are chained: each holds a digest of the name before it.
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

_DIGEST_BYTES = 16
_ITEMSIZE = 4


class BlockName(NamedTuple):
    """Of a full block: a digest of it and all before it, and its tokens, int32 one after another."""

    digest: bytes
    tokens: bytes


def root(cache_salt: str | None = None) -> bytes:
    """What the first block's name is chained to; caches of other salts share nothing."""
    return b"" if cache_salt is None else _digest(b"salt:", cache_salt.encode())


def names_of(token_ids: Sequence[int], block_size: int, before: bytes) -> list[BlockName]:
    """Names of the full blocks of `token_ids`, which follow what the digest `before` is of."""
    size = block_size * _ITEMSIZE
    num_blocks = len(token_ids) // block_size
    content = array.array("i", token_ids[: num_blocks * block_size]).tobytes()
    names = []
    for start in range(0, num_blocks * size, size):
        tokens = content[start : start + size]
        before = _digest(before, tokens)
        names.append(BlockName(before, tokens))
    return names


def _digest(before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, digest_size=_DIGEST_BYTES).digest()
