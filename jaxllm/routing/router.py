"""Which replica answers a request: the one at which it costs least, with what each probably has cached.

A choice weighs what Preble's E2 weighs (Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for
LLM Serving", ICLR 2025, Section 3.2): sending a request where its prefix is saves computing that ("exploit"),
sending it elsewhere saves waiting there ("explore"). Both are in tokens here, so that one comparison decides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from jaxllm.errors import ConfigError
from jaxllm.routing.loads import Loads
from jaxllm.routing.prefix_index import PrefixIndex
from jaxllm.routing.prompt_keys import BYTES_PER_TOKEN, PromptKeys

DEFAULT_CACHE_TOKENS = 2**17
"""How much a replica is thought to cache that has not said so."""
OUTPUT_WEIGHT = 0.25
"""What a token of an answer counts beside one of a prompt: answers advance together, and delay little."""
TYPICAL_OUTPUT_TOKENS = 256
"""How many tokens an answer is thought to have, if the request allows so many."""

_SCALES = 1 / 8, 4.0  # that are believed


class Choice(NamedTuple):
    """Where a request goes, and how many of its tokens are probably cached there."""

    replica: str
    num_cached_tokens: int


class Knowledge(NamedTuple):
    """What a policy may look at."""

    replicas: Sequence[str]
    prefixes: PrefixIndex
    loads: Loads
    rng: random.Random


class RoutingPolicy(Protocol):
    """One way to choose."""

    def choose(self, prompt: PromptKeys, known: Knowledge) -> Choice:
        """A replica for a prompt. Changes nothing that it is given."""
        ...


class PrefixAndLoad:
    """Least work: tokens queued there, those of the prompt to compute, and those to compute again for them.

    The last is Preble's cost of eviction, smoothed: what is computed takes the place of as many tokens, as
    far as the cache is full, and each of these would be computed again in the turns to come. It keeps idle
    replicas from staying empty while the one that holds a system prompt gets every conversation that begins
    with it.

    Compares a few replicas that hold the longest beginnings of the prompt, and two at random (power of two
    choices: Mitzenmacher, IEEE TPDS 2001), so that a choice takes as long for thousands of replicas as for
    ten.

    Args:
        num_holders: how many that hold something are looked at.
        eviction_weight: how often an evicted token is thought to be computed again, about the later turns of
            a conversation; simulated conversations are answered soonest from 4 on
            (benchmarks/router.json).
    """

    def __init__(self, num_holders: int = 4, eviction_weight: float = 4.0) -> None:
        self._num_holders, self._eviction_weight = num_holders, eviction_weight

    def choose(self, prompt: PromptKeys, known: Knowledge) -> Choice:
        """As the class says."""
        candidates = dict.fromkeys(two_at_random(known), 0)
        candidates |= known.prefixes.holders(prompt, self._num_holders, known.rng)
        best, least = Choice("", 0), float("inf")
        for replica, cached in candidates.items():
            evicting = self._eviction_weight * known.prefixes.share_filled(replica)
            cost = known.loads.load(replica) + (1 + prompt.num_tokens - cached) * (1 + evicting)
            if cost < least:
                best, least = Choice(replica, cached), cost
        return best


class TwoChoices:
    """The less loaded of two at random, wherever prefixes are."""

    def choose(self, prompt: PromptKeys, known: Knowledge) -> Choice:
        """As the class says."""
        return Choice(min(two_at_random(known), key=known.loads.load), 0)


class PrefixOnly:
    """Where the longest prefix is, whatever the load; else the less loaded of two at random."""

    def choose(self, prompt: PromptKeys, known: Knowledge) -> Choice:
        """As the class says."""
        for replica, cached in known.prefixes.holders(prompt, 1, known.rng):
            return Choice(replica, cached)
        return TwoChoices().choose(prompt, known)


class RoundRobin:
    """One after another."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, prompt: PromptKeys, known: Knowledge) -> Choice:
        """As the class says."""
        self._turn += 1
        return Choice(known.replicas[self._turn % len(known.replicas)], 0)


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "prefix": PrefixAndLoad,
    "two_choices": TwoChoices,
    "prefix_only": PrefixOnly,
    "round_robin": RoundRobin,
}
"""By name, as options say it."""


def two_at_random(known: Knowledge) -> list[str]:
    """Two replicas, different if there are two."""
    replicas = known.replicas
    first = int(known.rng.random() * len(replicas))
    if len(replicas) == 1:
        return [replicas[0]]
    second = (first + 1 + int(known.rng.random() * (len(replicas) - 1))) % len(replicas)
    return [replicas[first], replicas[second]]


