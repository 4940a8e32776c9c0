"""What each part measures, in a process of its own."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from gpu import codes, engine, kernels, steps
from gpu.inputs import Sizes
from gpu.report import Report
from jaxllm.engine.costs import shape_of
from jaxllm.pallas_kernels import default_implementation
from jaxllm.pallas_kernels.triton import alternative_tilings
from jaxllm.system import hardware


def measure(part: str, report: Report, sizes: Sizes, seed: int, implementation: str | None) -> None:
    """Measure one part of `PARTS`; what fails is noted in the report, and the rest goes on where it can."""
    report.values |= {"hardware": hardware.describe_hardware(), "versions": hardware.versions()}
    report.values |= {"seed": seed, "default_implementation": default_implementation()}
    report.write()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        try:
            PARTS[part](report, sizes, seed, implementation, Path(folder))
        except Exception as error:
            report.fail(part, error)


def _kernels(name: str) -> Callable[..., None]:
    def run(report: Report, sizes: Sizes, seed: int, implementation: str | None, folder: Path) -> None:
        capability = str(getattr(jax.devices()[0], "compute_capability", "9."))  # CPUs interpret everything
        if name == "mosaic" and not capability.startswith("9."):
            report.missing[name] = f"written for compute capability 9, and this device has {capability}"
            return
        report.rows("checks", kernels.check(name, sizes, seed))
        report.rows("checks", steps.check(name, sizes, seed))
        if name == "mosaic":  # of triton's among codes
            few = dataclasses.replace(sizes, heads=sizes.heads[1:2] or sizes.heads)
            report.rows("checks", kernels.check(name, few, seed, ("fp8_e4m3", "int8")))
        found = kernels.ceilings(sizes)
        report.rows("ceilings", [found])
        report.rows("decode attention", kernels.decode_speeds(name, found, sizes))
        report.rows("prefill attention", kernels.prefill_speeds(name, found, sizes))

    return run


def _codes(report: Report, sizes: Sizes, seed: int, implementation: str | None, folder: Path) -> None:
    """Products of codes, and attention over KV of 8 bits."""
    report.rows("checks", codes.check_products(sizes, seed))
    report.rows("checks", codes.check_writes(sizes, seed))
    few = dataclasses.replace(sizes, heads=sizes.heads[1::2] or sizes.heads)
    kv_dtypes = "int8", "fp8_e4m3", "fp8_e5m2"
    report.rows("checks", kernels.check("triton", few, seed, kv_dtypes))
    found = kernels.ceilings(sizes)
    report.rows("ceilings", [found])
    report.rows("products", codes.product_speeds(found, sizes))
    few = dataclasses.replace(sizes, contexts=sizes.contexts[1:] or sizes.contexts)
    for kv_dtype in kv_dtypes:
        report.rows("decode attention", kernels.decode_speeds("triton", found, few, kv_dtype))
        report.rows("prefill attention", kernels.prefill_speeds("triton", found, few, kv_dtype))


def _tilings(report: Report, sizes: Sizes, seed: int, implementation: str | None, folder: Path) -> None:
    """Triton's default tiles beside others, at three batches of one context, and one prompt."""
    found = kernels.ceilings(sizes)
    report.rows("ceilings", [found])
    few = dataclasses.replace(
        sizes,
        batches=sizes.batches[1:],
        contexts=sizes.contexts[:2][-1:],
        prefill_tokens=sizes.prefill_tokens[-1:],
    )
    for op, speeds in (("decode", kernels.decode_speeds), ("prefill", kernels.prefill_speeds)):
        for tiling in alternative_tilings(op, "bfloat16"):
            report.rows(f"{op} attention", speeds(f"triton:{tiling}", found, few))


