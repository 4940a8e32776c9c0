"""How much prompts slow down those who decode, and what pacing them costs at saturation.

    python scripts/bench_interference.py --out out/interference.json
    python scripts/bench_interference.py --executor jax --model MODEL --out out/interference-cpu.json

Time between tokens: `--decodes` requests decode while prompts of `--prompt-len` tokens arrive by a Poisson
process at a share of what the device can prefill when it does nothing else. Saturation: all requests are
there at once, with two kinds of chat-like lengths; tokens/s of preset `adaptive` over that of the best budget
of prompt tokens an iteration, and over separate iterations.

Simulated on a roofline (`--device`, `--shape`, bfloat16), or on the real engine, with costs it measures
first.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.predictors.base import CostModel, model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import LognormalLengths, Poisson, Trace, make_trace
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import MixedIterations, SchedulingPolicy, SeparateIterations
from jaxllm.sched.presets import adaptive, vllm_v1
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

CHATS = {
    "chatbot": ("chatbot", 256),  # the AdaptiveLLM paper's prompts, 17 tokens; outputs of 160 in the mean
    "sharegpt": (LognormalLengths(mean=161, sigma=0.8, shortest=4, longest=1024), 541),  # 161 and 338
}
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
Run = Callable[[Trace, SchedulerConfig, SchedulingPolicy, Ledger], RunResult]


def policies(costs: CostModel) -> dict[str, SchedulingPolicy]:
    """Those whose iterations are compared."""
    ours = adaptive(costs)
    return {
        "adaptive": ours,
        "whole budget": dataclasses.replace(ours, iterations=MixedIterations()),
        "separate": dataclasses.replace(ours, iterations=SeparateIterations()),
        "vllm_v1": vllm_v1(),
    }


def decoding_trace(num_decodes: int, num_tokens: int, prompt_len: int, times: Sequence[float]) -> Trace:
    """Requests that decode from the start, and prompts that come later, for one token each."""
    count = len(times)
    return Trace(
        name="interference",
        seed=0,
        arrival_times=np.array([0.0] * num_decodes + list(times)),
        prompt_lens=np.array([16] * num_decodes + [prompt_len] * count),
        output_lens=np.array([num_tokens] * num_decodes + [1] * count),
    )


def gaps(ledger: Ledger, num_decodes: int) -> list[float]:
    """Seconds between the tokens of those who decode, while all of them do."""
    times = [step.time for step in ledger.steps if step.num_decoded >= num_decodes]
    return np.diff(times).tolist()


def between_tokens(
    run: Run, config: SchedulerConfig, costs: CostModel, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Median and 99th percentile, alone and under each policy."""
    seconds = costs.step_seconds(0, 0, args.prompt_len, 1)
    step = costs.step_seconds(args.decodes, args.decodes * args.tokens // 2)
    # Enough of them until the last token, were every iteration thrice as long as its decodes.
    count = int(3 * step * args.tokens * args.share / seconds) + 1
    times = Poisson(args.share / seconds).times(count, np.random.default_rng(args.seed))
    found: dict[str, dict[str, float]] = {}
    for name, policy in {"alone": adaptive(costs), **policies(costs)}.items():
        ledger = Ledger()
        arrivals = [] if name == "alone" else times.tolist()
        trace = decoding_trace(args.decodes, args.tokens, args.prompt_len, arrivals)
        result = run(trace, config, policy, ledger)
        of_decodes = gaps(ledger, args.decodes)
        first = result.first_token_times - result.arrival_times
        found[name] = {
            "median": statistics.median(of_decodes),
            "p99": float(np.quantile(of_decodes, 0.99)),
            "gaps": len(of_decodes),
            "prompts_first_token_median": float(np.median(first[args.decodes :])) if arrivals else 0.0,
        }
        row = found[name]
        alone = found["alone"]
        print(
            f"{name}: between tokens median {1e3 * row['median']:.2f} ms, p99 {1e3 * row['p99']:.2f} ms "
            f"({row['p99'] / alone['p99']:.2f}x alone), first token of prompts "
            f"{1e3 * row['prompts_first_token_median']:.0f} ms"
        )
    return found


def saturation(
    run: Run, config: SchedulerConfig, costs: CostModel, args: argparse.Namespace
) -> dict[str, dict[str, Mapping[str, float]]]:
    """Output tokens/s when all requests are there at once, by lengths, policy and budget."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for chat, (prompts, longest) in CHATS.items():
        trace = make_trace(prompts, args.requests, longest, outputs="uniform", seed=args.seed)
        rates = {
            name: run(trace, config, policy, Ledger()).output_tokens_per_second
            for name, policy in policies(costs).items()
        }
        budgets: dict[str, float] = {}
        for budget in BUDGETS:
            if config.max_num_seqs < budget <= config.max_num_batched_tokens:
                limited = dataclasses.replace(config, max_num_batched_tokens=budget)
                policy = policies(costs)["whole budget"]
                budgets[str(budget)] = run(trace, limited, policy, Ledger()).output_tokens_per_second
        found[chat] = {"by_policy": rates, "by_budget": budgets}
        best, ours = max(budgets.values(), default=rates["whole budget"]), rates["adaptive"]
        print(
            f"{chat}, tokens/s: {ours:.0f}, {ours / best:.3f} of the best budget, "
            f"{ours / rates['separate']:.3f} of separate iterations, {ours / rates['vllm_v1']:.3f} of vllm_v1"
        )
    return found


def simulator(args: argparse.Namespace) -> tuple[Run, SchedulerConfig, CostModel, str]:
    """The simulated device."""
    shape = dataclasses.replace(model_shape(args.shape), dtype="bfloat16")
    costs = RooflineCostModel(shape, device_spec(args.device), block_size=16)

    def run(trace: Trace, config: SchedulerConfig, policy: SchedulingPolicy, ledger: Ledger) -> RunResult:
        return simulate(trace, config, policy, costs, overlap_swaps=True, ledger=ledger)

    config = SchedulerConfig(
        num_gpu_blocks=args.gpu_blocks,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    return run, config, costs, repr(costs)


def engine(args: argparse.Namespace) -> tuple[Run, SchedulerConfig, CostModel, str]:
    """The real engine, with costs it has measured."""
    from jaxllm import LLM
    from jaxllm.research.bench.replay import replay

    llm = LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        warm_up="all",
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=2048,
        num_gpu_blocks_override=args.gpu_blocks,
        profile_seconds=args.profile_seconds,
    )
    assert llm.costs is not None

    def run(trace: Trace, config: SchedulerConfig, policy: SchedulingPolicy, ledger: Ledger) -> RunResult:
        return replay(llm, trace, config, policy, costs=OnlineCalibration(llm.costs.model), ledger=ledger)

    return run, llm.engine.scheduler.config, OnlineCalibration(llm.costs.model), llm.costs_source


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=("sim", "jax"), default="sim")
    parser.add_argument("--device", default="H200", help="with sim")
    parser.add_argument("--shape", default="llama-3-8b", help="with sim: the model's sizes")
    parser.add_argument("--model", help="with jax: folder of a checkpoint")
    parser.add_argument("--load-format", default="auto", help="with jax: dummy for random weights")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="with jax")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--gpu-blocks", type=int, default=16384, help="of 16 tokens")
    parser.add_argument("--decodes", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000, help="of each that decodes")
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.7, help="of the prefill capacity")
    parser.add_argument("--requests", type=int, default=2000, help="at saturation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    if (args.executor == "jax") != (args.model is not None):
        parser.error("--executor jax needs --model, and --executor sim takes none")
    if not (0 < args.share <= 1 and args.decodes <= args.max_num_seqs):
        parser.error("--share must lie in (0, 1], and --decodes within --max-num-seqs")
    return args


def main(argv: list[str] | None = None) -> None:
    """Run it from the command line."""
    args = parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    run, config, costs, source = (simulator if args.executor == "sim" else engine)(args)
    values: dict[str, Any] = {
        "command": command_line(["python", "scripts/bench_interference.py", *words]),
        "costs": source,
        "hardware": describe_hardware() if args.executor == "jax" else None,
        "versions": versions(),
        "between_tokens": between_tokens(run, config, costs, args),
        "saturation": saturation(run, config, costs, args),
    }
    write_json(args.out, values)


if __name__ == "__main__":
    main()
