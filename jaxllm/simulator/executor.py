"""`SimulatedExecutor`: an `Executor` whose device is a cost model and whose clock is virtual."""

from __future__ import annotations

from jaxllm.predictors.base import CostModel
from jaxllm.sched.ledger import Ledger
from jaxllm.simulator.truth import Residuals, key_of
from jaxllm.types import SampledTokens, SchedulerOutput
from jaxllm.workloads.result import TimeSpent


class SimulatedExecutor:
    """Charges every step to a virtual clock and makes up its tokens (all 0).

    Copies either stop the device (`overlap_swaps=False`, as in AdaptiveLLM and vLLM 0.2.5) or run beside
    it: the copy out of a victim never delays anybody, and the copy in of a request that resumes delays its
    step by what the step before did not hide, and by a copy out of the same request still under way.

    Args:
        costs: seconds each piece of work takes; asked once for each.
        residuals: what they are multiplied by; None is a device without noise.
        num_gpu_blocks: blocks in the device's pool.
        block_size: tokens per block.
        overlap_swaps: whether copies run beside computation.
        ledger: told what each restore took.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        num_gpu_blocks: int,
        block_size: int,
        overlap_swaps: bool,
        residuals: Residuals | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.now = 0.0
        self.spent = TimeSpent()
        self._costs = costs
        self._residuals = residuals
        self._overlap_swaps = overlap_swaps
        self._ledger = ledger
        self._copied_out: dict[int, tuple[float, float]] = {}  # handle -> (ready at, seconds)
        self._link_free_at = 0.0
        self._hidden = 0.0  # seconds of the last step, behind which a copy in can hide

    def wait_until(self, time: float) -> None:
        """Let the clock run to `time`, with nothing to do."""
        if time > self.now:
            self.spent.idle += time - self.now
            self._hidden += time - self.now
            self.now = time

    def execute(self, scheduled: SchedulerOutput) -> SimulatedStep:
        """Charge one step; the clock then shows its end."""
        for handle in scheduled.discarded:
            self._copied_out.pop(handle, None)
        if scheduled.swap_out or scheduled.swap_in:
            self._copy(scheduled)
        started = self.now
        costs, spent = self._costs, self.spent
        prefill = scheduled.prefill
        if prefill:
            num_tokens = repeated = context = 0
            for chunk in prefill:
                num_tokens += chunk.length
                context += chunk.start
                if chunk.is_recompute:
                    repeated += chunk.length
            seconds = self._prefill_seconds(scheduled, num_tokens, context)
            if self._residuals is not None:
                seconds *= self._residuals.ratio("prefill", key_of(prefill[0].request))
            recompute = seconds * repeated / num_tokens
            spent.recompute += recompute
            spent.prefill += seconds - recompute
            self.now += seconds
            if self._ledger is not None and repeated:
                for chunk in prefill:
                    if chunk.is_recompute:
                        share = seconds * chunk.length / num_tokens
                        self._ledger.measured(chunk.request.request_id, share, scheduled.step_id)
        decode = scheduled.decode
        if decode:
            seconds = costs.decode_seconds(len(decode), sum([request.num_tokens for request in decode]))
            if self._residuals is not None:
                seconds *= self._residuals.ratio("decode", scheduled.step_id)
            spent.decode += seconds
            self.now += seconds
        self._hidden = self.now - started
        return SimulatedStep(len(decode) + sum([chunk.is_last for chunk in prefill]))

    def _prefill_seconds(self, scheduled: SchedulerOutput, num_tokens: int, context_tokens: int) -> float:
        return self._costs.prefill_seconds(num_tokens, len(scheduled.prefill), context_tokens)

    def _copy(self, scheduled: SchedulerOutput) -> None:
        for swap in scheduled.swap_out:
            seconds = self._costs.swap_out_seconds(len(swap.block_ids))
            if self._residuals is not None:
                seconds *= self._residuals.ratio("swap_out", key_of(swap.request))
            start = max(self.now, self._link_free_at) if self._overlap_swaps else self.now
            ready = start + seconds
            if not self._overlap_swaps:
                self.spent.swap_stall += seconds
                self.now = ready
            self._link_free_at = ready
            self._copied_out[swap.handle] = (ready, seconds)
        if not scheduled.swap_in:
            return
        done = self.now - (self._hidden if self._overlap_swaps else 0.0)
        for swap in scheduled.swap_in:
            ready, out_seconds = self._copied_out.pop(swap.handle)
            seconds = self._costs.swap_in_seconds(len(swap.block_ids) - swap.num_intact)
            if self._residuals is not None:
                seconds *= self._residuals.ratio("swap_in", key_of(swap.request))
            before = max(done, self.now)
            if seconds:
                done = max(done, ready) + seconds
            if self._ledger is not None:
                delay = max(0.0, done - before) if self._overlap_swaps else out_seconds + seconds
                self._ledger.measured(swap.request.request_id, delay, scheduled.step_id)
        stall = max(0.0, done - self.now)
        self.spent.swap_stall += stall
        self.now += stall


class SimulatedStep:
    """A step that has ended."""

    __slots__ = ("_num_sampled",)

    def __init__(self, num_sampled: int) -> None:
        self._num_sampled = num_sampled

    def fetch(self) -> SampledTokens:
        """Token 0 for every sampled request."""
        return SampledTokens([0] * self._num_sampled)
