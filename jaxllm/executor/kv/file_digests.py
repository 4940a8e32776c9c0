"""Digests of files' contents, remembered in the user's cache: weights are large, and seldom change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxllm.errors import WeightsError
from jaxllm.system.cache_folder import cache_folder
from jaxllm.system.threads import NativeThreads

_NUM_READERS, _STACK_BYTES = 8, 2**20  # threads that read weights
_CHUNK_BYTES = 4 * 2**20
_CLOCK_SECONDS = 0.02  # how coarse a file system's times may be
_DIGEST = re.compile("[0-9a-f]{128}")


def digest_of(path: Path, chunk_bytes: int) -> tuple[int, bytes]:
    """Bytes of a file, and a digest of them; read in chunks of so many.

    It is read unless it is the file that it was when it was last read: of the same path, size, times, inode
    and device. What is remembered is a hint: a folder that cannot be written to, and a record that makes no
    sense, cost only time.

    Raises:
        OSError: it cannot be read.
    """
    identity = _identity(path)
    record = _record(path)
    if record is not None and (known := _remembered(record, identity)) is not None:
        return identity["size"], known
    # A change that comes so soon that the times do not tell it.
    if abs(time.time() - identity["ctime_ns"] / 1e9) < _CLOCK_SECONDS:
        time.sleep(_CLOCK_SECONDS)
        identity = _identity(path)
    size, digest = _read(path, chunk_bytes)
    if record is not None and size == identity["size"] and _identity(path) == identity:
        _remember(record, identity, digest)
    return size, digest


def _identity(path: Path) -> dict[str, Any]:
    found = os.stat(path)
    return {
        "path": os.path.realpath(path),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }


def _record(path: Path) -> Path | None:
    """Where a file's digest is remembered; None if there is no home for it."""
    name = hashlib.blake2b(os.fsencode(os.path.realpath(path)), digest_size=16).hexdigest()
    with contextlib.suppress(RuntimeError):
        return cache_folder("weights") / f"{name}.json"
    return None


def _remembered(record: Path, identity: dict[str, Any]) -> bytes | None:
    try:
        found = json.loads(record.read_bytes())
        if found["file"] == identity and _DIGEST.fullmatch(found["digest"]):
            return bytes.fromhex(found["digest"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _remember(record: Path, identity: dict[str, Any], digest: bytes) -> None:
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=record.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"file": identity, "digest": digest.hex()}, file)
            os.replace(temporary, record)
        except BaseException:
            os.unlink(temporary)
            raise


def _read(path: Path, chunk_bytes: int) -> tuple[int, bytes]:
    hasher, size = hashlib.blake2b(), 0
    buffer = memoryview(bytearray(chunk_bytes))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            size += count
    return size, hasher.digest()


def weights_fingerprint(folder: Path) -> str:
    """Hex digest of names, sizes and contents of a checkpoint's config.json and weight files.

    These are its safetensors with their index, and all below its params/ folder (Orbax). Every byte counts;
    files that were read before are read again only if they have changed (`file_digests`).

    Raises:
        WeightsError: there are no weights, or a file cannot be read.
    """
    from jaxllm.loading.orbax_format import PARAMS_FOLDER  # imports JAX, which nothing else here needs

    folder = Path(folder)
    try:
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
        weights += (folder / PARAMS_FOLDER).rglob("*")
        names = {path.relative_to(folder).as_posix(): path for path in weights if path.is_file()}
        if not names:
            raise WeightsError(
                f"{str(folder)!r} has no weights to tell its KV blocks by: expected *.safetensors or a "
                f"{PARAMS_FOLDER}/ folder; keep no blocks of dummy weights"
            )
        if (folder / "config.json").is_file():
            names["config.json"] = folder / "config.json"
        hasher = hashlib.blake2b(digest_size=32)
        with NativeThreads(min(_NUM_READERS, len(names)), _STACK_BYTES, "jaxllm-weights") as threads:
            contents = {
                name: threads.submit(digest_of, path, _CHUNK_BYTES) for name, path in sorted(names.items())
            }
            for name, content in contents.items():
                size, digest = content.result()
                hasher.update(f"{name}\0{size}\0".encode() + digest)
    except OSError as error:
        raise WeightsError(f"cannot read the weights of {str(folder)!r}: {error}") from error
    return hasher.hexdigest()
