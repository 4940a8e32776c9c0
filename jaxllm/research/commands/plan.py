"""`jaxllm plan`: what a model will need and do on a GPU, without one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.commands.needs import not_with, only_with
from jaxllm.commands.options import check_distinct, note
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.predictors.base import WEIGHT_FORMATS
from jaxllm.research.figures import check_picture
from jaxllm.system.options import bound
from jaxllm.system.output_files import add_overwrite, check_writable

if TYPE_CHECKING:
    from jaxllm.models.architecture import ModelConfig
    from jaxllm.predictors.base import ModelShape
    from jaxllm.research.plan.layouts import Layout
    from jaxllm.research.plan.plan import Plan
    from jaxllm.research.shapes import Formats, Read

_GIB, _MIB = 2**30, 2**20
_LENGTHS = "512:128,2048:512,8192:1024"
_CONCURRENCY = "1,16,64"
_MAX_NUM_BATCHED_TOKENS = 8192
_MOST_CLIENTS = 2**16
_OF_PROGRAMS = ("every_bucket",)
_ON_GPUS = ("tensor_parallel", "pipeline_parallel")
_OF_SPEEDS = ("no_compile", "lengths", "concurrency", "within", *_ON_GPUS)
_OF_BOTH = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks"),
    *("gpu_memory_utilization", "mem_fraction"),
)
"""Options, by what they are of."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Compile a model's prefill, decode and swap programs for a GPU that need not be present, and "
        "report weights, KV pool, temporaries and headroom, the largest pool and batch that fit, and "
        "compile times. Needs the packages of JAX's CUDA plugin, no driver and no weights: a config.json "
        "is enough. Then simulate speeds, by kernels that others measured on such GPUs."
    )
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        metavar="MODEL",
        help="folder of a checkpoint, or its config.json; without compiling also a published shape such as "
        "llama-3-8b, and with --crossover several of these, with commas",
    )
    parser.add_argument("--device", metavar="NAME", help="a100, h100, h200, l40s, l4 or b200")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--quantization",
        metavar="NAME",
        help=f"of weights: {', '.join(WEIGHT_FORMATS)} (default: as MODEL has them)",
    )
    parser.add_argument(
        "--quantize-lm-head",
        action=argparse.BooleanOptionalAction,
        help="with --quantization the output head, too (default: yes)",
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="NAME", help="as of `LLM`; default: that of --dtype"
    )
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
    parser.add_argument("--no-compile", action="store_true", help="speeds only")
    parser.add_argument(
        "--lengths",
        metavar="IN:OUT,...",
        help=f"tokens of requests (default: those of {_LENGTHS} that the model takes)",
    )
    parser.add_argument(
        "--concurrency", default=_CONCURRENCY, metavar="N,...", help="clients (default: %(default)s)"
    )
    parser.add_argument(
        "--tensor-parallel",
        default="1",
        metavar="N,...",
        help="GPUs that share each layer, of the speeds that are simulated (default: %(default)s)",
    )
    parser.add_argument(
        "--pipeline-parallel",
        default="1",
        metavar="N,...",
        help="stages of layers, likewise (default: %(default)s)",
    )
    parser.add_argument(
        "--within",
        nargs="+",
        type=bound,
        default=[],
        metavar="NAME:MS",
        help="name the layout of fewest GPUs whose mean ttft or tpot is at most so many milliseconds",
    )
    parser.add_argument(
        "--crossover",
        action="store_true",
        help="only tell from which context on swapping beats recomputing: on all devices, or --device; of "
        "all published shapes, or MODEL",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw what --crossover tells")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan there")
    add_overwrite(parser)
    only_with(parser, "quantization", options=("quantize_lm_head",))
    only_with(parser, "crossover", options=("plot",))
    not_with(parser, "no_compile", _OF_PROGRAMS)
    not_with(parser, "crossover", (*_OF_PROGRAMS, *_OF_SPEEDS, *_OF_BOTH))
    unused = {name: parser.get_default(name) for name in _ON_GPUS}
    parser.set_defaults(run=run, unless_given=unused)


