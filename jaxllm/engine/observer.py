"""What steps and copies really took: for the calibration of predictions, and for the decision ledger."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.ledger import Ledger
from jaxllm.types import CopyTime, SchedulerOutput

_ALL_COMPARED = 64
_COMPARED_EACH = 4


class StepObserver:
    """Compares each step's duration with its prediction, and charges preemptions with what they cost.

    A recompute is charged with its share of the prefill, by tokens. A swap is charged with what the steps in
    which its copies start take longer than predicted, by blocks: copies run beside steps, so that their own
    durations would say nothing; the charge holds the error of the prediction, too. Of a prefill with copies
    recomputes share what was predicted, or all where nothing was; who comes back by both is charged with
    both. Steps with copies are left out of the comparison; of the others the first 64 are compared, then one
    in four.

    Args:
        costs: corrected as steps are observed; None compares nothing, and leaves swaps unmeasured.
        ledger: told what each restore took; None records nothing.
    """

    def __init__(self, costs: OnlineCalibration | None, ledger: Ledger | None) -> None:
        self.costs = costs
        self._ledger = ledger
        self._num_steps = 0

    def observe(self, scheduled: SchedulerOutput, seconds: float, num_decode_steps: int = 1) -> None:
        """Take a step that ran for `seconds`. Call before its tokens are committed.

        Args:
            scheduled: the step.
            seconds: how long it ran.
            num_decode_steps: decode iterations it computed; 0 if all its requests had ended before.
        """
        if seconds <= 0.0 or (scheduled.decode and not num_decode_steps):
            return
        self._num_steps += 1
        prefill_seconds = seconds
        is_compared = self._num_steps <= _ALL_COMPARED or self._num_steps % _COMPARED_EACH == 0
        if self.costs is not None and (is_compared or scheduled.has_copies):
            predicted = self._predicted(self.costs, scheduled, num_decode_steps)
            if scheduled.has_copies and predicted > 0.0:
                self._charge_swaps(scheduled, max(0.0, seconds - predicted))
                prefill_seconds = min(seconds, predicted)
            elif scheduled.has_copies:
                pass
            elif scheduled.prefill and not scheduled.decode:
                self.costs.observe("prefill", predicted, seconds)
            elif scheduled.decode and not scheduled.prefill:
                self.costs.observe("decode", predicted / num_decode_steps, seconds / num_decode_steps)
        if self._ledger is not None and scheduled.prefill:
            per_token = prefill_seconds / scheduled.num_prefill_tokens
            for chunk in scheduled.prefill:
                if chunk.is_recompute:
                    self._ledger.measured(
                        chunk.request.request_id, per_token * chunk.length, scheduled.step_id
                    )

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

    def _predicted(
        self, costs: OnlineCalibration, scheduled: SchedulerOutput, num_decode_steps: int = 1
    ) -> float:
        prefill, decode = scheduled.prefill, scheduled.decode
        seconds = 0.0
        if prefill:
            context = sum(chunk.start for chunk in prefill)
            seconds += costs.prefill_seconds(scheduled.num_prefill_tokens, len(prefill), context)
        if decode:
            context = sum(len(r.prompt_token_ids) + len(r.output_token_ids) for r in decode)
            context += len(decode) * (num_decode_steps - 1) // 2  # as many as in the middle one
            seconds += num_decode_steps * costs.decode_seconds(len(decode), context)
        return seconds

    def _charge_swaps(self, scheduled: SchedulerOutput, seconds: float) -> None:
        if self._ledger is None:
            return
        copies = [(swap, len(swap.block_ids)) for swap in scheduled.swap_out]
        copies += [
            (swap, len(swap.block_ids) - swap.num_intact) for swap in (*scheduled.swap_in, *scheduled.load)
        ]
        total = max(1, sum(num_blocks for _, num_blocks in copies))
        for swap, num_blocks in copies:
            self._ledger.measured(swap.request.request_id, seconds * num_blocks / total, scheduled.step_id)
