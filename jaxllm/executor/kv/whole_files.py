"""Files that nobody sees before they are whole, and what is left of those that never were."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence

_MAX_TEMPORARY_SECONDS = 3600
TEMPORARY_NAME = re.compile(r"\..+\.([0-9a-f]{8})-([0-9]+)-([0-9a-f]{8})-[0-9]+\.tmp")
_PROCESS = secrets.token_hex(4)  # tells this process from an earlier one of its id
_counter = itertools.count()


def replace_file(path: str, parts: Sequence[bytes | memoryview]) -> int:
    """Write a file that nobody sees before it is whole.

    Not synced: a crash of the machine may tear it, which whoever reads it finds.

    Returns:
        Its time, in nanoseconds.
    """
    folder, name = os.path.split(path)
    writer = f"{_machine()}-{os.getpid()}-{_PROCESS}-{next(_counter)}"
    temporary = os.path.join(folder, f".{name}.{writer}.tmp")
    os.makedirs(folder, exist_ok=True)
    try:
        with open(temporary, "xb") as file:
            for part in parts:
                file.write(part)
        now = time.time_ns()
        os.utime(temporary, ns=(now, now))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return now


def is_left_over(entry: os.DirEntry[str]) -> bool:
    """Whether nobody is writing a temporary file any more."""
    match = TEMPORARY_NAME.fullmatch(entry.name)
    if match is None:
        return False
    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _MAX_TEMPORARY_SECONDS:
        return True
    machine, pid, process = match[1], int(match[2]), match[3]
    if machine != _machine():
        return False
    if pid == os.getpid():
        return process != _PROCESS
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # another user's process
    return False


def _machine() -> str:
    """Tells process ids of this machine or container from those of others."""
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    text = f"{socket.gethostname()} {namespace}"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
