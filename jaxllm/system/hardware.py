"""What a measurement ran on: hardware, versions, memory."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import jax

import jaxllm

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def describe_host() -> dict[str, Any]:
    """The host's processor and memory; asks no device, all of whose memory another process may need.

    `load_average` is that of the last minute: on a shared machine it tells how noisy a timing is.
    """
    return {
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def describe_hardware() -> dict[str, Any]:
    """The host, see `describe_host`, and the device programs run on."""
    device = jax.devices()[0]
    return {
        **describe_host(),
        "platform": device.platform,
        "device": device.device_kind,
        "device_memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "backend": device.client.platform_version.strip(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, of this package, installed or not, and of the packages that decide its speed."""
    found = {"python": platform.python_version(), "jaxllm": jaxllm.__version__}
    for package in _PACKAGES:
        found[package] = importlib.metadata.version(package)
    return found


def peak_rss_bytes() -> int:
    """The most host memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int | None:
    """The most device memory this process has held; None where the device does not tell, as CPUs."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    print(json.dumps(describe_hardware()))
