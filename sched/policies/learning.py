"""Policies that learn from requests that have ended."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxllm.types import Request


@runtime_checkable
class LearningPolicy(Protocol):
    """An admission or victim policy that is told how long outputs got."""

    def ended(self, request: Request, *, is_whole: bool) -> None:
        """Take a request that holds nothing any more, and may never have started.

        Args:
            request: its lengths are final.
            is_whole: whether its output was over: no `max_tokens` cut it off, and nobody gave it up.
        """
        ...
