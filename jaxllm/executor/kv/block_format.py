"""What the file of a KV block holds: a header, a checksum of everything, the tokens, and the block."""

from __future__ import annotations

import hashlib
import io
import os
import struct

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.sched.cache.names import BlockName

FORMAT = "jaxllm-kv-blocks"
FORMAT_VERSION = 2
"""1 may hold blocks that were copied before they were computed."""
_HEADER = struct.Struct("<8sIIQ")  # magic, version, bytes of the tokens, bytes of the block
_MAGIC = b"jaxllmKV"
_CHECKSUM_BYTES = 16


class DamagedError(Exception):
    """A file does not hold the block of its name; says how."""


class BlockFormat:
    """Files of the blocks of one fingerprint, of which `key` is a digest.

    Raises:
        ConfigError: there are no blocks of such a shape or dtype.
    """

    def __init__(self, fingerprint: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        if not shape or min(shape) < 1:
            raise ConfigError(f"shape={shape} of a block must be of one or more sizes of at least 1")
        if dtype.hasobject:
            raise ConfigError(f"dtype={dtype} holds Python objects; blocks are of numbers")
        self._shape, self._dtype = shape, dtype
        self._block_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        person = f"KV blocks {FORMAT_VERSION}".encode()
        self.key = hashlib.blake2b(fingerprint.encode(), digest_size=16, person=person).digest()

    def size(self, name: BlockName) -> int:
        """Bytes of a block's file."""
        return _HEADER.size + _CHECKSUM_BYTES + len(name.tokens) + self._block_bytes

    def parts(self, name: BlockName, block: np.ndarray) -> tuple[bytes, bytes, bytes, memoryview]:
        """A block's file, in parts."""
        content = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        header = self._header(name)
        return header, self._checksum(header, name, content), name.tokens, content.data

    def parse(self, file: io.BufferedReader, name: BlockName) -> np.ndarray:
        """The block of a file, in an array of its own.

        Raises:
            DamagedError: the file does not hold it, whole and of this very name.
        """
        size, expected = os.fstat(file.fileno()).st_size, self.size(name)
        if size != expected:
            raise DamagedError(f"it has {size} bytes instead of {expected}")
        header = file.read(_HEADER.size)
        if header != self._header(name):
            raise DamagedError(f"it does not begin like a block of format {FORMAT_VERSION}")
        checksum = file.read(_CHECKSUM_BYTES)
        if file.read(len(name.tokens)) != name.tokens:
            raise DamagedError("it is of other tokens")
        content = np.empty(self._block_bytes, np.uint8)
        file.readinto(content.data)
        if checksum != self._checksum(header, name, content):
            raise DamagedError("its checksum is wrong")
        return content.view(self._dtype).reshape(self._shape)

    def _header(self, name: BlockName) -> bytes:
        return _HEADER.pack(_MAGIC, FORMAT_VERSION, len(name.tokens), self._block_bytes)

    def _checksum(self, header: bytes, name: BlockName, content: np.ndarray) -> bytes:
        """Of all that a file holds, and of whose it is: a copy under another name or fingerprint fails."""
        hasher = hashlib.blake2b(header, digest_size=_CHECKSUM_BYTES, key=self.key)
        hasher.update(name.digest)
        hasher.update(name.tokens)
        hasher.update(content.data)
        return hasher.digest()
