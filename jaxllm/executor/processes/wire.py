"""Messages between processes: a name and arguments, as JSON with arrays behind it. Nothing in them is run.

bytes of the JSON, bytes of the arrays (8 each, big endian) | JSON | arrays one after another
"""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import EngineError
from jaxllm.executor.programs import ProgramKey
from jaxllm.executor.sampling_programs import RowsKey, TakeKey
from jaxllm.executor.slot_params import Sampling
from jaxllm.types import BlockName, HostBlock, HostPiece

_HEAD = struct.Struct(">QQ")
MAX_FIRST_BYTES = 2**20
"""Of a message from somebody who is not known yet."""
_ARRAY = "array"
_NAMED: dict[str, Callable[..., Any]] = {
    "ProgramKey": lambda *numbers: ProgramKey(*numbers)._replace(sampling=Sampling(numbers[3])),
    "RowsKey": lambda rows, sampling: RowsKey(rows, Sampling(sampling)),
    "TakeKey": TakeKey,
    "BlockName": lambda digest, tokens, number: BlockName(
        bytes.fromhex(digest), bytes.fromhex(tokens), number
    ),
    "HostBlock": HostBlock,
    "HostPiece": HostPiece,
}


def packed(name: str, arguments: Sequence[Any]) -> bytes:
    """A message: its arguments are None, bools, numbers, text, arrays, keys, names, and lists of these."""
    arrays: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | jax.Array):
            array = np.ascontiguousarray(value)
            arrays.append(array.tobytes())
            return {_ARRAY: [array.dtype.name, list(array.shape)]}
        if isinstance(value, np.integer):
            return int(value)
        if isinstance(value, BlockName):
            return {"BlockName": [value.digest.hex(), value.tokens.hex(), value.number]}
        if type(value).__name__ in _NAMED:
            parts = value if isinstance(value, tuple) else dataclasses.astuple(value)
            return {type(value).__name__: [int(one) for one in parts]}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        if isinstance(value, dict):
            return {"dict": [[key, plain(one)] for key, one in value.items()]}
        return value

    text = json.dumps([name, [plain(one) for one in arguments]]).encode()
    rest = b"".join(arrays)
    return _HEAD.pack(len(text), len(rest)) + text + rest


def receive(connection: socket.socket, most: int | None = None) -> tuple[str, list[Any]]:
    """The next message.

    Raises:
        EOFError: the connection ends.
        OSError: it breaks, or nothing comes for as long as it waits.
        EngineError: it is none of ours, or longer than `most` bytes.
    """
    num_text, num_rest = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if most is not None and num_text + num_rest > most:
        raise EngineError(f"a first message of {num_text + num_rest} bytes is not one of jaxllm")
    text, rest = _exactly(connection, num_text), _exactly(connection, num_rest)
    start = 0

    def value(plain: Any) -> Any:
        nonlocal start
        if isinstance(plain, list):
            return [value(one) for one in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, given),) = plain.items()
        if kind == "dict":
            return {key: value(one) for key, one in given}
        if kind != _ARRAY:
            return _NAMED[kind](*given)
        dtype, shape = jnp.dtype(given[0]), given[1]
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(rest, dtype, count, start).reshape(shape)
        start += array.nbytes
        return array

    try:
        name, arguments = json.loads(text)
        return str(name), [value(one) for one in arguments]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise EngineError(f"a message is not one of jaxllm: {error}") from error


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 2**20))
        if not part:
            raise EOFError("the connection was closed")
        parts += part
    return bytes(parts)
