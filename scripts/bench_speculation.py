"""What drafts gain: tokens a second of editing and of ordinary completion, over numbers of streams.

    python scripts/bench_speculation.py --out speculation.json

Engines of one model, without drafts, with fixed numbers of them, and with as many as pay by cost, take turns
on the same prompts, so that what else the machine does meets all of them. What counts is the median over
`--repeats` of the ratio to the engine without drafts in the same turn, and its standard error. A second
engine without drafts shows what ratio two equal ones have. Editing is greedy: part of a file, and
its beginning once more. Ordinary completion samples at a temperature of 0.8.

    python scripts/bench_speculation.py --simulate docs/speculation.png --out simulated.json

draws what a draft model of 1B would gain Llama-3-8B on an H100 instead, simulated, over batch sizes and
shares of drafts that are right, beside the formula of Leviathan et al. (2023, theorem 3.8), to which a
verification takes no longer than a decode.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm import LLM, SamplingParams
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.results import about, write_json
from jaxllm.research.figures import COLOURS, check_picture, import_pyplot, save
from jaxllm.sched import queues, reading, running
from jaxllm.sched.policies import iterations, order, priority
from jaxllm.system.options import sizes
from jaxllm.system.output_files import OutputParser, new_file

_MODULES = queues, reading, running, iterations, order, priority
_PROMPTS = 64
_CONTROL = "off again"
_RESAMPLES = 500
_OPENINGS = (
    "def read_lines(path):\n",
    "import json\n\n\ndef load(",
    "class Queue:\n    def __init__(self",
    "for number in range(",
    "# Count the words of a text\n",
    "try:\n    import numpy\nexcept ",
    "def test_sum():\n    assert ",
    "async def fetch(session, url):\n",
)


def prompts_of(kind: str, count: int) -> list[str]:
    """Prompts, each of its own: parts of files, or openings."""
    if kind == "chat":
        return [f"# Part {number}\n{_OPENINGS[number % len(_OPENINGS)]}" for number in range(count)]
    prompts = []
    for number in range(count):
        lines = inspect.getsource(_MODULES[number % len(_MODULES)]).splitlines()
        first = 10 + 5 * (number // len(_MODULES)) % max(1, len(lines) - 50)
        part = "\n".join(lines[first : first + 36])
        prompts.append(f"{part}\n\n\n# Again:\n{part[: len(part) // 6]}")
    return prompts


def params_of(kind: str, num_tokens: int) -> SamplingParams:
    """Greedy for edits, else at random."""
    if kind == "edit":
        return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(temperature=0.8, seed=1, max_tokens=num_tokens, ignore_eos=True)


def configs_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings by name, that without drafts first."""
    found: dict[str, dict[str, Any]] = {"off": {}, _CONTROL: {}}
    common: dict[str, Any] = {"method": args.method}
    if args.draft_model or args.method == "draft_model":
        common["model"] = args.draft_model or demo_model_path()
    for count in args.fixed:
        config = {**common, "policy": "fixed", "num_speculative_tokens": count}
        found[f"fixed {count}"] = {"speculative_config": config}
        if args.apart:
            found[f"fixed {count}, apart"] = {"speculative_config": config, "num_scheduler_steps": 1}
    if args.most:
        config = {**common, "policy": "cost", "num_speculative_tokens": args.most}
        found["by cost"] = {"speculative_config": config}
    return found


