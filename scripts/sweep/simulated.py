"""A simulated device, by default an A800 with the paper's pools; runs that an interruption does not lose."""

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
from jaxllm.predictors.base import CostModel, ModelShape
from jaxllm.predictors.devices import DeviceSpec, device_spec
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.roofline import DEFAULT_STEP_OVERHEAD_SECONDS, RooflineCostModel
from jaxllm.predictors.table import TableAxes, TableCostModel
from jaxllm.research.shapes import load_shape
from jaxllm.research.simulator.fitted import noise_and_predictor
from jaxllm.research.simulator.run import simulate
from jaxllm.research.simulator.system import System, make_system
from jaxllm.research.simulator.truth import Residuals
from jaxllm.research.workloads import Trace
from jaxllm.research.workloads.result import RunResult
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulingPolicy

DEVICE, MEASURED_DEVICE = "A800-80GB-PCIe", "A100-80GB"
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 128, 64, 16
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 2048, 256, 2560
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
        device: its name; None is an A800, or of measured kernels an A100.
        link: bytes per second that copies reach, before `link_speed`; None is the device's.
        num_gpu_blocks, num_host_blocks: its pools; None are the paper's, or of another `kv_cache_dtype` those
            of as many bytes.
        kv_cache_dtype: of KV; None is float16.
    """

    model: str
    layout: str = "block"
    link_speed: float = 1.0
    step_overhead: float = DEFAULT_STEP_OVERHEAD_SECONDS
    samples: str | None = None
    seed: int = 0
    source: str = "roofline"
    device: str | None = None
    link: float | None = None
    num_gpu_blocks: int | None = None
    num_host_blocks: int | None = None
    kv_cache_dtype: str | None = None

    @property
    def shape(self) -> ModelShape:
        """The model's, with weights of 16 bits."""
        return load_shape(self.model, "float16", kv_cache_dtype=self.kv_cache_dtype or "auto")

    def _blocks(self, given: int | None, of_paper: int) -> int:
        wide = dataclasses.replace(self.shape, kv_dtype="auto").kv_bytes_per_token
        return of_paper * wide // self.shape.kv_bytes_per_token if given is None else given

    def spec(self) -> DeviceSpec:
        """The device, from the table."""
        return device_spec(self.device or (MEASURED_DEVICE if self.source == "silicon" else DEVICE))

    def system(self) -> System:
        """What `jaxllm.research.simulate` runs on, too; without noise."""
        filled = dataclasses.replace(
            self,
            samples=None,
            seed=0,
            num_gpu_blocks=self._blocks(self.num_gpu_blocks, NUM_GPU_BLOCKS),
            num_host_blocks=self._blocks(self.num_host_blocks, NUM_HOST_BLOCKS),
        )
        return _system(filled)

    def costs(self) -> CostModel:
        """Without noise."""
        return self.system().costs

    def run(
        self,
        trace: Trace,
        policy: Callable[[CostModel], SchedulingPolicy],
        *,
        overlap: bool,
        num_host_blocks: int | None = None,
        max_num_seqs: int = MAX_NUM_SEQS,
        is_table: bool = False,
        caches: bool = False,
    ) -> RunResult:
        """Simulate; the policy knows costs through predictors alone, corrected while it runs.

        Without noise costs are known exactly; with `is_table`, be there noise or not, through a table of
        them, which is what an engine looks costs up in. With `caches` policies that can have a prefix cache.
        """
        residuals, predicted = _noise_and_predictor(self)
        if is_table:
            predicted = _table(self)
        calibration = OnlineCalibration(predicted) if is_table or self.samples is not None else None
        system = self.system()
        config = SchedulerConfig(
            num_gpu_blocks=system.num_gpu_blocks,
            block_size=system.block_size,
            max_model_len=max(MAX_MODEL_LEN, int((trace.prompt_lens + trace.output_lens).max())),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_host_blocks=system.num_host_blocks if num_host_blocks is None else num_host_blocks,
        )
        chosen = policy(calibration or predicted)
        if caches and chosen.shares_prefixes:
            config = dataclasses.replace(config, enable_prefix_caching=True)
        return simulate(
            trace,
            config,
            chosen,
            system.costs,
            overlap_swaps=overlap,
            residuals=residuals,
            calibration=calibration,
        )


def noise_of(device: Device) -> Residuals:
    """What the device's costs are multiplied by."""
    return _noise_and_predictor(device)[0]


@functools.lru_cache(maxsize=8)
def _system(device: Device) -> System:
    spec, link = device.spec(), device.link
    costs: CostModel | str = device.source
    if device.source == "silicon":
        link = (spec.copied_per_second if link is None else link) * device.link_speed
    else:
        rate = (spec.host_bandwidth if link is None else link) * device.link_speed
        costs = RooflineCostModel(
            device.shape,
            dataclasses.replace(spec, host_bandwidth=rate),
            block_size=BLOCK_SIZE,
            link_efficiency=None if link is None else 1.0,
            step_overhead_seconds=device.step_overhead,
            pieces_per_block=2 * device.shape.num_layers if device.layout == "layer" else 0,
        )
        link = None
    return make_system(
        device.shape,
        device=spec,
        costs=costs,
        link=link,
        block_size=BLOCK_SIZE,
        gpu_blocks=device.num_gpu_blocks,
        host_blocks=device.num_host_blocks,
    )


@functools.lru_cache(maxsize=64)
def _noise_and_predictor(device: Device) -> tuple[Residuals, CostModel]:
    return noise_and_predictor(
        device.costs(),
        device.shape,
        device.samples,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        num_gpu_blocks=device.system().num_gpu_blocks,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        seed=device.seed,
    )


@functools.lru_cache(maxsize=8)
def _table(device: Device) -> TableCostModel:
    num_gpu_blocks = device.system().num_gpu_blocks
    axes = TableAxes.geometric(
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        max_context_tokens=num_gpu_blocks * BLOCK_SIZE,
        max_num_blocks=num_gpu_blocks,
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
    folders += [
        package / "engine",
        package / "types",
        *(scripts / name for name in ("paper", "sweep")),
    ]
    found = [*sorted(package.glob("*.py")), *sorted(scripts.glob("*_on_silicon.py"))]
    for folder in folders:
        found += [path for path in sorted(folder.glob("**/*.py")) if "report" not in path.name]
    return found


def _files_hash(cells: Sequence[Any]) -> str:
    """Of what the files hold that cells name."""
    named = {getattr(cell, field, None) for cell in cells for field in ("samples", "trace")}
    for data in {getattr(cell, "data", None) for cell in cells} - {None}:
        file, _, tokenizer = data.rsplit(":", 2)
        named |= {file, *map(str, pathlib.Path(tokenizer).glob("tokenizer*"))}
    return _hash_of([pathlib.Path(name) for name in sorted(named - {None})])


def _hash_of(paths: Sequence[pathlib.Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