def _steps(report: Report, sizes: Sizes, seed: int, implementation: str | None, folder: Path) -> None:
    """Dispatch, steps against the roofline, and a run of many requests."""
    found = kernels.ceilings(sizes)
    report.rows("ceilings", [found])
    name, batches = sizes.llama, sizes.batches
    tokens = max((sizes.context + sizes.longest) // 2, sizes.context + 2 * kernels.BLOCK_SIZE)
    num_blocks = engine.blocks_for(name, max(batches) * tokens + 4096)
    with engine.loaded(
        name, folder, sizes, implementation, num_gpu_blocks_override=num_blocks, num_host_blocks=0
    ) as llm:
        report.rows("start", [engine.start(llm, name, "cold")])
        report.rows("steps", _step_speeds(llm, found, sizes, batches, sizes.context))
        most = _most_tokens(sizes)
        report.rows("kernels of steps", engine.kernel_times(llm, folder, batches[1:], sizes.context, most))
        report.rows("dispatch", engine.dispatch_times(llm, batches, sizes.output_len))
        report.rows("sharegpt", engine.sharegpt_speed(llm, sizes.requests, sizes.longest))


def _low_precision(report: Report, sizes: Sizes, seed: int, implementation: str | None, folder: Path) -> None:
    """Steps and throughput with weights of 8 and 4 bits, and with KV of 8."""
    found = kernels.ceilings(sizes)
    report.rows("ceilings", [found])
    name, batches, most = sizes.llama, sizes.batches, _most_tokens(sizes)
    tokens = max((sizes.context + sizes.longest) // 2, sizes.context + 2 * kernels.BLOCK_SIZE)
    num_blocks = engine.blocks_for(name, max(batches) * tokens + 4096)
    for quantization, kv_dtype in (("fp8", "fp8_e4m3"), ("int8", "int8"), ("int4_weight", "int8")):
        held = {"quantization": quantization, "kv_cache_dtype": kv_dtype}
        with engine.loaded(
            name, folder, sizes, implementation, num_gpu_blocks_override=num_blocks, num_host_blocks=0,
            num_scheduler_steps=1, **held,
        ) as llm:  # fmt: skip
            for measured, rows in (
                ("start", [engine.start(llm, name, "cold")]),
                ("steps", _step_speeds(llm, found, sizes, batches, sizes.context)),
                ("kernels of steps", engine.kernel_times(llm, folder, batches[1:], sizes.context, most)),
                ("sharegpt", engine.sharegpt_speed(llm, sizes.requests, sizes.longest, 1)),
            ):
                report.rows(measured, (held | row for row in rows))


def _opt(report: Report, sizes: Sizes, seed: int, implementation: str | None, folder: Path) -> None:
    """Steps of a model without grouped queries, whose KV is several times as large."""
    found = kernels.ceilings(sizes)
    report.rows("ceilings", [found])
    name, batches, context = sizes.opt, sizes.batches[:3], sizes.context // 2
    num_blocks = engine.blocks_for(name, max(batches) * (context + 2 * kernels.BLOCK_SIZE))
    with engine.loaded(
        name, folder, sizes, implementation, num_gpu_blocks_override=num_blocks, num_host_blocks=0,
        num_scheduler_steps=1,
    ) as llm:  # fmt: skip
        report.rows("start", [engine.start(llm, name, "cold")])
        report.rows("steps", _step_speeds(llm, found, sizes, batches, context))


def _memory(report: Report, sizes: Sizes, seed: int, implementation: str | None, folder: Path) -> None:
    """Swaps, a second start, predictors and presets."""
    found = kernels.ceilings(sizes)
    report.rows("ceilings", [found])
    name, beside = sizes.llama, sizes.batches[1]
    shape = shape_of(engine.model_config(name), name, "bfloat16")
    report.rows("swaps", engine.swap_speeds(shape, sizes.swap_blocks, sizes.matmul, found))
    tokens = max(sizes.blocks, sizes.long_blocks, max(sizes.swap_blocks)) * kernels.BLOCK_SIZE
    tokens = max(tokens, sizes.max_model_len, beside * (sizes.context + 2 * kernels.BLOCK_SIZE))
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": engine.blocks_for(name, tokens),
        "num_host_blocks": max(sizes.host_blocks, sizes.long_blocks),
        "num_scheduler_steps": 1,
    }
    with engine.loaded(name, folder, sizes, implementation, **settings) as llm:
        report.rows("start", [engine.start(llm, name, "cold")])
    with engine.loaded(name, folder, sizes, implementation, **settings) as llm:
        report.rows("second start", [engine.start(llm, name, "warm")])
        report.rows("swaps beside decode", engine.hidden_swaps(llm, sizes.swap_blocks, beside, sizes.context))
        errors, model = engine.predictor_errors(llm, sizes.profile_seconds)
        report.rows("predictors", [{"kind": kind, **of_kind} for kind, of_kind in errors.items()])
        report.rows(
            "presets, long outputs",
            engine.long_output_speeds(
                llm, model, sizes.long_requests,
                blocks=sizes.long_blocks, max_num_seqs=sizes.long_seqs, longest=5 * sizes.longest // 4,
            ),
        )  # fmt: skip
        report.rows(
            "presets",
            engine.preset_speeds(
                llm, model, sizes.trace_requests,
                blocks=sizes.blocks, host_blocks=sizes.host_blocks, output_len=sizes.output_len,
            ),
        )  # fmt: skip


def _step_speeds(
    llm: Any, found: dict[str, float], sizes: Sizes, batches: tuple[int, ...], context: int
) -> Any:
    return engine.step_speeds(llm, found, batches, context, _most_tokens(sizes))


def _most_tokens(sizes: Sizes) -> int:
    """Of one prompt in a step."""
    return min(sizes.max_num_batched_tokens, sizes.max_model_len - 1)


PARTS: Mapping[str, Callable[..., None]] = {
    "kernels-triton": _kernels("triton"),
    "kernels-mosaic": _kernels("mosaic"),
    "kernels-xla": _kernels("xla"),
    "codes": _codes,
    "tilings": _tilings,
    "llama-3-8b": _steps,
    "llama-3-8b-codes": _low_precision,
    "llama-3-8b-memory": _memory,
    "opt-13b": _opt,
}
