"""Which thread an engine serves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxllm.errors import EngineError

_SECONDS_TO_LOOK_UP = 0.05  # after which it is asked what a thread has to do


class Owner:
    """Lets one thread at a time into an engine: the one whose requests it has, while it has any.

    Args:
        num_unfinished: what the engine still has to do or to report; 0 lets any thread in.
    """

    def __init__(self, num_unfinished: Callable[[], int]) -> None:
        """Nobody's."""
        self._num_unfinished = num_unfinished
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._lender: threading.Thread | None = None
        self._is_back: threading.Event | None = None  # while it is lent

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep other threads out; the caller owns the engine from now on.

        Raises:
            EngineError: another thread does, or the caller is inside already.
        """
        me = threading.current_thread()
        self._wait_until_back(me)
        # Who merely finishes a last step there is waited for.
        if not self._is_free(me) or not self._lock.acquire(blocking=self._thread is not me):
            raise self._taken(me)
        try:
            if not self._is_free(me):
                raise self._taken(me)
            self._thread = me
            yield
        finally:
            self._lock.release()

    def lend(self, thread: threading.Thread) -> None:
        """Give the engine to another thread, with the requests that the caller has on it.

        Raises:
            EngineError: a thread that is not the caller uses it.
        """
        with self.used():
            self._lender = self._thread if self._num_unfinished() else None
            self._is_back = threading.Event()
            self._thread = thread

    def give_back(self) -> None:
        """Let whoever lent the engine go on with it; called by the thread that it was lent to."""
        is_back, self._is_back = self._is_back, None
        self._thread, self._lender = self._lender, None
        assert is_back is not None  # once for each time it was lent
        is_back.set()

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
