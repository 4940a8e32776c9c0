"""Online correction: predictions multiplied by what the last measurements were off by."""

from __future__ import annotations

import dataclasses
import math
import typing

from jaxllm.errors import ConfigError, blame, is_outside
from jaxllm.predictors.base import COST_KINDS, CheckedCosts, CostKind, CostModel, asked, check_number

_FADING = 0.25  # of the rate


@dataclasses.dataclass(frozen=True)
class KindReport:
    """How well one kind of cost was predicted so far.

    `error_before` is the mean of |predicted - measured| / measured without the correction, `error_after` with
    the correction in force at each observation. Of a duration that is known to lie between two bounds they
    take the nearer one, and nothing if the prediction lies between them, too; `num_in_bounds` counts those of
    which both predictions did. Where there are no others the errors are unknown: None.
    `factor` is what predictions are multiplied by now: its distance from 1 is the drift of the device from
    the model. `num_ignored` counts observations of no work, or of no time.
    """

    count: int
    num_ignored: int
    num_in_bounds: int
    error_before: float | None
    error_after: float | None
    factor: float


@dataclasses.dataclass(slots=True)
class _State:
    log_factor: float = 0.0
    factor: float = 1.0
    count: int = 0
    num_ignored: int = 0
    num_moves: int = 0
    num_in_bounds: int = 0
    sum_before: float = 0.0
    sum_after: float = 0.0


class OnlineCalibration:
    """A `CostModel` that follows the device: another model's predictions times a factor per kind.

    Each observation moves log(factor) towards log(measured / predicted by the model):

        log factor += rate * clip(log(measured / predicted), -outlier_limit, outlier_limit)

    The first observations count more (rate 1/2, 1/3, ...) until `rate` is reached. The clip makes it a
    winsorised mean: one step that was interrupted moves the factor no more than one that was
    exp(outlier_limit) times too slow. It is not safe for several threads.

    Of some durations only bounds are known. A prediction between them is not corrected further; where the
    model's own lies between them, too, the correction fades, so that no outlier stays for ever.

    Args:
        model: what is corrected.
        rate: weight of a new observation, in (0, 1].
        outlier_limit: largest |log(measured / predicted)| that counts, in (0, 10].
        max_factor: the factor stays within [1 / max_factor, max_factor]; in [1, 1000].

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self, model: CostModel, *, rate: float = 0.02, outlier_limit: float = 0.5, max_factor: float = 8.0
    ) -> None:
        check_number("rate", rate, 1e-6, 1.0)
        check_number("outlier_limit", outlier_limit, 1e-6, 10.0)
        check_number("max_factor", max_factor, 1.0, 1000.0)
        self.model = model
        self._rate = rate
        self._outlier_limit = outlier_limit
        self._max_log_factor = math.log(max_factor)
        self._states: dict[CostKind, _State] = {kind: _State() for kind in COST_KINDS}
        self._prefill, self._decode, self._mixed, self._swap_out, self._swap_in = self._states.values()

    @property
    def model(self) -> CostModel:
        """What is corrected; another one may take its place, and the factors stay."""
        return self._model

    @model.setter
    def model(self, model: CostModel) -> None:
        self._model = model
        self._asked = CheckedCosts(model) if is_outside(model) else model

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """The model's seconds of a step, corrected; see `CostModel.step_seconds`.

        A mixed step takes the mean factor of its two parts, each weighted with what it would take alone,
        times one of its own: what is learned of either part counts for both.
        """
        seconds = self._asked.step_seconds
        if prompt_tokens <= 0 or num_prompts <= 0:
            return seconds(batch, context_tokens) * self._decode.factor
        work = prompt_tokens, num_prompts, prompt_context
        if batch <= 0:
            return seconds(0, 0, *work) * self._prefill.factor
        whole = seconds(batch, context_tokens, *work) * self._mixed.factor
        decode, prefill = self._decode.factor, self._prefill.factor
        if decode == prefill:
            return whole * decode
        decode_seconds, prefill_seconds = seconds(batch, context_tokens), seconds(0, 0, *work)
        total = decode_seconds + prefill_seconds
        if not total:
            return whole
        return whole * (decode_seconds * decode + prefill_seconds * prefill) / total

    def swap_out_seconds(self, num_blocks: int) -> float:
        """The model's seconds to copy blocks to the host, corrected."""
        return self._asked.swap_out_seconds(num_blocks) * self._swap_out.factor

    def swap_in_seconds(self, num_blocks: int) -> float:
        """The model's seconds to copy blocks to the device, corrected."""
        return self._asked.swap_in_seconds(num_blocks) * self._swap_in.factor

    def observe(self, kind: CostKind, predicted: float, measured: float) -> None:
        """Compare a prediction with what happened, and correct later predictions.

        Args:
            kind: which kind of work it was.
            predicted: seconds this object predicted for it. A few observations may lie between prediction
                and measurement; a delay of more than about 1 / `rate` of them makes the factor swing.
            measured: seconds it took. Where either is 0 there is nothing to compare, and the pair is ignored.

        Raises:
            ConfigError: the kind is unknown, or a number is negative or not finite.
        """
        self.observe_bounds(kind, predicted, measured, measured)

    def observe_bounds(self, kind: CostKind, predicted: float, shortest: float, longest: float) -> None:
        """As `observe`, of work that took between `shortest` and `longest` seconds.

        Raises:
            ConfigError: the kind is unknown, a number is negative or not finite, or the bounds are swapped.
        """
        state = self._state(kind)
        for name, seconds in (("predicted", predicted), ("measured", shortest), ("measured", longest)):
            if not 0.0 <= seconds < math.inf:
                raise ConfigError(f"{kind}: {name} seconds must be finite and at least 0, got {seconds}")
        if shortest > longest:
            raise ConfigError(f"{kind}: it cannot have taken at least {shortest} s and at most {longest} s")
        if predicted == 0.0 or longest == 0.0:
            state.num_ignored += 1
            return
        model = predicted / state.factor
        state.count += 1
        state.sum_before += _distance(model, shortest, longest)
        state.sum_after += _distance(predicted, shortest, longest)
        measured = min(max(predicted, shortest), longest)
        if shortest < longest and measured == predicted and shortest <= model <= longest:
            state.num_in_bounds += 1
        if measured != predicted or shortest == longest:
            limit = self._outlier_limit
            # A difference of logarithms: the quotient of extreme seconds may overflow.
            error = min(max(math.log(measured) - math.log(predicted), -limit), limit)
            state.num_moves += 1
            log_factor = state.log_factor + max(self._rate, 1.0 / (state.num_moves + 1)) * error
        elif shortest <= model <= longest:
            log_factor = state.log_factor * (1.0 - _FADING * self._rate)
        else:
            return
        state.log_factor = min(max(log_factor, -self._max_log_factor), self._max_log_factor)
        state.factor = math.exp(state.log_factor)

    def factor(self, kind: CostKind) -> float:
        """What predictions of `kind` are multiplied by now; 1.0 before the first observation."""
        return self._state(kind).factor

    def report(self) -> dict[CostKind, KindReport]:
        """Errors with and without the correction, and the drift, of each kind."""
        return {
            kind: KindReport(
                count=state.count,
                num_ignored=state.num_ignored,
                num_in_bounds=state.num_in_bounds,
                error_before=state.sum_before / state.count if state.count > state.num_in_bounds else None,
                error_after=state.sum_after / state.count if state.count > state.num_in_bounds else None,
                factor=state.factor,
            )
            for kind, state in self._states.items()
        }

    def _state(self, kind: CostKind) -> _State:
        if kind not in self._states:
            raise ConfigError(f"unknown kind of cost {kind!r}; use one of {', '.join(COST_KINDS)}")
        return self._states[kind]


