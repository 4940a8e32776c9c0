"""Proposers of drafts: which tokens may come next, guessed on the host, one way per file.

`PromptLookup` (`.ngram`): what followed the same few tokens before.
`SuffixLookup` (`.suffix`): what followed the longest ending that was there before, however long it is.
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

    def propose(self, request: Request, num_tokens: int) -> Sequence[int]:
        """At most `num_tokens` tokens that may follow the known ones, the next one first; none if unsure."""
        ...

    def forget(self, request: Request) -> None:
        """Let go of what is kept of a request that has ended, be it known or not."""
        ...
