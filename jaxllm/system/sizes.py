"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1.0, "b": 1.0, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}


def parse_bytes(text: str) -> float:
    """Bytes: a number, and perhaps a unit, such as "64GB" or "4GiB".

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(text)
    return float(match[1]) * _UNITS[match[2]]
