"""`jaxllm convert`: a Hugging Face checkpoint into an Orbax one."""

from __future__ import annotations

import argparse
import time

from jaxllm.commands.options import note
from jaxllm.models.linear_formats import QUANTIZATIONS
from jaxllm.system.dtypes import DTYPES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the command, and add its options."""
    parser.description = (
        "Write DST with config.json, the tokenizer and the weights of SRC as an Orbax checkpoint, or "
        "quantised, as compressed-tensors has them. "
        "DST must not exist, or be an empty folder; an interrupted conversion leaves none."
    )
    parser.add_argument("src", metavar="SRC", help="folder or id of a Hugging Face checkpoint")
    parser.add_argument("dst", metavar="DST", help="folder to write")
    parser.add_argument(
        "--dtype",
        metavar=f"{{auto,{','.join(DTYPES)}}}",
        default="auto",
        help="of the weights (default: the checkpoint's)",
    )
    parser.add_argument(
        "--quantization",
        choices=tuple(QUANTIZATIONS),
        help="round linear layers but for the output head, and write safetensors, which vLLM reads, too",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code."""
    from jaxllm.loading import convert_checkpoint
    from jaxllm.loading.checkpoints import checkpoint_folder

    started = time.perf_counter()
    source = checkpoint_folder(args.src)
    folder = convert_checkpoint(source, args.dst, args.dtype, quantization=args.quantization)
    files = folder.glob("*.safetensors") if args.quantization else (folder / "params").rglob("*")
    size = sum(path.stat().st_size for path in files if path.is_file())
    note(f"wrote {folder} ({size / 2**20:.1f} MiB of weights) in {time.perf_counter() - started:.1f} s")
    return 0
