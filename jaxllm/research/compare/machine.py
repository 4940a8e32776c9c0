"""The machine that measures, and what else it does meanwhile."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

_BUSY_SAMPLE_SECONDS = 3.0


def hardware() -> dict[str, Any]:
    """The processor, its cores and its memory."""
    model = platform.processor() or platform.machine()
    memory = None
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        model = found.group(1) if found else model
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "busy_share_at_start": busy_share(_BUSY_SAMPLE_SECONDS),
    }


def busy_share(seconds: float) -> float | None:
    """How much of the processors' time others take now; None where it cannot be told.

    Processes of lowest priority, which make way, do not count; nor does what ran before, as it would in a
    load average.
    """
    first = _processor_times()
    if first is None:
        return None
    time.sleep(seconds)
    second = _processor_times()
    assert second is not None
    spent = [after - before for before, after in zip(first, second, strict=True)]
    _, nice, _, idle, wait, *_ = spent
    return round(1 - (nice + idle + wait) / max(1, sum(spent)), 3)


def _processor_times() -> list[int] | None:
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    except OSError:
        return None
    return [int(word) for word in words[1:9]]
