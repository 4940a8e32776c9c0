"""Throughput of jaxllm beside transformers, vLLM and OpenVINO: the same model, token ids and output lengths.

    python scripts/compare_frameworks.py MODEL short,mixed --backends jaxllm,transformers --out compare.json
    python scripts/compare_frameworks.py --from-json compare.json --plot compare.png

MODEL is a checkpoint folder, each workload one of short, long and mixed, or a JSON file
`{"prompts": [[ids]], "max_tokens": [counts]}`. docs/compare.md says how to set the back-ends up. `--out` is
written anew after each repetition.

Exit status: 0; 1 if jaxllm and transformers differ in more than `--max-disagreement` of the requests, or if
no back-end gave a result; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compare import report
from compare.backends import BACKENDS, get_backends, interpreters
from compare.runner import Comparison
from compare.workloads import BLOCK_SIZE, PROMPT_LENGTHS, Workload, get_workload, save_workload

from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.output_files import OutputParser, new_file

MAX_MODEL_LEN = 1024
MAX_DISAGREEMENT = 0.05
"""Rounding decides near-ties: about one greedy token in 10^4 of a random-weight model in float32."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="checkpoint folder")
    parser.add_argument(
        "workload", nargs="?", help=f"one or more of {','.join(PROMPT_LENGTHS)}, or JSON files"
    )
    parser.add_argument("--backends", default="jaxllm,transformers", help=f"of {','.join(BACKENDS)}")
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="the Python to run a back-end with"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--repeat-within",
        type=float,
        default=1.3,
        metavar="FACTOR",
        help="stop static batch sizes that take longer than this times the best one's first time",
    )
    parser.add_argument(
        "--give-up-factor",
        type=float,
        default=5.0,
        metavar="FACTOR",
        help="stop static batch sizes that take longer than this times the fastest other back-end",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights and KV; in 16 bits batch shapes change rounding, so greedy tokens may differ",
    )
    parser.add_argument(
        "--dummy-weights",
        action="store_true",
        help="MODEL needs a config.json only; each framework draws weights, and tokens are not compared",
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests that run at once")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="in a step of jaxllm or transformers-cb"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-requests", type=int, default=64, help="of a named workload")
    parser.add_argument("--static-batch-sizes", default="64,32,16,8", help="to try for transformers")
    parser.add_argument(
        "--jaxllm-settings",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further fields of EngineConfig",
    )
    parser.add_argument("--max-disagreement", type=float, default=MAX_DISAGREEMENT, metavar="SHARE")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds one worker's command may take")
    parser.add_argument("--save-workload", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=new_file, metavar="FILE.json")
    parser.add_argument("--plot", type=new_file, metavar="FILE.png")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE.json", help="show earlier results, run nothing"
    )
    args = parser.parse_args(argv)
    if args.from_json is None and args.workload is None:
        parser.error("name a checkpoint folder and a workload, or --from-json")
    for name in ("repeat_within", "give_up_factor"):
        if not getattr(args, name) >= 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    for name in ("repetitions", "threads", "num_requests", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    return args


def measure(args: argparse.Namespace, command: str) -> Iterator[dict[str, Any]]:
    """Run the comparison; yields the results so far, as JSON values, after each repetition.

    Raises:
        ValueError: an argument does not fit the others or the model.
    """
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    backends = get_backends(args.backends)
    pythons = interpreters(args.python, backends)
    workloads = [
        get_workload(name, num_requests=args.num_requests, vocab_size=config["vocab_size"], seed=args.seed)
        for name in args.workload.split(",")
    ]
    if len({workload.name for workload in workloads}) < len(workloads):
        raise ValueError(f"workloads {args.workload!r}: give each name once")
    if args.save_workload is not None:
        if len(workloads) > 1:
            raise ValueError(f"--save-workload takes one workload, not {args.workload!r}")
        save_workload(workloads[0], args.save_workload)
    sizes = [int(size) for size in args.static_batch_sizes.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"--static-batch-sizes {args.static_batch_sizes}: every size must be at least 1")
    job = make_job(args, config, *workloads)
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    results = {
        "command": command,
        "model": {"name": args.model.resolve().name, **{name: config.get(name) for name in names}},
        "seed": args.seed,
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "repeat_within": args.repeat_within,
        "give_up_factor": args.give_up_factor,
        "max_model_len": job["max_model_len"],
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "dummy_weights": args.dummy_weights,
        "num_blocks": job["num_blocks"],
        "jaxllm_settings": args.jaxllm_settings,
        "hardware": report.hardware(),
    }
    summaries: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="compare-frameworks-") as folder,
        Comparison(backends, pythons, job, Path(folder), args.timeout) as comparison,
    ):
        for workload in workloads:
            variants = {backend.name: backend.variants(sizes, len(workload.prompts)) for backend in backends}
            for repetitions in comparison.run(
                workload, variants, args.repetitions, args.repeat_within, args.give_up_factor
            ):
                summary = workload.summary() | {"repetitions": repetitions}
                present = report.collect(comparison, workload, compares_tokens=not args.dummy_weights)
                yield results | {"workloads": [*summaries, summary], "rows": [*rows, *present]}
            summaries.append(summary)
            rows += present


def make_job(args: argparse.Namespace, config: dict[str, Any], *workloads: Workload) -> dict[str, Any]:
    """What every worker is asked to set up: one length limit, one pool size, one number of threads.

    Raises:
        ValueError: a workload is too long for the model.
    """
    positions = config.get("max_position_embeddings", MAX_MODEL_LEN)
    longest = max(workload.longest for workload in workloads)
    if longest > positions:
        raise ValueError(f"the longest sequence has {longest} tokens; the model ends at {positions}")
    heads = config["num_attention_heads"]
    row = config.get("num_key_value_heads", heads) * config.get("head_dim", config["hidden_size"] // heads)
    num_blocks = max(workload.num_blocks(args.max_num_seqs) for workload in workloads)
    itemsize = 4 if args.dtype == "float32" else 2
    pool_bytes = num_blocks * BLOCK_SIZE * config["num_hidden_layers"] * row * 2 * itemsize
    max_model_len = min(positions, max(MAX_MODEL_LEN, longest))
    return {
        "model": str(args.model.resolve()),
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "seed": args.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "dummy_weights": args.dummy_weights,
        "block_size": BLOCK_SIZE,
        "num_blocks": max(num_blocks, -(-max_model_len // BLOCK_SIZE)),
        "kv_cache_gib": -(-pool_bytes // 2**30),
        "settings": args.jaxllm_settings,
    }


def main() -> int:
    """Entry point."""
    args = parse_args()
    if args.from_json is not None:
        results = json.loads(args.from_json.read_text(encoding="utf-8"))
    else:
        try:
            for results in measure(args, command_line(["python", *sys.argv])):
                if args.out is not None:
                    write_json(args.out, results)
        except (OSError, KeyError, ValueError) as error:
            print(f"compare_frameworks.py: {type(error).__name__}: {error}", file=sys.stderr)
            return 2
    print(report.table(results))
    if args.plot is not None:
        report.plot(results, args.plot)
    share = report.disagreement(results["rows"])
    if share is not None and share > args.max_disagreement:
        print(
            f"jaxllm and transformers differ in {share:.0%} of the requests; "
            f"{args.max_disagreement:.0%} may be near-ties",
            file=sys.stderr,
        )
        return 1
    return 0 if any(row["output_tokens_per_second"] for row in results["rows"]) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the workers on the way out
    sys.exit(main())
