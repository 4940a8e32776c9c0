"""Whether two back-ends chose the same greedy tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Divergence:
    """The first position at which one request's tokens differ from the reference's.

    `gap` is how far the reference's best logit leads its second best there: small for a near-tie, which
    rounding may decide either way. None where it was not computed.
    """

    request: int
    position: int
    reference_token: int
    token: int
    gap: float | None = None


def divergences(reference: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[Divergence]:
    """The requests whose tokens differ, each with its first difference."""
    found = []
    for request, (expected, tokens) in enumerate(zip(reference, outputs, strict=True)):
        pairs = zip(expected, tokens, strict=True)
        first = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
        if first is not None:
            found.append(Divergence(request, first, expected[first], tokens[first]))
    return found


def agreement(
    reference_name: str, reference: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """How many requests match in full, and where the others first differ, as JSON values."""
    found = divergences(reference, outputs)
    return {
        "reference": reference_name,
        "num_requests": len(reference),
        "num_matching": len(reference) - len(found),
        "divergences": [dataclasses.asdict(divergence) for divergence in found],
    }
