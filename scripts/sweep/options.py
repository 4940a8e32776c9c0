"""Command-line options that are lists."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


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
