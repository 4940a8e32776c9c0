"""How many tokens are drafted for each request of an iteration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from jaxllm.predictors.base import CostModel
from jaxllm.sched.acceptance import Chance
from jaxllm.sched.policies.correction import Correction
from jaxllm.sched.policies.regimes import Regime


@dataclasses.dataclass(frozen=True, slots=True)
class IterationRows:
    """An iteration as it is without drafts.

    `num_decodes` requests decode, with `num_context_tokens` tokens together, beside `num_prompt_tokens` of
    others; `num_free` rows are left for drafts. With `looks_up` it is one of several in which the device
    drafts by itself, and finds something for this `share` of the requests.
    """

    num_decodes: int
    num_context_tokens: int
    num_prompt_tokens: int
    num_free: int
    looks_up: bool = False
    share: float = 1.0


class VerifyingWork(NamedTuple):
    """An iteration: how many requests decode, how many of these verify, and how many drafts together.

    `depth` is the most drafts of one of them: so many times a draft model runs. With `looks_up` the device
    drafts by itself, and all are means of several iterations.
    """

    num_decodes: int
    num_verified: int = 0
    num_drafts: int = 0
    depth: int = 0
    looks_up: bool = False

    @property
    def kind(self) -> tuple[str, int]:
        """Whether it verifies, and who drafts, and its rows, four sizes to an octave."""
        way = ("looking up" if self.looks_up else "verifying") if self.num_drafts else "plain"
        return way, round(4 * math.log2(self.num_decodes + self.num_drafts))


class SpeculationPolicy(Protocol):
    """Says how many of the tokens that were proposed are verified."""

    def is_worth_asking(self, num_running: int) -> bool:
        """Whether proposals are asked for at all, beside so many requests that decode."""
        ...

    def num_drafts(
        self, proposed: Sequence[int], acceptance: Sequence[Chance], iteration: IterationRows
    ) -> Sequence[int]:
        """How many drafts of each request are verified.

        Args:
            proposed: of each request how many there are, one or more.
            acceptance: of each how likely they are right, by its own history.
            iteration: what goes on beside them.
        """
        ...

    def is_worth_looking_up(self, num_right: float, *, are_there: bool) -> bool:
        """Whether the device drafts by itself, if so many are likely to be right of a request each time.

        `are_there` says whether there are proposals now.
        """
        ...

    def asked(self, seconds: float, num_steps: int) -> None:
        """Note that proposals were asked for, how long that took, and in how many steps any are verified."""
        ...

    def observe(self, work: VerifyingWork, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Take what iterations without prompts took, from the end of those before them to their own.

        There were `num_steps` of them, which got `num_tokens` tokens.
        """
        ...

    def may_begin(self) -> bool:
        """Whether a proposer that computes its drafts is asked of requests for the first time."""
        ...

    def begun(self, seconds: float) -> None:
        """Note what it took for the first time of some requests, beyond what it takes later."""
        ...

    def predicted(self, work: VerifyingWork) -> float | None:
        """Seconds of an iteration without prompts; None if it predicts nothing."""
        ...


_WORTH_LOOKING_UP = 0.25


