"""`jaxllm eval-quantised`: how near a checkpoint's predictions are to those of the one it was made from."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxllm.errors import RequestError
from jaxllm.models.linear_formats import QUANTIZATIONS
from jaxllm.system.dtypes import KV_DTYPES
from jaxllm.system.output_files import add_overwrite, check_writable


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Predict a text token by token with two checkpoints, such as an original and a quantised one, and "
        "print perplexities, how often they find the same token likeliest, the Kullback-Leibler divergence "
        "of the second from the first, and where they part most. Prints Markdown."
    )
    parser.add_argument("first", metavar="A", help="folder of the checkpoint that the other is measured by")
    parser.add_argument("second", metavar="B", help="folder of the other")
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="what is predicted, in UTF-8"
    )
    parser.add_argument(
        "--num-tokens", type=int, default=4096, metavar="N", help="most of its tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=512,
        metavar="N",
        help="tokens of the pieces that it is cut into (default: %(default)s, at most the models')",
    )
    parser.add_argument(
        "--dtype", default="float32", metavar="NAME", help="of weights and arithmetic (default: float32)"
    )
    parser.add_argument("--second-dtype", metavar="NAME", help="of B's (default: as --dtype)")
    parser.add_argument(
        "--quantization", choices=tuple(QUANTIZATIONS), help="what B's weights are rounded to while loaded"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        metavar=f"{{auto,{','.join(KV_DTYPES)}}}",
        default="auto",
        help="what B's keys and values are stored as before they are attended to (default: what B has scales "
        "for, or not stored)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write all of it there")
    add_overwrite(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return the exit code."""
    from jaxllm.loading.checkpoints import checkpoint_folder
    from jaxllm.research.bench.results import about, write_json
    from jaxllm.research.quality import compare_quality

    check_writable({"--json": args.json}, overwrite=args.overwrite)
    try:
        text = args.text.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read --text {str(args.text)!r} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--text {str(args.text)!r} is no UTF-8 ({error}): convert it") from error
    first, second = checkpoint_folder(args.first), checkpoint_folder(args.second)
    found = compare_quality(
        first,
        second,
        text,
        num_tokens=args.num_tokens,
        context=args.context,
        dtype=args.dtype,
        second_dtype=args.second_dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    names = [folder.resolve().name for folder in (first, second)]
    print(found.table(*(names if names[0] != names[1] else ("first", "second"))))
    if args.json is not None:
        write_json(args.json, about(["jaxllm", *args.command_line]) | found.to_json())
    return 0
