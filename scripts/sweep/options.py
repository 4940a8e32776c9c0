"""Types of command-line options: lists, and arrivals."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.workloads import ArrivalProcess, parse_arrivals

ARRIVALS_HELP = (
    "all, poisson:RATE, gamma:RATE:CV, closed:CLIENTS or closed:CLIENTS:THINK (default: %(default)s)"
)


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values of a kind with commas between them, none of them twice."""

    def parse(text: str) -> list[Any]:
        try:
            values = [kind(value) for value in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no list with commas: {error}") from None
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice")
        return values

    return parse


def arrivals_of(text: str) -> ArrivalProcess:
    """An argparse type: what `parse_arrivals` makes of it."""
    try:
        return parse_arrivals(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
