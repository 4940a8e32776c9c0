"""Swaps, steps, dispatch, presets and start times of whole engines with random weights."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compilation_cache import compilation_cache

from gpu.inputs import CONFIGS, Sizes, sharegpt_like
from gpu.kernels import BLOCK_SIZE, seconds_of
from gpu.report import Row, attempt
from jaxllm import LLM, SamplingParams
from jaxllm.engine.costs import shape_of
from jaxllm.engine.profiling import Profiler
from jaxllm.errors import CapacityError, EngineError
from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.executor.placement import Placement
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.config import config_from_dict
from jaxllm.predictors.base import CostModel, ModelShape
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.beside_steps import hidden_swap_shares
from jaxllm.research.bench.replay import replay
from jaxllm.research.bench.step_times import StepTimer
from jaxllm.research.bench.throughput import Repetition, overhead, run_once
from jaxllm.research.workloads import AllAtOnce, ClosedLoop, Trace, make_trace
from jaxllm.research.workloads.lengths import LognormalLengths
from jaxllm.sched.presets import make_preset
from jaxllm.system import hardware
from jaxllm.types import host_blocks_of

_LEFT_BYTES = 2**20
_MOVES = 100
_STEPS_A_RUN = 5  # of `Profiler`
_KERNELS_KEPT = 40
MEMORY_PRESETS = (
    "adaptive",
    "adaptive_throughput",
    "paper",
    "paper_strategy",
    "vllm",
    "vllm_swap",
    "vllm_v1",
)


def model_config(name: str) -> ModelConfig:
    """The configuration of a model of `CONFIGS`."""
    return config_from_dict(CONFIGS[name])


def write_config(name: str, folder: Path) -> Path:
    """A checkpoint's folder without weights."""
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return model


def shape_in(llm: LLM) -> ModelShape:
    """The model's sizes as an engine holds it."""
    held = llm.executor.config
    return shape_of(llm.model_config, Path(llm.config.model).name, llm.dtype, held.formats, held.kv_dtype)


@contextlib.contextmanager
def loaded(
    name: str, folder: Path, sizes: Sizes, implementation: str | None, **settings: Any
) -> Iterator[LLM]:
    """An engine with random weights, whose memory is free again afterwards.

    Programs go to the compilation cache in `folder`; those of this process are forgotten before.

    Raises:
        EngineError: something keeps arrays of the engine alive.
    """
    jax.clear_caches()
    compilation_cache.reset_cache()
    gc.collect()  # what goes later would hide what stays
    before = live_bytes()
    llm = LLM(
        write_config(name, folder),
        skip_tokenizer_init=True,
        warm_up="all",
        enable_prefix_caching=False,
        load_format="dummy",
        dtype="float32" if jax.default_backend() == "cpu" else "bfloat16",
        profile_seconds=0.0,
        attention_implementation=implementation,
        compilation_cache_dir=folder / "xla-cache",
        max_model_len=sizes.max_model_len,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        decode_buckets=sizes.batches,
        prefill_buckets=sizes.prefill_buckets,
        **settings,
    )
    try:
        yield llm
    finally:
        llm.executor.release()
        del llm
        gc.collect()
        left = live_bytes() - before
        if left > _LEFT_BYTES:
            raise EngineError(
                f"{left} bytes of arrays outlive {name}, more than {_LEFT_BYTES}: something refers to them, "
                "and the next model may not fit; measure it in a process of its own (--parts)"
            )


def live_bytes() -> int:
    """Size of all arrays that are referred to."""
    return sum(array.nbytes for array in jax.live_arrays())


def start(llm: LLM, name: str, kind: str) -> Row:
    """What it took to load, with a compilation cache that is empty ("cold") or full ("warm")."""
    programs = [
        {"name": program.name, **dataclasses.asdict(program)} for program in llm.executor.compile_report()
    ]
    return {
        "model": name,
        "start": kind,
        **dataclasses.asdict(llm.load_times),
        "peak_device_bytes": hardware.peak_device_bytes(),
        "programs": programs,
    }


