"""Suffix lookup: what followed the longest ending that was there before, however long it is.

Oliaro et al., "SuffixDecoding" (2024, arXiv 2411.04975): the longer the ending is that was found again, the
more tokens are proposed (section 4: at most `factor` times its length). Each request has an automaton of its
own, of prompt and output, instead of a tree that requests share; Blumer et al., "The smallest automaton
recognizing the subwords of a text" (1985), which grows by a token in constant time.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.sched.proposers.ngram import repeated
from jaxllm.types import Request


class SuffixAutomaton:
    """All runs of tokens of a text that grows. A state stands for runs that end at the same places.

    Attributes:
        tokens: the text.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]  # the state of the longest ending that ends at more places
        self._lengths = [0]  # of the longest run
        self._ends = [0]  # places after one of its runs, of those before the text's end the latest known
        self._last = 0  # the state of all of the text
        self._match = 0, 0

    def match(self) -> tuple[int, int]:
        """Length of the longest ending that was there before, and the place after it there; 0 for none."""
        return self._match

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens."""
        for token in tokens:
            self._add(token)

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        place, following, links = len(self.tokens), self._next, self._links
        new = self._state(place, {}, 0, place)
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        if state >= 0:
            links[new] = self._only(state, token)
        self._last = new
        found = links[new]
        self._match = self._lengths[found], self._ends[found]
        self._ends[found] = place

    def _only(self, state: int, token: int) -> int:
        """The state after `token` of just the runs of `state`; it is split off one of longer ones, too."""
        after, length = self._next[state][token], self._lengths[state] + 1
        if self._lengths[after] == length:
            return after
        copy = self._state(length, dict(self._next[after]), self._links[after], self._ends[after])
        while state >= 0 and self._next[state].get(token) == after:
            self._next[state][token] = copy
            state = self._links[state]
        self._links[after] = copy
        return copy

    def _state(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._next.append(following)
        self._links.append(link)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._links) - 1


class SuffixLookup:
    """Proposes what followed the longest ending that was there before.

    Args:
        factor: most proposed tokens for each token of that ending.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self._automata: dict[str, SuffixAutomaton] = {}

    def __repr__(self) -> str:
        return f"SuffixLookup(factor={self.factor:g})"

    def propose(self, asked: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """See `Proposer`."""
        return [self._follow(request, num_tokens) for request, num_tokens in asked]

    def seconds(self, num_requests: int, num_tokens: int) -> None:
        """See `Proposer`."""

    def _follow(self, request: Request, num_tokens: int) -> Sequence[int]:
        automaton = self._automata.setdefault(request.request_id, SuffixAutomaton())
        automaton.extend(request.token_ids(len(automaton.tokens), request.num_known_tokens))
        length, place = automaton.match()
        num_tokens = min(num_tokens, int(length * self.factor))
        return repeated(automaton.tokens, place, num_tokens) if num_tokens > 0 else []

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._automata.pop(request.request_id, None)
