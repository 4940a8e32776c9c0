"""What a study gives: its runs, figures of them with intervals, and these as tables, JSON and drawings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.research.intervals import Interval, mean_interval, ratio_interval
from jaxllm.research.simulator.system import System
from jaxllm.research.workloads import Trace
from jaxllm.research.workloads.checks import check_choice
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.config import SchedulerConfig


@dataclasses.dataclass(frozen=True)
class Run:
    """One policy on one draw of the load.

    Args:
        policy: its name.
        seed: of the load.
        result: what became of each request.
        figures: `FIGURES` by name.
    """

    policy: str
    seed: int
    result: RunResult
    figures: Mapping[str, float]


FIGURES: Mapping[str, tuple[str, float, str]] = {
    "tokens_per_second": ("tokens/s", 1.0, ",.0f"),
    "first_token_seconds": ("first token, s", 1.0, ",.3f"),
    "p99_first_token_seconds": ("its 99th percentile, s", 1.0, ",.3f"),
    "token_seconds": ("time per token, ms", 1e3, ",.1f"),
    "waiting_seconds": ("waiting, s", 1.0, ",.3f"),
    "latency_seconds": ("latency, s", 1.0, ",.2f"),
    "preemptions": ("preemptions", 1.0, ",.0f"),
    "swaps": ("swaps", 1.0, ",.0f"),
    "cached_share": ("prompt tokens found in the cache, %", 1e2, ".1f"),
    "kept_share": ("drafts kept, %", 1e2, ".1f"),
}
"""What is told of a run: a table's heading, and by what and how it is written there. Seconds are means."""


def figures_of(result: RunResult, trace: Trace) -> dict[str, float]:
    """`FIGURES` of a run of `trace`; a request of one output token has no time per token."""
    first = result.first_token_times - result.arrival_times
    many = trace.output_lens > 1
    decoding = (result.finish_times - result.first_token_times)[many] / (trace.output_lens[many] - 1)
    return {
        "tokens_per_second": result.output_tokens_per_second,
        "first_token_seconds": float(first.mean()),
        "p99_first_token_seconds": float(np.quantile(first, 0.99)),
        "token_seconds": float(decoding.mean()) if many.any() else 0.0,
        "waiting_seconds": float((result.first_scheduled_times - result.arrival_times).mean()),
        "latency_seconds": float((result.finish_times - result.arrival_times).mean()),
        "preemptions": float(result.num_preemptions),
        "swaps": float(result.num_swaps),
        "cached_share": result.num_cached_tokens / int(trace.prompt_lens.sum()),
        "kept_share": result.num_kept_drafts / max(1, result.num_draft_tokens),
    }


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What `simulate` gives.

    Args:
        system: what was simulated.
        config: the scheduler's limits; a policy that never swaps had no host memory, and one that plans
            without a prefix cache had none.
        load: the trace, for people.
        notes: what became of its rows and requests: `Trace.notes`, of the first seed.
        runs: of each policy all seeds, in the order of the policies.
    """

    system: System
    config: SchedulerConfig
    load: str
    notes: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Their names, as they were given."""
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the load."""
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    def of(self, policy: str) -> tuple[Run, ...]:
        """The runs of a policy, by seed.

        Raises:
            ConfigError: there is no such policy.
        """
        found = tuple(run for run in self.runs if run.policy == policy)
        if not found:
            raise ConfigError(f"policy {policy!r} was not simulated; these were: {', '.join(self.policies)}")
        return found

    def figure(self, policy: str, name: str) -> Interval:
        """The mean over seeds of one of `FIGURES`, with its 95 % interval (Student's).

        Raises:
            ConfigError: there is no such policy or figure.
        """
        check_choice("figure", name, tuple(FIGURES))
        return mean_interval([run.figures[name] for run in self.of(policy)])

    def over(self, policy: str, base: str, name: str = "tokens_per_second") -> Interval:
        """The ratio of a figure to that of another policy on the same seeds, with its 95 % interval.

        Raises:
            ConfigError: there is no such policy or figure, or it is 0 in a run.
        """
        check_choice("figure", name, tuple(FIGURES))
        pairs = [
            (one.figures[name], other.figures[name])
            for one, other in zip(self.of(policy), self.of(base), strict=True)
        ]
        if not all(min(pair) > 0 for pair in pairs):
            raise ConfigError(f"{name} is 0 in some run, so that it has no ratio; look at figure() of each")
        return ratio_interval([one / other for one, other in pairs])

    def table(self) -> str:
        """Markdown: a row for each policy, means and half their 95 % intervals over seeds."""
        is_there = {
            "cached_share": self.config.enable_prefix_caching,
            "kept_share": any(run.result.num_draft_tokens for run in self.runs),
        }
        shown_ones = {name: how for name, how in FIGURES.items() if is_there.get(name, True)}
        base = self.policies[-1]
        has_base = len(self.policies) > 1
        headings = [
            "policy",
            *(f"over {base}" for _ in range(has_base)),
            *(how[0] for how in shown_ones.values()),
        ]
        notes = [f"Of the load: {'; '.join(self.notes)}."] if self.notes else []
        lines = [
            self.caption(),
            *notes,
            "",
            f"| {' | '.join(headings)} |",
            f"|---{'|---:' * (len(headings) - 1)}|",
        ]
        for policy in self.policies:
            cells = [policy]
            if has_base:
                cells.append(_written(self.over(policy, base), 1.0, ".3f"))
            cells += [_written(self.figure(policy, name), *how[1:]) for name, how in shown_ones.items()]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def caption(self) -> str:
        """What was simulated, in a sentence or two."""
        system, config = self.system, self.config
        cache = ", prefix cache" if config.enable_prefix_caching else ""
        seeds = f"; {len(self.seeds)} seeds, ± half a 95 % interval" if len(self.seeds) > 1 else ""
        return (
            f"Simulated: {system.model.name} ({system.model.held}) on {system.device}, seconds from "
            f"{system.source}; {system.num_gpu_blocks:,} KV blocks of {system.block_size} tokens, "
            f"{system.num_host_blocks:,} on the host; at most {config.max_num_seqs} sequences and "
            f"{config.max_num_batched_tokens:,} tokens a step{cache}. {self.load}{seeds}."
        )

    def to_json(self) -> dict[str, Any]:
        """Setting, means with intervals, and the figures of each run, as JSON values."""
        policies = {}
        for policy in self.policies:
            intervals = {name: self.figure(policy, name) for name in FIGURES}
            is_sure = len(self.seeds) > 1
            policies[policy] = {
                name: {"mean": one.mean, "low": one.low, "high": one.high} if is_sure else {"mean": one.mean}
                for name, one in intervals.items()
            }
        return {
            "simulated": self.caption(),
            "notes": list(self.notes),
            "system": self.system.facts(),
            "config": dataclasses.asdict(self.config),
            "policies": policies,
            "runs": [
                {"policy": run.policy, "seed": run.seed, **run.figures, **run.result.summary()}
                for run in self.runs
            ],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the figures by policy, and what waits and runs over the time of the first seed.

        Raises:
            ConfigError: matplotlib is missing, or writes no such files.
        """
        from jaxllm.research.simulator.drawing import draw

        draw(self, Path(path))


def _written(value: Interval, scale: float, form: str) -> str:
    mean = format(scale * value.mean, form)
    return mean if value.high == np.inf else f"{mean} ± {format(scale * (value.high - value.low) / 2, form)}"
