"""Swaps, steps, presets and start times of whole engines with random weights."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from gpu.kernels import seconds_of
from jaxllm import LLM
from jaxllm.bench.replay import replay
from jaxllm.costs import shape_of
from jaxllm.executor.swapper import BlockSwapper
from jaxllm.models.config import LlamaConfig, OPTConfig, config_from_dict
from jaxllm.predictors.base import ModelShape
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.profiling import Profiler
from jaxllm.sched.presets import make_preset
from jaxllm.workloads import AllAtOnce, ClosedLoop, make_trace

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama-3-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "opt-13b": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 50272,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "ffn_dim": 20480,
        "word_embed_proj_dim": 5120,
        "max_position_embeddings": 2048,
    },
    "smoke": {
        **_LLAMA,
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    },
}

MEMORY_PRESETS = (
    "adaptive",
    "adaptive_throughput",
    "paper",
    "paper_strategy",
    "vllm",
    "vllm_swap",
    "vllm_v1",
)


def model_config(name: str) -> LlamaConfig | OPTConfig:
    """The configuration of a published shape."""
    return config_from_dict(CONFIGS[name])


def load(name: str, folder: Path, **settings: Any) -> LLM:
    """An engine of a published shape with random weights."""
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIGS[name]))
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return LLM(
        model, skip_tokenizer_init=True, load_format="dummy", dtype=dtype, profile_seconds=0.0, **settings
    )


def start_times(name: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """Seconds to load and compile with an empty compilation cache, and again with a full one."""
    cache = folder / "xla-cache"
    times = []
    for _ in range(2):
        jax.clear_caches()
        compilation_cache.reset_cache()
        started = time.perf_counter()
        llm = load(name, folder, compilation_cache_dir=str(cache), **settings)
        times.append({"seconds": time.perf_counter() - started, **dataclasses.asdict(llm.load_times)})
        del llm
    compilation_cache.reset_cache()
    return {"cold": times[0], "warm": times[1]}


def swap_speeds(
    shape: ModelShape, block_size: int, counts: tuple[int, ...], matmul: int
) -> Iterator[dict[str, Any]]:
    """Bytes a second to the host and back by number of blocks, against one pinned copy of as many bytes.

    `hidden_share` is the share of the copy out that a computation of its length hides. Gather and scatter
    are what moves blocks between the pool and the arrays that are copied, both within the device's memory:
    their bytes a second count reads and writes, as those of the copy ceiling do.
    """
    device = jax.devices()[0]
    swapper = BlockSwapper(device, max(counts))
    kv = (shape.num_layers, 2, shape.num_kv_heads, block_size, shape.head_dim)
    pool = jnp.zeros((max(counts) + 1, *kv), shape.dtype)
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
        outs, ins = [], []
        for number in range(5):
            jax.block_until_ready(pool)
            started = time.perf_counter()
            swapper.swap_out(pool, number, ids)
            swapper.wait(number)
            outs.append(time.perf_counter() - started)
            started = time.perf_counter()
            pool = jax.block_until_ready(swapper.swap_in(pool, number, ids))
            ins.append(time.perf_counter() - started)
        out, back = float(np.median(outs)), float(np.median(ins))
        one = seconds_of(lambda: product(a), 5)
        repeats = max(1, round(out / one))
        gathered, scattered, pool = device_copies(pool, next(size for size in swapper.sizes if size <= count))
        started = time.perf_counter()
        jax.block_until_ready([product(a) for _ in range(repeats)])
        alone = time.perf_counter() - started
        started = time.perf_counter()
        swapper.swap_out(pool, 99, ids)
        results = [product(a) for _ in range(repeats)]
        swapper.wait(99)
        jax.block_until_ready(results)
        together = time.perf_counter() - started
        swapper.discard(99)
        yield {
            "blocks": count,
            "bytes": num_bytes,
            "out_share_of_pinned_copy": plain_out / out,
            "in_share_of_pinned_copy": plain_in / back,
            "out_bytes_per_second": num_bytes / out,
            "in_bytes_per_second": num_bytes / back,
            "gather_bytes_per_second": gathered,
            "scatter_bytes_per_second": scattered,
            "hidden_share": min(1.0, max(0.0, 1 - (together - alone) / out)),
        }


def device_copies(pool: jax.Array, count: int) -> tuple[float, float, jax.Array]:
    """Bytes a second, read and written, that `count` blocks are moved with out of the pool and into it.

    `count` is the size of a piece. The pool is donated; it comes back as it was.
    """
    programs = {name: jitted for name, jitted, _ in BlockSwapper.programs(pool, count)}
    gather, scatter = programs[f"swap out of {count}"], programs[f"swap in of {count}"]
    ids = np.arange(count, dtype=np.int32)
    piece = jax.block_until_ready(gather(pool, ids))
    box = [pool]

    def write() -> jax.Array:
        box[0] = scatter(box[0], ids, piece)
        return box[0]

    out = seconds_of(lambda: gather(box[0], ids), 10)
    back = seconds_of(write, 10)
    return 2 * piece.nbytes / out, 2 * piece.nbytes / back, box[0]


def step_speeds(
    llm: LLM, found: dict[str, float], batches: tuple[int, ...], context: int, prefill_tokens: int
) -> Iterator[dict[str, Any]]:
    """Decode and prefill steps against the bytes and flops they need, at the measured ceilings."""
    shape = shape_of(llm.model_config, Path(llm.config.model).name, llm.dtype)
    profiler = Profiler(llm.executor, shape)
    pool_tokens = llm.executor.num_gpu_blocks * llm.executor.block_size
    for batch in batches:
        if batch * (context + llm.executor.block_size) > pool_tokens:
            continue  # does not fit beside the weights
        seconds = profiler.time_decode(batch, context)
        num_bytes = shape.weight_bytes + batch * context * shape.kv_bytes_per_token
        least = num_bytes / found["copy_bytes_per_second"]
        yield {
            "step": "decode",
            "batch": batch,
            "context": context,
            "seconds": seconds,
            "share": least / seconds,
        }
    seconds = profiler.time_prefill(prefill_tokens, 1)
    flops = 2 * shape.num_layer_parameters * prefill_tokens + 2 * shape.num_head_parameters
    flops += (
        4 * shape.num_layers * shape.num_heads * shape.head_dim * prefill_tokens * (prefill_tokens + 1) / 2
    )
    least = flops / found["matmul_bf16_flops_per_second"]
    yield {"step": "prefill", "tokens": prefill_tokens, "seconds": seconds, "share": least / seconds}


def hidden_swaps(llm: LLM, counts: tuple[int, ...], batch: int, context: int) -> Iterator[dict[str, Any]]:
    """Shares of copies to the host and back, by number of blocks, that decode steps hide."""
    shape = shape_of(llm.model_config, Path(llm.config.model).name, llm.dtype)
    profiler = Profiler(llm.executor, shape)
    for count in counts:
        out, back = profiler.hidden_swap_shares(count, batch, context)
        yield {"blocks": count, "batch": batch, "context": context, "out_hidden": out, "in_hidden": back}


def predictor_errors(llm: LLM, seconds: float) -> tuple[dict[str, Any], OnlineCalibration]:
    """Held-out errors of predictors fitted in so many seconds of measurements, and their table."""
    shape = shape_of(llm.model_config, Path(llm.config.model).name, llm.dtype)
    profiler = Profiler(llm.executor, shape)
    samples = profiler.samples(seconds)
    fits = profiler.fit(samples, is_brief=True)
    errors = {kind: dataclasses.asdict(fit.report.test) for kind, fit in fits.items()}
    return errors, OnlineCalibration(profiler.costs_of(profiler.profile(samples, fits)))


def preset_speeds(
    llm: LLM, costs: OnlineCalibration, num_requests: int, *, blocks: int, host_blocks: int, output_len: int
) -> Iterator[dict[str, Any]]:
    """The memory policies on the same requests, all at once and in a closed loop, with few blocks."""
    config = dataclasses.replace(
        llm.engine.scheduler.config, num_gpu_blocks=blocks, num_host_blocks=host_blocks
    )
    for arrivals, preset in itertools.product(
        (AllAtOnce(), ClosedLoop(num_requests // 4 or 1)), MEMORY_PRESETS
    ):
        trace = make_trace("chatbot", num_requests, output_len, arrivals=arrivals, seed=0)
        calibration = OnlineCalibration(costs.model)
        result = replay(llm, trace, config, make_preset(preset, calibration), costs=calibration)
        yield {"preset": preset, "arrivals": repr(arrivals), **result.summary()}
