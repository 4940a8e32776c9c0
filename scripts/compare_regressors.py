"""AdaptiveLLM's eight regressors on kernels measured on a GPU: their errors, and what decisions lose by them.

    python scripts/compare_regressors.py --out out/regressors.json

Steps of random sizes take what `SiliconCostModel` says. Each regressor of the paper (Section 4.5), at the
best of ten degrees, is fitted to them: on a random split, and with the largest quarter of a size left out.
Then policies swap or recompute by what it predicts, corrected as the engine does, on links of several speeds,
simulated. What was measured comes to pass. Regret is what their choices took beyond the cheaper ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import multiprocessing
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from compare_on_silicon import LOADS, Cell, trace_of
from sweep.options import list_of

from jaxllm.predictors.base import CostKind, CostModel
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.regression import REGRESSORS, FittedRegressor, RegressionCostModel, Sample, fit
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.predictors.table import TableAxes, TableCostModel
from jaxllm.research.bench.results import about, write_json
from jaxllm.research.iterations import IterationFit, fit_iterations
from jaxllm.research.simulator.gpu import pool_blocks
from jaxllm.research.simulator.run import simulate
from jaxllm.research.simulator.truth import HindsightAction, RegretMeter, Residuals
from jaxllm.sched.baselines import VLLM025
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import AdaptiveAction, SchedulerPolicy
from jaxllm.sched.presets import make_preset
from jaxllm.system.output_files import OutputParser, new_file

EXACT = "the tables themselves"
PRESETS = ("paper_strategy", "adaptive")
_STEP, _BATCH, _CONTEXT, _PROMPTS = 8192, 256, 4096, 8
"""The most tokens of prompts, decodes, cached tokens of a sequence and prompts of a step that is drawn."""
_LONGEST = 32768
_MOST_DEGREE = 5  # of which mixed steps have fewer features than are fitted to


def drawn_steps(costs: SiliconCostModel, count: int, seed: int) -> list[Sample]:
    """So many steps of each kind, evenly on a logarithmic scale; half of the prompts begin at their start."""
    rng = np.random.default_rng(seed)

    def between(low: int, high: int) -> int:
        return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))

    samples = []
    for kind, _ in itertools.product(("decode", "prefill", "mixed"), range(count)):
        decodes, prompts = (0, 0), (0, 0, 0)
        if kind != "prefill":
            batch = between(1, _BATCH)
            decodes = batch, batch * between(16, _CONTEXT)
        if kind != "decode":
            num_prompts = between(1, _PROMPTS)
            cached = num_prompts * between(16, _CONTEXT) if rng.random() < 0.5 else 0
            prompts = max(num_prompts, between(16, _STEP)), num_prompts, cached
        samples.append(Sample.step(costs.model, costs.step_seconds(*decodes, *prompts), *decodes, *prompts))
    return samples


def copies(costs: SiliconCostModel, num_blocks: int) -> dict[CostKind, FittedRegressor]:
    """What the paper predicts copies by: their bytes over a bandwidth."""
    sizes = sorted({round(float(size)) for size in np.geomspace(1, num_blocks, 64)})
    made = [
        [
            Sample.swap_out(costs.model, costs.block_size, size, costs.swap_out_seconds(size))
            for size in sizes
        ],
        [Sample.swap_in(costs.model, costs.block_size, size, costs.swap_in_seconds(size)) for size in sizes],
    ]
    return {of[0].kind: fit(of, names=["linear"], degrees=[1]).regressor for of in made}


def table_of(costs: CostModel, num_blocks: int) -> TableCostModel:
    """What an engine looks costs up in."""
    axes = TableAxes.geometric(
        max_num_batched_tokens=_STEP,
        max_num_seqs=_BATCH,
        max_context_tokens=_BATCH * _CONTEXT,
        max_num_blocks=num_blocks,
        max_prefill_context_tokens=_CONTEXT,
    )
    return TableCostModel.distil(costs, axes)


def decided(
    cell: Cell,
    preset: str,
    link: float,
    steps: Mapping[CostKind, FittedRegressor],
    seeds: int,
) -> dict[str, float]:
    """What a preset loses that predicts by these regressors, or by the tables if there are none."""
    shape = model_shape(cell.model, "float16")
    costs = SiliconCostModel(shape, cell.device, tensor_parallel=cell.gpus, link=link * 1e9)
    num_blocks = cell.num_gpu_blocks or pool_blocks(costs)
    exact = table_of(costs, num_blocks)
    predicted: CostModel = exact
    if steps:
        fitted = RegressionCostModel({**steps, **copies(costs, num_blocks)}, shape, costs.block_size)
        predicted = table_of(fitted, num_blocks)
    config = SchedulerConfig(
        num_gpu_blocks=num_blocks,
        block_size=costs.block_size,
        max_model_len=_LONGEST,
        max_num_seqs=cell.max_num_seqs,
        max_num_batched_tokens=_STEP,
        num_host_blocks=int(cell.host_bytes / (costs.kv_bytes_per_token * costs.block_size)),
    )
    regret = best = wrong = decisions = 0.0
    speeds = []
    for seed in range(seeds):
        calibration = OnlineCalibration(predicted)
        policy = make_preset(preset, calibration)
        meter = RegretMeter(
            AdaptiveAction(calibration), HindsightAction(AdaptiveAction, costs, Residuals({}))
        )
        assert isinstance(policy, SchedulerPolicy | VLLM025)
        policy = dataclasses.replace(policy, action=meter)
        found = simulate(trace_of(cell, seed, 1.0), config, policy, costs, calibration=calibration)
        speeds.append(found.output_tokens_per_second)
        regret, best = regret + meter.regret_seconds, best + meter.best_seconds
        wrong, decisions = wrong + meter.num_wrong, decisions + meter.num_decisions
    return {
        "tokens_per_second": statistics.fmean(speeds),
        "decisions": decisions,
        "wrong": wrong / max(1.0, decisions),
        "regret": regret / best if best else 0.0,
    }


def errors_of(found: IterationFit) -> dict[str, Any]:
    """Of a kind of step: on a random split, and where the fit had nothing of the like."""
    assert found.report.test is not None
    regions = {region.name: region.errors.mape for region in found.regions}
    return {"degree": found.report.chosen.degree, "random": found.report.test.mape, "left_out": regions}


def one_row(
    cell: Cell, name: str, links: Sequence[float], count: int, degrees: Sequence[int], seeds: int
) -> dict[str, Any]:
    """A regressor, its errors and its decisions."""
    steps: dict[CostKind, FittedRegressor] = {}
    errors = {}
    if name != EXACT:
        costs = SiliconCostModel(model_shape(cell.model, "float16"), cell.device, tensor_parallel=cell.gpus)
        for found in fit_iterations(drawn_steps(costs, count, 0), names=[name], degrees=degrees):
            steps[found.report.kind] = found.regressor
            errors[str(found.report.kind)] = errors_of(found)
    decisions = [
        {"preset": preset, "link": link, **decided(cell, preset, link, steps, seeds)}
        for preset, link in itertools.product(PRESETS, links)
    ]
    return {"regressor": name, "errors": errors, "decisions": decisions}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown: a line for each regressor, means over what was left out, and the largest regrets."""
    kinds = ("decode", "prefill", "mixed")
    exact = next(row for row in rows if row["regressor"] == EXACT)
    lines = [
        f"| regressor | {' | '.join(f'{kind}, random split | left out' for kind in kinds)} | wrong choices | "
        "regret | tokens/s over exact |",
        "|---|" + "---:|" * (2 * len(kinds) + 3),
    ]
    for row in rows:
        cells = []
        for kind in kinds:
            of_kind = row["errors"].get(kind)
            cells += ["-", "-"] if of_kind is None else [f"{of_kind['random']:.1%}"]
            if of_kind is not None:
                left_out = of_kind["left_out"].values()
                cells.append(f"{statistics.fmean(left_out):.1%}" if left_out else "-")
        made = row["decisions"]
        ratios = [
            one["tokens_per_second"] / other["tokens_per_second"]
            for one, other in zip(made, exact["decisions"], strict=True)
        ]
        total = sum(one["decisions"] for one in made)
        wrong = sum(one["wrong"] * one["decisions"] for one in made) / max(1.0, total)
        cells += [f"{wrong:.1%}", f"{max(one['regret'] for one in made):.1%}"]
        lines.append(f"| {row['regressor']} | {' | '.join(cells)} | {min(ratios):.3f}..{max(ratios):.3f} |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, required=True, help="JSON file to write")
    parser.add_argument("--model", default="llama-2-13b")
    parser.add_argument("--device", default="a100")
    parser.add_argument("--load", default="chat", help="of scripts/compare_on_silicon.py")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--blocks", type=int, help="of the pool (default: what fits)")
    parser.add_argument("--links", type=list_of(float), default=[6.0, 12.0, 22.0, 50.0], help="GB/s")
    parser.add_argument("--regressors", type=list_of(str), default=list(REGRESSORS))
    parser.add_argument("--degrees", type=list_of(int), default=list(range(1, 11)))
    parser.add_argument("--samples", type=int, default=2000, help="steps of each kind")
    parser.add_argument("--seeds", type=int, default=3, help="of the traces, from 0 on")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.regressors if name not in REGRESSORS]:
        parser.error(f"--regressors: there is no {', '.join(unknown)}; there are {', '.join(REGRESSORS)}")
    if min(args.requests, args.seeds, args.jobs, args.samples // 100, args.blocks or 1) < 1:
        parser.error("--requests, --seeds, --jobs and --blocks must be at least 1, --samples 100")
    if args.blocks == 0 or not all(0 < link < math.inf for link in args.links):
        parser.error("--blocks must be at least 1, and --links above 0 and finite")
    if not 1 <= min(args.degrees) <= _MOST_DEGREE or max(args.degrees) > 10:
        parser.error(f"--degrees are from 1 to 10, and one of them at most {_MOST_DEGREE}")
    if args.load not in LOADS:
        parser.error(f"--load {args.load}: there are {', '.join(LOADS)}")
    with parser.errors():
        pool_blocks(SiliconCostModel(model_shape(args.model, "float16"), args.device))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, simulate, print a table, write one JSON file."""
    args = parse_args(argv)
    cell = Cell(args.device, args.model, args.load, _BATCH, args.requests, num_gpu_blocks=args.blocks)
    names = [EXACT, *args.regressors]
    run = functools.partial(
        one_row, cell, links=args.links, count=args.samples, degrees=args.degrees, seeds=args.seeds
    )
    if args.jobs == 1:
        rows = [*map(run, names)]
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            rows = [*pool.map(run, names)]
    print(summary(rows))
    command = ["python", "scripts/compare_regressors.py", *(sys.argv[1:] if argv is None else argv)]
    write_json(args.out, {**about(command), "rows": rows})


if __name__ == "__main__":
    main()
