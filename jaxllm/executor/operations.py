"""What one process asks of the others of an engine, by name, so that all do the same in the same order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_W = TypeVar("_W", bound="Asked")
OPERATIONS: dict[str, Callable[..., Any]] = {}
"""What may be asked of a worker, by name."""


class Others(Protocol):
    """The other processes of an engine."""

    @property
    def is_lost(self) -> bool:
        """Whether one of them is gone."""
        ...

    def tell(self, name: str, arguments: Sequence[Any]) -> None:
        """Have each of them do an operation, after those before it.

        Raises:
            EngineError: one of them is gone.
        """
        ...

    def ask(self, name: str) -> dict[int, Any]:
        """What each of them says of something, waited for, by rank.

        Raises:
            EngineError: one of them is gone.
        """
        ...

    def news(self, seconds: float = 0.0) -> list[tuple[int, Any]]:
        """Ranks, and what these have said of themselves since the last call; waited for at most so long.

        Raises:
            EngineError: one of them is gone.
        """
        ...

    def end(self) -> None:
        """Let them end: nothing is told any more."""
        ...

    def blame(self, error: BaseException) -> None:
        """If one of them turns out to be gone, which is most likely the cause of an error, say so.

        Raises:
            EngineError: one is.
        """
        ...

    def wait(self, arrays: Any) -> None:
        """Wait until arrays are computed.

        Raises:
            EngineError: one of them is gone, so that they may never be.
        """
        ...


class Asked(Protocol):
    """Whose operations these are."""

    others: Others | None


def operation(do: Callable[Concatenate[_W, _P], _R]) -> Callable[Concatenate[_W, _P], _R]:
    """What all processes of an engine do when one is asked to; arguments go by their places."""
    name = do.__name__

    @functools.wraps(do)
    def ask(self: _W, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        assert not kwargs
        if self.others is None:
            return do(self, *args, **kwargs)
        self.others.tell(name, args)
        try:
            return do(self, *args, **kwargs)
        except Exception as error:
            self.others.blame(error)
            raise

    OPERATIONS[name] = do
    return ask
