"""How likely drafts are right, by what became of those before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.types import Request

_KEPT, _KEPT_OF_ALL = 0.95, 0.98
"""Of what was, with each verification: of a request, and of all."""
_PRIOR = 0.5
_TRIALS_OF_ALL = 16.0
"""What is known of all requests counts as so many drafts of one."""


@dataclasses.dataclass(slots=True)
class Acceptance:
    """How many drafts were tried, each after those before it were right, and how many of these were right."""

    num_tried: float = 0.0
    num_right: float = 0.0

    def add(self, num_tried: int, num_right: int, kept: float = _KEPT) -> None:
        """Take drafts; of what was before so much is `kept`."""
        self.num_tried = self.num_tried * kept + num_tried
        self.num_right = self.num_right * kept + num_right

    def rate(self, prior: float, num_trials: float = 2.0) -> float:
        """How likely the next one is right; what was thought before counts as so many."""
        return (self.num_right + prior * num_trials) / (self.num_tried + num_trials)


class Chance(NamedTuple):
    """How likely the first draft of a proposal is right, and each later one if all before it were."""

    first: float
    later: float

    def of(self, number: int) -> float:
        """How likely so many drafts are all right."""
        return self.first * self.later ** (number - 1)

    def expected(self, num_drafts: int) -> float:
        """How many of so many drafts are likely to be right."""
        if self.later >= 1.0:
            return self.first * num_drafts
        return self.first * (1.0 - self.later**num_drafts) / (1.0 - self.later)


@dataclasses.dataclass(slots=True)
class Acceptances:
    """Of drafts after others that were right, and of those after wrong ones or none.

    Who copies goes on copying: the two differ more than two requests do.
    """

    after_right: Acceptance = dataclasses.field(default_factory=Acceptance)
    after_wrong: Acceptance = dataclasses.field(default_factory=Acceptance)

    def after(self, was_right: bool) -> Acceptance:
        """One of the two."""
        return self.after_right if was_right else self.after_wrong

    def forget(self) -> None:
        """Let what was learned count a tenth less."""
        for one in (self.after_right, self.after_wrong):
            one.add(0, 0, 0.9)


@dataclasses.dataclass(slots=True)
class History(Acceptances):
    """Those of a request, and whether its newest drafts were all right.

    What was proposed and not verified counts, too, once the tokens are known: `proposed` from place `start`.
    It had `num_tokens`, and `num_preemptions`, when some were proposed or verified last.
    """

    was_right: bool = False
    start: int = 0
    proposed: Sequence[int] = ()
    num_tokens: int = 0
    num_preemptions: int = 0

    def chance(self, of_all: Acceptances) -> Chance:
        """How likely the next drafts are right; as of all while few of its own are known."""
        first, later = (
            self.after(was_right).rate(of_all.after(was_right).rate(_PRIOR), _TRIALS_OF_ALL)
            for was_right in (self.was_right, True)
        )
        return Chance(first, later)

    def add(self, num_drafts: int, num_right: int, of_all: Acceptances) -> None:
        """Take so many drafts, of which the first so many were right, for those of all requests, too."""
        for one, kept in ((self, _KEPT), (of_all, _KEPT_OF_ALL)):
            one.after(self.was_right).add(1, min(1, num_right), kept)
            if num_right and num_drafts > 1:
                one.after_right.add(min(num_drafts - 1, num_right), num_right - 1, kept)
        self.was_right = num_right == num_drafts

    def compare(self, request: Request, of_all: Acceptances) -> None:
        """Take what was proposed, as far as its place is known."""
        known = request.token_ids(self.start, self.start + len(self.proposed)) if self.proposed else ()
        if known:
            pairs = zip(known, self.proposed, strict=False)
            num_right = next((place for place, (one, other) in enumerate(pairs) if one != other), len(known))
            self.add(len(known), num_right, of_all)
            self.proposed = ()