def blocks_for(name: str, tokens: int) -> int:
    """KV blocks for so many tokens, as far as memory goes."""
    limit = hardware.describe_hardware()["device_memory_bytes"]
    wanted = -(-tokens // BLOCK_SIZE)
    if limit is None:
        return wanted
    shape = shape_of(model_config(name), name, "bfloat16")
    fitting = int((0.8 * limit - shape.weight_bytes) // shape.block_bytes(BLOCK_SIZE))
    if fitting < 1:
        raise CapacityError(f"{name} takes {shape.weight_bytes} bytes, and the device has {limit} for us")
    return min(wanted, fitting)


def swap_speeds(
    shape: ModelShape, counts: tuple[int, ...], matmul: int, found: dict[str, float]
) -> Iterator[Row]:
    """Bytes a second to the host and back by number of blocks, against one pinned copy of as many bytes.

    `hidden_share` is the share of the copy out that a computation of its length hides, `out_call_seconds` and
    `in_call_seconds` how long the host is held up by starting the copies. A gather and a scatter move blocks
    between the pool and the arrays that are copied, within the device's memory; `move_share_of_copy` is of
    both together, reads and writes counted as those of the copy ceiling are (caches help few blocks).
    """
    device = jax.devices()[0]
    swapper = BlockSwapper(Placement((device,)), max(counts))
    kv = (shape.num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    pool = jnp.zeros((2 * max(counts), *kv), shape.dtype)
    pool = swapper.warm_up(pool)
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    here = jax.sharding.SingleDeviceSharding(device)
    a = jax.random.normal(jax.random.key(0), (matmul, matmul), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    for count in counts:
        ids = tuple(range(count))
        block = pool[:count] + 0
        num_bytes = block.nbytes
        plain_out = seconds_of(lambda block=block: jax.device_put(block, host), 3)
        copied = jax.block_until_ready(jax.device_put(block, host))
        plain_in = seconds_of(lambda copied=copied: jax.device_put(copied, here), 3)
        outs, ins, out_calls, in_calls = [], [], [], []
        for number in range(5):
            jax.block_until_ready(pool)
            started = time.perf_counter()
            swapper.swap_out(pool, number, ids)
            out_calls.append(time.perf_counter() - started)
            swapper.wait(number)
            outs.append(time.perf_counter() - started)
            started = time.perf_counter()
            pool = swapper.swap_in(pool, ids, host_blocks_of(number, count))
            in_calls.append(time.perf_counter() - started)
            jax.block_until_ready(pool)
            ins.append(time.perf_counter() - started)
            swapper.drop_all(number)
        out, back = float(np.median(outs)), float(np.median(ins))
        one = seconds_of(lambda: product(a), 5)
        repeats = max(1, round(out / one))
        move, pool = move_seconds(pool, piece := next(size for size in swapper.sizes if size <= count))
        started = time.perf_counter()
        jax.block_until_ready([product(a) for _ in range(repeats)])
        alone = time.perf_counter() - started
        started = time.perf_counter()
        swapper.swap_out(pool, 99, ids)
        results = [product(a) for _ in range(repeats)]
        swapper.wait(99)
        jax.block_until_ready(results)
        together = time.perf_counter() - started
        swapper.drop_all(99)
        yield {
            "blocks": count,
            "bytes": num_bytes,
            "out_share_of_pinned_copy": plain_out / out,
            "in_share_of_pinned_copy": plain_in / back,
            "out_bytes_per_second": num_bytes / out,
            "in_bytes_per_second": num_bytes / back,
            "out_call_seconds": statistics.median(out_calls),
            "in_call_seconds": statistics.median(in_calls),
            "moved_blocks": piece,
            "move_share_of_copy": 4 * piece * num_bytes / count / move / found["copy_bytes_per_second"],
            "hidden_share": min(1.0, max(0.0, 1 - (together - alone) / out)),
        }


def move_seconds(pool: jax.Array, count: int) -> tuple[float, jax.Array]:
    """Seconds to gather `count` blocks of the pool and scatter them to others, in a loop on the device.

    The pool is donated, and comes back changed.
    """
    jitted = {name: program for name, program, _ in BlockSwapper.programs(pool, count)}
    gather, scatter = jitted[f"swap out of {count}"], jitted[f"swap in of {count}"]
    ids = jnp.arange(count, dtype=jnp.int32)

    def turn(number: Any, pool: jax.Array) -> jax.Array:
        parity = number % 2
        blocks = lax.optimization_barrier(gather(pool, ids + count * parity))  # else the pool is copied, too
        return scatter(pool, ids + count * (1 - parity), blocks)

    loop = jax.jit(lambda pool: lax.fori_loop(0, _MOVES, turn, pool), donate_argnums=0)
    box = [pool]

    def run() -> jax.Array:
        box[0] = loop(box[0])
        return box[0]

    return seconds_of(run, 1) / _MOVES, box[0]


def step_speeds(
    llm: LLM, found: dict[str, float], batches: tuple[int, ...], context: int, prefill_tokens: int
) -> Iterator[Row]:
    """Decode and prefill steps against the bytes and flops they need, at the measured ceilings."""
    shape = shape_in(llm)
    profiler = Profiler(llm.executor, shape)
    for batch in batches:
        least = shape.weight_bytes + batch * context * shape.kv_bytes_per_token
        least /= found["copy_bytes_per_second"]

        def measure(batch: int = batch, least: float = least) -> Row:
            seconds = profiler.time_decode(batch, context)
            return {"seconds": seconds, "share": least / seconds}

        yield attempt({"step": "decode", "batch": batch, "context": context}, measure)
    seconds = profiler.time_prefill(prefill_tokens, 1)
    flops = 2 * shape.num_layer_parameters * prefill_tokens + 2 * shape.num_head_parameters
    flops += (
        4 * shape.num_layers * shape.num_heads * shape.head_dim * prefill_tokens * (prefill_tokens + 1) / 2
    )
    least = flops / found["matmul_bf16_flops_per_second"]
    yield {"step": "prefill", "tokens": prefill_tokens, "seconds": seconds, "share": least / seconds}


def kernel_times(
    llm: LLM, folder: Path, batches: tuple[int, ...], context: int, prefill_tokens: int
) -> Iterator[Row]:
    """What the device ran in steps, from a trace: each kernel's launches and seconds of one step.

    Steps are decodes of `batches`, and a prefill. `busy_seconds` is the sum over kernels, `span_seconds` from
    the first to the end of the last, of a step. On a CPU there is no device to trace, and no row.
    """
    profiler = Profiler(llm.executor, shape_in(llm))
    steps = [
        ({"step": "decode", "batch": batch, "context": context}, profiler.time_decode, (batch, context))
        for batch in batches
    ]
    steps.append(({"step": "prefill", "tokens": prefill_tokens}, profiler.time_prefill, (prefill_tokens, 1)))
    for row, measure, arguments in steps:
        trace = Path(tempfile.mkdtemp(dir=folder))
        with jax.profiler.trace(str(trace)):
            measure(*arguments, repetitions=1)
        [path] = trace.glob("plugins/profile/*/*.xplane.pb")
        found = _device_events(path)
        if found:
            yield row | _kernels_of(found, 2 * _STEPS_A_RUN)


def _device_events(path: Path) -> list[Any]:
    """What a trace has of a GPU's streams."""
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return [event for line in lines if line.name.startswith("Stream") for event in line.events]


def _kernels_of(events: list[Any], num_steps: int) -> Row:
    seconds = collections.defaultdict(list)
    for event in events:
        seconds[event.name].append(event.duration_ns * 1e-9)
    costly = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    span = max(event.end_ns for event in events) - min(event.start_ns for event in events)
    return {
        "launches": len(events) / num_steps,
        "busy_seconds": sum(map(sum, seconds.values())) / num_steps,
        "span_seconds": span * 1e-9 / num_steps,
        "kernels": [
            {"name": name, "launches": len(times) / num_steps, "seconds": sum(times) / num_steps}
            for name, times in costly[:_KERNELS_KEPT]
        ],
    }


def dispatch_times(llm: LLM, batches: tuple[int, ...], output_len: int) -> Iterator[Row]:
    """How long starting a decode step holds the host up, of the step's time, in a running engine.

    Medians of a step's parts, as `jaxllm.research.bench.step_times` names them: `program` is the call that
    starts the device's program. If that takes a step's time, it waits for the device, and the host cannot run
    ahead.
    """
    for batch in batches:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        run = _run(llm, [([1 + row] * 8, params) for row in range(batch)])
        steps = [step for step in run.timer.steps if step.kind == "decode"]
        yield {
            "batch": batch,
            "steps": len(steps),
            "tokens_per_step": batch * (output_len - 1) / len(steps),
            **{
                f"{part}_seconds": statistics.median(getattr(step, part) for step in steps)
                for part in ("total", "program", "host", "fetch")
            },
            "blocked_share": sum(step.program for step in steps) / sum(step.total for step in steps),
        }


def sharegpt_speed(llm: LLM, num_requests: int, longest: int, repetitions: int = 2) -> Iterator[Row]:
    """Throughput of requests of ShareGPT's lengths, all present at the start, more than run at once."""
    prompts, outputs = sharegpt_like(
        num_requests, longest=longest, vocab_size=llm.model_config.vocab_size, seed=0
    )
    requests = [
        (prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        for prompt, count in zip(prompts, outputs, strict=True)
    ]
    for repetition in range(repetitions):
        run = _run(llm, requests)
        yield {
            "repetition": repetition,
            "requests": num_requests,
            "most_running": max(step.num_decode for step in run.timer.steps),
            "prompt_tokens": run.num_prompt_tokens,
            "output_tokens": run.num_output_tokens,
            "seconds": run.seconds,
            "output_tokens_per_second": run.num_output_tokens / run.seconds,
            **overhead([run]),
        }


def _run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> Repetition:
    with StepTimer(llm.engine, llm.executor) as timer:
        return run_once(llm.engine, timer, requests)


def hidden_swaps(llm: LLM, counts: tuple[int, ...], batch: int, context: int) -> Iterator[Row]:
    """Shares of copies to the host and back, by number of blocks, that decode steps hide."""
    shape = shape_in(llm)
    profiler = Profiler(llm.executor, shape)
    for count in counts:
        out, back = hidden_swap_shares(profiler, count, batch, context)
        yield {"blocks": count, "batch": batch, "context": context, "out_hidden": out, "in_hidden": back}


def predictor_errors(llm: LLM, seconds: float) -> tuple[dict[str, Any], CostModel]:
    """Held-out errors of predictors fitted in so many seconds of measurements, and their table."""
    shape = shape_in(llm)
    profiler = Profiler(llm.executor, shape)
    samples = profiler.samples(seconds)
    fits = profiler.fit(samples, is_brief=True)
    errors = {kind: dataclasses.asdict(fit.report.test) for kind, fit in fits.items()}
    return errors, profiler.costs_of(profiler.profile(samples, fits))


def long_output_speeds(
    llm: LLM, costs: CostModel, num_requests: int, *, blocks: int, max_num_seqs: int, longest: int
) -> Iterator[Row]:
    """Presets on outputs that outgrow the pool, all at once: lognormal, of up to `longest` tokens.

    Device and host have so many blocks each. Requests say how many tokens they ask for, and get them.
    """
    config = dataclasses.replace(
        llm.engine.scheduler.config,
        num_gpu_blocks=blocks, num_host_blocks=blocks, max_num_seqs=max_num_seqs,
        max_prefill_seqs=min(max_num_seqs, llm.engine.scheduler.config.max_prefill_seqs),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    prompts, outputs = (
        LognormalLengths(mean=most * 0.3, sigma=0.6, shortest=2, longest=most).sample(num_requests, rng)
        for most in (max(10, longest // 10), longest)
    )
    trace = Trace(
        name="long outputs",
        seed=0,
        arrival_times=np.zeros(num_requests),
        prompt_lens=prompts,
        output_lens=outputs,
    )
    for preset in ("vllm_v1", "paper_strategy", "adaptive_throughput", "adaptive"):
        calibration = OnlineCalibration(costs)
        result = replay(llm, trace, config, make_preset(preset, calibration), costs=calibration)
        yield {"preset": preset, "blocks": blocks, "requests": num_requests, **result.summary()}


def preset_speeds(
    llm: LLM, costs: CostModel, num_requests: int, *, blocks: int, host_blocks: int, output_len: int
) -> Iterator[Row]:
    """The memory policies on the same requests, all at once and in a closed loop, with few blocks."""
    config = dataclasses.replace(
        llm.engine.scheduler.config, num_gpu_blocks=blocks, num_host_blocks=host_blocks
    )
    for arrivals, preset in itertools.product(
        (AllAtOnce(), ClosedLoop(num_requests // 4 or 1)), MEMORY_PRESETS
    ):
        trace = make_trace("chatbot", num_requests, output_len, arrivals=arrivals, seed=0)
        calibration = OnlineCalibration(costs)
        result = replay(llm, trace, config, make_preset(preset, calibration), costs=calibration)
        yield {"preset": preset, "arrivals": repr(arrivals), **result.summary()}
