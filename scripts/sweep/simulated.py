"""A simulated A800 with the paper's pools, its noise, and runs on it that an interruption does not lose."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jaxllm
from jaxllm.predictors.base import CostModel, model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.roofline import DEFAULT_STEP_OVERHEAD_SECONDS, RooflineCostModel
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.predictors.table import TableAxes, TableCostModel
from jaxllm.research.simulator.fitted import noise_and_predictor
from jaxllm.research.simulator.run import simulate
from jaxllm.research.simulator.truth import Residuals
from jaxllm.research.workloads import Trace
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulingPolicy

DEVICE, MEASURED_DEVICE = "A800-80GB-PCIe", "A100-80GB"
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 128, 64, 16
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 2048, 256, 2560
LAYOUTS = ("block", "layer")
COSTS = ("roofline", "silicon")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Device:
    """A simulated device: a roofline of an A800 or kernels measured on an A100, and a real profile's noise.

    Args:
        model: one of the paper's.
        layout: of a block in the pool. In "block" its layers lie together, as in this engine; in "layer" K
            and V of each are copied apart, as vLLM 0.2.5 does.
        link_speed: times the data sheet's, or the measured one.
        step_overhead: fixed seconds of a step; of a roofline.
        samples: file of a real profile's measurements, whose noise to take; None for none.
        seed: of the noise, and of what the predictors are fitted to.
        source: of the costs, of `COSTS`; measured kernels have only the layout "block".
    """

    model: str
    layout: str = "block"
    link_speed: float = 1.0
    step_overhead: float = DEFAULT_STEP_OVERHEAD_SECONDS
    samples: str | None = None
    seed: int = 0
    source: str = "roofline"

    def costs(self) -> RooflineCostModel | SiliconCostModel:
        """Without noise."""
        if self.source == "silicon":
            return _silicon(self.model, self.link_speed)
        shape, device = model_shape(self.model), device_spec(DEVICE)
        return RooflineCostModel(
            shape,
            dataclasses.replace(device, host_bandwidth=device.host_bandwidth * self.link_speed),
            block_size=BLOCK_SIZE,
            step_overhead_seconds=self.step_overhead,
            pieces_per_block=2 * shape.num_layers if self.layout == "layer" else 0,
        )

    def run(
        self,
        trace: Trace,
        policy: Callable[[CostModel], SchedulingPolicy],
        *,
        overlap: bool,
        num_host_blocks: int = NUM_HOST_BLOCKS,
        max_num_seqs: int = MAX_NUM_SEQS,
        is_table: bool = False,
    ) -> RunResult:
        """Simulate; the policy knows costs through predictors alone, corrected while it runs.

        Without noise costs are known exactly; with `is_table`, be there noise or not, through a table of
        them, which is what an engine looks costs up in.
        """
        residuals, predicted = _noise_and_predictor(self)
        if is_table:
            predicted = _table(self)
        calibration = OnlineCalibration(predicted) if is_table or self.samples is not None else None
        config = SchedulerConfig(
            num_gpu_blocks=NUM_GPU_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_host_blocks=num_host_blocks,
        )
        return simulate(
            trace,
            config,
            policy(calibration or predicted),
            self.costs(),
            overlap_swaps=overlap,
            residuals=residuals,
            calibration=calibration,
        )


def noise_of(device: Device) -> Residuals:
    """What the device's costs are multiplied by."""
    return _noise_and_predictor(device)[0]


@functools.lru_cache(maxsize=8)
def _silicon(model: str, link_speed: float) -> SiliconCostModel:
    link = device_spec(MEASURED_DEVICE).copied_per_second * link_speed
    return SiliconCostModel(model_shape(model), MEASURED_DEVICE, block_size=BLOCK_SIZE, link=link)


@functools.lru_cache(maxsize=64)
def _noise_and_predictor(device: Device) -> tuple[Residuals, CostModel]:
    return noise_and_predictor(
        device.costs(),
        model_shape(device.model),
        device.samples,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        seed=device.seed,
    )


@functools.lru_cache(maxsize=8)
def _table(device: Device) -> TableCostModel:
    axes = TableAxes.geometric(
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        max_context_tokens=NUM_GPU_BLOCKS * BLOCK_SIZE,
        max_num_blocks=NUM_GPU_BLOCKS,
        max_prefill_context_tokens=MAX_MODEL_LEN,
    )
    return TableCostModel.distil(device.costs(), axes)


def run_all(
    cells: Sequence[Any], run: Callable[[Any], Row], *, jobs: int, journal: pathlib.Path
) -> list[Row]:
    """Rows of all cells, in their order; `journal` keeps them for runs of the same sources and files.

    Args:
        cells: frozen dataclasses of JSON values; a field `samples` names a file, `data` a
            FILE:COLUMN:TOKENIZER.
        run: makes a row of a cell; a module's function, for other processes.
        jobs: processes.
        journal: JSON lines: hashes of sources and files, then a cell and its row each.
    """
    journal.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Row] = {}
    header = json.dumps({"sources": _hash_of(source_files()), "files": _files_hash(cells)})
    text = journal.read_text(encoding="utf-8") if journal.exists() else ""
    lines = text.splitlines()
    if lines and lines[0] == header:
        for line in lines[1:]:
            try:
                cell, row = json.loads(line)
            except ValueError:  # the last one, cut off
                continue
            found[json.dumps(cell)] = row
    else:
        lines = []
    keys = [json.dumps(dataclasses.asdict(cell)) for cell in cells]
    missing = list({key: cell for key, cell in zip(keys, cells, strict=True) if key not in found}.items())
    if found and missing:
        print(f"{len(keys) - len(missing)} of {len(keys)} runs are in {journal}", file=sys.stderr)
    with journal.open("a" if lines else "w", encoding="utf-8") as file:
        if not lines:
            file.write(header + "\n")
        elif not text.endswith("\n"):
            file.write("\n")
        for key, row in zip([key for key, _ in missing], _mapped(run, missing, jobs), strict=True):
            found[key] = row
            file.write(f"[{key}, {json.dumps(row)}]\n")
            file.flush()
    return [found[key] for key in keys]


def _mapped(run: Callable[[Any], Row], missing: Sequence[tuple[str, Any]], jobs: int) -> Iterator[Row]:
    cells = [cell for _, cell in missing]
    if jobs == 1 or len(cells) < 2:
        yield from map(run, cells)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(run, cells, chunksize=max(1, min(8, len(cells) // (4 * jobs))))


def source_files() -> list[pathlib.Path]:
    """All that decides what a run gives."""
    package, scripts = pathlib.Path(jaxllm.__file__).parent, pathlib.Path(__file__).parents[1]
    folders = [package / name for name in ("sched", "predictors", "research/simulator", "research/workloads")]
    folders += [package / "engine", *(scripts / name for name in ("paper", "policies", "sweep"))]
    found = sorted(package.glob("*.py"))
    for folder in folders:
        found += [path for path in sorted(folder.glob("**/*.py")) if "report" not in path.name]
    return found


def _files_hash(cells: Sequence[Any]) -> str:
    """Of what the files hold that cells name."""
    named = {getattr(cell, "samples", None) for cell in cells}
    for data in {getattr(cell, "data", None) for cell in cells} - {None}:
        file, _, tokenizer = data.rsplit(":", 2)
        named |= {file, *map(str, pathlib.Path(tokenizer).glob("tokenizer*"))}
    return _hash_of([pathlib.Path(name) for name in sorted(named - {None})])


def _hash_of(paths: Sequence[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
