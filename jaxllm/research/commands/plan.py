"""`jaxllm plan`: what a model will need on a GPU, found out by compiling for it, without one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.commands.options import check_distinct, note
from jaxllm.errors import ConfigError
from jaxllm.system.output_files import add_overwrite, check_writable

if TYPE_CHECKING:
    from jaxllm.research.plan.plan import Plan

_GIB, _MIB = 2**30, 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Compile a model's prefill, decode and swap programs for a GPU that need not be present, and "
        "report weights, KV pool, temporaries and headroom, the largest pool and batch that fit, and "
        "compile times. Needs the packages of JAX's CUDA plugin, no driver and no weights: a config.json "
        "is enough."
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of a checkpoint, or its config.json"
    )
    parser.add_argument("--device", required=True, metavar="NAME", help="a100-80gb, h100, h200 or l40")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="default: the model's")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="default: as `LLM` on it")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="likewise")
    parser.add_argument("--block-size", type=int, default=16, metavar="N")
    parser.add_argument("--num-gpu-blocks", type=int, metavar="N", help="default: as many as fit")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.95, metavar="F")
    parser.add_argument(
        "--mem-fraction",
        type=float,
        default=float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")),
        metavar="F",
        help="share of memory JAX takes (default: XLA_PYTHON_CLIENT_MEM_FRACTION, or 0.95)",
    )
    parser.add_argument(
        "--every-bucket", action="store_true", help="compile every size, not only the largest of each kind"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan there")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compile, print, and return the exit code."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU that is present shall not be touched
    from jaxllm.executor.memory import default_limits
    from jaxllm.loading.checkpoints import checkpoint_folder
    from jaxllm.models.config import config_from_dict, read_hf_config
    from jaxllm.models.registry import weight_bytes
    from jaxllm.research.plan.plan import make_plan
    from jaxllm.research.plan.target import get_target
    from jaxllm.system.dtypes import ITEMSIZES, dtype_of

    for name in ("gpu_memory_utilization", "mem_fraction"):
        if not 0 < getattr(args, name) <= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be in (0, 1]")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    folder = args.model.parent if args.model.name == "config.json" else checkpoint_folder(args.model)
    if args.json is not None:
        check_distinct({"MODEL": str(folder / "config.json"), "--json": str(args.json)})
        check_writable({"--json": args.json}, overwrite=args.overwrite)
    config = config_from_dict(read_hf_config(folder))
    max_model_len = args.max_model_len or config.default_max_model_len
    config = config.with_max_model_len(max_model_len)
    target = get_target(args.device)
    taken = int(target.memory_size * args.mem_fraction)
    dtype = dtype_of("dtype", args.dtype)
    defaults = default_limits(config, ITEMSIZES[dtype], weight_bytes(config, dtype), taken)
    plan = make_plan(
        config,
        target,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs or defaults[0],
        max_num_batched_tokens=args.max_num_batched_tokens or defaults[1],
        block_size=args.block_size,
        num_gpu_blocks=args.num_gpu_blocks,
        utilization=args.gpu_memory_utilization,
        mem_fraction=args.mem_fraction,
        every_bucket=args.every_bucket,
        tell=note,
    )
    print(describe(plan))
    if args.json is not None:
        args.json.write_text(json.dumps(dataclasses.asdict(plan), indent=1) + "\n", encoding="utf-8")
    return 0


def describe(plan: Plan) -> str:
    """The plan as Markdown."""
    lines = [
        f"{plan.device}, {plan.dtype}, attention `{plan.implementation}`, "
        f"{plan.utilization:g} of the {plan.mem_fraction:g} that JAX takes of "
        f"{plan.memory_bytes / _GIB:.1f} GiB:",
        "",
        "| | GiB |",
        "|---|---:|",
        f"| weights | {plan.weight_bytes / _GIB:.2f} |",
        f"| KV pool, {plan.num_blocks} blocks of {plan.block_size} tokens | {plan.pool_bytes / _GIB:.2f} |",
        f"| staging of swaps | {plan.staged_bytes / _GIB:.2f} |",
        f"| temporaries and outputs, at most | {plan.temporary_bytes / _GIB:.2f} |",
        f"| headroom | {plan.headroom_bytes / _GIB:.2f} |",
        "",
        f"The pool holds {plan.num_blocks * plan.block_size} tokens: {plan.longest_requests} requests of "
        f"{plan.max_model_len} tokens at once; programs take batches of up to {plan.max_num_seqs}.",
        "",
        "| program | temporaries, MiB | outputs, MiB | in place, GiB | copies of the pool | compiled in, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for program in plan.programs:
        lines.append(
            f"| {program.name} | {program.temporary_bytes / _MIB:.1f} | {program.output_bytes / _MIB:.2f} | "
            f"{program.aliased_bytes / _GIB:.2f} | {program.pool_copies} | {program.compile_seconds:.1f} |"
        )
    return "\n".join(lines)
