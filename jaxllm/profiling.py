"""Measures what steps and swaps cost on this device, and fits predictors to it."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxllm import hardware
from jaxllm.errors import ConfigError
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.predictors.base import COST_KINDS, CostKind, ModelShape
from jaxllm.predictors.regression import Fit, RegressionCostModel, Sample, fit
from jaxllm.predictors.store import Profile
from jaxllm.predictors.table import TableAxes, TableCostModel
from jaxllm.sampling_params import SamplingParams
from jaxllm.types import PrefillChunk, Request, SchedulerOutput, Swap

_GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
_MIN_SAMPLES = 60
_MIN_SWAP_SIZES = 24  # a fit needs ten different ones
_CONTEXT_SHARE = 0.3  # of prefills that continue sequences


class Profiler:
    """Runs made-up steps on an idle engine's executor and times them.

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
        self._executor = executor
        self._config = executor.config
        self._random = random.Random(seed)
        self.model = model
        self._repetitions = repetitions
        draws: dict[CostKind, Callable[[], Sample | None]] = {
            "prefill": self._prefill,
            "decode": self._decode,
            "mixed": self._mixed,
        }
        if executor.config.max_num_seqs == 1:
            del draws["mixed"]
        self._draws = draws

    def samples(self, seconds: float) -> dict[CostKind, list[Sample]]:
        """Measure for about so long, at least 60 samples of each kind.

        Swaps are measured only if the engine has host blocks, mixed steps if it takes several sequences.
        """
        found: dict[CostKind, list[Sample]] = {kind: [] for kind in COST_KINDS}
        for _ in range(2):  # first uses: pages, caches
            for draw in self._draws.values():
                draw()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds or self._too_few(found):
            for draw in self._draws.values():
                sample = draw()
                if sample is not None:
                    found[sample.kind].append(sample)
            if self._config.num_host_blocks:
                for sample in self._swap():
                    found[sample.kind].append(sample)
        return {kind: samples for kind, samples in found.items() if samples}

    def _too_few(self, found: Mapping[CostKind, Sequence[Sample]]) -> bool:
        return any(len(found[kind]) < _MIN_SAMPLES for kind in self._draws)

    def time_decode(self, batch: int, context: int, repetitions: int = 10) -> float:
        """Median seconds of a decode step of `batch` sequences of `context` tokens.

        Raises:
            ConfigError: they do not fit the pool.
        """
        requests = self._requests([context + 1] * batch)
        if requests is None:
            raise ConfigError(f"{batch} sequences of {context} tokens do not fit the pool")
        scheduled = SchedulerOutput(0, decode=tuple(requests))
        return statistics.median(self._time(scheduled) for _ in range(repetitions + 1))

    def time_prefill(self, num_tokens: int, num_seqs: int, repetitions: int = 10) -> float:
        """Median seconds of a prefill step of `num_seqs` prompts of `num_tokens` together.

        Raises:
            ConfigError: they do not fit the pool.
        """
        if not num_seqs <= num_tokens <= num_seqs * (self._config.max_model_len - 1):
            raise ConfigError(f"{num_tokens} tokens are no {num_seqs} prompts of 1 to max_model_len - 1")
        lengths = self._split(num_tokens, num_seqs)
        requests = self._requests([length + 1 for length in lengths])
        if requests is None:
            raise ConfigError(f"{num_tokens} tokens do not fit the pool")
        chunks = [PrefillChunk(r, 0, length, True) for r, length in zip(requests, lengths, strict=True)]
        scheduled = SchedulerOutput(0, prefill=tuple(chunks))
        return statistics.median(self._time(scheduled) for _ in range(repetitions + 1))

    def hidden_swap_shares(
        self, num_blocks: int, batch: int, context: int, repetitions: int = 5
    ) -> tuple[float, float]:
        """Shares, 0 to 1, of a copy of `num_blocks` to the host, and of one back, that decode steps hide.

        A copy runs beside as many steps of `batch` sequences of `context` tokens as take as long as it does
        alone; whatever both together take longer than the steps was not hidden. Medians.

        Raises:
            ConfigError: they do not fit the pool, or the engine has no host blocks.
        """
        executor = self._executor
        if num_blocks > self._config.num_gpu_blocks:
            raise ConfigError(f"{num_blocks} blocks are more than the pool's {self._config.num_gpu_blocks}")
        step = self.time_decode(batch, context)
        alone = [executor.time_swap(num_blocks) for _ in range(repetitions)]
        out_alone, in_alone = (statistics.median(times) for times in zip(*alone, strict=True))
        requests = self._requests([context + 1] * batch)
        assert requests is not None  # `time_decode` had them, too
        decode = SchedulerOutput(0, decode=tuple(requests))
        nobody = Request("", [0], _GREEDY, arrival_time=0.0, arrival_index=-1, max_total_tokens=2)
        swap = Swap(nobody, -2, tuple(range(num_blocks)))  # handle -1 is that of `time_swap`

        def seconds(num_steps: int, first: SchedulerOutput, last: SchedulerOutput) -> float:
            started = time.perf_counter()
            steps = [executor.execute(one) for one in (first, *[decode] * (num_steps - 1), last)]
            for one in steps:
                one.fetch()
            while executor.copies().num_leaving:
                time.sleep(1e-5)
            return time.perf_counter() - started

        shares: tuple[list[float], list[float]] = ([], [])
        start_out = dataclasses.replace(decode, swap_out=(swap,))
        start_in = dataclasses.replace(decode, load=(swap,))
        end_in = dataclasses.replace(decode, joined=(swap,))
        for _ in range(repetitions):
            num_steps = max(1, math.ceil(out_alone / step))
            without = seconds(num_steps, decode, decode)
            shares[0].append(1 - (seconds(num_steps, start_out, decode) - without) / out_alone)
            num_steps = max(1, math.ceil(in_alone / step))
            without = seconds(num_steps, decode, decode)
            shares[1].append(1 - (seconds(num_steps, start_in, end_in) - without) / in_alone)
        out_share, in_share = (min(1.0, max(0.0, statistics.median(of))) for of in shares)
        return out_share, in_share

    def swap_samples(self, count: int) -> dict[CostKind, list[Sample]]:
        """Measure `count` swaps out and back.

        Raises:
            ConfigError: the engine has no host blocks.
        """
        found: dict[CostKind, list[Sample]] = {"swap_out": [], "swap_in": []}
        for _ in range(count):
            for sample in self._swap():
                found[sample.kind].append(sample)
        return found

    def fit(self, samples: dict[CostKind, list[Sample]], *, is_brief: bool = False) -> dict[CostKind, Fit]:
        """The best predictor of each kind; `is_brief` tries only those that are fitted within a second."""
        tried: dict[str, Any] = {"names": ["linear", "ridge"], "degrees": [1, 2, 3]} if is_brief else {}
        return {kind: fit(of_kind, **tried) for kind, of_kind in samples.items()}

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
        config = self._config
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
        table = TableCostModel.distil(RegressionCostModel(regressors, self.model, config.block_size), axes)
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

    # One measurement each

    def _prefill(self) -> Sample | None:
        return self._step(self._draw_size(self._config.buckets.sizes), 0)

    def _mixed(self) -> Sample | None:
        total = max(2, self._draw_size(self._config.buckets.sizes))
        return self._step(total, self._draw_size((min(total, self._config.max_num_seqs) - 1,)))

    def _decode(self) -> Sample | None:
        batch = self._draw_size(self._config.buckets.decode)
        return self._step(batch, batch)

    def _step(self, num_rows: int, batch: int) -> Sample | None:
        """Measure a step of so many rows, `batch` of them decodes; None if what was drawn does not fit."""
        config, uniform = self._config, self._random.uniform
        longest = config.max_model_len - 1
        room = config.num_gpu_blocks // max(1, batch) * config.block_size
        most = min(longest, room // 2 if num_rows > batch else room)
        if batch and most < 1:
            return None
        mean = max(1, round(most ** self._random.random())) if batch else 0
        contexts = [min(most, max(1, round(mean * uniform(0.5, 1.5)))) for _ in range(batch)]
        lengths, starts = self._chunks(num_rows - batch, config.max_num_seqs - batch)
        totals = [start + length for start, length in zip(starts, lengths, strict=True)]
        requests = self._requests([*(context + 1 for context in contexts), *(total + 1 for total in totals)])
        if requests is None:
            return None
        chunks = [
            PrefillChunk(request, start, length, True)
            for request, start, length in zip(requests[batch:], starts, lengths, strict=True)
        ]
        scheduled = SchedulerOutput(0, decode=tuple(requests[:batch]), prefill=tuple(chunks))
        work = (batch, sum(contexts), sum(lengths), len(lengths), sum(starts))
        return Sample.step(self.model, self._median(scheduled), *work)

    def _chunks(self, num_tokens: int, max_seqs: int) -> tuple[list[int], list[int]]:
        """Lengths and starts of prompt chunks of so many tokens, or as many as sequences may have."""
        if num_tokens < 1:
            return [], []
        config, longest = self._config, self._config.max_model_len - 1
        most = min(config.buckets.max_prefill_seqs, max_seqs)
        num_tokens = min(num_tokens, longest * most)
        num_seqs = self._random.randint(-(-num_tokens // longest), min(most, num_tokens))
        lengths = self._split(num_tokens, num_seqs)
        starts = [0] * num_seqs
        if self._random.random() < _CONTEXT_SHARE:
            room = min(longest, config.num_gpu_blocks // (2 * num_seqs) * config.block_size)
            starts = [self._random.randint(0, max(0, room - length)) for length in lengths]
        return lengths, starts

    def _swap(self) -> Iterator[Sample]:
        config = self._config
        longest = -(-config.max_model_len // config.block_size)
        num_blocks = self._random.randint(1, max(longest, _MIN_SWAP_SIZES))
        timed = [self._executor.time_swap(num_blocks) for _ in range(self._repetitions)]
        out_seconds, in_seconds = (statistics.median(times) for times in zip(*timed, strict=True))
        yield Sample.swap_out(self.model, config.block_size, num_blocks, out_seconds)
        yield Sample.swap_in(self.model, config.block_size, num_blocks, in_seconds)

    def _median(self, scheduled: SchedulerOutput) -> float:
        return statistics.median(self._time(scheduled) for _ in range(self._repetitions))

    def _time(self, scheduled: SchedulerOutput) -> float:
        started = time.perf_counter()
        self._executor.execute(scheduled).fetch()
        return time.perf_counter() - started

    def _draw_size(self, compiled: Sequence[int]) -> int:
        most = compiled[-1]
        if self._random.random() < 0.5:
            return min(most, self._random.choice(compiled) + self._random.choice((0, 0, 1)))
        return max(1, round(most ** self._random.random()))

    def _split(self, total: int, parts: int) -> list[int]:
        """`parts` positive lengths of sum `total`, none longer than a sequence may be."""
        longest = self._config.max_model_len - 1
        lengths = [1] * parts
        left = total - parts
        while left:
            place = self._random.randrange(parts)
            more = min(left, longest - lengths[place], max(1, total // parts))
            lengths[place] += more
            left -= more
        return lengths

    def _requests(self, totals: Sequence[int]) -> list[Request] | None:
        """Requests of these lengths, newest token included, in blocks of their own; None if too large."""
        size = self._config.block_size
        requests, next_block = [], 0
        for slot, total in enumerate(totals):
            num_blocks = -(-(total - 1) // size)
            tokens = [1 + (slot + i) % (self.model.vocab_size - 1) for i in range(total - 1)]
            request = Request(
                str(slot), tokens, _GREEDY, arrival_time=0.0, arrival_index=slot, max_total_tokens=total + 1
            )
            request.block_ids = list(range(next_block, next_block + num_blocks))
            request.slot, request.num_tokens = slot, total
            next_block += num_blocks
            requests.append(request)
        return requests if next_block <= self._config.num_gpu_blocks else None


def _distilled_error(table: TableCostModel, test: Sequence[Sample]) -> dict[str, float]:
    """How far a table is off on samples nothing was fitted to: `ErrorStats`, as values."""
    errors = [abs(table.seconds_of(one.kind, one.work) - one.seconds) / one.seconds for one in test]
    return {"mape": statistics.fmean(errors), "median": statistics.median(errors), "largest": max(errors)}
