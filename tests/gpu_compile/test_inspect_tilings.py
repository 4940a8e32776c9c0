"""The script that asks the assembler what the Triton kernels take, with an assembler that makes it up."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "inspect_tilings.py"
ASSEMBLER = """#!/bin/sh
echo "ptxas info : Used 100 registers, used 1 barriers" >&2
echo "    0 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads" >&2
printf 'Cuda tools, release 1\\nBuild 2\\n'
"""


def run(folder, *options):
    environment = {**os.environ, "PATH": str(folder), "CUDA_HOME": str(folder)}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_every_tiling_is_reported(tmp_path):
    path = tmp_path / "ptxas"
    path.write_text(ASSEMBLER)
    path.chmod(0o755)
    out = tmp_path / "tilings.json"
    options = ["--devices", "l40", "--dtypes", "float32", "--heads", "4,2,128", "--out", str(out)]
    done = run(tmp_path, *options, "--tilings", "k64,q64,w4,s2")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["op"], row["tiling"], row["is_default"]) for row in rows] == [
        ("decode", "k32,q64,w4,s2", True),
        ("decode", "k64,q64,w4,s2", False),
        ("prefill", "k32,q32,w8,s2", True),
        ("prefill", "k64,q64,w4,s2", False),
    ]
    first, *_, last = rows
    assert (first["registers"], first["spilled_bytes"]) == (100, 24)
    assert first["shared_memory_bytes"] > 2 * 32 * 128 * 4  # a tile of K and of V
    assert first["programs"] == 102400 // (first["shared_memory_bytes"] + 1024)
    assert first["is_asynchronous"]
    assert "Shared memory size limit exceeded" in last["error"]
    assert f"| l40 | prefill | float32 | auto | k64,q64,w4,s2 | {last['error']} |" in done.stdout


def test_what_is_missing_or_wrong_is_named(tmp_path):
    assert "there is no ptxas: install the CUDA toolkit" in run(tmp_path).stderr
    assert "num_warps is 5: use one of 1, 2, 4, 8, 16" in run(tmp_path, "--tilings", "k64,q64,w5,s2").stderr