def run(args: argparse.Namespace) -> int:
    """Compile, simulate, print, and return the exit code."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # a GPU that is present shall not be touched
    _check(args)
    if args.crossover:
        found: dict[str, Any] = {"crossover": _crossover(args)}
    else:
        if args.model is None or args.device is None:
            raise ConfigError("name a MODEL and a --device; only --crossover takes all that are known")
        model = _model(args)
        found = {} if args.no_compile else _compiled(args, model)
        sizes = _sizes(args, model.config)
        try:
            found["speeds"] = _speeds(args, model.shape, sizes, found)
        except (CapacityError, ConfigError) as error:
            if args.no_compile:
                raise
            found["speeds"] = []  # what was compiled is not lost
            print(f"\nNo speeds: {error}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _check(args: argparse.Namespace) -> None:
    from jaxllm.research.plan.layouts import BOUNDS

    for name in ("gpu_memory_utilization", "mem_fraction"):
        if not 0 < getattr(args, name) <= 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be in (0, 1]")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
    _numbers_of("--lengths", _LENGTHS if args.lengths is None else args.lengths, 2)
    args.clients = [one[0] for one in _numbers_of("--concurrency", args.concurrency, 1)]
    if max(args.clients) > _MOST_CLIENTS:
        raise ConfigError(f"--concurrency: {max(args.clients)} clients are more than {_MOST_CLIENTS}")
    args.gpus = [
        [one[0] for one in _numbers_of(f"--{name.replace('_', '-')}", getattr(args, name), 1)]
        for name in _ON_GPUS
    ]
    args.bounds = {name: milliseconds / 1e3 for name, milliseconds in args.within}
    if unknown := args.bounds.keys() - BOUNDS.keys():
        raise ConfigError(f"--within {min(unknown)!r} is unknown; choose from {', '.join(BOUNDS)}")
    if len(args.bounds) < len(args.within):
        raise ConfigError("--within has two bounds of one name: drop one of them")
    check_picture(args.plot)
    written = {
        name: path for name, path in (("--json", args.json), ("--plot", args.plot)) if path is not None
    }
    if written:
        model = args.model or Path()
        read = model if model.name == "config.json" else model / "config.json"
        check_distinct({"MODEL": str(read), **{name: str(path) for name, path in written.items()}})
        check_writable(written, overwrite=args.overwrite)


def _numbers_of(option: str, text: str, count: int) -> list[tuple[int, ...]]:
    """The values of an option, each so many numbers with colons between."""
    found = []
    for one in text.split(","):
        parts = one.split(":")
        if len(parts) != count or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            wanted = "IN:OUT, tokens of at least 1" if count == 2 else "a number of at least 1"
            raise ConfigError(f"{option}: {one!r} is not {wanted}")
        found.append(tuple(int(part) for part in parts))
    return found


def _sizes(args: argparse.Namespace, config: ModelConfig | None) -> list[tuple[int, int]]:
    """Tokens of prompts and outputs to tell speeds of: those asked for, or such as the model takes."""
    limit = args.max_model_len or (None if config is None else config.default_max_model_len)
    sizes = [(one[0], one[1]) for one in _numbers_of("--lengths", args.lengths or _LENGTHS, 2)]
    fitting = [size for size in sizes if limit is None or sum(size) <= limit]
    if args.lengths is not None and fitting != sizes:
        raise ConfigError(f"--lengths {args.lengths}: prompt and output are at most {limit} tokens together")
    return fitting or [(max(1, (limit or 2) // 2), max(1, (limit or 2) // 4))]


def _model(args: argparse.Namespace) -> Read:
    """The sizes of MODEL, and its configuration, which a published shape has not."""
    from jaxllm.predictors.devices import DEVICES
    from jaxllm.research.shapes import read_model

    found = read_model(args.model, args.dtype, _formats(args))
    if args.kv_cache_dtype == "auto" and found.shape.kv_dtype == "fp8_e4m3" and args.device is not None:
        named = [spec for spec in DEVICES.values() if spec.is_called(args.device)]
        if named and "fp8" not in named[0].peak_flops:  # as an engine does there
            found = found._replace(shape=dataclasses.replace(found.shape, kv_dtype="auto"))
    if found.config is None and not (args.no_compile or args.crossover):
        raise ConfigError(f"{args.model} is a published shape; add --no-compile, or give its config.json")
    return found


def _formats(args: argparse.Namespace) -> Formats:
    from jaxllm.research.shapes import Formats

    return Formats(args.quantization, args.quantize_lm_head is not False, args.kv_cache_dtype)


def _compiled(args: argparse.Namespace, model: Read) -> dict[str, Any]:
    """Compile for the device, and print what that shows."""
    from jaxllm.executor.memory import default_limits
    from jaxllm.models.registry import weight_bytes
    from jaxllm.research.plan.plan import make_plan
    from jaxllm.research.plan.target import get_target
    from jaxllm.system.dtypes import dtype_of

    config, formats = model.config, model.formats
    assert config is not None  # published shapes are not compiled
    assert formats is not None
    max_model_len = args.max_model_len or config.default_max_model_len
    config = config.with_max_model_len(max_model_len)
    target = get_target(args.device)
    taken = int(target.memory_size * args.mem_fraction)
    dtype = dtype_of("dtype", args.dtype)
    kv_dtype = dtype if model.shape.kv_dtype == "auto" else model.shape.kv_dtype
    defaults = default_limits(config, dtype, weight_bytes(config, dtype, formats), taken, kv_dtype)
    plan = make_plan(
        config,
        target,
        dtype=dtype,
        formats=formats,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs or defaults[0],
        max_num_batched_tokens=args.max_num_batched_tokens or defaults[1],
        block_size=args.block_size,
        num_gpu_blocks=args.num_gpu_blocks,
        utilization=args.gpu_memory_utilization,
        mem_fraction=args.mem_fraction,
        every_bucket=args.every_bucket,
        tensor_parallel=args.gpus[0][0],
        tell=note,
    )
    print(describe(plan))
    return dataclasses.asdict(plan)


def _speeds(
    args: argparse.Namespace, shape: ModelShape, sizes: list[tuple[int, int]], compiled: dict[str, Any]
) -> list[dict[str, Any]]:
    """Simulate, and print what that shows; in the pool that was compiled for, if it is of the same kind."""
    from jaxllm.research.plan.layouts import layouts, smallest_within

    tensor_parallel, pipeline_parallel = args.gpus
    is_same = all(getattr(args, name) == args.unless_given[name] for name in _ON_GPUS)
    found = list(
        layouts(
            shape,
            args.device,
            tensor_parallel,
            pipeline_parallel,
            sizes,
            args.clients,
            block_size=args.block_size,
            utilization=args.gpu_memory_utilization * args.mem_fraction,
            num_blocks=args.num_gpu_blocks or (compiled.get("num_blocks") if is_same else None),
            max_num_seqs=args.max_num_seqs or compiled.get("max_num_seqs"),
            max_num_batched_tokens=args.max_num_batched_tokens
            or compiled.get("max_num_batched_tokens")
            or _MAX_NUM_BATCHED_TOKENS,
        )
    )
    told = [layout for layout in found if layout.speeds]
    if not told:
        raise CapacityError(found[-1].why_not)
    print(describe_speeds(found, args.block_size))
    if args.bounds:
        print(describe_smallest(smallest_within(found, args.bounds), args.bounds))
    names = "tensor_parallel", "pipeline_parallel", "weight_bytes", "num_blocks", "source"
    return [
        dataclasses.asdict(speed) | {name: getattr(layout, name) for name in names}
        for layout in told
        for speed in layout.speeds
    ]


def _crossover(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print from how many tokens on swapping beats recomputing."""
    from jaxllm.predictors.devices import device_spec
    from jaxllm.predictors.published_shapes import MODEL_SHAPES
    from jaxllm.predictors.silicon import ALIKE
    from jaxllm.predictors.silicon_tables import MEASURED
    from jaxllm.research.plan.crossover import crossovers, describe_crossovers, plot_crossovers
    from jaxllm.research.shapes import read_model

    names = MODEL_SHAPES if args.model is None else str(args.model).split(",")
    shapes = [read_model(name, args.dtype, _formats(args)).shape for name in names]
    devices = [*MEASURED, *ALIKE] if args.device is None else [device_spec(args.device).name]
    found = list(crossovers(shapes, devices))
    print(describe_crossovers(found))
    if args.plot is not None:
        if not found:
            raise ConfigError(f"--plot {args.plot}: no device holds the model, so there is nothing to draw")
        plot_crossovers(found, args.plot)
    return [dataclasses.asdict(one) for one in found]


