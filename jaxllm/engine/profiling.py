"""Measures what steps and swaps cost on this device, and fits predictors to it."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxllm.errors import ConfigError
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.predictors.base import COST_KINDS, CostKind, ModelShape
from jaxllm.predictors.programs import ProgramCosts
from jaxllm.predictors.regression import Fit, RegressionCostModel, Sample, fit
from jaxllm.predictors.store import Profile
from jaxllm.predictors.table import TableAxes, TableCostModel
from jaxllm.sampling.params import SamplingParams
from jaxllm.system import hardware
from jaxllm.types import PrefillChunk, Request, SchedulerOutput

_GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
_MIN_SAMPLES = 60
_MIN_SWAP_SIZES = 24  # a fit needs ten different ones
_CONTEXT_SHARE = 0.3  # of prefills that continue sequences
_PADDING_SECONDS = 2.0
_TIMED_STEPS = 3  # of a run; one more goes before them, and one after
RUN_STEPS = _TIMED_STEPS + 2
_GROWTH = (_TIMED_STEPS + 1) // 2  # tokens that decodes gain in a run before its middle, and after it


@dataclasses.dataclass(frozen=True)
class Work:
    """What one measurement runs: a step's decodes and prompt chunks, in tokens, or a copy out and back.

    Args:
        contexts: tokens that each decoding sequence attends to, in the middle of a run.
        lengths: new tokens of each prompt chunk.
        starts: tokens of its sequence that are in the cache already.
        num_blocks: KV blocks of a copy; the others are empty then.
    """

    contexts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    num_blocks: int = 0


class Profiler:
    """Runs made-up steps on an idle engine's executor and times them.

    Steps are timed as an engine runs them: each is dispatched while the one before it runs, sampled tokens
    stay on the device, and a step takes from the end of the one before it to its own. So the host's work
    counts only where the device waits for it; an engine with `async_scheduling=False` waits for all of it,
    and takes longer. Scheduling itself is not timed. A run is five steps alike, in which decodes grow by a
    token from step to step, and the mean of the middle three is measured. Copies are timed alone.

    Sizes are drawn at random, as often at and just above the sizes that programs are compiled for as
    anywhere between, since padding makes costs jump there. Kinds of work take turns, so that a noisy
    stretch of time does not fall on one of them.

    Args:
        executor: warm, and without requests: its pool's contents are overwritten.
        model: the sizes of its model.
        seed: of the sizes drawn.
        repetitions: times each of them is measured in a row; the sample is the median. One keeps the noise
            in, which simulations want; several show what the predictors themselves are worth.
    """

    def __init__(
        self, executor: ModelExecutor, model: ModelShape, *, seed: int = 0, repetitions: int = 1
    ) -> None:
        self.executor = executor
        self.config = executor.config
        self._random = random.Random(seed)
        self.model = model
        self._repetitions = repetitions
        self._is_warm = False
        draws: dict[CostKind, Callable[[], Work | None]] = {
            "prefill": self._prefill,
            "decode": self._decode,
            "mixed": self._mixed,
        }
        if executor.config.max_num_seqs == 1:
            del draws["mixed"]
        self._draws = draws
        self.programs = self.config.buckets.program_sizes()  # until `warm_up`

    def samples(self, seconds: float, at_least: int = _MIN_SAMPLES) -> dict[CostKind, list[Sample]]:
        """Measure for about so long, and `at_least` so many samples of each kind.

        Swaps are measured only if the engine has host blocks, mixed steps if it takes several sequences.
        """
        found: dict[CostKind, list[Sample]] = {kind: [] for kind in COST_KINDS}
        if not self._is_warm:
            self.warm_up()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds or any(
            len(found[kind]) < at_least for kind in self._draws
        ):
            for work in self.draw():
                for sample in self.measure(work):
                    found[sample.kind].append(sample)
        return {kind: samples for kind, samples in found.items() if samples}

    def warm_up(self) -> None:
        """Compile every program, and measure a few sizes that nobody looks at."""
        self.executor.warm_up()
        for _ in range(2):
            for work in self.draw():
                self.measure(work)
        self.programs = self.config.buckets.program_sizes(self._padding_share())
        self._is_warm = True

    def draw(self) -> list[Work]:
        """One size of each kind, drawn at random; without those that do not fit the pool."""
        drawn = [draw() for draw in self._draws.values()]
        if self.config.num_host_blocks:
            drawn.append(self._swap())
        return [work for work in drawn if work is not None]

    def measure(self, work: Work) -> list[Sample]:
        """One sample of a step; of a copy one out, and one back.

        A step's counts are of the rows that its program computes, those of the padding included as far as
        they cost (`ProgramSizes`): of them costs do not jump, and an engine with other programs is served.

        Raises:
            ConfigError: it does not fit the pool, or the engine has no host blocks.
        """
        if work.num_blocks:
            return self._measure_swap(work.num_blocks)
        contexts, lengths, starts = work.contexts, work.lengths, work.starts
        scheduled = self.schedule(work)
        seconds = statistics.median(self.time_run(scheduled) for _ in range(self._repetitions))
        batch, num_tokens = self.programs.padded(len(contexts), sum(lengths), len(lengths))
        counts = (batch, sum(contexts), num_tokens, len(lengths), sum(starts))
        return [Sample.step(self.model, seconds, *counts)]

    def time_decode(self, batch: int, context: int, repetitions: int = 10) -> float:
        """Median seconds of a decode step of `batch` sequences of `context` tokens.

        Raises:
            ConfigError: they do not fit the pool.
        """
        scheduled = self.schedule(Work(contexts=(context,) * batch))
        return statistics.median(self.time_run(scheduled) for _ in range(repetitions + 1))

    def time_prefill(self, num_tokens: int, num_seqs: int, repetitions: int = 10) -> float:
        """Median seconds of a prefill step of `num_seqs` prompts of `num_tokens` together.

        Raises:
            ConfigError: they do not fit the pool.
        """
        if not num_seqs <= num_tokens <= num_seqs * (self.config.max_model_len - 1):
            raise ConfigError(f"{num_tokens} tokens are no {num_seqs} prompts of 1 to max_model_len - 1")
        lengths = tuple(self._split(num_tokens, num_seqs))
        scheduled = self.schedule(Work(lengths=lengths, starts=(0,) * num_seqs))
        return statistics.median(self.time_run(scheduled) for _ in range(repetitions + 1))

    def swap_samples(self, count: int) -> dict[CostKind, list[Sample]]:
        """Measure `count` swaps out and back.

        Raises:
            ConfigError: the engine has no host blocks.
        """
        found: dict[CostKind, list[Sample]] = {"swap_out": [], "swap_in": []}
        for _ in range(count):
            for sample in self.measure(self._swap()):
                found[sample.kind].append(sample)
        return found

    def fit(self, samples: dict[CostKind, list[Sample]], *, is_brief: bool = False) -> dict[CostKind, Fit]:
        """The best predictor of each kind; `is_brief` tries only those that are fitted within a second."""
        tried: dict[str, Any] = {"names": ["linear", "ridge"], "degrees": [1, 2, 3]} if is_brief else {}
        return {kind: fit(of_kind, **tried) for kind, of_kind in samples.items()}

    def costs_of(self, profile: Profile) -> ProgramCosts:
        """What a profile predicts of this engine's steps."""
        return ProgramCosts(profile.table, self.programs)

    def profile(self, samples: dict[CostKind, list[Sample]], fits: dict[CostKind, Fit]) -> Profile:
        """What to store.

        Raises:
            ConfigError: swaps were not measured.
        """
        missing = sorted({*self._draws, "swap_out", "swap_in"} - fits.keys())
        if missing:
            raise ConfigError(
                f"a profile needs {', '.join(missing)} too: set num_host_blocks to measure swaps"
            )
        config = self.config
        regressors = {kind: found.regressor for kind, found in fits.items()}
        axes = TableAxes.geometric(
            max_num_batched_tokens=config.buckets.sizes[-1],
            max_num_seqs=config.max_num_seqs,
            max_context_tokens=min(config.num_gpu_blocks * config.block_size,
                                   config.max_num_seqs * config.max_model_len),
            max_num_blocks=max(-(-config.max_model_len // config.block_size), _MIN_SWAP_SIZES),
            max_prefill_context_tokens=min(config.num_gpu_blocks * config.block_size,
                                           config.buckets.max_prefill_seqs * config.max_model_len),
        )  # fmt: skip
        buckets = config.buckets
        axes = dataclasses.replace(
            axes,
            prefill_tokens=tuple(sorted({*axes.prefill_tokens, *buckets.sizes})),
            decode_batch=tuple(sorted({*axes.decode_batch, *buckets.decode})),
        )
        fitted = RegressionCostModel(regressors, self.model, config.block_size)
        possible = ProgramCosts(fitted, self.programs, config.max_model_len)
        table = TableCostModel.distil(possible, axes, padding_share=self.programs.padding_share)
        return Profile(
            device=jax.devices()[0].device_kind,
            model=self.model,
            block_size=config.block_size,
            versions=hardware.versions(),
            num_samples={kind: len(of_kind) for kind, of_kind in samples.items()},
            errors={
                kind: found.report.to_dict() | {"distilled": _distilled_error(table, found.test)}
                for kind, found in fits.items()
            },
            table=table,
        )

    # What is measured

    def _prefill(self) -> Work | None:
        return self._step(self._draw_size(self.config.buckets.sizes), 0)

    def _mixed(self) -> Work | None:
        total = max(2, self._draw_size(self.config.buckets.sizes))
        return self._step(total, self._draw_size((min(total, self.config.max_num_seqs) - 1,)))

    def _decode(self) -> Work | None:
        batch = self._draw_size(self.config.buckets.decode)
        return self._step(batch, batch)

    def _step(self, num_rows: int, batch: int) -> Work | None:
        """A step of so many rows, `batch` of them decodes; None if what was drawn does not fit."""
        config, uniform = self.config, self._random.uniform
        longest = config.max_model_len - 1
        room = config.num_gpu_blocks // max(1, batch) * config.block_size
        most = min(longest, room // 2 if num_rows > batch else room)
        if batch and most < 1:
            return None
        most = max(1, most - _GROWTH)
        least = min(most, 1 + _GROWTH)
        mean = max(1, round(most ** self._random.random())) if batch else 0
        contexts = [min(most, max(least, round(mean * uniform(0.5, 1.5)))) for _ in range(batch)]
        lengths, starts = self._chunks(num_rows - batch, config.max_num_seqs - batch)
        work = Work(tuple(contexts), tuple(lengths), tuple(starts))
        return work if self._num_blocks(work) <= config.num_gpu_blocks else None

    def _chunks(self, num_tokens: int, max_seqs: int) -> tuple[list[int], list[int]]:
        """Lengths and starts of prompt chunks of so many tokens, or as many as sequences may have."""
        if num_tokens < 1:
            return [], []
        config, longest = self.config, self.config.max_model_len - 1
        most = min(config.buckets.max_prefill_seqs, max_seqs)
        num_tokens = min(num_tokens, longest * most)
        num_seqs = self._random.randint(-(-num_tokens // longest), min(most, num_tokens))
        lengths = self._split(num_tokens, num_seqs)
        starts = [0] * num_seqs
        if self._random.random() < _CONTEXT_SHARE:
            room = min(longest, config.num_gpu_blocks // (2 * num_seqs) * config.block_size)
            starts = [self._random.randint(0, max(0, room - length)) for length in lengths]
        return lengths, starts

    def _swap(self) -> Work:
        longest = -(-self.config.max_model_len // self.config.block_size)
        return Work(num_blocks=self._random.randint(1, max(longest, _MIN_SWAP_SIZES)))

    # One measurement each

    def _measure_swap(self, num_blocks: int) -> list[Sample]:
        timed = [self.executor.time_swap(num_blocks) for _ in range(self._repetitions)]
        out_seconds, in_seconds = (statistics.median(times) for times in zip(*timed, strict=True))
        size = self.config.block_size
        return [
            Sample.swap_out(self.model, size, num_blocks, out_seconds),
            Sample.swap_in(self.model, size, num_blocks, in_seconds),
        ]

    def time_run(self, scheduled: SchedulerOutput, host_seconds: float = 0.0) -> float:
        """Seconds of a step in a run of steps alike, each dispatched before the one before it is read.

        The host computes for `host_seconds` before it dispatches one, while the one before it runs.
        """
        execute, decode, size = self.executor.execute, scheduled.decode, self.config.block_size
        lengths = [
            (one, one.num_tokens, min(self.config.max_model_len, len(one.block_ids) * size + 1))
            for one in decode
        ]
        ends: list[float] = []
        before = None
        for place in range(-_GROWTH, _GROWTH + 1):
            for request, middle, most in lengths:
                request.num_tokens = min(max(2, middle + place), most)
            until = time.thread_time() + host_seconds
            while host_seconds and time.thread_time() < until:
                pass
            dispatched = execute(scheduled)
            if before is not None:
                before.fetch()
                ends.append(time.perf_counter())
            before = dispatched
        assert before is not None
        before.fetch()
        for request, middle, _ in lengths:
            request.num_tokens = middle
        return (ends[-1] - ends[0]) / _TIMED_STEPS

    def _padding_share(self) -> float:
        """What a row of padding takes of the time of a prompt's token, of the two largest programs that fit.

        Filling a program costs less than going over to one with as many rows more; 1 if there is only one.
        """
        config = self.config
        room = min(config.num_gpu_blocks // config.max_num_seqs * config.block_size, config.max_model_len - 1)
        sizes = [size for size in config.buckets.sizes if -(-size // room) <= config.buckets.max_chunks(size)]
        if len(sizes) < 2:
            return 1.0
        small, large = sizes[-2:]
        half = (small + large) // 2
        num_seqs = -(-large // room)
        steps = [
            self.schedule(Work(lengths=tuple(self._split(size, num_seqs)), starts=(0,) * num_seqs))
            for size in (small, half, large)
        ]
        times: list[list[float]] = []
        started = time.perf_counter()
        while len(times) < 2 or (len(times) < 16 and time.perf_counter() - started < _PADDING_SECONDS):
            times.append([self.time_run(step) for step in steps])
        of_small, of_half, of_large = (statistics.median(of_size) for of_size in zip(*times, strict=True))
        per_token = (of_large - of_half) / (large - half)
        per_row = (of_large - of_small) / (large - small)
        return min(1.0, max(0.0, 1 - per_token / per_row)) if per_row > 0 else 1.0

    def _draw_size(self, compiled: Sequence[int]) -> int:
        most = compiled[-1]
        if self._random.random() < 0.5:
            return min(most, self._random.choice(compiled) + self._random.choice((0, 0, 1)))
        return max(1, round(most ** self._random.random()))

    def _split(self, total: int, parts: int) -> list[int]:
        """`parts` positive lengths of sum `total`, none longer than a sequence may be."""
        longest = self.config.max_model_len - 1
        lengths = [1] * parts
        left = total - parts
        while left:
            place = self._random.randrange(parts)
            more = min(left, longest - lengths[place], max(1, total // parts))
            lengths[place] += more
            left -= more
        return lengths

    def _blocks_of(self, work: Work) -> list[int]:
        """KV blocks of each sequence, decodes first, with room for a run's tokens as far as there is any."""
        config = self.config
        room = config.num_gpu_blocks // max(1, len(work.contexts)) * config.block_size
        most = min(config.max_model_len - 1, room)
        totals = [max(context, min(context + _GROWTH, most)) for context in work.contexts]
        totals += [start + length for start, length in zip(work.starts, work.lengths, strict=True)]
        return [-(-total // config.block_size) for total in totals]

    def _num_blocks(self, work: Work) -> int:
        return sum(self._blocks_of(work))

    def schedule(self, work: Work) -> SchedulerOutput:
        """An iteration of requests in blocks of their own, which may be run again and again.

        Raises:
            ConfigError: they do not fit the pool.
        """
        batch, next_block, requests = len(work.contexts), 0, []
        ends = [start + length for start, length in zip(work.starts, work.lengths, strict=True)]
        blocks = self._blocks_of(work)
        if sum(blocks) > self.config.num_gpu_blocks:
            raise ConfigError(
                f"{sum(work.contexts) + sum(ends)} tokens of {len(blocks)} sequences do not fit the pool"
            )
        for slot, (end, num_blocks) in enumerate(zip((*work.contexts, *ends), blocks, strict=True)):
            tokens = [1 + (slot + i) % (self.model.vocab_size - 1) for i in range(end)]
            request = Request(
                str(slot), tokens, _GREEDY, arrival_time=0.0, arrival_index=slot, max_total_tokens=end + 2
            )
            request.block_ids = list(range(next_block, next_block + num_blocks))
            request.slot, request.num_tokens = slot, end + 1
            next_block += num_blocks
            requests.append(request)
        chunks = [
            PrefillChunk(request, start, length, is_last=True, is_first=not start)
            for request, start, length in zip(requests[batch:], work.starts, work.lengths, strict=True)
        ]
        return SchedulerOutput(0, decode=tuple(requests[:batch]), prefill=tuple(chunks))


def _distilled_error(table: TableCostModel, test: Sequence[Sample]) -> dict[str, float]:
    """How far a table is off on samples nothing was fitted to: `ErrorStats`, as values."""
    errors = [abs(table.seconds_of(one.kind, one.work) - one.seconds) / one.seconds for one in test]
    return {"mape": statistics.fmean(errors), "median": statistics.median(errors), "largest": max(errors)}
