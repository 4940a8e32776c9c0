"""Which thread an engine serves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxllm.errors import EngineError
from jaxllm.system import forks

_SECONDS_TO_LOOK_UP = 0.05  # after which it is asked what a thread has to do


class Owner:
    """Lets one thread at a time into an engine: the one whose requests it has, while it has any.

    Args:
        num_unfinished: what the engine still has to do or to report; 0 lets any thread in.
    """

    def __init__(self, num_unfinished: Callable[[], int]) -> None:
        """Nobody's."""
        self._num_unfinished = num_unfinished
        self._fork = forks.number
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._lender: threading.Thread | None = None
        self._is_back: threading.Event | None = None  # while it is lent

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep other threads out; the caller owns the engine from now on.

        Raises:
            EngineError: another thread does, or the caller is inside already; or this is a forked process.
        """
        me = threading.current_thread()
        self._wait_until_free(me)
        with self._lock:  # who merely finishes a last step there is waited for
            if not self._is_free(me):
                raise self._taken(me)
            self._thread = me
            yield

    def check_process(self) -> None:
        """Verify that the engine was made in this process.

        Raises:
            EngineError: it was made before a fork.
        """
        if self._fork != forks.number:
            raise EngineError(f"this engine was made before the process was forked; {forks.WAY_OUT}")

    def lend(self, thread: threading.Thread) -> None:
        """Give the engine to another thread, with the requests that the caller has on it.

        Raises:
            EngineError: a thread that is not the caller uses it.
        """
        me, is_back = threading.current_thread(), threading.Event()
        self._wait_until_free(me)
        with self._lock:
            if not self._is_free(me):
                raise self._taken(me)
            lender = me if self._num_unfinished() else None
            # No call from here on: Ctrl-C would come between.
            self._is_back, self._lender, self._thread = is_back, lender, thread

    def give_back(self, thread: threading.Thread) -> None:
        """Let whoever lent the engine to a thread go on with it; nothing, unless it is lent to that one."""
        is_back = self._is_back
        if is_back is not None and self._thread is thread:
            self._is_back, self._thread, self._lender = None, self._lender, None
            is_back.set()

    def _wait_until_free(self, me: threading.Thread) -> None:
        """Wait until it is likely that a thread may come in; raise if it is not to."""
        self.check_process()
        self._wait_until_back(me)
        if not self._is_free(me) or (self._thread is me and self._lock.locked()):
            raise self._taken(me)

    def _wait_until_back(self, me: threading.Thread) -> None:
        """Wait for a thread that has nothing left to do, or to which the caller lent the engine."""
        while True:
            owner, is_back = self._thread, self._is_back
            if is_back is None or owner is None or owner is me or _has_ended(owner):
                return
            if self._lender is not me and self._num_unfinished():
                raise self._taken(me)
            is_back.wait(_SECONDS_TO_LOOK_UP)

    def _is_free(self, thread: threading.Thread) -> bool:
        owner = self._thread
        return owner is thread or owner is None or _has_ended(owner) or not self._num_unfinished()

    def _taken(self, thread: threading.Thread) -> EngineError:
        name = "another thread" if self._thread is None else f"thread {self._thread.name!r}"
        return EngineError(
            f"thread {thread.name!r} called an engine that {name} uses, with {self._num_unfinished()} live "
            "requests; an engine serves one thread: use LLM.generate or LLM.stream, which any thread may call"
        )


def _has_ended(thread: threading.Thread) -> bool:
    return thread.ident is not None and not thread.is_alive()
