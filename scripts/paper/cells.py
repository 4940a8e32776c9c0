"""The runs of the evaluation: which there are, and how the simulator does one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from sweep.simulated import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    Device,
)

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.roofline import DEFAULT_STEP_OVERHEAD_SECONDS
from jaxllm.research.simulator.load import sent
from jaxllm.research.workloads import (
    PromptDataset,
    Trace,
    fit_trace,
    load_dataset_file,
    load_trace,
    make_trace,
    parse_arrivals,
)
from jaxllm.sched.policies import (
    AdaptiveAction,
    AlwaysRecompute,
    Decision,
    FairPriority,
    PoolState,
    PreemptionAction,
    SchedulingPolicy,
)
from jaxllm.sched.presets import make_preset, paper
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.types import Request

MODELS = ("opt-13b", "opt-30b", "llama-13b", "llama-32.5b")
DATASETS = ("chatbot", "alpaca", "summary")
PRESETS = ("vllm", "vllm_swap", "vllm_v1", "paper_strategy", "paper", "adaptive")
OVERLAPPING = frozenset({"adaptive"})
"""Presets whose copies run beside computation by default. In the published systems they stop the device."""
OUTPUT_LENGTHS = (8, 16, 32, 64, 128, 256)
BATCH_LIMITS = (8, 16, 32, 64, 128)
CLOSED_LOOP = "closed:128"
PARTS = ("table3", "readings", "fig3", "fig4", "control", "swap_both")
MAX_PROMPT_LEN = 1500  # of a data set's file, as of the shapes assumed
OUTPUTS = ("max", "uniform")


class MostUrgentVictim:
    """Algorithm 1 as its pseudo-code is printed: sorted ascending by priority, taken from the end."""

    outranks = None

    def score(self, request: Request, now: float) -> float:
        """The most urgent goes first."""
        return -FairPriority().score(request, now)


@dataclasses.dataclass(frozen=True)
class CompareThenRecompute:
    """The paper's control of Section 4.6: predicts both costs, and recomputes whatever they are."""

    action: AdaptiveAction

    def choose(self, victim: Request, state: PoolState, now: float) -> Decision:
        """Recompute."""
        return self.action.choose(victim, state, now)._replace(action=PreemptionAction.RECOMPUTE)


def _literal(costs: CostModel) -> SchedulingPolicy:
    return dataclasses.replace(paper(costs), victim=MostUrgentVictim())


def _comparing(costs: CostModel) -> SchedulingPolicy:
    return dataclasses.replace(paper(costs), action=CompareThenRecompute(AdaptiveAction(costs)))


def _not_comparing(costs: CostModel) -> SchedulingPolicy:
    return dataclasses.replace(paper(costs), action=AlwaysRecompute())


VARIANTS: Mapping[str, Callable[[CostModel], SchedulingPolicy]] = {
    "paper, literal": _literal,
    "paper, compares and recomputes": _comparing,
    "paper, recomputes": _not_comparing,
}
"""Policies of this evaluation alone, beside the presets."""


def policy_of(name: str, costs: CostModel) -> SchedulingPolicy:
    """A preset or one of `VARIANTS`."""
    return VARIANTS[name](costs) if name in VARIANTS else make_preset(name, costs)


class Reading(NamedTuple):
    """One of the settings that the paper's text allows; a row of Table 3.

    `arrivals` is of `jaxllm.research.workloads.parse_arrivals`, `overhead` seconds of the host a step, `why`
    what in the paper speaks for it.
    """

    name: str
    preset: str
    arrivals: str
    why: str
    layout: str = "block"
    overhead: float = DEFAULT_STEP_OVERHEAD_SECONDS
    overlap: bool = False

    @property
    def full_name(self) -> str:
        """The name without the row above it."""
        of = "strategy alone" if self.preset == "paper_strategy" else "scheduler and strategy"
        return self.name.replace("...", f"{of},")


