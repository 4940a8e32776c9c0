"""What copies of KV between device and pinned host memory cost, and when recomputing costs less.

    python scripts/bench_link.py --out link.json --plot link.png
    python scripts/bench_link.py --parts simulated

Part `link` times copies of one sequence's KV to pinned host memory and back, by block size and tokens, in the
engine's layout (whole blocks, gathered and scattered by its own swapper) and in vLLM's (K and V of each block
and layer apart), and fits latency, cost of a piece and rate (`jaxllm.predictors.link`). Part `measured` sets
such swaps of --model's KV beside its prefill, as in vLLM's Fig. 19 (Kwon et al. 2023); part `simulated` does
so for a roofline, and measures nothing. Everything timed is compiled before, and waited for.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

from memory.block_size import BLOCK_SIZES, TOKENS, block_size_rows
from memory.link_report import draw_link, report_lines
from memory.options import add_common, check_files, integer, leave, provenance
from sweep.options import list_of

from jaxllm.errors import JaxllmError
from jaxllm.predictors.base import MODEL_SHAPES
from jaxllm.predictors.devices import DEVICES
from jaxllm.predictors.roofline import DEFAULT_PIECE_SECONDS
from jaxllm.system.output_files import OutputParser

PARTS = ("link", "simulated", "measured")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = "comma-separated (default: %(default)s)"
    parser.add_argument("--parts", type=list_of(str), default=",".join(PARTS), help=shown)
    parser.add_argument(
        "--block-sizes", type=list_of(integer(1, 1024)), default=",".join(map(str, BLOCK_SIZES)), help=shown
    )
    parser.add_argument(
        "--tokens", type=list_of(integer(1, 2**17)), default=",".join(map(str, TOKENS)), help=shown
    )
    for name, default, most in (("layers", 12, 256), ("kv-heads", 8, 256), ("head-dim", 64, 1024)):
        parser.add_argument(
            f"--{name}", type=integer(1, most), default=default, help="link: of the KV (default: %(default)s)"
        )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--model", type=pathlib.Path, help="measured: a checkpoint (the embedded demo model)")
    parser.add_argument(
        "--prefill-block-size", type=integer(1, 1024), default=16, help="measured: (default: %(default)s)"
    )
    parser.add_argument("--simulated-model", choices=sorted(MODEL_SHAPES), default="opt-13b")
    parser.add_argument("--simulated-device", choices=sorted(DEVICES), default="A800-80GB-PCIe")
    parser.add_argument("--repetitions", type=integer(1, 1000), default=15, help="default: %(default)s")
    parser.add_argument("--seed", type=integer(0, 2**31), default=0, help="default: %(default)s")
    add_common(parser)
    args = parser.parse_args(argv)
    if not set(args.parts) <= set(PARTS):
        parser.error(f"--parts {','.join(args.parts)}: name some of {', '.join(PARTS)}")
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: there is no config.json in it")
    check_files(parser, args)
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What each part found."""
    found: dict[str, Any] = {}
    sizes, tokens = sorted(args.block_sizes), sorted(args.tokens)
    rows, of = [], []
    if "simulated" in args.parts:
        rows += block_size_rows(
            model=args.simulated_model, device=args.simulated_device, block_sizes=sizes, tokens=tokens
        )
        of.append(
            f"Simulated: {args.simulated_model} on a roofline of {args.simulated_device}, "
            f"{1e6 * DEFAULT_PIECE_SECONDS:.0f} us for each piece of vLLM's layout (an assumption)."
        )
    if {"link", "measured"} & set(args.parts):
        from memory.copies import KVShape, copy_rows, fit_rows, measured_rows, recompute_rows

        from jaxllm.loading.checkpoints import demo_model_path

        timing = (args.repetitions, args.seed)
        if "link" in args.parts:
            kv = KVShape(args.layers, args.kv_heads, args.head_dim, args.dtype)
            found |= {"kv": dataclasses.asdict(kv), "copies": list(copy_rows(kv, sizes, tokens, *timing))}
            found["fits"] = fit_rows(found["copies"])
        if "measured" in args.parts:
            model = args.model or demo_model_path()
            kv, prefills = recompute_rows(model, args.dtype, args.prefill_block_size, tokens, *timing)
            rows += measured_rows(list(copy_rows(kv, sizes, tokens, *timing)), prefills)
            of.append(
                f"Measured: {model.resolve().name} in {args.dtype} on this device, prefills with blocks of "
                f"{args.prefill_block_size}."
            )
    if rows:
        found |= {"block_sizes_of": " ".join(of), "block_sizes": rows}
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and write JSON and the figure."""
    args = parse_args(argv)
    report = {**provenance("bench_link.py", argv), "repetitions": args.repetitions, "seed": args.seed}
    try:
        report |= measure(args)
    except JaxllmError as error:
        raise SystemExit(f"bench_link.py: {error}") from None
    leave(args, report, report_lines(report), draw_link)


if __name__ == "__main__":
    main()
