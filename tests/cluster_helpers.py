"""Helpers of the tests with Ray."""

import os
import signal
from pathlib import Path

OBJECT_STORE = 100 * 2**20
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "decode_buckets": [4],
    "prefill_buckets": [64],
    "num_gpu_blocks_override": 64,
    "num_host_blocks": 0,
}
"""An engine that starts fast."""


def engine_options():
    """`SMALL` for a command line."""
    return [
        f"--{name.replace('_', '-')}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in SMALL.items()
    ]


def pids_of(name):
    """Processes of this machine that Ray calls so."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if name.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def kill(pid):
    os.kill(pid, signal.SIGKILL)
