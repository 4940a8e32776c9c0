"""Policies compared on the real engine by one trace: warm, in turns, and with how sure differences are."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student_t

from jaxllm.errors import ConfigError, shown
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.replay import replay
from jaxllm.research.figures import import_pyplot, save
from jaxllm.research.workloads.checks import MAX_SEED, check_integer
from jaxllm.sched.presets import as_policy

if TYPE_CHECKING:
    from jaxllm.llm import LLM
    from jaxllm.research.workloads import Trace
    from jaxllm.research.workloads.result import RunResult
    from jaxllm.sched.config import SchedulerConfig

_Arm = TypeVar("_Arm")
_FEWEST, _NUM_DRAWN = 3, 10_000
BUSY_SHARE = 0.1
"""Of the processors that others take, above which a machine is said to be busy."""
_POWER = 0.8
_LONGEST_COMPILE = 120.0


def turns(arms: Sequence[_Arm], repetitions: int, order: random.Random) -> Iterator[tuple[int, _Arm]]:
    """Each repetition's number and arms, all of them once, in an order drawn anew for each."""
    for repetition in range(repetitions):
        for arm in order.sample(arms, len(arms)):
            yield repetition, arm


def bootstrap_interval(
    logarithms: Sequence[float], seed: int, num_drawn: int = _NUM_DRAWN
) -> tuple[float, float]:
    """Ends of the 95 % interval of exp(mean of `logarithms`), by drawing as many of them with replacement.

    It is widened for few of them (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", expanded
    percentiles), but never leaves their range: of three it holds the truth in three cases of four.
    """
    values, count = np.asarray(logarithms), len(logarithms)
    tail = 100 * float(norm.cdf(-math.sqrt(count / (count - 1)) * student_t.ppf(0.975, count - 1)))
    drawn = np.random.default_rng(seed).choice(values, size=(num_drawn, count))
    low, high = np.percentile(drawn.mean(axis=1), [tail, 100 - tail])
    return math.exp(low), math.exp(high)


def smallest_seen(logarithms: Sequence[Sequence[float]]) -> float:
    """The smallest difference of two arms, relative, that such repetitions find in four cases of five.

    By a two-sided paired t-test at 5 %, from the spread of the logarithms of ratios, pooled over the pairs.

    Args:
        logarithms: for each pair of arms one for each repetition, two or more.
    """
    count = len(logarithms[0])
    variance = statistics.fmean([statistics.variance(of_pair) for of_pair in logarithms])
    freedom = len(logarithms) * (count - 1)
    quantiles = float(student_t.ppf(0.975, freedom) + student_t.ppf(_POWER, freedom))
    return math.expm1(quantiles * math.sqrt(variance / count))


class OthersShare:
    """What other processes take of the machine's processors from its making until it is asked.

    None where the system does not tell (`/proc/stat`).
    """

    def __init__(self) -> None:
        self._busy, self._own, self._at = _busy_seconds(), _own_seconds(), time.perf_counter()

    def __call__(self) -> float | None:
        """The share, from 0 to 1."""
        busy, elapsed = _busy_seconds(), time.perf_counter() - self._at
        if busy is None or self._busy is None:
            return None
        others = busy - self._busy - (_own_seconds() - self._own)
        return min(1.0, max(0.0, others / max(1e-9, elapsed * (os.cpu_count() or 1))))


