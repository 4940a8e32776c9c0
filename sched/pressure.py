"""What preemptions have led to of late: the running means that the costs of an action depend on."""

from __future__ import annotations

import dataclasses

_RATE = 0.1  # weight of the newest value


@dataclasses.dataclass(slots=True)
class RecentPressure:
    """Running means over the recent prefills, swap-ins and returns of preempted requests.

    Attributes:
        prefill_tokens, prefill_seqs: of a prefill iteration.
        swap_in_seqs: requests that resume together, in iterations in which any do.
        away_seconds: from a preemption to the iteration that restores the request.
        lost_share: of a preempted request's blocks, those that were overwritten by then.
    """

    prefill_tokens: float = 0.0
    prefill_seqs: float = 0.0
    swap_in_seqs: float = 1.0
    away_seconds: float = 0.0
    lost_share: float = 1.0

    def prefilled(self, num_tokens: int, num_seqs: int) -> None:
        """Take a prefill iteration."""
        self.prefill_tokens += _RATE * (num_tokens - self.prefill_tokens)
        self.prefill_seqs += _RATE * (num_seqs - self.prefill_seqs)

    def swapped_in(self, num_seqs: int) -> None:
        """Take an iteration in which requests resume."""
        self.swap_in_seqs += _RATE * (num_seqs - self.swap_in_seqs)

    def returned(self, away_seconds: float, lost_share: float) -> None:
        """Take a request that is restored, be it by a copy or by a prefill."""
        self.away_seconds += _RATE * (away_seconds - self.away_seconds)
        self.lost_share += _RATE * (lost_share - self.lost_share)