_EAGER = 15e-3
OWN = ("device", "link", "num_gpu_blocks", "num_host_blocks", "kv_cache_dtype", "trace", "too_long")
"""Fields of a `Cell` that are of settings other than the paper's."""
RECORDED = "recorded"
"""Arrivals of a trace, as they are."""
READINGS = (
    Reading("scheduler and strategy, all at once", "paper", "all", "all requests sent before the first step"),
    Reading(
        "scheduler and strategy, 128 clients", "paper", "closed:128", 'requests are sent by "many threads"'
    ),
    Reading("scheduler and strategy, 64 clients", "paper", "closed:64", "as many threads as the batch limit"),
    Reading(
        "... 128 clients, printed Algorithm 1",
        "paper, literal",
        "closed:128",
        "the pseudo-code sorts ascending and pops the end: the most urgent",
    ),
    Reading(
        "... 128 clients, vLLM's layout",
        "paper",
        "closed:128",
        "vLLM copies each block, layer, K and V apart: about 11 GB/s",
        layout="layer",
    ),
    Reading(
        "... 128 clients, slow host",
        "paper",
        "closed:128",
        "an eager PyTorch step's 15 ms of the host",
        overhead=_EAGER,
    ),
    Reading(
        "strategy alone, all at once", "paper_strategy", "all", "Section 4.3 tests the memory strategy apart"
    ),
    Reading("strategy alone, 128 clients", "paper_strategy", "closed:128", "likewise"),
    Reading("... vLLM's layout", "paper_strategy", "closed:128", "the link at about 11 GB/s", layout="layer"),
    Reading("... slow host", "paper_strategy", "closed:128", "15 ms of the host a step", overhead=_EAGER),
    Reading(
        "... copies overlapped",
        "paper_strategy",
        "closed:128",
        "copies on a CUDA stream of their own, as vLLM's swaps are",
        overlap=True,
    ),
    Reading(
        "... copies overlapped, vLLM's layout",
        "paper_strategy",
        "closed:128",
        "both",
        layout="layer",
        overlap=True,
    ),
    Reading(
        "... copies overlapped, slow host",
        "paper_strategy",
        "closed:128",
        "both",
        overhead=_EAGER,
        overlap=True,
    ),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run; `layout`, `overhead` and `overlap` as in `Reading`, `data` as for `prompts_of`.

    `costs` is the simulated device's (`sweep.simulated.COSTS`). What follows it is None in the paper's own
    setting: the device's name, the bytes per second of its link, its pools, KV's dtype, and a trace's file in
    place of a data set, with what becomes of its requests that are too long (`fit_trace`).
    """

    part: str
    model: str
    dataset: str
    preset: str
    max_output_len: int
    max_num_seqs: int
    outputs: str
    arrivals: str
    overlap: bool
    num_requests: int
    seed: int
    samples: str | None = None
    data: str | None = None
    layout: str = "block"
    overhead: float = DEFAULT_STEP_OVERHEAD_SECONDS
    costs: str = "roofline"
    device: str | None = None
    link: float | None = None
    num_gpu_blocks: int | None = None
    num_host_blocks: int | None = None
    kv_cache_dtype: str | None = None
    trace: str | None = None
    too_long: str | None = None

    def simulated(self) -> Device:
        """What it runs on."""
        return Device(
            self.model,
            self.layout,
            step_overhead=self.overhead,
            samples=self.samples,
            seed=self.seed,
            source=self.costs,
            device=self.device,
            link=self.link,
            num_gpu_blocks=self.num_gpu_blocks,
            num_host_blocks=self.num_host_blocks,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def values(self) -> dict[str, Any]:
        """Its fields, without those of settings other than the paper's where it has none."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if name not in OWN or value is not None}


def make_cells(
    parts: Sequence[str],
    models: Sequence[str],
    datasets: Sequence[str],
    *,
    num_requests: int,
    seeds: Sequence[int],
    max_num_seqs: int = MAX_NUM_SEQS,
    presets: Sequence[str] = PRESETS,
    batch_limits: Sequence[int] = BATCH_LIMITS,
    arrivals: Sequence[str] = (CLOSED_LOOP, "all"),
    samples: str | None = None,
    data: Mapping[str, str] = MappingProxyType({}),
    costs: str = "roofline",
    own: Mapping[str, Any] = MappingProxyType({}),
) -> list[Cell]:
    """Every run of the parts (`PARTS`); `data` has files of prompts by data set, `own` of `OWN` what is set.

    Fig. 4 has all models for the first of the arrivals, and the first model for the others.
    """
    cells: list[Cell] = []
    groups = list(itertools.product(seeds, models, datasets))

    def add(part: str, preset: str, length: int, limit: int, outputs: str, sent: str, **changes: Any) -> None:
        changes.setdefault("overlap", preset in OVERLAPPING)
        is_beside = part == "fig4" and sent != arrivals[0]
        for seed, model, dataset in groups:
            if is_beside and model != models[0]:
                continue
            cells.append(
                Cell(
                    part,
                    model,
                    dataset,
                    preset,
                    length,
                    limit,
                    outputs,
                    sent,
                    num_requests=num_requests,
                    seed=seed,
                    samples=samples,
                    data=data.get(dataset),
                    costs=costs,
                    **own,
                    **changes,
                )
            )

    if "table3" in parts:
        for sent, preset, outputs in itertools.product(arrivals, presets, OUTPUTS):
            add("table3", preset, 64, max_num_seqs, outputs, sent)
    if "fig3" in parts:
        for preset, length in itertools.product(presets, OUTPUT_LENGTHS):
            add("fig3", preset, length, max_num_seqs, "max", arrivals[0])
    if "fig4" in parts:
        for sent, preset, limit in itertools.product(arrivals, presets, batch_limits):
            if limit <= max_num_seqs:
                add("fig4", preset, 64, limit, "max", sent)
    if "readings" in parts:
        limit = min(max(BATCH_LIMITS), max_num_seqs)
        for outputs in OUTPUTS:
            baselines = dict.fromkeys((reading.arrivals, reading.overhead) for reading in READINGS)
            for sent, overhead in baselines:
                add("readings", "vllm", 64, limit, outputs, sent, overhead=overhead)
            for reading in READINGS:
                changes = {
                    "layout": reading.layout,
                    "overhead": reading.overhead,
                    "overlap": reading.overlap,
                }
                add("readings", reading.preset, 64, limit, outputs, reading.arrivals, **changes)
    if "swap_both" in parts:
        for preset, outputs in itertools.product(("vllm_swap", "vllm_swap_both", "adaptive"), OUTPUTS):
            add("swap_both", preset, 64, max_num_seqs, outputs, arrivals[0])
    if "control" in parts:
        for preset in ("paper, compares and recomputes", "paper, recomputes"):
            add("control", preset, 64, max_num_seqs, "max", arrivals[0])
    return cells


@functools.lru_cache(maxsize=8)
def prompts_of(data: str) -> PromptDataset:
    """The prompts of `FILE:COLUMN:TOKENIZER`, those of usable length.

    Raises:
        ConfigError: it is not of that form, or cannot be read.
    """
    path, *rest = data.rsplit(":", 2)
    if len(rest) != 2:
        raise ConfigError(f"data {data!r}: write FILE:COLUMN:TOKENIZER, the last a checkpoint's folder")
    tokenizer = load_tokenizer(rest[1])
    return load_dataset_file(path, rest[0], tokenizer, max_prompt_len=MAX_PROMPT_LEN, on_bad="skip")


@functools.lru_cache(maxsize=2)
def recorded(path: str) -> Trace:
    """The trace of a file."""
    return load_trace(path)


def trace_of(cell: Cell) -> Trace:
    """What a cell plays."""
    if cell.trace is not None:
        found = recorded(cell.trace)
        found = found.head(min(cell.num_requests, len(found)))
        pool = cell.simulated().system().num_gpu_blocks * BLOCK_SIZE
        found = fit_trace(found, pool, cell.too_long or "raise", limit_name="--gpu-blocks x block size")
        return found if cell.arrivals == RECORDED else sent(found, cell.arrivals, cell.seed)
    return make_trace(
        cell.dataset if cell.data is None else prompts_of(cell.data),
        cell.num_requests,
        cell.max_output_len,
        outputs="max" if cell.outputs == "max" else "uniform",
        arrivals=parse_arrivals(cell.arrivals),
        seed=cell.seed,
    )


def fitting(trace: Trace, max_model_len: int) -> Trace:
    """The trace with prompts cut to what the model's positions leave beside the outputs.

    Texts, which nobody cuts, are dropped where a prompt is cut.

    Raises:
        ConfigError: an output leaves no room for a prompt.
    """
    longest = max_model_len - trace.output_lens
    if longest.min() < 1:
        raise ConfigError(
            f"outputs of {trace.output_lens.max()} tokens leave no prompt in {max_model_len} positions"
        )
    lens, ids = np.minimum(trace.prompt_lens, longest), trace.prompt_token_ids
    if np.array_equal(lens, trace.prompt_lens):
        return trace
    if ids is not None:
        ids = tuple(prompt[:length] for prompt, length in zip(ids, lens.tolist(), strict=True))
    return dataclasses.replace(trace, prompt_lens=lens, prompt_token_ids=ids, prompt_texts=None)


def simulate_cell(cell: Cell, *, is_table: bool = False) -> dict[str, Any]:
    """Simulate one cell; the result holds its fields and the summary; `is_table` as in `Device.run`."""
    trace = trace_of(cell)
    result = cell.simulated().run(
        trace,
        lambda costs: policy_of(cell.preset, costs),
        overlap=cell.overlap,
        max_num_seqs=cell.max_num_seqs,
        is_table=is_table,
        caches=cell.trace is not None and trace.shares_prefixes,
    )
    return {
        **cell.values(),
        **result.summary(),
        "scheduling_seconds": result.scheduling_seconds,
    }
