"""Types of command-line options: lists and arrivals."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.research.workloads import ArrivalProcess, parse_arrivals

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


def in_words(arrivals: str) -> str:
    """What `parse_arrivals` takes, for people."""
    kind, *numbers = arrivals.split(":")
    if kind == "closed":
        thinking = f" who think {numbers[1]} s" if len(numbers) > 1 else ""
        return f"a closed loop of {numbers[0]} clients{thinking}"
    if kind == "poisson":
        return f"Poisson arrivals, {numbers[0]} a second"
    if kind == "gamma":
        return f"gamma arrivals, {numbers[0]} a second, coefficient of variation {numbers[1]}"
    return "arrivals as recorded" if kind == "recorded" else "all requests at once"
