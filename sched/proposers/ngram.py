"""Prompt lookup: what followed the same few tokens before.

Saxena, "Prompt Lookup Decoding" (2023, github.com/apoorvumang/prompt-lookup-decoding); also Yang et al.,
"Inference with Reference" (2023, arXiv 2304.04487). The tokens are found by an index that grows with them,
instead of a search over all of them, and of several places the latest counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.types import Request


class _Index:
    """Where each short run of a request's tokens was last followed by something."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._sizes = sizes
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in sizes]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add what is new: every run that now has a successor."""
        known, first = self.tokens, max(1, len(self.tokens))
        known += tokens
        for size, ends in zip(self._sizes, self._ends, strict=True):
            for end in range(max(first, size), len(known)):
                ends[tuple(known[end - size : end])] = end

    def follow(self, num_tokens: int) -> list[int]:
        """What followed the longest run that the tokens end with."""
        known = self.tokens
        for size, ends in zip(self._sizes, self._ends, strict=True):
            if len(known) >= size and (end := ends.get(tuple(known[-size:]))) is not None:
                return repeated(known, end, num_tokens)
        return []


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
        self._indices: dict[str, _Index] = {}

    def __repr__(self) -> str:
        return f"PromptLookup(least={self.least}, most={self.most})"

    def propose(self, asked: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """See `Proposer`."""
        return [self._follow(request, num_tokens) for request, num_tokens in asked]

    def seconds(self, num_requests: int, num_tokens: int) -> None:
        """See `Proposer`."""

    def _follow(self, request: Request, num_tokens: int) -> Sequence[int]:
        index = self._indices.get(request.request_id)
        if index is None:
            index = _Index(range(self.most, self.least - 1, -1))
            self._indices[request.request_id] = index
        index.extend(request.token_ids(len(index.tokens), request.num_known_tokens))
        return index.follow(num_tokens)

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._indices.pop(request.request_id, None)
