"""How much is queued at each replica: what it reported, and what was sent since."""

from __future__ import annotations

import collections
import dataclasses

_SECONDS_UNTIL_REPORTED = 1.0
"""After which a request that was sent is surely counted by its replica."""


@dataclasses.dataclass(slots=True)
class _Replica:
    reported: int = 0
    unreported: int = 0  # tokens of `sent`
    sent: collections.OrderedDict[str, tuple[int, float]] = dataclasses.field(
        default_factory=collections.OrderedDict
    )  # request -> tokens, when


class Loads:
    """Queued tokens of each replica.

    A report is true when it is made, and late when it comes. So a request counts in full from when it is sent
    until it ends, or until a report comes that was surely made after the replica had it and speaks for it.
    Without reports, every request counts until it ends.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._replica_of: dict[str, str] = {}

    def __contains__(self, replica: object) -> bool:
        """Whether a replica is known."""
        return replica in self._replicas

    def add(self, replica: str) -> None:
        """Know of a replica, at which nothing is queued."""
        self._replicas[replica] = _Replica()

    def remove(self, replica: str) -> None:
        """Forget a replica, and what was sent to it."""
        for request_id in self._replicas.pop(replica).sent:
            del self._replica_of[request_id]

    def load(self, replica: str) -> int:
        """Tokens that are queued there."""
        one = self._replicas[replica]
        return one.reported + one.unreported

    def sent(self, replica: str, request_id: str, num_tokens: int, now: float) -> None:
        """A request of so many tokens goes to a replica."""
        one = self._replicas[replica]
        one.sent[request_id] = num_tokens, now
        one.unreported += num_tokens
        self._replica_of[request_id] = replica

    def ended(self, request_id: str) -> None:
        """A request has ended, or was refused; one that a report has spoken for is no longer known here."""
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            one = self._replicas[replica]
            one.unreported -= one.sent.pop(request_id)[0]

    def report(self, replica: str, num_tokens: int, now: float) -> None:
        """A replica says how many tokens are queued at it."""
        one = self._replicas[replica]
        one.reported = num_tokens
        while one.sent:
            request_id, (tokens, when) = next(iter(one.sent.items()))
            if when > now - _SECONDS_UNTIL_REPORTED:
                break
            del one.sent[request_id], self._replica_of[request_id]
            one.unreported -= tokens
