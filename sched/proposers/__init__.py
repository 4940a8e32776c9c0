"""Proposers of drafts: which tokens may come next, one way per file.

`PromptLookup` (`.ngram`): what followed the same few tokens before.
`SuffixLookup` (`.suffix`): what followed the longest ending that was there before, however long it is.

Those that compute on a device are of the room `jaxllm.executor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxllm.types import Request


class Proposer(Protocol):
    """Guesses a request's next tokens. Whatever it guesses, outputs stay the same: it only saves steps.

    It is asked in the thread that schedules, and only reads requests. Their known tokens are those of prompt
    and outputs; they only ever get longer.
    """

    def propose(self, asked: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """Of each request at most so many tokens that may follow the known ones, the next one first.

        There are none if it is unsure.
        """
        ...

    def seconds(self, num_requests: int, num_tokens: int) -> float | None:
        """What it takes to propose so many tokens of each of so many requests.

        Whoever can tell is asked only for what is to be verified. None if there are as many as there happen
        to be, for next to nothing: they are looked at first.
        """
        ...

    def forget(self, request: Request) -> None:
        """Let go of what is kept of a request that has ended, be it known or not."""
        ...


class ChainedProposer(Proposer, Protocol):
    """One that can go on from what an iteration kept before the host knows that, on the device."""

    def prepare(self, asked: Sequence[tuple[Request, int]]) -> bool:
        """Whether it can draft for each request until it has so many tokens, without the host.

        Then it holds what it needs for that.
        """
        ...

    def kept(self, request: Request) -> None:
        """Note that the host knows of a request's tokens of such iterations, all of them."""
        ...

    def forget_prefixes(self) -> None:
        """Find nothing again of what requests have left."""
        ...
