"""Prompt lookup: what followed the same few tokens before.

Saxena, "Prompt Lookup Decoding" (2023, github.com/apoorvumang/prompt-lookup-decoding); also Yang et al.,
"Inference with Reference" (2023, arXiv 2304.04487). Of several places the latest counts. Tokens are searched
as bytes, backwards: a thousand take a microsecond, and nothing has to be made of a prompt first.
"""

from __future__ import annotations

import array
from collections.abc import Sequence

from jaxllm.types import Request

_TYPE = "i"
_WIDTH = array.array(_TYPE).itemsize


def repeated(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; where they reach the end they go round, as whoever repeats would."""
    found = list(tokens[start : start + count])
    period = len(tokens) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


class PromptLookup:
    """Proposes what followed the last `most` to `least` tokens before, the longest run that is found.

    Args:
        least: shortest run that counts.
        most: longest run that is looked for.
    """

    def __init__(self, least: int = 2, most: int = 4) -> None:
        self.least, self.most = least, most
        self._known: dict[str, tuple[list[int], bytearray]] = {}

    def __repr__(self) -> str:
        return f"PromptLookup(least={self.least}, most={self.most})"

    def propose(self, asked: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """See `Proposer`."""
        return [self._follow(request, num_tokens) for request, num_tokens in asked]

    def seconds(self, num_requests: int, num_tokens: int) -> None:
        """See `Proposer`."""

    def _follow(self, request: Request, num_tokens: int) -> Sequence[int]:
        tokens, text = self._known.setdefault(request.request_id, ([], bytearray()))
        new = request.token_ids(len(tokens), request.num_known_tokens)
        tokens += new
        text += array.array(_TYPE, new).tobytes()
        for size in range(min(self.most, len(tokens) - 1), self.least - 1, -1):
            end = _latest(text, size)
            if end is not None:
                return repeated(tokens, end, num_tokens)
        return []

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._known.pop(request.request_id, None)


def _latest(text: bytearray, size: int) -> int | None:
    """Where the last `size` tokens were before, the place after them there; None if they were not."""
    run, stop = text[-size * _WIDTH :], len(text) - _WIDTH
    while (start := text.rfind(run, 0, stop)) >= 0:
        if start % _WIDTH == 0:
            return start // _WIDTH + size
        stop = start + len(run) - 1  # it began within a token
    return None
