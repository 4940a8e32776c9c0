"""What the Triton kernels need of GPUs that need not be there: registers, spills, shared memory.

    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION    # of the JAX installed
    PYTHONPATH=. JAX_PLATFORMS=cpu python scripts/inspect_tilings.py --out tilings.json

Compiles decode and prefill attention for each device, dtype and tiling, and lets `ptxas` (of the CUDA
toolkit, of Triton, or `pip install nvidia-cuda-nvcc-cu12`) say what the machine code takes. `programs` is how
many of them a core holds at once; bytes in flight is what they can have asked of memory together. KV in
fp8_e4m3 is left out below compute capability 8.9. This is no measurement of speed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

_DUMP = tempfile.TemporaryDirectory()
os.environ["XLA_FLAGS"] = " ".join(  # read once, by jax
    [os.environ.get("XLA_FLAGS", ""), f"--xla_dump_to={_DUMP.name}", "--xla_dump_emitter_re=ptx"]
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jaxllm import pallas_kernels  # noqa: E402
from jaxllm.errors import ConfigError  # noqa: E402
from jaxllm.pallas_kernels.kv_layout import KVLayout  # noqa: E402
from jaxllm.pallas_kernels.triton import Tiling, alternative_tilings, default_tiling  # noqa: E402
from jaxllm.research.bench.results import command_line, write_json  # noqa: E402
from jaxllm.research.plan.target import Compiler, GPUTarget, get_target  # noqa: E402
from jaxllm.system import hardware  # noqa: E402
from jaxllm.system.output_files import OutputParser, new_file  # noqa: E402

_RESERVED_SHARED_MEMORY = 1024  # of each program, by the system
_REGISTERS_PER_CORE = 65536


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="a100-80gb,l40", help="default: %(default)s")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="default: %(default)s")
    parser.add_argument("--kv-dtypes", default="auto", help="of keys and values; default: as --dtypes")
    parser.add_argument("--pool-gib", type=float, default=0.1, help="size of the pool; default: %(default)s")
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, head_dim")
    parser.add_argument("--tilings", default="", help="more of them, such as k64,q32,w4,s2 (separated by /)")
    parser.add_argument("--out", type=new_file, help="write the results to this JSON file")
    args = parser.parse_args(argv)
    args.heads = tuple(map(int, args.heads.split(",")))
    if len(args.heads) != 3:
        parser.error("--heads takes three numbers")
    try:
        args.tilings = [Tiling.parse(text) for text in args.tilings.split("/") if text]
    except ConfigError as error:
        parser.error(str(error))
    return args


def find_ptxas() -> str:
    """The assembler of the CUDA toolkit, or of NVIDIA's or Triton's packages."""
    found = shutil.which("ptxas")
    places = [(pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), "bin/ptxas")]
    for package, pattern in (("nvidia", "*/bin/ptxas"), ("triton", "backends/nvidia/bin/ptxas")):
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations or ()) if spec is not None else ()
        places += [(pathlib.Path(folder), pattern) for folder in folders]
    for folder, pattern in places:
        found = found or next(map(str, sorted(folder.glob(pattern))), None)
    if found is None:
        sys.exit("there is no ptxas: install the CUDA toolkit, or pip install nvidia-cuda-nvcc-cu12")
    return found


def arguments(
    op: str, heads: tuple[int, int, int], dtype: str, kv_dtype: str, pool_gib: float
) -> tuple[Any, ...]:
    """Abstract arguments: 16 sequences, one row each or 2048 together."""
    struct = jax.ShapeDtypeStruct
    num_q, num_kv, dim = heads
    layout = KVLayout(dtype if kv_dtype == "auto" else kv_dtype, dim)
    block = 2, 2, num_kv, 16, layout.width
    num_blocks = int(pool_gib * 2**30 / math.prod(block) / layout.array_dtype.itemsize)
    pool = struct((num_blocks, *block), layout.array_dtype)
    tables, lengths = struct((16, 64), jnp.int32), struct((16,), jnp.int32)
    if op == "decode":
        return struct((16, num_q, dim), dtype), pool, tables, lengths
    starts, num_seqs = struct((17,), jnp.int32), struct((), jnp.int32)
    return struct((2048, num_q, dim), dtype), pool, tables, starts, lengths, num_seqs


def inspect(
    compiler: Compiler, target: GPUTarget, op: str, tiling: Tiling, args: tuple[Any, ...], ptxas: str
) -> dict[str, Any]:
    """What one kernel takes; `error` if it does not compile."""
    folder = pathlib.Path(_DUMP.name)
    for path in folder.iterdir():
        path.unlink()
    call = functools.partial(
        getattr(pallas_kernels, f"{op}_attention"),
        layer=1,
        scale=args[0].shape[2] ** -0.5,
        implementation=f"triton:{tiling}",
    )
    try:
        compiler.compile(jax.jit(call), *compiler.struct(args))
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).partition(", context")[0]}
    name = f"paged_{op}_attention"
    thunks = _only("thunk sequence", list(folder.glob("*thunk_sequence.txt")))
    line = _only(f"line about {name}", [line for line in thunks.read_text().splitlines() if name in line])
    shared = int(line.rpartition("shared_memory: ")[2].split()[0])
    assembly = [path for path in folder.glob("*.ptx") if f".entry {name}" in path.read_text()]
    ptx = _only(f"PTX of {name}", assembly)
    architecture = _number(r"\.target (sm_\w+)", ptx.read_text())
    command = [ptxas, "-v", "--gpu-name", architecture, str(ptx), "-o", str(folder / "cubin")]
    output = subprocess.run(command, capture_output=True, text=True)
    if output.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{output.stderr}")
    registers = int(_number(r"Used (\d+) registers", output.stderr))
    threads = 32 * tiling.num_warps
    programs = min(
        _REGISTERS_PER_CORE // (-(-registers // 8) * 8 * threads),
        target.shared_memory_per_core // (shared + _RESERVED_SHARED_MEMORY),
        target.threads_per_core // threads,
    )
    num_tiles = max(1, (tiling.num_stages - 1) // 2)  # of KV; the block table's tiles take stages, too
    kv_tile_bytes = 2 * tiling.kv_tile * args[1].shape[5] * jnp.dtype(args[1].dtype).itemsize
    return {
        "registers": registers,
        "spilled_bytes": int(_number(r"(\d+) bytes spill stores", output.stderr)),
        "shared_memory_bytes": shared,
        "programs": programs,
        "kv_bytes_in_flight": programs * num_tiles * kv_tile_bytes,
        "is_asynchronous": "cp.async" in ptx.read_text(),
        "uses_tensor_cores": "mma" in ptx.read_text(),
    }


def _only(what: str, found: list[Any]) -> Any:
    if len(found) != 1:
        sys.exit(
            f"XLA of JAX {jax.__version__} left {len(found)} files or lines where one {what} was expected: "
            "use a version of JAX that pyproject.toml allows"
        )
    return found[0]


def _number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        sys.exit(f"found no {pattern!r} in:\n{text}")
    return match.group(1)


def main(argv: list[str] | None = None) -> None:
    """Print a table and write JSON."""
    args = parse_args(argv)
    ptxas = find_ptxas()
    rows = []
    print(
        "| device | op | dtype | KV | tiling | registers | spilled | shared memory | programs | in flight |"
    )
    print("|---|---|---|---|---|---:|---:|---:|---:|---:|")
    for device in args.devices.split(","):
        target = get_target(device)
        with Compiler(target) as compiler:
            dtypes = args.dtypes.split(","), args.kv_dtypes.split(",")
            for op in ("decode", "prefill"):
                for dtype, kv_dtype in itertools.product(*dtypes):
                    if kv_dtype == "fp8_e4m3" and target.compute_capability < (8, 9):
                        continue  # engines refuse it, for XLA's compiler aborts
                    shapes = arguments(op, args.heads, dtype, kv_dtype, args.pool_gib)
                    kv_bytes = shapes[1].dtype.itemsize
                    default = default_tiling(op, target.description, dtype, args.heads[2], kv_bytes)
                    tilings = dict.fromkeys((default, *alternative_tilings(op, dtype), *args.tilings))
                    for tiling in tilings:
                        found = inspect(compiler, target, op, tiling, shapes, ptxas)
                        row = {"device": device, "op": op, "dtype": dtype, "kv_dtype": kv_dtype}
                        row |= {"tiling": str(tiling)}
                        rows.append(row | {"is_default": tiling == default} | found)
                        values = found.get("error") or " | ".join(
                            f"{found[key]:,}"
                            for key in (
                                "registers",
                                "spilled_bytes",
                                "shared_memory_bytes",
                                "programs",
                                "kv_bytes_in_flight",
                            )
                        )
                        mark = " (default)" * (tiling == default)
                        print(f"| {' | '.join(row.values())}{mark} | {values} |", flush=True)
    if args.out is not None:
        version = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
        report = {
            "command": command_line(["python", *sys.argv]),
            "versions": hardware.versions() | {"ptxas": version.strip().splitlines()[-2]},
            "heads": args.heads,
            "pool_gib": args.pool_gib,
            "rows": rows,
        }
        write_json(args.out, report)


if __name__ == "__main__":
    main()
