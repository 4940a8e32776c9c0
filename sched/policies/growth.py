"""Admission by growth: how many requests to have under way, by what they will come to hold.

A request whose KV is in host memory is still under way: it does not give its place to a new one. Else
requests that are half done pile up there until it is full, and are computed again and again. Whose KV is
dropped starts anew, when there is room for it.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxllm.errors import ConfigError
from jaxllm.predictors.lengths import LengthPolicy
from jaxllm.predictors.survival import AHEAD, OutputSurvival
from jaxllm.sched.pool_state import PoolState, Progress
from jaxllm.types import Request

Array = NDArray[np.float64]

_GROWS, _SHRINKS, _LEAST = 1.08, 0.78, 0.1
_ENDS_TO_CHANGE = 8
_MOST_AHEAD = 1 / 64


class GrowthAdmission(abc.ABC):
    """Asks what all requests under way will hold together, once for each that starts or ends.

    What they hold grows, and so do the guesses of it, until one of them ends: who was refused stays so.
    """

    _refused_at = -1  # ends of requests before the last refusal

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether there is room for what it will hold."""
        if self._refused_at == state.progress.num_ended:
            return False
        is_admitted = self.has_room([*state.under_way, request], num_needed, state)
        self._refused_at = -1 if is_admitted else state.progress.num_ended
        return is_admitted

    @abc.abstractmethod
    def has_room(self, requests: Sequence[Request], num_needed: int, state: PoolState) -> bool:
        """Whether `requests` will have room together; the last of them is new, and takes so many blocks."""


