"""What became of a trace that was played, be it by the engine or by the simulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(slots=True)
class TimeSpent:
    """Seconds by what they were spent on.

    `decode` is what the decodes of all steps would take without prompts beside them, `prefill` and
    `recompute` what prompt tokens add to that; `recompute` is the part, in proportion to tokens, that repeats
    work a preemption threw away. `swap_stall` is the part of the copies that nothing hid. A real engine
    measures steps, and cannot tell a stall from the step it delays: there it is what steps with copies took
    longer than predicted, and what decodes take beside prompts is predicted, too.
    """

    prefill: float = 0.0
    recompute: float = 0.0
    decode: float = 0.0
    swap_stall: float = 0.0
    idle: float = 0.0


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What became of a trace. Times are seconds of the run's clock, arrays are by request.

    `scheduling_seconds` is the host's own time in `Scheduler.schedule`, `prediction_seconds` that of
    decisions and of comparing predictions with measurements; `host_seconds` is what the engine's thread had
    of a processor, for these, for sending steps and for reading them. None if nobody measured it.
    `num_cached_tokens` are tokens of prompts that were found in the prefix cache instead of computed,
    `num_host_cached_tokens` those of them in host memory, `num_disk_cached_tokens` those in files.
    `num_draft_tokens` were verified, `num_kept_drafts` of them right; `draft_gain` is tokens a second with
    them over those predicted without, None if that is not known.
    """

    seconds: float
    num_output_tokens: int
    num_steps: int
    num_prefill_steps: int
    num_prefill_tokens: int
    num_preemptions: int
    num_swaps: int
    mean_decode_batch: float
    spent: TimeSpent
    arrival_times: npt.NDArray[np.float64]
    first_scheduled_times: npt.NDArray[np.float64]
    first_token_times: npt.NDArray[np.float64]
    finish_times: npt.NDArray[np.float64]
    scheduling_seconds: float
    prediction_seconds: float | None = None
    host_seconds: float | None = None
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    num_disk_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_kept_drafts: int = 0
    draft_gain: float | None = None

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput."""
        return self.num_output_tokens / self.seconds

    @property
    def weighted_turnaround(self) -> npt.NDArray[np.float64]:
        """(finish - arrival) / (finish - first scheduled) of each request (AdaptiveLLM, Fig. 4)."""
        return (self.finish_times - self.arrival_times) / (self.finish_times - self.first_scheduled_times)

    def summary(self) -> dict[str, Any]:
        """The figures that reports quote, as JSON values."""
        turnaround = self.weighted_turnaround
        latency = self.finish_times - self.arrival_times
        return {
            "seconds": self.seconds,
            "output_tokens_per_second": self.output_tokens_per_second,
            "requests_per_second": len(self.finish_times) / self.seconds,
            "mean_weighted_turnaround": float(turnaround.mean()),
            "mean_latency_seconds": float(latency.mean()),
            "p99_latency_seconds": float(np.quantile(latency, 0.99)),
            "num_steps": self.num_steps,
            "num_prefill_steps": self.num_prefill_steps,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_host_cached_tokens": self.num_host_cached_tokens,
            "num_disk_cached_tokens": self.num_disk_cached_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_kept_drafts": self.num_kept_drafts,
            "draft_gain": self.draft_gain,
            "mean_first_token_seconds": float((self.first_token_times - self.arrival_times).mean()),
            "num_preemptions": self.num_preemptions,
            "num_swaps": self.num_swaps,
            "mean_decode_batch": self.mean_decode_batch,
            "seconds_spent": dataclasses.asdict(self.spent),
        }