def _busy_seconds() -> float | None:
    """What all processors have worked since the system began."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=11)
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """An arm's runs, one for each repetition.

    Attributes:
        runs: in order of the repetitions.
        tokens_per_second: generated, of each run.
        ratio: to the first arm's, the geometric mean over the repetitions; 1 for the first.
        interval: 95 % of that, by bootstrap over the repetitions.
        others: what other processes took of the processors in each run, from 0 to 1; None if not known.
    """

    runs: Sequence[RunResult]
    tokens_per_second: Sequence[float]
    ratio: float
    interval: tuple[float, float]
    others: Sequence[float | None]


@dataclasses.dataclass(frozen=True)
class ReplayComparison:
    """Arms by name, the first the one that others are compared with.

    Attributes:
        arms: what became of each.
        smallest_difference: relative; smaller ones are missed here in more than one case of five.
        others_share: the most that other processes took of the processors in a run; None if not known.
        load_average: of the last minute, when it had ended.
    """

    arms: Mapping[str, ArmResult]
    smallest_difference: float
    others_share: float | None
    load_average: float

    @property
    def is_busy(self) -> bool | None:
        """Whether others took more than a tenth of the processors in a run; None if that is not known."""
        return None if self.others_share is None else self.others_share > BUSY_SHARE

    @property
    def caveat(self) -> str:
        """What cannot be seen, and whether the machine was busy."""
        said = f"differences under {100 * self.smallest_difference:.2g} % cannot be seen here"
        if self.others_share is None:
            return f"{said}; load average {self.load_average:.2f}, other processes' share not known"
        state = "busy" if self.is_busy else "quiet"
        return f"{said}; the machine was {state}: others took up to {self.others_share:.0%} of its processors"

    def __str__(self) -> str:
        """A line for each arm, and the caveat."""
        baseline = next(iter(self.arms))
        lines = []
        for name, arm in self.arms.items():
            low, high = arm.interval
            against = "" if name == baseline else f", {arm.ratio:.3f} [{low:.3f}, {high:.3f}] of {baseline}"
            if against and abs(arm.ratio - 1.0) < self.smallest_difference:
                against += ": too near to tell"
            median = statistics.median(arm.tokens_per_second)
            lines.append(f"{name}: {median:.0f} tokens/s, median of {len(arm.runs)}{against}")
        return "\n".join([*lines, self.caveat])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, without what became of single requests."""
        return {
            "arms": {
                name: {
                    "tokens_per_second": list(arm.tokens_per_second),
                    "ratio": arm.ratio,
                    "interval": list(arm.interval),
                    "others": list(arm.others),
                    "num_preemptions": [run.num_preemptions for run in arm.runs],
                }
                for name, arm in self.arms.items()
            },
            "smallest_difference": self.smallest_difference,
            "others_share": self.others_share,
            "load_average": self.load_average,
            "is_busy": self.is_busy,
        }

    def plot(self, path: Path | str) -> None:
        """Ratios to the first arm with their intervals, each repetition's as a dot, under the caveat.

        Raises:
            ConfigError: matplotlib is missing, or writes no such files.
        """
        pyplot = import_pyplot()
        baseline = next(iter(self.arms.values()))
        figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.5 * len(self.arms)), layout="constrained")
        for row, arm in enumerate(self.arms.values()):
            pairs = zip(arm.tokens_per_second, baseline.tokens_per_second, strict=True)
            ratios = [mine / theirs for mine, theirs in pairs]
            axes.plot(ratios, [row] * len(ratios), ".", color="#999999")
            axes.plot(arm.interval, (row, row), color="#0072b2")
            axes.plot(arm.ratio, row, "o", color="#0072b2")
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(self.arms)), list(self.arms))
        axes.invert_yaxis()
        axes.set_xlabel(f"tokens/s, as a ratio to {next(iter(self.arms))}")
        axes.set_title(self.caveat, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        save(figure, Path(path))


def compare_replays(
    llm: LLM,
    trace: Trace,
    arms: Mapping[str, object],
    repetitions: int = 3,
    seed: int = 0,
    *,
    config: SchedulerConfig | None = None,
) -> ReplayComparison:
    """Play a trace under several policies, so that what differs is the policies.

    Programs that the engine compiles in the background are waited for, and every arm runs once, which counts
    for nothing: so all that it needs is compiled. Then each repetition runs all arms, in an order drawn anew.
    An arm's predictions begin as the engine's, and are corrected in its own run only.

    Args:
        llm: whose executor computes; it must have nothing to do.
        trace: arrivals or clients, prompts and output lengths.
        arms: by name what `jaxllm.sched.presets.as_policy` takes, two or more; the first is what the others
            are compared with. A policy that is given as an object keeps what it has learned.
        repetitions: runs of each that count, 3 or more.
        seed: of the order, and of the bootstrap.
        config: limits of the scheduler, within those of `llm`; by default its own.

    Raises:
        ConfigError: there are fewer arms or repetitions, `llm` is busy, or `config` exceeds what it was built
            for.
        RequestTooLargeError: a request of the trace can never fit.
    """
    if not isinstance(arms, Mapping):
        raise ConfigError(
            f"arms={shown(arms)} must be policies by name, such as {{'mine': ..., 'v1': 'vllm_v1'}}"
        )
    seed = check_integer("seed", seed, 0, MAX_SEED)
    if len(arms) < 2 or isinstance(repetitions, bool) or repetitions < _FEWEST:
        raise ConfigError(
            f"{len(arms)} arms and repetitions={repetitions}: a comparison takes two arms or more, and at "
            f"least {_FEWEST} repetitions"
        )
    limits = llm.engine.scheduler.config if config is None else config
    runs: dict[str, list[RunResult]] = {name: [] for name in arms}
    shares: dict[str, list[float | None]] = {name: [] for name in arms}

    def play(name: str) -> RunResult:
        costs = OnlineCalibration(llm.costs.model)
        return replay(llm, trace, limits, as_policy(arms[name], costs), costs=costs, warns=False)

    _wait_for_programs(llm)
    for name in arms:
        play(name)
    for _, name in turns(list(arms), repetitions, random.Random(seed)):
        share = OthersShare()
        runs[name].append(play(name))
        shares[name].append(share())
    return compared(runs, shares, seed)


def _wait_for_programs(llm: LLM) -> None:
    """Wait until nothing compiles in the background, or nothing has been compiled for two minutes."""
    until, before = time.monotonic() + _LONGEST_COMPILE, -1
    while (progress := llm.compile_progress()).num_compiled < progress.num_programs:
        if progress.num_compiled > before:
            until, before = time.monotonic() + _LONGEST_COMPILE, progress.num_compiled
        if time.monotonic() > until:
            return
        time.sleep(0.05)


def compared(
    runs: Mapping[str, Sequence[RunResult]], shares: Mapping[str, Sequence[float | None]], seed: int
) -> ReplayComparison:
    """What runs of arms say, those of one place a pair; `shares` are what others took of the processors."""
    rates = {name: [run.output_tokens_per_second for run in of_arm] for name, of_arm in runs.items()}
    baseline, *others = rates
    logarithms = {
        name: [math.log(mine / theirs) for mine, theirs in zip(rates[name], rates[baseline], strict=True)]
        for name in rates
    }
    arms = {
        name: ArmResult(
            runs[name],
            rates[name],
            math.exp(statistics.fmean(logarithms[name])),
            bootstrap_interval(logarithms[name], seed),
            shares[name],
        )
        for name in rates
    }
    known = [share for of_arm in shares.values() for share in of_arm if share is not None]
    smallest = smallest_seen([logarithms[name] for name in others])
    return ReplayComparison(arms, smallest, max(known, default=None), os.getloadavg()[0])
