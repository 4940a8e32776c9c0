"""What steps and copies really took: for the calibration of predictions, and for the decision ledger."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.predictors.base import CostModel, step_kind
from jaxllm.predictors.online import CheckedCalibration, OnlineCalibration
from jaxllm.sched.ledger import Ledger
from jaxllm.types import CopyTime, SchedulerOutput

_ALL_COMPARED = 64
_COMPARED_EACH = 4


class StepObserver:
    """Compares each step's duration with its prediction, and charges preemptions with what they cost.

    A recompute is charged with its share, by tokens, of what the prompt tokens added to the step: what it
    took longer than its decodes alone are predicted to. A swap is charged with what the steps in which its
    copies start take longer than predicted, by blocks: copies run beside steps, so that their own durations
    would say nothing; the charge holds the error of the prediction, too. A step of which only
    a bound is known bounds the charge. Steps with copies are left out of the comparison; of the others the
    first 64 are compared, then one in four.

    Args:
        costs: corrected as steps are observed; None compares nothing, and leaves swaps unmeasured.
        ledger: told what each restore took; None records nothing.
    """

    def __init__(self, costs: OnlineCalibration | CheckedCalibration | None, ledger: Ledger | None) -> None:
        self.costs = costs
        self._ledger = ledger
        self._num_steps = 0

    def observe(self, scheduled: SchedulerOutput, seconds: float, *, is_timed: bool = True) -> None:
        """Take a step that ran for `seconds`; at most for so long if it is not `is_timed`."""
        if seconds <= 0.0 or scheduled.num_drafts:  # whose rows are no prompts'
            return
        self._num_steps += 1
        costs, ledger, prefill = self.costs, self._ledger, scheduled.prefill
        is_compared = self._num_steps <= _ALL_COMPARED or self._num_steps % _COMPARED_EACH == 0
        if costs is not None and (is_compared or scheduled.has_copies):
            predicted = predicted_seconds(costs, scheduled)
            if not scheduled.has_copies:
                each, longest = predicted / scheduled.num_decode_steps, seconds / scheduled.num_decode_steps
                kind = step_kind(len(scheduled.decode), len(prefill))
                costs.observe_bounds(kind, each, longest if is_timed else 0.0, longest)
            elif predicted > 0.0:
                self._charge_swaps(scheduled, max(0.0, seconds - predicted), is_timed)
                seconds = min(seconds, predicted)
        if ledger is None or not any(chunk.num_recomputed for chunk in prefill):
            return
        added = seconds
        if costs is not None:
            added -= costs.step_seconds(len(scheduled.decode), scheduled.num_context_tokens)
        per_token = max(0.0, added) / scheduled.num_prefill_tokens
        for chunk in prefill:
            if chunk.num_recomputed:
                charge = per_token * chunk.num_recomputed
                ledger.measured(chunk.request.request_id, charge, scheduled.step_id, is_timed=is_timed)

    def observe_copies(self, timed: Iterable[CopyTime]) -> None:
        """Take durations of copies, as far as they are known."""
        costs = self.costs
        if costs is None:
            return
        for copy in timed:
            bounds = copy.shortest, copy.longest
            if copy.is_out:
                costs.observe_bounds("swap_out", costs.swap_out_seconds(copy.num_blocks), *bounds)
            else:
                costs.observe_bounds("swap_in", costs.swap_in_seconds(copy.num_blocks), *bounds)

    def _charge_swaps(self, scheduled: SchedulerOutput, seconds: float, is_timed: bool) -> None:
        if self._ledger is None:
            return
        copies = (*scheduled.swap_out, *scheduled.swap_in, *scheduled.load)
        total = max(1, sum([len(swap.block_ids) for swap in copies]))
        for swap in copies:
            charge = seconds * len(swap.block_ids) / total
            if swap.request is not None:
                self._ledger.measured(swap.request.request_id, charge, scheduled.step_id, is_timed=is_timed)


def predicted_seconds(costs: CostModel, scheduled: SchedulerOutput) -> float:
    """What a step is predicted to take, without copies."""
    prefill, batch = scheduled.prefill, len(scheduled.decode)
    num_tokens, before = scheduled.num_prefill_tokens, sum([chunk.start for chunk in prefill])
    step = costs.step_seconds(batch, scheduled.num_context_tokens, num_tokens, len(prefill), before)
    return step * scheduled.num_decode_steps
