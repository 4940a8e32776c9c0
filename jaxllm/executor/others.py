"""The other processes of an engine, as an executor sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


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
