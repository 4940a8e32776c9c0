"""Threads for native code: with as much stack as it needs, and not within it when the interpreter ends."""

from __future__ import annotations

import atexit
import concurrent.futures
import concurrent.futures.thread  # by others it may be too late: once the main thread has ended
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

_T = TypeVar("_T")
_NICENESS = 10


class WorkingThread(threading.Thread):
    """A thread that works only for others, and that the interpreter waits for, whoever it was started by."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        """As `threading.Thread`, which is a daemon where a daemon starts it."""
        super().__init__(target=target, name=name, daemon=False)


def is_interpreter_exiting() -> bool:
    """Whether nobody is left to work for: the main thread has ended, and so have all that outlive it."""
    if threading.main_thread().is_alive():
        return False
    others = (one for one in threading.enumerate() if not (one.daemon or isinstance(one, WorkingThread)))
    return not any(one.is_alive() for one in others)


def be_nice() -> None:
    """Let other threads of this process go first from now on, where the system can tell them apart."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_starting = threading.Lock()  # the size of a stack is that of all threads that start


class NativeThreads:
    """Threads that are there until they are closed or the interpreter ends, which waits for what they do.

    Others may use them while it does: not all that runs then has ended with the main thread. A context
    manager, which closes them.
    """

    def __init__(
        self, num_threads: int, stack_bytes: int, name: str, initializer: Callable[[], object] | None = None
    ) -> None:
        """Start so many, each with a stack of so many bytes, and with a call of `initializer`."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)
        with _starting:
            before = threading.stack_size(stack_bytes)
            try:
                for number in range(num_threads):
                    thread = threading.Thread(
                        target=self._run, args=(initializer,), name=f"{name}_{number}", daemon=True
                    )
                    thread.start()
                    self._threads.append(thread)
            finally:
                threading.stack_size(before)

    def submit(self, function: Callable[..., _T], *arguments: Any) -> concurrent.futures.Future[_T]:
        """Have a function called by one of them; whatever it raises is raised by the future."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def call() -> None:
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # a panic of native code is no Exception
                future.set_exception(error)

        self._work.put(call)
        return future

    def _run(self, initializer: Callable[[], object] | None) -> None:
        if initializer is not None:
            initializer()
        while (call := self._work.get()) is not None:
            call()
            del call  # and what it holds

    def close(self) -> None:
        """End them once they have done what they were given."""
        atexit.unregister(self.close)
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
