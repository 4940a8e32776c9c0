"""Options with bounds, and what a measurement says about itself."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.output_files import new_file


def integer(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} must lie in [{low}, {high}]")
        return value

    return parse


def add_common(parser: argparse.ArgumentParser) -> None:
    """`--out` and `--plot`."""
    parser.add_argument("--out", type=new_file, metavar="FILE.json", help="results to write")
    parser.add_argument("--plot", type=new_file, metavar="FILE.png", help="figure to draw of them")


def check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse figures of no known kind, before anything is measured."""
    if args.plot is not None and args.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {args.plot}: name a .png, .svg or .pdf file")


def provenance(script: str, argv: Sequence[str] | None) -> dict[str, Any]:
    """Command, hardware and versions, in front of a measurement's results."""
    from jaxllm.system import hardware

    command = ["python", f"scripts/{script}", *(sys.argv[1:] if argv is None else argv)]
    return {
        "command": command_line(command),
        "hardware": hardware.describe_hardware(),
        "versions": hardware.versions(),
    }


def leave(
    args: argparse.Namespace,
    report: dict[str, Any],
    lines: Sequence[str],
    draw: Callable[[dict[str, Any], pathlib.Path], None],
) -> None:
    """Print the lines, and write the results and the figure where asked for."""
    print("\n".join(lines))
    if args.out is not None:
        write_json(args.out, report)
    if args.plot is not None:
        draw(report, args.plot)
