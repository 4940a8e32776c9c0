"""Times starts: from the first line of Python to text, with nothing cached and with what earlier starts left.

    python scripts/bench_start.py out/bench107m-gqa --out start.json

Each start is a process of its own: of a batch of greedy requests, of one whose requests ask for different
things of the sampler, and of the command; with a compilation cache that holds nothing, native kernels only,
or all that the start before it left. Peak memory is given beside the weights and the KV pool. Then two
engines of one process, one after another, which differ in their policy and compile all programs before the
first request: the second one takes those of the first.
"""

from __future__ import annotations

import json
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.registry import weight_bytes
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

CACHES = ("nothing", "native kernels", "everything")
_POOL_BYTES = 256 * 2**20
_BATCH = """
import json, sys
from jaxllm import LLM, SamplingParams
from jaxllm.system.hardware import peak_rss_bytes
model, cache, count, pool = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kinds = json.loads(sys.argv[5])
sizes = {"max_num_seqs": count, "kv_cache_memory": pool}
llm = LLM(model, compilation_cache_dir=cache, skip_tokenizer_init=True, **sizes)
params = [SamplingParams(ignore_eos=True, **kinds[i % len(kinds)]) for i in range(count)]
llm.generate([[5 + i] * 24 for i in range(count)], params, use_tqdm=False)
print(json.dumps({"peak_bytes": peak_rss_bytes(), "pool_bytes": llm.executor.pool_bytes}), flush=True)
"""
_AGAIN = """
import json, sys, time
from jaxllm import LLM, SamplingParams
model, cache, count, pool = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
for policy in ("adaptive", "vllm_v1"):
    started = time.perf_counter()
    sizes = {"max_num_seqs": count, "kv_cache_memory": pool, "warm_up": "all", "scheduler_policy": policy}
    llm = LLM(model, compilation_cache_dir=cache, skip_tokenizer_init=True, **sizes)
    llm.generate([[5 + i] * 24 for i in range(count)], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    llm.close()
    del llm
    print(json.dumps({"seconds": seconds}), flush=True)
"""
_GREEDY = {"temperature": 0, "max_tokens": 1}
_KINDS = [
    {"max_tokens": 4, **options}
    for options in (
        {"temperature": 0},
        {"seed": 1},
        {"top_p": 0.9},
        {"top_k": 20, "min_p": 0.01},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"frequency_penalty": 0.3, "logprobs": 1},
    )
]


def timed(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, float, str]:
    """Wall seconds until a command prints its first line, processor seconds to its end, and the line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{command[:3]} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, line


def starts(model: str, count: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """A start of each batch and one of the command, with each state of the cache."""
    batch, mixed = (
        [sys.executable, "-c", _BATCH, model, str(folder), str(size), str(_POOL_BYTES), json.dumps(kinds)]
        for size, kinds in ((count, [_GREEDY]), (2 * len(_KINDS), _KINDS))
    )
    command = [sys.executable, "-m", "jaxllm", "generate", "--model", model, "--kv-cache-memory", "256MiB"]
    command += ["--compilation-cache-dir", str(folder), "--tokenizer", str(demo_model_path())]
    command += ["--max-tokens", "1", "--ignore-eos", "def add(a, b):"]
    found = []
    for name, line in (
        (f"{count} prompts", batch),
        (f"{2 * len(_KINDS)} prompts, {len(_KINDS)} kinds of options", mixed),
        ("jaxllm generate, one prompt", command),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        for cache in CACHES:
            if cache == "native kernels":
                for path in folder.glob("jit_*"):
                    path.unlink()
            seconds, processor_seconds, output = timed(line)
            found.append(
                {"start": name, "cached": cache, "seconds": seconds, "processor_seconds": processor_seconds}
            )
            if line is not command:
                found[-1] |= json.loads(output)
    lines = subprocess.run(
        [sys.executable, "-c", _AGAIN, model, str(folder), str(count), str(_POOL_BYTES)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name, line in zip(("first", "second"), lines, strict=True):
        found.append({"start": f"{name} engine of a process", "cached": "everything", **json.loads(line)})
    return found


def main() -> None:
    """Measure, and write JSON."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args()
    hardware = describe_hardware()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            starts(args.model, args.num_prompts, pathlib.Path(folder, "cache"))
            for _ in range(args.repetitions)
        ]
    rows = []
    for same in zip(*runs, strict=True):
        rows.append({key: same[0][key] for key in ("start", "cached")})
        for key in same[0].keys() - rows[-1].keys():
            rows[-1][key] = statistics.median(run[key] for run in same)
        print(f"{rows[-1]['start']}, cached {rows[-1]['cached']}: {rows[-1]['seconds']:.1f} s", flush=True)
    result = {
        "command": command_line(["python", *sys.argv]),
        "hardware": hardware,
        "versions": versions(),
        "weight_bytes": weight_bytes(config_from_dict(read_hf_config(pathlib.Path(args.model))), "float32"),
        "repetitions": args.repetitions,
        "rows": rows,
    }
    write_json(args.out, result)


if __name__ == "__main__":
    main()