def describe_speeds(found: list[Layout], block_size: int) -> str:
    """Speeds of layouts as Markdown, and what memory they have."""
    told = [layout for layout in found if layout.speeds]
    lines = [
        "",
        f"Simulated from {told[0].source}:",
        "",
        "| layout | GPUs | weights of each, GiB | KV of all, tokens |",
        "|---|---:|---:|---:|",
        *(
            f"| {one.name} | {one.num_gpus} | {one.weight_bytes / _GIB:.1f} | "
            f"{one.num_blocks * block_size:,} |"
            if one.speeds
            else f"| {one.name} | {one.num_gpus} | {one.why_not} | |"
            for one in found
        ),
        "",
        "| layout | prompt, output | clients | tokens/s | ms a token | first token, s | preemptions | "
        "seconds from |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for layout in told:
        for one in layout.speeds:
            sources = ", ".join(f"{name} {share:.0%}" for name, share in one.sources.items())
            lines.append(
                f"| {layout.name} | {one.input_tokens}, {one.output_tokens} | {one.concurrency} | "
                f"{one.tokens_per_second:,.0f} | {1e3 * one.seconds_per_token:.1f} | "
                f"{one.first_token_seconds:.3f} | {one.num_preemptions} | {sources} |"
            )
    return "\n".join(lines)


def describe_smallest(
    found: Mapping[tuple[int, int, int], Layout | None], bounds: Mapping[str, float]
) -> str:
    """The layouts of fewest GPUs within bounds, as Markdown."""
    said = ", ".join(f"{name} at most {1e3 * most:g} ms" for name, most in bounds.items())
    lines = [
        "",
        f"Fewest GPUs with {said}, on average:",
        "",
        "| prompt, output | clients | layout | GPUs |",
        "|---|---:|---|---:|",
    ]
    for (num_input, num_output, clients), layout in found.items():
        name, count = (layout.name, str(layout.num_gpus)) if layout is not None else ("none of these", "")
        lines.append(f"| {num_input}, {num_output} | {clients} | {name} | {count} |")
    return "\n".join(lines)


def describe(plan: Plan) -> str:
    """The plan as Markdown."""
    held = f", weights {plan.weights}" if plan.weights else ""
    held += f", KV {plan.kv_dtype}" if plan.kv_dtype != plan.dtype else ""
    lines = [
        f"{plan.device}, {plan.dtype}{held}, attention `{plan.implementation}`, "
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
