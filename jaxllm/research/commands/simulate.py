"""`jaxllm simulate`: scheduling policies on a simulated device, without one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from jaxllm.commands.needs import only_with
from jaxllm.commands.options import check_distinct
from jaxllm.commands.words import call_too
from jaxllm.errors import ConfigError
from jaxllm.research.commands.bench_serve import length_range
from jaxllm.research.commands.rows import add_of_traces, reading_of, too_long_of
from jaxllm.system.options import json_object
from jaxllm.system.output_files import add_overwrite, check_writable
from jaxllm.system.sizes import parse_bytes


def size(text: str) -> float:
    """Bytes, as `parse_bytes` reads them."""
    return parse_bytes(text)


def gigabytes_a_second(text: str) -> float:
    """Bytes a second, of so many GB/s."""
    if not 1e-3 <= float(text) <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be GB/s, from 0.001 to 1e6")
    return float(text) * 1e9


gigabytes_a_second.__name__ = "number (GB/s)"
size.__name__ = "size (bytes, or such as 64GB)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Simulate scheduling policies: the engine's own scheduler with a virtual clock, on costs of a GPU "
        "that need not be there. The load is a recorded trace, or is drawn; of several draws (--seeds) the "
        "table has means with 95 % intervals. Prints Markdown."
    )
    of_load = parser.add_argument_group("load")
    for name, convert, metavar, text in _LOAD:
        of_load.add_argument(f"--{name}", type=convert, metavar=metavar, help=text)
    add_of_traces(parser, of_load, "trace", "dataset")
    of_system = parser.add_argument_group("device")
    for name, convert, metavar, text in _SYSTEM:
        of_system.add_argument(f"--{name}", type=convert, metavar=metavar, help=text)
    of_system.add_argument(
        "--quantize-lm-head",
        action=argparse.BooleanOptionalAction,
        help="with --quantization the output head, too (default: yes)",
    )
    of_policies = parser.add_argument_group("scheduling")
    of_policies.add_argument(
        "--policy",
        metavar="NAME,...",
        help="as LLM(scheduler_policy=...): presets and module:attribute (default: adaptive,vllm_v1); the "
        "last is what others are compared with",
    )
    for name, convert, metavar, text in _SCHEDULING:
        of_policies.add_argument(f"--{name}", type=convert, metavar=metavar, help=text)
    of_policies.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="(default: where prompts of the trace may begin alike)",
    )
    of_result = parser.add_argument_group("result")
    of_result.add_argument("--plot", type=Path, metavar="FILE.png", help="draw figures and a timeline")
    of_result.add_argument("--json", type=Path, metavar="FILE", help="write figures of all runs there, too")
    add_overwrite(parser)
    pools = {"num_gpu_blocks": "--gpu-blocks", "num_host_blocks": "--host-blocks"}
    call_too(parser, num_clients="--closed", num_requests="--num-prompts", **pools)
    only_with(parser, "trace", "dataset", options=("tokenizer",))
    only_with(parser, "dataset", options=("column",))
    only_with(parser, "quantization", options=("quantize_lm_head",))
    parser.set_defaults(run=run)


_LOAD: tuple[tuple[str, Any, str, str], ...] = (
    ("trace", Path, "FILE", "requests: see docs/howto/simulate.md for the forms (default: drawn)"),
    ("tokenizer", str, "DIR", "counts the tokens of a --trace of text, or of --dataset"),
    ("num-prompts", int, "N", "requests (default: 1000, or all of --trace)"),
    ("dataset", str, "NAME", "prompts to draw: chatbot, alpaca or summary, or a file (default: chatbot)"),
    ("column", str, "NAME", "the prompts' column in the file --dataset"),
    ("input-len", length_range, "N[:M]", "tokens of each prompt, or a range, instead of --dataset"),
    ("output-len", length_range, "N[:M]", "tokens of each output, or a range to draw from (default: 128)"),
    (
        "arrivals",
        str,
        "ARRIVALS",
        "all, poisson:RATE, gamma:RATE:CV, closed:CLIENTS[:THINK] (default: all, or as --trace says); or",
    ),
    ("rate", float, "R", "requests a second: --trace stretched in time, or Poisson; or"),
    ("closed", int, "N", "clients who wait for their answers"),
    ("seeds", int, "N", "draws of the load; of a --trace, with replacement (default: 1)"),
)
_SYSTEM: tuple[tuple[str, Any, str, str], ...] = (
    ("model", str, "MODEL", "a published shape, a checkpoint or a config.json (default: llama-3-8b)"),
    ("device", str, "NAME", "a100, h100, h200, l40s, l4, b200, ... (default: a100)"),
    (
        "costs",
        str,
        "COSTS",
        "silicon (measured kernels), roofline, a profile's JSON, or module:attribute (default: silicon)",
    ),
    ("dtype", str, "NAME", "of weights and KV (default: bfloat16)"),
    ("quantization", str, "NAME", "of weights: int8, int8_weight, int4_weight, fp8 or fp8_block"),
    ("kv-cache-dtype", str, "NAME", "of KV, as int8 or fp8_e4m3 (default: that of --dtype)"),
    ("tensor-parallel", int, "N", "GPUs that share each layer, with --costs silicon (default: 1)"),
    ("pipeline-parallel", int, "N", "stages of layers, each on as many GPUs (default: 1)"),
    ("block-size", int, "N", "tokens of a KV block (default: 16)"),
    ("gpu-blocks", int, "N", "KV blocks of the device (default: what fits its memory)"),
    ("memory-utilization", float, "X", "share of its memory that is used (default: 0.9)"),
    (
        "host-memory",
        size,
        "SIZE",
        "for KV: bytes, or such as 64GB (default: 4GiB, or as much as the GPU's pool if that is less)",
    ),
    ("host-blocks", int, "N", "KV blocks of it, instead"),
    ("link", gigabytes_a_second, "GB/s", "that copies reach between device and host (default: the device's)"),
)
_SCHEDULING: tuple[tuple[str, Any, str, str], ...] = (
    ("max-model-len", int, "N", "tokens of a request (default: the model's, or what the pool holds)"),
    ("max-num-seqs", int, "N", "requests of a step (default: 256)"),
    ("max-num-batched-tokens", int, "N", "tokens of a step (default: 8192)"),
    (
        "speculative-config",
        json_object,
        "JSON",
        'drafts, such as {"acceptance": 0.7, "num_speculative_tokens": 4, "model": "llama-3.2-1b"}',
    ),
)
_AS_THEY_ARE = (
    *(
        "trace",
        "num_prompts",
        "arrivals",
        "rate",
        "closed",
        "seeds",
    ),
    *("model", "device", "costs", "dtype", "quantization", "quantize_lm_head", "kv_cache_dtype"),
    *(
        "tensor_parallel",
        "pipeline_parallel",
        "block_size",
        "memory_utilization",
        "link",
        "speculative_config",
    ),
    *("host_memory", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_blocks", "host_blocks", "prefix_caching", "policy"),
)


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and return the exit code."""
    from jaxllm.research.bench.results import about, write_json
    from jaxllm.research.figures import check_picture
    from jaxllm.research.simulator.study import simulate

    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU that is present shall not be touched
    written = {"--json": args.json, "--plot": args.plot}
    check_distinct({"--trace": args.trace, **written})
    check_picture(args.plot)
    check_writable(written, overwrite=args.overwrite)
    given = {name: getattr(args, name) for name in _AS_THEY_ARE}
    given |= _drawn(args) if args.trace is None else _read(args)
    given["too_long"] = too_long_of(args)
    found = simulate(**{name: value for name, value in given.items() if value is not None})
    print(found.table())
    if args.json is not None:
        write_json(args.json, about(["jaxllm", *args.command_line]) | found.to_json())
    if args.plot is not None:
        found.plot(args.plot)
    return 0


