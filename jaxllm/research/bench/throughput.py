"""Offline throughput: prompts, all at once, greedy; how many tokens a second, and where time goes."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.engine.ledgers import plain_setting
from jaxllm.engine.outputs import RequestOutput
from jaxllm.errors import ConfigError
from jaxllm.executor import compile_stats
from jaxllm.models.registry import abstract_params
from jaxllm.research.bench.step_times import STEP_KINDS, StepTimer
from jaxllm.sampling.params import SamplingParams
from jaxllm.system import hardware

if TYPE_CHECKING:
    from jaxllm.engine.engine import Engine
    from jaxllm.llm import LLM
    from jaxllm.research.workloads import Trace

_MAX_PROMPTS, _MAX_LENGTH = 10**7, 2**24
_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of random token ids, with lengths uniform in inclusive ranges.

    Args:
        num_prompts: how many.
        input_len: shortest and longest prompt, in tokens.
        output_len: shortest and longest output, in tokens.
        seed: of lengths and tokens.

    Raises:
        ConfigError: a number is below 1, or a range is empty.
    """

    num_prompts: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_prompts <= _MAX_PROMPTS:
            raise ConfigError(f"num_prompts={self.num_prompts} must be from 1 to {_MAX_PROMPTS}")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} must be at least 0")
        for name in ("input_len", "output_len"):
            low, high = getattr(self, name)
            if not 1 <= low <= high <= _MAX_LENGTH:
                raise ConfigError(f"{name}={low}:{high} must be a range of lengths from 1 to {_MAX_LENGTH}")

    @property
    def longest(self) -> int:
        """Tokens that a request may have."""
        return self.input_len[1] + self.output_len[1]

    def facts(self) -> dict[str, Any]:
        """What it is, as JSON values."""
        return {**dataclasses.asdict(self), "sampling": "greedy, ignore_eos, random token ids"}

    def requests(self, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
        """Prompts and their parameters; the same for the same workload."""
        rng = np.random.default_rng(self.seed)
        inputs = rng.integers(*self.input_len, size=self.num_prompts, endpoint=True)
        outputs = rng.integers(*self.output_len, size=self.num_prompts, endpoint=True)
        return [
            (rng.integers(vocab_size, size=num_inputs).tolist(), _greedy(num_outputs))
            for num_inputs, num_outputs in zip(inputs.tolist(), outputs.tolist(), strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class RecordedWorkload:
    """The prompts and output lengths of a trace, whatever its arrivals.

    Args:
        trace: whose requests.

    Raises:
        ConfigError: it has conversations, whose turns cannot be there at once.
    """

    trace: Trace

    def __post_init__(self) -> None:
        if self.trace.follows is not None:
            raise ConfigError(
                f"the turns of {self.trace.name!r} come after each other's answers, and all requests are to "
                "be there at once: use `jaxllm bench serve --trace`"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return int((self.trace.prompt_lens + self.trace.output_lens).max())

    def facts(self) -> dict[str, Any]:
        """What it is, as JSON values."""
        return {"trace": self.trace.summary(), "sampling": "greedy, ignore_eos"}

    def requests(self, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
        """Prompts and their parameters.

        Raises:
            RequestError: the trace's token ids do not fit the vocabulary.
        """
        lengths = self.trace.output_lens.tolist()
        return [
            (self.trace.token_ids(index, vocab_size), _greedy(length)) for index, length in enumerate(lengths)
        ]


def _greedy(num_outputs: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_outputs, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Repetition:
    """One timed pass over a workload. `outputs` keep the requests' metrics; `timer` is of one engine."""

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    outputs: Sequence[RequestOutput]
    timer: StepTimer | None


def run_once(
    engine: Engine, timer: StepTimer, requests: Sequence[tuple[list[int], SamplingParams]]
) -> Repetition:
    """Queue all requests, and step until the last has finished; both are timed."""
    started = time.perf_counter()
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(f"bench-{number}", prompt, params)
    outputs = []
    while engine.has_unfinished_requests:
        outputs += [output for output in timer.step() if output.finished]
    return _repetition_of(time.perf_counter() - started, outputs, timer)


def _repetition_of(seconds: float, outputs: Sequence[RequestOutput], timer: StepTimer | None) -> Repetition:
    return Repetition(
        seconds,
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(output.token_ids) for output in outputs),
        outputs,
        timer,
    )


def measure_throughput(
    llm: LLM,
    workload: Workload | RecordedWorkload,
    *,
    repetitions: int = 3,
    warm_up_repetitions: int = 1,
    tell: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Run a workload several times.

    Args:
        llm: it must have nothing to do.
        workload: the requests of each repetition.
        repetitions: timed passes.
        warm_up_repetitions: passes before them that are not timed (every program has run once already).
        tell: is given a line of progress after every repetition.

    Returns:
        A JSON object; times in seconds, sizes in bytes.

    Raises:
        ConfigError: the workload's longest request does not fit max_model_len, or nothing is repeated.
    """
    check_options(
        workload,
        repetitions,
        warm_up_repetitions,
        prefix_cache_dir=llm.config.prefix_cache_dir,
        max_model_len=llm.max_model_len,
    )
    requests = workload.requests(llm.model_config.vocab_size)
    for number in range(warm_up_repetitions):
        passed = _repetition(llm, requests)
        tell(f"warm-up {number + 1} of {warm_up_repetitions}: {passed.seconds:.2f} s")
    compiled_before, _ = compile_stats.total()
    runs = []
    for number in range(repetitions):
        runs.append(_repetition(llm, requests))
        rate = runs[-1].num_output_tokens / runs[-1].seconds
        tell(
            f"repetition {number + 1} of {repetitions}: {runs[-1].seconds:.2f} s, {rate:.1f} output tokens/s"
        )
    compiled_after, _ = compile_stats.total()
    return {
        "hardware": hardware.describe_hardware(),
        "versions": hardware.versions(),
        "engine": _engine_facts(llm),
        "workload": workload.facts()
        | {
            "num_prompt_tokens": runs[0].num_prompt_tokens,
            "num_output_tokens": runs[0].num_output_tokens,
            "detokenize": llm.tokenizer is not None,
        },
        "warm_up": {"programs_run_once": True, "repetitions": warm_up_repetitions},
        "repetitions": repetitions,
        "seconds": [run.seconds for run in runs],
        **_rates(llm, runs),
        **_latencies(runs),
        "compilations_after_warm_up": compiled_after - compiled_before,
        "num_preemptions": [_preemptions(run) for run in runs],
        "engine_overhead": overhead(runs),
        "peak_rss_bytes": hardware.peak_rss_bytes(),
        "peak_device_bytes": hardware.peak_device_bytes(),
    }


def _repetition(llm: LLM, requests: Sequence[tuple[list[int], SamplingParams]]) -> Repetition:
    llm.reset_prefix_cache()  # of the passes before it
    if len(llm.replicas) > 1:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        started = time.perf_counter()
        outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
        return _repetition_of(time.perf_counter() - started, outputs, None)
    with StepTimer(llm.engine, llm.executor) as timer:
        return run_once(llm.engine, timer, requests)


def check_options(
    workload: Workload | RecordedWorkload,
    repetitions: int,
    warm_up_repetitions: int,
    *,
    prefix_cache_dir: object = None,
    max_model_len: int | None = None,
) -> None:
    """Verify what `measure_throughput` is to do, before or after a model is loaded.

    Raises:
        ConfigError: nothing is repeated, passes would share the files of a cache, or the longest request does
            not fit `max_model_len`.
    """
    if repetitions < 1 or warm_up_repetitions < 0:
        raise ConfigError(
            f"repetitions={repetitions} must be at least 1, "
            f"warm_up_repetitions={warm_up_repetitions} at least 0"
        )
    if prefix_cache_dir is not None:
        raise ConfigError(
            f"prefix_cache_dir={prefix_cache_dir!r} would let a pass find what the one before it "
            "computed; leave it out"
        )
    longest = workload.longest
    if max_model_len is not None and longest > max_model_len:
        way_out = "shorten input_len or output_len"
        if isinstance(workload, RecordedWorkload):
            way_out = "cut such with --clip, leave them out with --skip, or raise max_model_len"
        raise ConfigError(
            f"the longest request has {longest} tokens, more than max_model_len={max_model_len}; {way_out}"
        )


def _engine_facts(llm: LLM) -> dict[str, Any]:
    config, model = llm.executor.config, llm.model_config
    return {
        "architecture": model.architecture,
        "num_params": num_params(llm),
        "dtype": llm.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "data_parallel_size": len(llm.replicas),
        "max_num_batched_tokens": llm.engine.scheduler.config.max_num_batched_tokens,
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_gpu_blocks,
        "pool_bytes": llm.executor.pool_bytes,
        "async_scheduling": llm.config.async_scheduling,
        "load_seconds": llm.load_times.load_seconds,
        "compile_seconds": llm.compile_progress().seconds,
        "num_programs": len(llm.executor.programs),
        "settings": {
            field.name: plain_setting(value)
            for field in dataclasses.fields(llm.config)
            if (value := getattr(llm.config, field.name)) != field.default
        },
    }


def num_params(llm: LLM) -> int:
    """Weights of the model, tied ones once."""
    structs = abstract_params(llm.model_config, llm.dtype).values()
    return sum(math.prod(struct.shape) for struct in structs)


def _rates(llm: LLM, runs: Sequence[Repetition]) -> dict[str, Any]:
    totals = [(run.num_prompt_tokens + run.num_output_tokens) / run.seconds for run in runs]
    # A forward pass multiplies and adds each weight once per token; attention is left out.
    return {
        "output_tokens_per_second": spread([run.num_output_tokens / run.seconds for run in runs]),
        "total_tokens_per_second": spread(totals),
        "requests_per_second": spread([len(run.outputs) / run.seconds for run in runs]),
        "gflop_per_second": spread([2 * num_params(llm) * rate / 1e9 for rate in totals]),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest of the repetitions."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _latencies(runs: Sequence[Repetition]) -> dict[str, Any]:
    """TTFT from the arrival, which all requests share, so it holds the time in the queue; TPOT after it."""
    first, rest, whole = [], [], []
    for run in runs:
        for output in run.outputs:
            metrics = output.metrics
            if metrics is None or metrics.first_token_time is None or metrics.finished_time is None:
                continue
            first.append(metrics.first_token_time - metrics.arrival_time)
            whole.append(metrics.finished_time - metrics.arrival_time)
            if len(output.token_ids) > 1:
                rest.append((metrics.finished_time - metrics.first_token_time) / (len(output.token_ids) - 1))
    return {
        "ttft_seconds": percentiles(first),
        "tpot_seconds": percentiles(rest),
        "latency_seconds": percentiles(whole),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not values:
        return None
    found = np.percentile(values, _PERCENTILES).tolist()
    return {"mean": statistics.fmean(values)} | {
        f"p{percentile}": value for percentile, value in zip(_PERCENTILES, found, strict=True)
    }


def _preemptions(run: Repetition) -> int:
    return sum(output.metrics.num_preemptions for output in run.outputs if output.metrics is not None)


def overhead(runs: Sequence[Repetition]) -> dict[str, Any] | None:
    """The host's time outside device programs (see `step_times`): shares of wall time, step medians.

    `prompt_program_fill` is the share of the rows of programs with prompts that computed something. None of
    several engines, whose steps are not timed.
    """
    timers = [run.timer for run in runs if run.timer is not None]
    if len(timers) < len(runs):
        return None
    steps = [step for timer in timers for step in timer.steps]
    seconds = sum(run.seconds for run in runs)
    inside = sum(step.program + step.fetch for step in steps)
    parts = ("schedule", "pack", "commit", "host", "program", "fetch", "total")
    kinds = {kind: [step for step in steps if step.kind == kind] for kind in STEP_KINDS}
    rows = sum(step.num_rows for step in steps)
    used = sum(step.num_decode + step.num_prefill_tokens for step in steps if step.num_rows)
    return {
        "host_share": (seconds - inside) / seconds,
        "prompt_program_fill": used / rows if rows else None,
        "shares": {part: sum(getattr(step, part) for step in steps) / seconds for part in parts},
        "num_steps": {kind: len(found) for kind, found in kinds.items()},
        "median_step_seconds": {
            kind: {part: statistics.median(getattr(step, part) for step in found) for part in parts}
            for kind, found in kinds.items()
            if found
        },
    }
