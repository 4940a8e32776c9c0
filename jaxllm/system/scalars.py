"""Numbers that somebody's own code answers with, as Python's."""

from __future__ import annotations

import decimal
import fractions
from typing import Any

_PLAIN = frozenset((float, int, bool, str, type(None)))


def plain(value: Any) -> Any:
    """A number as a Python one, whatever kind it is of; what is none stays as it is.

    Args:
        value: NumPy's and JAX's scalars and arrays of no axes, a `Decimal`, a `Fraction`, or a named tuple
            that holds such; an array of one axis becomes a list.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    try:
        if isinstance(value, decimal.Decimal | fractions.Fraction):
            return float(value)
        if hasattr(value, "dtype") and getattr(value, "ndim", None) in (0, 1):
            found = value.tolist()
            is_plain = type(found) in _PLAIN or not hasattr(found, "__float__")
            return found if is_plain else float(found)  # NumPy keeps bfloat16 and its like
    except (OverflowError, TypeError, ValueError):  # too large, or of a trace
        pass
    return value


def real(value: object) -> float | None:
    """A number as a float, as `plain` has it; None of what is none, such as True or text."""
    found = plain(value)
    if type(found) is float:
        return found
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found)
    except OverflowError:
        return None