class Router:
    """Keeps what a policy looks at: who is there, what was sent where, and what is queued.

    Not for several threads at once. Times are seconds of any clock that never goes back. A token is
    `BYTES_PER_TOKEN` bytes of a prompt here, as in its keys; what replicas say is converted.

    Args:
        policy: how to choose.
        output_weight: see `OUTPUT_WEIGHT`.
        seed: of what is chosen at random.
    """

    def __init__(
        self, policy: RoutingPolicy | None = None, *, output_weight: float = OUTPUT_WEIGHT, seed: int = 0
    ) -> None:
        self._policy = PrefixAndLoad() if policy is None else policy
        self._output_weight = output_weight
        self._rng = random.Random(seed)
        self._prefixes, self._loads = PrefixIndex(), Loads()
        self._replicas: list[str] = []
        self._scales: dict[str, float] = {}  # tokens as counted here, for one of the model's

    @property
    def replicas(self) -> Sequence[str]:
        """Who may be chosen."""
        return self._replicas

    def set_replicas(self, replicas: Iterable[str]) -> None:
        """Choose among these from now on; what is known of those that stay is kept."""
        chosen, before = list(dict.fromkeys(replicas)), set(self._replicas)
        for gone in before.difference(chosen):
            self._prefixes.remove(gone)
            self._loads.remove(gone)
            self._scales.pop(gone, None)
        for new in chosen:
            if new not in before:
                self._prefixes.add(new, DEFAULT_CACHE_TOKENS)
                self._loads.add(new)
        self._replicas = chosen

    def route(
        self,
        request_id: str,
        prompt: PromptKeys,
        *,
        now: float,
        max_tokens: int | None = None,
        avoid: Collection[str] = (),
    ) -> Choice:
        """Choose a replica for a request, and count the request there until it has `ended`.

        Args:
            request_id: of its own.
            prompt: its keys.
            now: the time.
            max_tokens: of the answer, if that is limited.
            avoid: replicas that have failed it, left alone while there are others.

        Raises:
            ConfigError: there is no replica.
        """
        if not self._replicas:
            raise ConfigError("there is no replica to send a request to; set_replicas names them")
        among: Sequence[str] = self._replicas
        prefixes = self._prefixes
        if avoid:
            among = [replica for replica in among if replica not in avoid] or among
        choice = self._policy.choose(prompt, Knowledge(among, prefixes, self._loads, self._rng))
        if choice.replica not in among:
            choice = TwoChoices().choose(prompt, Knowledge(among, prefixes, self._loads, self._rng))
        answer = TYPICAL_OUTPUT_TOKENS if max_tokens is None else min(max_tokens, TYPICAL_OUTPUT_TOKENS)
        answer_cost = round(self._scale(choice.replica) * self._output_weight * answer)
        queued = prompt.num_tokens - choice.num_cached_tokens + answer_cost
        self._loads.sent(choice.replica, request_id, queued, now)
        prefixes.note(choice.replica, prompt)
        return choice

    def ended(self, request_id: str) -> None:
        """A request has been answered, or has failed."""
        self._loads.ended(request_id)

    def report(
        self,
        replica: str,
        *,
        now: float,
        queued_tokens: int,
        cache_tokens: int | None = None,
        bytes_per_token: float | None = None,
    ) -> None:
        """A replica says what is queued at it, and how many tokens its cache has room for.

        One that is not there (any more) is not listened to.

        Args:
            replica: who says so.
            now: the time.
            queued_tokens: of the model's.
            cache_tokens: likewise; None changes nothing.
            bytes_per_token: of the prompts it was sent; a cache that holds fewer bytes than is thought here
                would be sent what it no longer has. None takes the others' mean.
        """
        if replica not in self._loads:
            return
        if bytes_per_token is not None:
            least, most = _SCALES
            self._scales[replica] = min(most, max(least, bytes_per_token / BYTES_PER_TOKEN))
        scale = self._scale(replica)
        self._loads.report(replica, round(scale * queued_tokens), now)
        if cache_tokens is not None:
            self._prefixes.add(replica, round(scale * cache_tokens))

    def _scale(self, replica: str) -> float:
        known = self._scales.get(replica)
        if known is None and self._scales:
            return sum(self._scales.values()) / len(self._scales)
        return 1.0 if known is None else known
