"""Which thread an engine serves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from jaxllm.errors import EngineError


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

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep other threads out; the caller owns the engine from now on.

        Raises:
            EngineError: another thread does, or the caller is inside already.
        """
        me = threading.current_thread()
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

    def hand_over(self, thread: threading.Thread) -> threading.Thread | None:
        """Give the engine to another thread; returns the caller if it has requests on it, which go with it.

        Raises:
            EngineError: a thread that is not the caller uses it.
        """
        with self.used():
            owner, self._thread = self._thread, thread
            return owner if self._num_unfinished() else None

    def release_to(self, thread: threading.Thread | None) -> None:
        """Give the engine back, from the thread that it was handed over to."""
        if self._thread is threading.current_thread():
            self._thread = thread

    def _is_free(self, thread: threading.Thread) -> bool:
        owner = self._thread
        return owner is thread or owner is None or not (owner.is_alive() and self._num_unfinished())

    def _taken(self, thread: threading.Thread) -> EngineError:
        name = "another thread" if self._thread is None else f"thread {self._thread.name!r}"
        return EngineError(
            f"thread {thread.name!r} called an engine that {name} uses, with {self._num_unfinished()} live "
            "requests; an engine serves one thread: use LLM.generate or LLM.stream, which any thread may call"
        )
