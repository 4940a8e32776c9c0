"""An engine from an `EngineConfig`: what `LLM`, the command and a server share."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import jaxllm
from jaxllm import pallas_kernels
from jaxllm.engine import drafting, processes, sizing
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.ledgers import header_of, open_ledger
from jaxllm.engine.models import Model, placements, read_model
from jaxllm.engine.observer import StepObserver
from jaxllm.engine.profiling import Profiler
from jaxllm.errors import ConfigError, WeightsError
from jaxllm.executor.fastest import FASTEST
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.executor.kv.file_digests import weights_fingerprint
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.executor.processes.links import Leader
from jaxllm.executor.step_programs import CompileProgress, StepPrograms
from jaxllm.loading.given import iter_given
from jaxllm.models.architecture import ARCHITECTURES, ModelConfig
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.predictors.online import OnlineCalibration, named
from jaxllm.predictors.programs import ProgramCosts
from jaxllm.predictors.table import TableCostModel
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.ledger import Ledger, PreemptionRecord, StepRecord
from jaxllm.sched.presets import DEFAULT_PRESET
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system import forks
from jaxllm.text import tokenizer as tokenization

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)
_FILE_BYTES = 16 * 2**30
_WRITING_SHARE = 4  # one in so many host blocks is for blocks on their way to files that nobody else holds
_BRIEF_PROFILE_SECONDS = 10.0
_NUMERICS_VERSION = 2
"""Of how keys and values are computed: one more when a change gives others, so that no older file is read."""


@dataclasses.dataclass(frozen=True)
class LoadTimes:
    """Seconds spent before the first request: reading weights, and then compiling and warming up.

    With `warm_up="background"` programs are compiled beside both, and after them.
    """

    load_seconds: float
    warm_up_seconds: float


@dataclasses.dataclass(frozen=True)
class Assembly:
    """An engine that is ready, and what it was made of.

    Attributes:
        engine: runs requests.
        executor: its executor.
        tokenizer: the checkpoint's; None if it was to be left out.
        model_config: with the engine's `max_model_len`.
        dtype: of weights and KV.
        costs: predicted seconds, corrected as the engine runs.
        costs_source: where they come from; None if nothing is known.
        load_times: seconds it took.
        default_params: the checkpoint's own sampling parameters.
        device: where weights and pool are, or the first of several.
        reload: reads the checkpoint's weights again; None if others were given.
        is_other: whether the checkpoint has other weights by now than those that files are of.
        files: of the prefix cache; None if there are none.
    """

    engine: Engine
    executor: ModelExecutor
    tokenizer: PreTrainedTokenizerBase | None
    model_config: ModelConfig
    dtype: str
    costs: OnlineCalibration
    costs_source: str | None
    load_times: LoadTimes
    default_params: SamplingParams
    device: jax.Device
    reload: Callable[[], Iterator[tuple[str, jax.Array]]] | None
    is_other: Callable[[], bool]
    files: BlockFiles | None = None


@under_jax_defaults
def assemble(
    config: EngineConfig,
    on_record: Callable[[PreemptionRecord | StepRecord], None] | None = None,
    params: Mapping[str, Any] | None = None,
    replica: int = 0,
) -> Assembly:
    """Size the pool, load the model while its programs compile, and put an engine together.

    Args:
        config: how.
        on_record: told of the scheduler's decisions (`Ledger`), in the thread that runs the engine.
        params: weights by name, instead of those of the checkpoint, of which then only the configuration and
            the tokenizer are read.
        replica: which one it is of `data_parallel_size`, from 0; it takes the devices after those before it.

    Raises:
        ConfigError: a setting or the checkpoint's configuration is invalid or unsupported.
        WeightsError: the weights are missing, truncated or do not match.
        CapacityError: the device cannot hold the model and one KV block.
        EngineError: this process was forked after the package had used JAX.
    """
    forks.note_jax()
    if config.ledger is None:
        return _assemble(config, on_record and Ledger(on_record=on_record), params, replica)
    ledger, close = open_ledger(config.ledger, on_record)  # now rather than after loading
    try:
        made = _assemble(config, ledger, params, replica)
    except BaseException:
        close()
        os.unlink(config.ledger)
        raise
    weakref.finalize(made.engine, close)
    return made


def assemble_replicas(
    config: EngineConfig,
    on_record: Callable[..., None] | None = None,
    params: Mapping[str, Any] | None = None,
) -> tuple[Assembly, ...]:
    """The engines of a configuration, `data_parallel_size` of them; arguments and errors as `assemble`.

    `on_record` is also told which `replica` decided, from 0.
    """
    made: list[Assembly] = []
    try:
        for replica in range(config.data_parallel_size):
            tell = None if on_record is None else functools.partial(on_record, replica=replica)
            made.append(assemble(config, tell, params, replica))
    except BaseException:
        for one in made:
            one.engine.close()
            one.executor.release()
        raise
    return tuple(made)


def _assemble(
    config: EngineConfig, ledger: Ledger | None, params: Mapping[str, Any] | None, replica: int
) -> Assembly:
    started = time.perf_counter()
    leader = processes.lead(config, params) if config.nnodes > 1 else None
    try:
        return _assemble_model(config, ledger, params, replica, started, leader)
    except BaseException as error:
        if leader is not None:
            leader.end(f"it could not start: {error}")
        raise


def _assemble_model(
    config: EngineConfig,
    ledger: Ledger | None,
    params: Mapping[str, Any] | None,
    replica: int,
    started: float,
    leader: Leader | None,
) -> Assembly:
    model = read_model(config, placements(config)[replica], params)
    chosen = sizing.choose(config, model)
    draft = drafting.read_draft(config, model, chosen)
    beside = None if draft is None else draft.needs
    sizes = sizing.size(config, model, chosen, has_weights=params is not None, beside=beside)
    if leader is not None:
        sizes = processes.agree(leader, config, model, chosen, sizes)
    loaded = _load(config, model, sizes, started, params, draft, leader)
    return _join(config, model, chosen, sizes, loaded, ledger)


@dataclasses.dataclass(frozen=True)
class _Loaded:
    executor: ModelExecutor
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    times: LoadTimes
    reload: Callable[[], Iterator[tuple[str, jax.Array]]] | None


def _load(
    config: EngineConfig,
    model: Model,
    sizes: sizing.Sizes,
    started: float,
    given: Mapping[str, Any] | None,
    draft: drafting.Draft | drafting.Heads | drafting.Eagle | None,
    leader: Leader | None,
) -> _Loaded:
    """Load tokenizer and weights while programs compile."""
    elsewhere = None if leader is None else leader.compile
    programs = StepPrograms(sizes.model_config, sizes.executor, model.placement, elsewhere)
    if config.attention_implementation != FASTEST:  # which is to be measured first
        programs.begin()
    try:
        tokenizer = None
        if not config.skip_tokenizer_init:  # transformers is imported beside the compiling
            tokenizer = _tokenizer(model.tokenizer_folder)
        eos_token_ids = tokenization.eos_token_ids(model.folder, tokenizer, config.hf_overrides)
        if given is None:
            weights = processes.stored(config, model, sizes)
        else:
            weights = iter_given(given, model.dtype, model.device)
        placed = processes.placed(model, sizes, weights)
        if leader is not None:
            leader.ask("loaded")
        executor = ModelExecutor(
            sizes.model_config, placed, sizes.executor, model.placement, programs, others=leader
        )
        if leader is not None:
            weakref.finalize(executor, leader.end)
            leader.ask("ready")
            leader.tell("all ready", ())
        if draft is not None:
            executor.drafter = draft.make(executor)
        loaded = time.perf_counter()
        if config.warm_up != "background":
            _warm_up(executor)
    except BaseException:
        programs.close()
        raise
    times = LoadTimes(loaded - started, time.perf_counter() - loaded)
    reload = None if given is not None else functools.partial(processes.stored, config, model, sizes)
    return _Loaded(executor, tokenizer, eos_token_ids, times, reload)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """That of a folder; an engine can do without one."""
    try:
        return tokenization.load_tokenizer(folder)
    except ConfigError as error:
        error.or_else(skip_tokenizer_init=", or pass skip_tokenizer_init=True and give prompts as token ids")
        raise


def _join(
    config: EngineConfig,
    model: Model,
    chosen: sizing.Choices,
    sizes: sizing.Sizes,
    loaded: _Loaded,
    ledger: Ledger | None,
) -> Assembly:
    """Put an engine together."""
    executor, scheduling = loaded.executor, chosen.scheduling
    costs = named(scheduling.costs)
    costs_source = _settle_costs(config, executor, chosen)
    files = weights = None
    if config.prefix_cache_dir is not None:
        weights = weights_fingerprint(model.folder)
        files = _keep_files(
            config, weights, executor, sizes.model_config, chosen.kernels, sizes.num_writing_blocks
        )
    if ledger is not None:
        ledger.costs = None if costs_source is None else costs
        settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        policy = DEFAULT_PRESET if config.scheduler_policy is None else config.scheduler_policy
        device, version = executor.device_kind, jax.__version__
        ledger.begin(header_of(policy, device, costs_source, settings, sizes.scheduler, jax=version))
    speculation = None
    if config.speculative_config is not None:
        predicted = costs.model if isinstance(costs, OnlineCalibration) else costs
        speculation = config.speculative_config.make(chosen.max_drafts, named(predicted), executor.drafter)
    engine = Engine(
        executor,
        Scheduler(
            sizes.scheduler,
            scheduling.policy,
            ledger=ledger,
            files=executor.file_index,
            speculation=speculation,
        ),
        observer=StepObserver(costs, ledger),
        vocab_size=model.config.vocab_size,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        async_scheduling=config.async_scheduling,
        num_scheduler_steps=config.num_scheduler_steps,
        has_rotary_positions=ARCHITECTURES[model.config.architecture].has_rotary_positions,
    )
    return Assembly(
        engine,
        executor,
        loaded.tokenizer,
        sizes.model_config,
        model.dtype,
        scheduling.costs,
        costs_source,
        loaded.times,
        model.default_params,
        model.device,
        loaded.reload,
        functools.partial(_is_other, model.folder, weights),
        files,
    )


def _is_other(folder: Path, weights: str | None) -> bool:
    """Whether a checkpoint's weights are not those of a fingerprint, if there is one, or nobody can tell."""
    try:
        return weights is not None and weights_fingerprint(folder) != weights
    except WeightsError:
        return True