class CheckedCalibration(CheckedCosts):
    """A calibration from outside the package, which is named wherever it raises.

    Args:
        model: is asked.

    Raises:
        ConfigError, UserCodeError: by its methods, as those of `CheckedCosts` do.
    """

    model: OnlineCalibration

    def observe_bounds(self, kind: CostKind, predicted: float, shortest: float, longest: float) -> None:
        """The calibration's."""
        self._ask("observe_bounds", kind, predicted, shortest, longest)

    def report(self) -> dict[CostKind, KindReport]:
        """The calibration's."""
        found: dict[CostKind, KindReport] = self._ask("report")
        return found

    def _ask(self, name: str, *work: object) -> typing.Any:
        try:
            return getattr(self.model, name)(*work)
        except Exception as error:
            raise blame(self.model, asked(name, work), error)  # noqa: B904, which chains


@typing.overload
def named(costs: OnlineCalibration) -> OnlineCalibration | CheckedCalibration: ...


@typing.overload
def named(costs: CostModel) -> CostModel: ...


def named(costs: CostModel) -> CostModel:
    """A predictor as an engine asks it: one from outside the package is named where it raises."""
    if not is_outside(costs):
        return costs
    return CheckedCalibration(costs) if isinstance(costs, OnlineCalibration) else CheckedCosts(costs)


def _distance(seconds: float, shortest: float, longest: float) -> float:
    """Of a prediction from what is known of a duration, relative to that."""
    if seconds < shortest:
        return (shortest - seconds) / shortest
    return (seconds - longest) / longest if seconds > longest else 0.0
