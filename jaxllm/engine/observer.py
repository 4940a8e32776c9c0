"""What steps really took: for the calibration of predictions, and for the decision ledger."""

from __future__ import annotations

from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.ledger import Ledger
from jaxllm.types import SchedulerOutput


class StepObserver:
    """Compares each step's duration with its prediction, and charges re-prefills to their preemptions.

    Steps with swaps are left out of the comparison: their duration holds copies too.

    Args:
        costs: corrected as steps are observed; None compares nothing.
        ledger: told what each recompute took; None records nothing.
    """

    def __init__(self, costs: OnlineCalibration | None, ledger: Ledger | None) -> None:
        self.costs = costs
        self._ledger = ledger

    def observe(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Take a step that ran for `seconds`. Call before its tokens are committed."""
        if seconds <= 0.0:
            return
        costs, prefill, decode = self.costs, scheduled.prefill, scheduled.decode
        if costs is not None and not scheduled.swap_in and not scheduled.swap_out:
            if prefill and not decode:
                context = sum(chunk.start for chunk in prefill)
                predicted = costs.prefill_seconds(scheduled.num_prefill_tokens, len(prefill), context)
                costs.observe("prefill", predicted, seconds)
            elif decode and not prefill:
                context = sum(len(r.prompt_token_ids) + len(r.output_token_ids) for r in decode)
                costs.observe("decode", costs.decode_seconds(len(decode), context), seconds)
        if self._ledger is not None and prefill:
            per_token = seconds / scheduled.num_prefill_tokens
            for chunk in prefill:
                if chunk.request.metrics.num_preemptions > chunk.request.metrics.num_swaps:
                    self._ledger.measured(chunk.request.request_id, per_token * chunk.length)
