"""Times generation with one decode step in a device program and with several.

    python scripts/bench_multi_step.py --out multi-step.json

Every prompt has 16 tokens and gets `--output-len` more, greedily. The settings take turns within a
repetition, so that a machine whose speed drifts is as fair to one as to the other.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time
from typing import Any

from jaxllm import LLM, SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

SETTINGS = {"single steps": 1, "several": None}
_PROMPT_LEN = 16


def seconds_of(llm: LLM, num_scheduler_steps: int | None, batch: int, output_len: int) -> float:
    """Seconds until `batch` requests have ended."""
    built = llm.engine.scheduler
    engine = Engine(
        llm.executor,
        Scheduler(built.config, built.policy),
        vocab_size=llm.model_config.vocab_size,
        num_scheduler_steps=num_scheduler_steps,
    )
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    for index in range(batch):
        engine.add_request(str(index), [5 + index] * _PROMPT_LEN, params)
    started = time.perf_counter()
    while engine.has_unfinished_requests:
        engine.step()
    return time.perf_counter() - started


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(demo_model_path()), help="folder of a checkpoint")
    parser.add_argument("--batches", default="1,4,16", help="requests at once (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    batches = [int(batch) for batch in args.batches.split(",")]
    if min(args.output_len, args.repetitions, *batches) < 1:
        parser.error("--batches, --output-len and --repetitions must be at least 1")
    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        warm_up="all",
        enable_prefix_caching=False,
        max_num_seqs=max(batches),
        max_model_len=_PROMPT_LEN + args.output_len,
    )
    rows: list[dict[str, Any]] = []
    for batch in batches:
        rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in range(args.repetitions):
            for name, num_steps in SETTINGS.items():
                rates[name].append(
                    batch * args.output_len / seconds_of(llm, num_steps, batch, args.output_len)
                )
        single, several = rates.values()
        speedup = statistics.median(b / a for a, b in zip(single, several, strict=True))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        rows.append({"batch": batch, "tokens_per_second": medians, "speedup": speedup, "all": rates})
        print(f"batch {batch}: {medians}, {speedup:.2f}x")
    values = {
        "command": command_line(
            ["python", "scripts/bench_multi_step.py", *(sys.argv[1:] if argv is None else argv)]
        ),
        "model": pathlib.Path(args.model).name,
        "hardware": describe_hardware(),
        "versions": versions(),
        "output_len": args.output_len,
        "rows": rows,
    }
    write_json(args.out, values)


if __name__ == "__main__":
    main()