def one_run(
    llm: LLM, kind: str, streams: int, num_tokens: int, groups: int
) -> tuple[float, float, list[list[int]]]:
    """Tokens a second, tokens of each verification, and the tokens, of so many streams at a time."""
    prompts = prompts_of(kind, streams * max(1, min(groups, _PROMPTS // streams)))
    speculation = llm.engine.scheduler.speculation
    before = (0, 0)
    if speculation is not None:
        before = speculation.counts.num_verifications, speculation.counts.num_kept
    began = time.perf_counter()
    outputs = []
    for first in range(0, len(prompts), streams):
        group = prompts[first : first + streams]
        outputs += llm.generate(group, params_of(kind, num_tokens), use_tqdm=False)
    seconds = time.perf_counter() - began
    yielded = 0.0
    if speculation is not None and (count := speculation.counts.num_verifications - before[0]):
        yielded = 1 + (speculation.counts.num_kept - before[1]) / count
    tokens = [list(output.token_ids) for output in outputs]
    return sum(map(len, tokens)) / seconds, yielded, tokens


def standard_error(ratios: Sequence[float]) -> float:
    """That of their median, by drawing from them as many again and again."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)]
    return statistics.stdev(medians)


def measure(
    llms: dict[str, LLM], kind: str, streams: int, num_tokens: int, groups: int, repeats: int
) -> dict[str, Any]:
    """A case, all engines in turns, in any order, after one run each that does not count."""
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    yielded, same = dict.fromkeys(llms, 0.0), dict.fromkeys(llms, True)
    shuffle = random.Random(0)
    for turn in range(repeats + 1):
        outputs: dict[str, list[list[int]]] = {}
        for name in shuffle.sample(list(llms), len(llms)):
            speed, per_step, tokens = one_run(llms[name], kind, streams, num_tokens, groups)
            outputs[name] = tokens
            if turn:
                speeds[name].append(speed)
                yielded[name] += per_step / repeats
        for name, tokens in outputs.items():
            same[name] &= tokens == outputs["off"]
    ratios = {
        name: [one / off for one, off in zip(found, speeds["off"], strict=True)]
        for name, found in speeds.items()
    }
    return {
        "kind": kind,
        "streams": streams,
        "tokens_per_second": speeds,
        "ratio": {name: statistics.median(found) for name, found in ratios.items()},
        "standard_error": {name: standard_error(found) for name, found in ratios.items()},
        "tokens_per_verification": yielded,
        "same_tokens": same,
    }


def line_of(row: dict[str, Any]) -> str:
    """A case in a line: each engine's ratio, its standard error, and the tokens of a verification."""
    parts = [
        f"{name} {row['ratio'][name]:.3f} ± {row['standard_error'][name]:.3f} "
        f"({row['tokens_per_verification'][name]:.1f})"
        for name in row["ratio"]
        if name != "off"
    ]
    off = statistics.median(row["tokens_per_second"]["off"])
    return f"{row['kind']:5} {row['streams']:3} streams: off {off:.0f} tokens/s; {', '.join(parts)}"


_TARGET, _DRAFT, _DEVICE = "llama-3-8b", "llama-3.2-1b", "h100"
_BATCHES, _SHARES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (0.5, 0.6, 0.7, 0.8, 0.9)
_MOST, _FIXED, _PROMPT, _OUTPUT = 8, 4, 512, 256


def formula(share: float, count: int, cost: float) -> float:
    """Leviathan's gain of `count` drafts at `cost` target's steps, each right with probability `share`."""
    return (1 - share ** (count + 1)) / (1 - share) / (count * cost + 1)


def simulated(batch: int, drafts: dict[str, Any] | None) -> float:
    """Tokens a second of so many clients."""
    from jaxllm.research import simulate
    from jaxllm.research.workloads import UniformLengths

    found = simulate(
        model=_TARGET,
        device=_DEVICE,
        policy="vllm_v1",
        dataset=UniformLengths(shortest=_PROMPT, longest=_PROMPT),
        output_len=_OUTPUT,
        num_prompts=max(96, 8 * batch),
        closed=batch,
        max_num_seqs=batch,
        speculative_config=drafts and {"model": _DRAFT, **drafts},
    )
    return found.figure("vllm_v1", "tokens_per_second").mean


def simulated_rows() -> list[dict[str, Any]]:
    """Gains of each batch and share: of a fixed number, by cost, and by the formula with its best number."""
    from jaxllm.research.simulator.system import make_system

    costs = [make_system(model, device=_DEVICE).costs for model in (_TARGET, _DRAFT)]
    rows = []
    for batch in _BATCHES:
        plain, context = simulated(batch, None), batch * (_PROMPT + _OUTPUT // 2)
        target, draft = (model.step_seconds(batch, context) for model in costs)
        for share in _SHARES:
            drafts = {"acceptance": share, "num_speculative_tokens": _MOST}
            fixed = {**drafts, "num_speculative_tokens": _FIXED, "policy": "fixed"}
            row = {
                "batch": batch,
                "acceptance": share,
                "tokens_per_second": plain,
                "fixed": simulated(batch, fixed) / plain,
                "by cost": simulated(batch, drafts) / plain,
                "formula": max(formula(share, count, draft / target) for count in range(_MOST + 1)),
            }
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Gain over the batch, by how likely drafts are right."""
    figure, panels = import_pyplot().subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for panel, name, title in zip(
        panels,
        ("by cost", "fixed"),
        (f"up to {_MOST} drafts, by cost", f"{_FIXED} drafts, always"),
        strict=True,
    ):
        for colour, share in zip(COLOURS, _SHARES, strict=False):
            of_share = [row for row in rows if row["acceptance"] == share]
            label = f"{share:.0%} of drafts right"
            panel.plot(_BATCHES, [row[name] for row in of_share], marker="o", color=colour, label=label)
            panel.plot(_BATCHES, [row["formula"] for row in of_share], color=colour, linestyle=":")
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(_BATCHES, map(str, _BATCHES))
        panel.set_xlabel("requests that decode together")
        panel.set_title(title, loc="left", fontsize=10)
    panels[0].set_ylabel("tokens/s over those without drafts")
    panels[0].legend(fontsize=8)
    (free,) = panels[1].plot([], [], color="black", linestyle=":", label="if verifying were free (Leviathan)")
    panels[1].legend(handles=[free], fontsize=8, loc="lower left")
    save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, required=True)
    parser.add_argument("--model", help="folder of a checkpoint; by default the embedded model")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--fixed", type=sizes, default=[3, 5, 8], help="fixed numbers of drafts")
    parser.add_argument(
        "--draft-model", help="folder, of draft_model (by default the embedded model), medusa or eagle3"
    )
    parser.add_argument("--apart", action="store_true", help="fixed numbers also with the host between steps")
    parser.add_argument("--most", type=int, default=8, help="most drafts by cost; 0 for none")
    parser.add_argument("--streams", type=sizes, default=[1, 8, 64])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["edit", "chat"])
    parser.add_argument("--tokens", type=int, default=96, help="of each output")
    parser.add_argument(
        "--groups",
        type=int,
        default=16,
        help=f"of streams a turn, one after another, of {_PROMPTS} prompts at most",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--simulate", type=Path, metavar="FILE.png", help="draw a simulated H100 instead")
    args = parser.parse_args(argv)
    if min(args.groups, args.repeats, args.tokens, *args.streams) < 1:
        parser.error("--groups, --repeats, --tokens and --streams must be at least 1")
    if unknown := {*args.kinds} - {"edit", "chat"}:
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}; there are edit and chat")
    if args.draft_model and args.method not in ("draft_model", "medusa", "eagle3"):
        parser.error(f"--draft-model means nothing to --method {args.method}")
    command = ["python", "scripts/bench_speculation.py", *(sys.argv[1:] if argv is None else argv)]
    if args.simulate is not None:
        with parser.errors():
            check_picture(args.simulate)
        rows = simulated_rows()
        draw(rows, args.simulate)
        write_json(args.out, {**about(command), "rows": rows})
        return
    llms = {
        name: LLM(args.model, max_num_seqs=64, warm_up="all", **settings)
        for name, settings in configs_of(args).items()
    }
    rows = []
    for kind in args.kinds:
        for streams in args.streams:
            row = measure(llms, kind, streams, args.tokens, args.groups, args.repeats)
            print(line_of(row), flush=True)
            rows.append(row)
    values = about(command)
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        values["note"] = "other work kept the processors busy: ratios, taken in turns, tell more than seconds"
    write_json(args.out, {**values, "rows": rows})


if __name__ == "__main__":
    main()
