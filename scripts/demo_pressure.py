"""The embedded model with too few KV blocks: what is preempted, what that costs, and how presets compare.

python scripts/demo_pressure.py
python scripts/demo_pressure.py --plot timeline.png --ledger decisions.jsonl
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from jaxllm import LLM
from jaxllm.engine.ledgers import read_ledger
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.bench.replay import replay
from jaxllm.research.commands.explain import Span, plot, summary, timeline
from jaxllm.research.figures import check_picture
from jaxllm.research.workloads import make_trace
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.ledger import Ledger, PreemptionRecord
from jaxllm.sched.presets import make_preset
from jaxllm.system.output_files import OutputParser, new_file

PRESETS = ("adaptive", "vllm", "vllm_swap")


def run(llm: LLM, preset: str, num_requests: int, seed: int, path: Path) -> RunResult:
    """One preset on the trace, its decisions written to `path`."""
    costs = OnlineCalibration(llm.costs.model)
    trace = make_trace("alpaca", num_requests, 64, outputs="uniform", seed=seed)
    with path.open("w", encoding="utf-8") as file:
        ledger = Ledger(file, costs)
        config = llm.engine.scheduler.config
        result = replay(llm, trace, config, make_preset(preset, costs), costs=costs, ledger=ledger)
        ledger.close()
    return result


def row(preset: str, result: RunResult, records: list[PreemptionRecord]) -> str:
    """A line of the table."""
    predicted = [record.predicted_seconds for record in records if record.predicted_seconds is not None]
    measured = [record.measured_seconds for record in records if record.measured_seconds is not None]
    swapped = sum(record.is_swap for record in records)
    costs = f"{1e3 * sum(predicted):.0f} ms" if predicted else "-"
    return (
        f"| {preset} | {result.output_tokens_per_second:.0f} | {result.weighted_turnaround.mean():.2f} | "
        f"{len(records)} | {swapped} | {len(records) - swapped} | {costs} | {1e3 * sum(measured):.0f} ms |"
    )


def spans_of(result: RunResult, ledger: Ledger) -> list[Span]:
    """When each request waited and ran, by the ledger's clock; all were sent at once."""
    times = zip(result.arrival_times, result.first_scheduled_times, result.finish_times, strict=True)
    begun = ledger.steps[0].time - float(result.first_scheduled_times.min())
    return [Span(str(place), *(begun + float(one) for one in of)) for place, of in enumerate(times)]


def main() -> None:
    """Run it from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--gpu-blocks", type=int, default=40)
    parser.add_argument("--host-blocks", type=int, default=20)
    parser.add_argument("--profile-seconds", type=float, default=4.0, help="time to measure costs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ledger", type=new_file, help="keep the decisions of preset adaptive there")
    parser.add_argument("--plot", type=new_file, metavar="FILE.png", help="draw its timeline, by matplotlib")
    args = parser.parse_args()
    with parser.errors():
        check_picture(args.plot)
    llm = LLM(
        skip_tokenizer_init=True,
        warm_up="all",
        enable_prefix_caching=False,
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=args.gpu_blocks,
        num_host_blocks=args.host_blocks,
        decode_buckets=[16],
        prefill_buckets=[32, 128],
        profile_seconds=args.profile_seconds,
    )
    print(
        f"\n{args.requests} requests at once, {args.gpu_blocks} device and {args.host_blocks} host blocks of "
        f"{llm.executor.block_size} tokens; costs: {llm.costs_source}\n"
    )
    print(
        "| preset | tokens/s | weighted turnaround | preemptions | swapped | dropped | predicted | measured |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        run(llm, "vllm", 4, args.seed, Path(folder) / "warm-up.jsonl")
        kept, spans = None, []
        for preset in PRESETS:
            path = Path(folder) / f"{preset}.jsonl"
            if preset == "adaptive" and args.ledger is not None:
                path = args.ledger
            result = run(llm, preset, args.requests, args.seed, path)
            ledger = read_ledger(path)
            if kept is None:
                kept, spans = ledger, spans_of(result, ledger)
            print(row(preset, result, ledger.preemptions))
    assert kept is not None
    print("\nvllm predicts nothing: its predictions are the ledger's, of a prefill for each victim alone.")
    print(f"\npreset adaptive: {summary(kept, top=3)}")
    print(timeline(kept.steps, width=72))
    if args.plot is not None:
        plot(kept, args.plot, spans)


if __name__ == "__main__":
    main()