def _keep_files(
    config: EngineConfig,
    weights: str,
    executor: ModelExecutor,
    model_config: ModelConfig,
    kernels: str,
    most_writing: int,
) -> BlockFiles:
    """The files of the prefix cache, those of engines that compute the same keys and values."""
    assert config.prefix_cache_dir is not None
    rope = getattr(model_config, "rope", None)
    frequencies = (
        b"" if rope is None else rope.inverse_frequencies().tobytes()
    )  # some depend on max_model_len
    about: dict[str, object] = {
        "weights": weights,
        "load_format": config.load_format,
        "overrides": sorted((config.hf_overrides or {}).items()),
        "rope": hashlib.blake2b(frequencies, digest_size=16).hexdigest(),
        "dtype": executor.config.dtype,
        "formats": repr(executor.config.formats),
        "kv_dtype": executor.config.kv_dtype,
        "block": list(executor.block_shape),
        "kernels": f"{kernels} on {executor.device_kind}",
        "matmul_precision": getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009, mypy
        "versions": {"jaxllm": jaxllm.__version__, "jax": jax.__version__, "numerics": _NUMERICS_VERSION},
    }
    if executor.others is not None:  # converted checkpoints may be unlike each other
        about["weights of others"] = sorted(executor.others.ask("loaded").items())
    if own_code := _own_code(kernels, ARCHITECTURES[model_config.architecture].model):
        about["own_code"] = own_code
    return executor.keep_files(
        Path(config.prefix_cache_dir).expanduser(),
        json.dumps(about, default=str),
        config.prefix_cache_dir_bytes or _FILE_BYTES,
        most_writing,
    )