class AsProposed:
    """All of them: a fixed number of drafts, as far as there are proposals."""

    def is_worth_asking(self, num_running: int) -> bool:
        """Always."""
        return True

    def num_drafts(
        self, proposed: Sequence[int], acceptance: Sequence[Chance], iteration: IterationRows
    ) -> Sequence[int]:
        """As many as proposed."""
        return proposed

    def is_worth_looking_up(self, num_right: float, *, are_there: bool) -> bool:
        """Where some are verified, or are likely to be soon."""
        return are_there or num_right >= _WORTH_LOOKING_UP

    def asked(self, seconds: float, num_steps: int) -> None:
        """Of no interest."""

    def observe(self, work: VerifyingWork, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Of no interest."""

    def may_begin(self) -> bool:
        """Always."""
        return True

    def begun(self, seconds: float) -> None:
        """Of no interest."""

    def predicted(self, work: VerifyingWork) -> float | None:
        """Nothing."""
        return None


class BelowBatch:
    """As another policy says, while fewer than `limit` requests decode (vLLM's `disable_by_batch_size`)."""

    def __init__(self, limit: int, policy: SpeculationPolicy) -> None:
        self._limit, self._policy = limit, policy
        self.num_drafts, self.is_worth_looking_up = policy.num_drafts, policy.is_worth_looking_up
        self.asked, self.observe, self.predicted = policy.asked, policy.observe, policy.predicted
        self.may_begin, self.begun = policy.may_begin, policy.begun

    def is_worth_asking(self, num_running: int) -> bool:
        """Below the limit."""
        return num_running < self._limit and self._policy.is_worth_asking(num_running)


_ROWS = 32.0


def _by_rows(num_rows: int) -> float:
    """What an iteration takes where no model knows, in units of one that computes nothing."""
    return 1.0 + num_rows / _ROWS


_ALL, _NONE, _BY_COST = range(3)
"""Ways of drafting, in the order in which they are tried first."""
_HOPELESS = 1.0  # iterations without drafts that all of them are predicted to lose
_RATE, _RATE_OF_BEST = 0.2, 0.05
_LEAST_SHARE = 0.1  # of an iteration that is not for drafting, whatever that is said to take


class ByCost:
    """As many as give the most tokens a second, by what iterations of so many rows take; none if none does.

    A request whose drafts are right with probability p each gets its j-th one with p**j (Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding", 2023, section 3.1); the first one has a
    probability of its own, for who copies goes on. Of all drafts the
    likeliest are verified, as many as make the expected tokens over the predicted seconds the largest.

    Seconds are those of the cost model, times what iterations of about as many rows were off by so far, with
    all that the host does between them; without a model 32 rows more take as long as all else. Each time that
    drafts do not pay, what they add is taken to be a little less, until they are tried again: so neither a
    measurement that was disturbed nor a wrong model is believed for long. What asking costs is bounded, too:
    while nothing comes of it, it may take `share` of the time. Of a proposer that computes its drafts that is
    part of what an iteration with so many takes.

    Host and device work in turns while tokens are drafted, and side by side otherwise, and drafts are right
    for long and wrong for long. No sum of parts tells what that is worth: for each size of batch tokens a
    second are measured without drafts, with all of them, and with as many as seem best (`Regime`).

    What drafting has lost, also where a draft model had to compute prompts, is a debt, which gains pay back,
    and `_FOR_TRIALS` of the time without drafts. In debt all drafts are not tried, and no more requests
    begin.

    Args:
        costs: predicts seconds of iterations.
        share: see above.
        margin: how much more drafts must promise than none, relative.
        drafting: seconds that drafting takes, of how many requests how many tokens each; None for no time.
    """

    _FORGET_AFTER = 64
    """Observations, after which predictions are made anew, for contexts have grown."""
    _TRY_AFTER = 128
    """Iterations that verified drafts, in which other numbers of them are tried."""
    _DOUBT = 0.99
    _FOR_TRIALS = 0.02
    """Of the seconds without drafts, what pays for trials."""
    _REMEMBERED = 256
    """Iterations whose gains pay for what comes after them."""
    _MOST_DEBT, _HELD_UP = 64.0, 4.0
    """In iterations without drafts; and how often what is predicted, at most, one is taken to last."""

    def __init__(
        self,
        costs: CostModel,
        *,
        share: float = 0.005,
        margin: float = 0.03,
        drafting: Callable[[int, int], float | None] = lambda *_: None,
    ) -> None:
        self._costs, self._share, self._margin, self._drafting = costs, share, margin, drafting
        self._corrections = {way: Correction() for way in ("plain", "verifying", "looking up")}
        self._num_verified = 0
        self._trust = 1.0  # in what drafts add
        self._debt = 0.0  # seconds
        self._predicted: dict[VerifyingWork, float] = {}
        self._num_observed = 0
        self._asking = self._running = 0.0
        self._cost_of_asking = self._gain_of_asking = 0.0  # seconds each time, by and by
        self._outlook = 0.0  # what all drafts are predicted to save, in iterations without, by and by
        self._promised = 0.0  # seconds that the drafts chosen last are predicted to save
        self._regimes: dict[int, Regime] = {}  # by size of the batch, two to an octave
        self._context = 0

    def is_worth_asking(self, num_running: int) -> bool:
        """Where drafts have paid, while it costs next to nothing or less than it is predicted to gain."""
        if self._regime(num_running).way == _NONE:
            return False
        return self._gain_of_asking > self._cost_of_asking or self._asking <= self._share * self._running

    def _regime(self, num_decodes: int) -> Regime:
        size = round(2 * math.log2(max(1, num_decodes)))
        if size not in self._regimes:  # other sizes have told enough for predictions
            # One request alone has no others whose drafts are likelier.
            usual = _ALL if size == 0 else _BY_COST
            self._regimes[size] = Regime(3, usual=usual, begins_with_last=bool(self._regimes))
        return self._regimes[size]

    def asked(self, seconds: float, num_steps: int) -> None:
        """See `SpeculationPolicy`."""
        self._asking = 0.0 if num_steps else self._asking + seconds
        self._cost_of_asking += _RATE * (seconds - self._cost_of_asking)
        self._gain_of_asking += _RATE * (num_steps * self._promised - self._gain_of_asking)

    def predicted(self, work: VerifyingWork) -> float | None:
        """See `SpeculationPolicy`."""
        return self.seconds(work) if any(self._corrections.values()) else None

    def observe(self, work: VerifyingWork, num_steps: int, num_tokens: int, seconds: float) -> None:
        """See `SpeculationPolicy`."""
        self._pay(work, num_steps, num_tokens, seconds)
        regime, is_free = self._regime(work.num_decodes), self._debt <= 0.0
        if is_free or work.num_drafts or regime.way != _ALL:  # else it is not its way that took as long
            regime.observe(num_tokens / work.num_decodes, seconds, barred=() if is_free else (_ALL,))
        self._running += seconds
        seconds /= num_steps
        if self._running > 100 * seconds:
            self._running, self._asking = self._running / 2, self._asking / 2
        self._num_observed += 1
        if self._num_observed % self._FORGET_AFTER == 0:
            self._predicted.clear()
        predicted = self._model(work)
        if seconds <= 0.0 or predicted <= 0.0:
            return
        (way, size), is_tried_again = work.kind, work.num_drafts > 0 and self._trust < 1.0
        if is_tried_again:
            self._trust = 1.0
        measured = max(seconds - self._seconds_of_drafting(work), _LEAST_SHARE * seconds)
        self._corrections[way].add(size, measured / predicted, doubts=is_tried_again)

    def may_begin(self) -> bool:
        """Without debt."""
        return self._debt <= 0.0

    def begun(self, seconds: float) -> None:
        """See `SpeculationPolicy`."""
        self._debt += max(0.0, seconds)

    def _pay(self, work: VerifyingWork, num_steps: int, num_tokens: int, seconds: float) -> None:
        """Take what iterations have lost or gained; one that was held up has not lost all of that."""
        if not any(self._corrections.values()):
            return
        plain = 0.0
        if work.num_drafts or self._debt > 0.0:
            plain = self.seconds(VerifyingWork(work.num_decodes))
        if work.num_drafts:
            seconds = min(seconds, num_steps * self._HELD_UP * self.seconds(work))
            self._debt += seconds - num_tokens / work.num_decodes * plain
        else:
            self._debt -= self._FOR_TRIALS * seconds
        if self._debt > 0.0:
            self._debt = min(self._debt, self._MOST_DEBT * plain)
        else:
            self._debt *= 1.0 - 1.0 / self._REMEMBERED

    def num_drafts(
        self, proposed: Sequence[int], acceptance: Sequence[Chance], iteration: IterationRows
    ) -> Sequence[int]:
        """See `SpeculationPolicy`."""
        self._context = iteration.num_context_tokens // max(1, iteration.num_decodes)
        is_measured = not iteration.num_prompt_tokens
        regime = self._regime(iteration.num_decodes)
        if is_measured and regime.way == _ALL:
            self._promised = self._saved_by_all(proposed, acceptance, iteration)
            # What is best so far is believed for a while: chances alternate.
            rate = 1.0 if regime.is_trying else _RATE_OF_BEST
            self._outlook += rate * (self._promised / self._plain(iteration) - self._outlook)
            if self._outlook > -_HOPELESS:
                return proposed
            regime.decline()
        self._outlook = 0.0
        ranked = sorted(
            [
                (chance.of(j), -j, place)
                for place, chance in enumerate(acceptance)
                for j in range(1, proposed[place] + 1)
            ],
            reverse=True,
        )
        num_decodes, deepest, share = iteration.num_decodes, max(proposed), iteration.share
        plain, self._promised = self._plain(iteration), 0.0
        added = self._adding(plain, iteration)
        trust = self._trust if is_measured else 1.0
        best = (1.0 + self._margin) * num_decodes / plain
        num_best, depth_best, ranked_best = 0, 0, ranked
        is_whole = iteration.looks_up  # else a few numbers are enough to find the best
        for depth in range(deepest if self._drafting(1, 1) is None else 1, deepest + 1):
            found = [one for one in ranked if -one[1] <= depth][: iteration.num_free]
            num_verified, expected = 0, float(num_decodes)
            for count, (gain, number, _) in enumerate(found, 1):
                num_verified += number == -1
                expected += gain * share
                if count < len(found) if is_whole else count % (1 << max(0, count.bit_length() - 3)):
                    continue
                rows = math.ceil(num_verified * share), math.ceil(count * share)
                work = VerifyingWork(num_decodes, *rows, depth, iteration.looks_up)
                seconds = plain + added(work) * trust
                value = expected / seconds
                if value > best:
                    best, num_best, depth_best, ranked_best = value, count, depth, found
                    self._promised = expected / num_decodes * plain - seconds
        num_best = self._varied(num_best) if is_measured else num_best
        if iteration.looks_up and num_best:
            return [min(count, depth_best) for count in proposed]
        counts = [0] * len(proposed)
        for _, _, place in ranked_best[:num_best]:
            counts[place] += 1
        return counts

    def _saved_by_all(
        self, proposed: Sequence[int], acceptance: Sequence[Chance], iteration: IterationRows
    ) -> float:
        """Seconds that all drafts are predicted to save, or as many as there are rows for."""
        num_decodes, share = iteration.num_decodes, iteration.share
        if sum(proposed) > iteration.num_free:
            most = max(1, iteration.num_free // len(proposed))
            proposed = [min(most, count) for count in proposed]
        num_right = sum(map(Chance.expected, acceptance, proposed))
        rows = math.ceil(len(proposed) * share), math.ceil(sum(proposed) * share)
        drafting = self.seconds(VerifyingWork(num_decodes, *rows, max(proposed), iteration.looks_up))
        num_tokens = 1.0 + num_right * share / num_decodes
        return num_tokens * self._plain(iteration) - drafting

    def _plain(self, iteration: IterationRows) -> float:
        """Seconds of an iteration without drafts."""
        return self.seconds(VerifyingWork(iteration.num_decodes))

    def is_worth_looking_up(self, num_right: float, *, are_there: bool) -> bool:
        """Where that is likely to make up for what the host does meanwhile otherwise."""
        return num_right >= _WORTH_LOOKING_UP

    def _varied(self, num_best: int) -> int:
        """Now and then a half or a quarter more, or less, so that what it takes is known."""
        if not num_best:
            self._trust *= self._DOUBT
            return 0
        self._num_verified += 1
        quarter, rest = divmod(self._num_verified, self._TRY_AFTER // 4)
        step = max(1, num_best // (4 if quarter & 4 else 2))
        return num_best if rest else (num_best, num_best - step, num_best + step, 0)[quarter % 4]

    def seconds(self, work: VerifyingWork) -> float:
        """Predicted, as measured; what was never done takes what other ways of it make likely."""
        way, size = work.kind
        correction = self._corrections[way] or next(filter(None, self._corrections.values()), Correction())
        return self._model(work) * correction.factor(size) + self._seconds_of_drafting(work)

    def _seconds_of_drafting(self, work: VerifyingWork) -> float:
        if not work.num_drafts:
            return 0.0
        depth = work.depth or -(-work.num_drafts // work.num_verified)
        return self._drafting(work.num_verified, depth) or 0.0

    def _adding(self, plain: float, iteration: IterationRows) -> Callable[[VerifyingWork], float]:
        """Says what drafts add to the `plain` seconds; beside prompts rows are not as cheap as elsewhere."""
        if not iteration.num_prompt_tokens:
            return lambda work: self.seconds(work) - plain
        decodes = iteration.num_decodes, iteration.num_context_tokens

        def seconds(num_drafts: int) -> float:
            rows = iteration.num_prompt_tokens + num_drafts
            return self._costs.step_seconds(*decodes, rows, 1) or _by_rows(iteration.num_decodes + rows)

        without, correction = seconds(0), plain / self._model(VerifyingWork(iteration.num_decodes))
        return lambda work: (
            max(0.0, seconds(work.num_drafts) - without) * correction + self._seconds_of_drafting(work)
        )

    def _model(self, work: VerifyingWork) -> float:
        """By the cost model, or if it knows nothing by rows alone."""
        seconds = self._predicted.get(work)
        if seconds is None:
            num_plain = work.num_decodes - work.num_verified
            chunks: tuple[int, ...] = ()
            if work.num_drafts:
                rows = work.num_verified + work.num_drafts
                chunks = rows, work.num_verified, work.num_verified * self._context
            seconds = self._costs.step_seconds(num_plain, num_plain * self._context, *chunks)
            seconds = seconds or _by_rows(work.num_decodes + work.num_drafts)
            self._predicted[work] = seconds
        return seconds
