"""A slice of a machine's processors for each engine on it, so that two do not fight for one.

XLA, and with it the native kernels, make a thread for each processor that the process may run on. So a
process that is bound to a slice before the first program computes with as many threads as the slice has
processors.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

_FOLDER = "jaxllm-processors"


class CpuSlice:
    """Processors that no other slice on this machine holds; the operating system gives them back at exit.

    Args:
        num_cpus: how many.

    Attributes:
        cpus: which; empty if so many are not free, and the process stays unbound.
    """

    def __init__(self, num_cpus: int) -> None:
        folder = Path(tempfile.gettempdir()) / f"{_FOLDER}-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._locks: list[int] = []
        self.cpus: tuple[int, ...] = ()
        there = sorted(os.sched_getaffinity(0))
        if num_cpus >= len(there):
            return
        chosen = []
        for cpu in there:
            lock = os.open(folder / str(cpu), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._locks.append(lock)
            chosen.append(cpu)
            if len(chosen) == num_cpus:
                self.cpus = tuple(chosen)
                return
        self.release()

    def bind(self) -> None:
        """Bind this process to the slice, with the threads it has; later ones inherit that."""
        if not self.cpus:
            return
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), self.cpus)
            except ProcessLookupError:
                continue  # it has just ended

    def release(self) -> None:
        """Let others have the processors."""
        while self._locks:
            os.close(self._locks.pop())
        self.cpus = ()