def _own_code(kernels: str, model: object) -> list[str]:
    """Digests of the modules from outside this package that attention and the model are in."""
    names = [kernels.partition(":")[0], getattr(model, "__module__", "")]
    known = (*pallas_kernels.IMPLEMENTATIONS, FASTEST)
    paths = [
        getattr(sys.modules.get(name), "__file__", None)
        for name in names
        if name not in known and name.partition(".")[0] != "jaxllm"
    ]
    return [hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest() for path in paths if path]


def _settle_costs(config: EngineConfig, executor: ModelExecutor, chosen: sizing.Choices) -> str | None:
    """Replace estimated costs by a brief profile, if asked to or if there is none; returns their source.

    Raises:
        ConfigError: `profile_seconds` is set, and nothing would use what it measures.
    """
    seconds, scheduling = config.profile_seconds, chosen.scheduling
    has_swaps = executor.config.num_host_blocks > 0
    is_idle = scheduling.is_ready_made and config.ledger is None
    if seconds and (is_idle or not has_swaps):
        raise ConfigError(
            f"profile_seconds={seconds:g} would measure costs that nobody weighs: give a "
            "scheduler_policy by name, or a ledger, and num_host_blocks"
        )
    source = scheduling.source
    if isinstance(config.costs, OnlineCalibration):  # which is the user's, and may be of several engines
        return source
    estimated = scheduling.costs.model
    padding_share = 0.0 if chosen.has_native_products else 1.0  # these compute the rows in use alone
    if isinstance(estimated, TableCostModel):
        padding_share = estimated.padding_share
    scheduling.costs.model = ProgramCosts(estimated, executor.config.buckets.program_sizes(padding_share))
    if not has_swaps:
        return source
    if seconds is None:
        seconds = _BRIEF_PROFILE_SECONDS if scheduling.needs_measuring else 0.0
    if seconds and not (source or "").startswith("profile"):
        _logger.info("measuring costs for %g s; `jaxllm profile` does it once and for all", seconds)
        profiler = Profiler(executor, chosen.shape)
        samples = profiler.samples(seconds)
        profile = profiler.profile(samples, profiler.fit(samples, is_brief=True))
        scheduling.costs.model = profiler.costs_of(profile)
        return f"profile of {seconds:g} s at start"
    if (
        scheduling.weighs_costs
        and not scheduling.has_own_costs
        and not (source or "profile").startswith("profile")
    ):
        is_chosen = scheduling.is_chosen or config.num_host_blocks is not None
        level = logging.WARNING if is_chosen else logging.INFO
        _logger.log(
            level, "predicted costs (%s) were not measured here; `jaxllm profile` measures them", source
        )
    return source


def _warm_up(executor: ModelExecutor) -> None:
    """Compile and run every program, with a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(desc="Compiling programs", unit="program", disable=None, leave=False) as bar:

        def show(progress: CompileProgress) -> None:
            bar.total, bar.n = progress.num_programs, progress.num_compiled
            bar.refresh()

        executor.warm_up(show)