def _read(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that are of a trace's file."""
    from jaxllm.text.tokenizer import load_tokenizer

    for name in ("dataset", "column", "input_len", "output_len"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--trace has lengths: drop --{name.replace('_', '-')}, or drop --trace")
    found = reading_of(args)
    if args.tokenizer is not None:
        found["tokenizer"] = load_tokenizer(args.tokenizer)
    return found


def _drawn(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that are of a load that is drawn."""
    from jaxllm.research.workloads import DATASETS, load_dataset_file
    from jaxllm.text.tokenizer import load_tokenizer

    found: dict[str, Any] = {name: getattr(args, name) for name in ("dataset", "input_len", "output_len")}
    if args.dataset is not None and args.dataset not in DATASETS:
        if args.column is None or args.tokenizer is None:
            raise ConfigError(
                f"--dataset {args.dataset} is none of {', '.join(DATASETS)}; a file needs --column and "
                "--tokenizer"
            )
        found["dataset"] = load_dataset_file(
            args.dataset, args.column, load_tokenizer(args.tokenizer), on_bad=args.on_bad or "raise"
        )
    elif any(value is not None for value in (args.column, args.tokenizer, args.on_bad)):
        raise ConfigError(
            f"--column, --tokenizer and --on-bad are of a --dataset that is a file, and {args.dataset} is "
            "drawn: drop them"
        )
    return found
