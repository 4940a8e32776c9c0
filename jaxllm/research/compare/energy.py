"""Joules that processors and GPUs have used, where the machine tells."""

from __future__ import annotations

import contextlib
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Counts joules between two readings: of CPU packages by RAPL, of GPUs by NVML.

    Args:
        powercap: where Linux has RAPL's counters.
    """

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._packages = [
            folder for folder in sorted(powercap.glob("intel-rapl:*")) if folder.name.count(":") == 1
        ]
        self._last = self._read()

    def joules(self) -> float | None:
        """Since the last call, or since it was made; None where nothing can be read.

        RAPL's counters begin anew at their largest value, every few minutes to hours: one lap is counted.
        """
        before, self._last = self._last, self._read()
        total = 0.0
        for name, (after, most) in self._last.items():
            if name in before:
                used = after - before[name][0]
                total += used if used >= 0 else used + most
        return total if self._last.keys() & before.keys() else None

    def _read(self) -> dict[str, tuple[float, float]]:
        """Joules so far of each source, and where its counter begins anew."""
        found: dict[str, tuple[float, float]] = {}
        for folder in self._packages:
            with contextlib.suppress(OSError, ValueError):  # root alone may read it on many systems
                values = [
                    int((folder / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj")
                ]
                found[folder.name] = values[0], values[1]
        with contextlib.suppress(Exception):  # no NVML, no driver, or an older GPU
            import pynvml

            pynvml.nvmlInit()
            for number in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                found[f"gpu{number}"] = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, 0.0
        return found