@dataclasses.dataclass(unsafe_hash=True)
class FullLengthAdmission(GrowthAdmission):
    """As if each request would grow to its limit, prompt and `max_tokens` (vLLM's pull request 37307).

    Nobody is ever preempted. Where requests give no limit, few run.
    """

    def has_room(self, requests: Sequence[Request], num_needed: int, state: PoolState) -> bool:
        """Whether all fit at their full length."""
        size = state.block_size
        return sum([-(-(one.max_total_tokens - 1) // size) for one in requests]) <= state.num_blocks


@dataclasses.dataclass(unsafe_hash=True)
class PastFuture(GrowthAdmission):
    """LightLLM's: the peak of what those under way will hold, by the outputs of the past (ASPLOS 2025).

    An output that is so long by now is drawn from those of the past that were longer. A request that is
    longer than all of them, or comes before any has ended, is taken to reach its limit. Requests end one
    after another, and at each end those that are left have grown by as many tokens.

    Args:
        reserve: share of the pool that stays free at the peak; the paper compares 0.03, 0.05 and 0.1.
        window: outputs that are remembered.
        lengths: predicts outputs instead; with `TrueLength` this is the bound that hindsight gives.
        seed: of the draws.

    Raises:
        ConfigError: `reserve` is out of range.
    """

    reserve: float = 0.05
    window: int = 1000
    lengths: LengthPolicy | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.reserve < 1.0:
            raise ConfigError(f"reserve must lie in [0, 1), got {self.reserve}")
        self._past: collections.deque[int] = collections.deque(maxlen=self.window)
        self._rng = np.random.default_rng(self.seed)

    def ended(self, request: Request, *, is_whole: bool) -> None:
        """Remember its output."""
        if request.has_started:
            self._past.append(len(request.output_token_ids))

    def has_room(self, requests: Sequence[Request], num_needed: int, state: PoolState) -> bool:
        """Whether the peak is within the pool."""
        held = np.array([one.num_tokens for one in requests], np.float64)
        left = np.maximum(1.0, self._ends(requests, held) - held)
        return peak(held, left) <= (1.0 - self.reserve) * state.num_blocks * state.block_size

    def _ends(self, requests: Sequence[Request], held: Array) -> Array:
        """Tokens `[N]` at which each request is taken to end."""
        limits = np.array([one.max_total_tokens for one in requests], np.float64)
        prompts = np.array([one.num_prompt_tokens for one in requests], np.float64)
        if self.lengths is not None:
            predicted = [self.lengths.predict(one) for one in requests]
            outputs = np.array([math.inf if one is None else one for one in predicted])
            return np.minimum(prompts + outputs, limits)
        past = np.sort(np.array(self._past, np.float64))
        first = np.searchsorted(past, held - prompts, side="right")
        drawn = first + (self._rng.random(len(first)) * (len(past) - first)).astype(np.int64)
        return np.minimum(prompts + np.append(past, math.inf)[drawn], limits)


def peak(held: Array, left: Array) -> float:
    """Most tokens that requests hold together, which grow alike from `held` `[N]` by `left` `[N]`."""
    order = np.argsort(-left)
    return float((np.cumsum(held[order]) + left[order] * np.arange(1, len(order) + 1)).max())


@dataclasses.dataclass(unsafe_hash=True)
class NewTokenRatio:
    """SGLang's: each request under way will generate a share of what its limit leaves it.

    The share falls from iteration to iteration. When requests had to be preempted it jumps to what those
    under way have generated of their limits, with some iterations more. A new request counts with its whole
    limit.

    Args:
        first: the share at the start.
        least: as a share of `first`, what it falls to.
        num_iterations: within which it falls so far.
        clip: most tokens that a request is taken to generate.
        ahead: iterations that must be possible after a preemption.
    """

    first: float = 0.7
    least: float = 0.14
    num_iterations: int = 600
    clip: int = 4096
    ahead: int = 20

    def __post_init__(self) -> None:
        self._share, self._seen = self.first, (0, 0)

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether the free blocks suffice for all that are under way, and the request's limit."""
        self._follow(state)
        left = sum([min(one.max_total_tokens - one.num_tokens, self.clip) for one in state.under_way])
        new = min(request.max_total_tokens - request.num_tokens, self.clip)
        return num_needed * state.block_size + new + self._share * left <= state.num_free * state.block_size

    def _follow(self, state: PoolState) -> None:
        """Let the share fall, or jump."""
        before, progress = self._seen, state.progress
        self._seen = progress.num_iterations, progress.num_preempted
        if progress.num_preempted > before[1] and state.under_way:
            limits = [one.max_total_tokens - one.num_prompt_tokens for one in state.under_way]
            generated = [one.num_tokens - one.num_prompt_tokens + self.ahead for one in state.under_way]
            self._share = min(1.0, sum(generated) / sum(limits))
            return
        fall = (1.0 - self.least) * self.first / self.num_iterations
        num_passed = progress.num_iterations - before[0]
        self._share = max(self.least * self.first, self._share - fall * num_passed)


@dataclasses.dataclass(unsafe_hash=True)
class FeedbackLimit:
    """A limit on requests under way that climbs to where most tokens/s are generated.

    It holds from the first preemption on. Then it moves by a share each period: on in the same direction
    while tokens/s rise, and back when they fall.

    Args:
        num_iterations: of a period, at least.
        share: by which the limit moves.
    """

    num_iterations: int = 256
    share: float = 0.0625

    def __post_init__(self) -> None:
        self._limit, self._rate, self._direction = math.inf, 0.0, -1
        self._began = 0.0, 0, 0  # time, iterations, tokens

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether fewer requests are under way than may be."""
        progress = state.progress
        if self._limit == math.inf and progress.num_preempted:
            self._limit = float(len(state.under_way))
        if progress.num_iterations >= self._began[1] + self.num_iterations:
            self._climb(state)
        return len(state.under_way) < self._limit

    def _climb(self, state: PoolState) -> None:
        """Move the limit by what the last period was worth."""
        progress = state.progress
        seconds = state.now - self._began[0]
        rate = (progress.num_generated - self._began[2]) / seconds if seconds > 0.0 else 0.0
        if rate < self._rate:
            self._direction = -self._direction
        self._rate, self._began = rate, (state.now, progress.num_iterations, progress.num_generated)
        if self._limit < math.inf:
            self._limit = max(1.0, self._limit * (1.0 + self._direction * self.share))


@dataclasses.dataclass(unsafe_hash=True)
class ExpectedGrowth(GrowthAdmission):
    """What those under way are expected to hold, by how long outputs of their age get, is to fit both pools.

    Lengths are learned from outputs that ended and from those that go on (`OutputSurvival`); a `max_tokens`
    that a request gives bounds them. How much of the pools may be promised follows from what was lost: once
    eight requests have ended it grows by a twelfth, or shrinks by a fifth if too many tokens have to be
    computed again. And nobody comes back to lose its blocks at once.

    Args:
        budget: tokens that may be lost for each that is generated.
        most: what may be promised at most, as a share of the blocks of device and host.
        num_ahead: iterations for which those who run must have room when somebody starts or comes back, or
            a 64th of the pool, if that is less: where outputs are short, somebody ends soon.

    Raises:
        ConfigError: a number is out of range.
    """

    budget: float = 0.03
    most: float = 0.9
    num_ahead: int = 12

    def __post_init__(self) -> None:
        if not (self.budget >= 0.0 and _LEAST <= self.most < math.inf and self.num_ahead >= 0):
            raise ConfigError(
                f"budget={self.budget!r} and num_ahead={self.num_ahead!r} must be at least 0, and "
                f"most={self.most!r} at least {_LEAST:g} and finite"
            )
        self._survival = OutputSurvival()
        self.ended = self._survival.ended
        self._share = min(1.0, self.most)
        self._seen = 0, 0, 0  # of those that ended: how many, tokens generated and lost until then
        self._num_free = 0  # requests that may start before the sum is taken again, unless one ends
        self._counted_at = 0  # ends of requests when it was

    def admits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """As `GrowthAdmission`, and as `readmits`."""
        return self.readmits(request, num_needed, state) and super().admits(request, num_needed, state)

    def readmits(self, request: Request, num_needed: int, state: PoolState) -> bool:
        """Whether those who run can then go on for a while."""
        num_left = (state.num_free - num_needed) * state.block_size
        most = _MOST_AHEAD * state.num_blocks * state.block_size
        return num_left >= min(self.num_ahead * state.num_running, most)

    def has_room(self, requests: Sequence[Request], num_needed: int, state: PoolState) -> bool:
        """Whether the expected peak may be promised."""
        self._follow(state.progress)
        num_ended = state.progress.num_ended
        if self._num_free and num_ended == self._counted_at:
            self._num_free -= 1
            return True
        num_held = state.num_blocks - state.num_free + num_needed
        num_held += sum([len(one.host_blocks) for one in requests if not one.block_ids])
        expected = self.expected_peak(requests, num_held * state.block_size)
        promised = self._share * (state.num_blocks + state.num_host_blocks) * state.block_size
        # As many may follow as leave half of what is left, if they are like those under way.
        self._num_free = max(0, int((promised - expected) / (2.0 * expected / len(requests))))
        self._counted_at = num_ended
        return expected <= promised

    def _follow(self, progress: Progress) -> None:
        """Change what may be promised by what was lost."""
        num_ended, generated, lost = self._seen
        passed = progress.num_ended - num_ended
        if passed < 0:  # of another scheduler
            self._seen = 0, 0, 0
            return
        if passed < _ENDS_TO_CHANGE:
            return  # however many ended since: all that they show is whether too much was lost
        is_lost = progress.num_lost - lost > self.budget * (progress.num_generated - generated)
        share = self._share * (_SHRINKS if is_lost else _GROWS)
        self._share = min(self.most, max(_LEAST, share))
        self._seen = progress.num_ended, progress.num_generated, progress.num_lost

    def expected_peak(self, requests: Sequence[Request], num_held: float) -> float:
        """Most tokens that `requests`, the last of them new, are expected to hold together.

        They hold `num_held` now, some of it shared.
        """
        held = np.array([one.num_tokens for one in requests], np.float64)
        ages = held - np.array([one.num_prompt_tokens for one in requests], np.float64)
        limits = np.array([one.max_total_tokens for one in requests], np.float64) - held + ages
        self._survival.fit(ages[:-1])
        goes_on = self._survival.going_on(ages, limits)
        held *= min(1.0, num_held / held.sum())
        return float(((held[:, None] + AHEAD) * goes_on).sum(axis=0).max())
