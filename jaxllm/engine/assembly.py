"""An engine from an `EngineConfig`: what `LLM`, the command and a server share."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

import jaxllm
from jaxllm import pallas_kernels
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.costs import shape_of
from jaxllm.engine.engine import Engine
from jaxllm.engine.ledgers import open_ledger
from jaxllm.engine.observer import StepObserver
from jaxllm.engine.profiling import Profiler
from jaxllm.engine.scheduling import Scheduling, make_scheduling
from jaxllm.errors import ConfigError
from jaxllm.executor import memory
from jaxllm.executor.buckets import Buckets
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.fastest import FASTEST
from jaxllm.executor.kv.disk import BlockFiles, weights_fingerprint
from jaxllm.executor.model_executor import ModelExecutor
from jaxllm.executor.step_programs import CompileProgress, StepPrograms
from jaxllm.loading import load_params, resolve_dtype
from jaxllm.loading.checkpoints import checkpoint_folder
from jaxllm.loading.generation_config import default_sampling_params
from jaxllm.models.architecture import ARCHITECTURES, ModelConfig
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.registry import pack_linear_weights, weight_bytes
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.predictors.base import ModelShape
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.programs import ProgramCosts
from jaxllm.predictors.table import TableCostModel
from jaxllm.sampling.logits_processors import load_processors
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger, PreemptionRecord, StepRecord
from jaxllm.sched.scheduler import Scheduler
from jaxllm.system import forks
from jaxllm.system.cache_folder import cache_folder
from jaxllm.system.dtypes import ITEMSIZES
from jaxllm.text import tokenizer as tokenization
from jaxllm.types import MAX_DECODE_STEPS, MAX_STAGED_BLOCKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)
_FILE_BYTES = 16 * 2**30
_WRITING_SHARE = 4  # one in so many host blocks is for blocks on their way to files that nobody else holds
_BRIEF_PROFILE_SECONDS = 10.0
_NUMERICS_VERSION = 1
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
    files: BlockFiles | None = None


@under_jax_defaults
def assemble(
    config: EngineConfig,
    on_record: Callable[[PreemptionRecord | StepRecord], None] | None = None,
) -> Assembly:
    """Size the pool, load the model while its programs compile, and put an engine together.

    Args:
        config: how.
        on_record: told of the scheduler's decisions (`Ledger`), in the thread that runs the engine.

    Raises:
        ConfigError: a setting or the checkpoint's configuration is invalid or unsupported.
        WeightsError: the weights are missing, truncated or do not match.
        CapacityError: the device cannot hold the model and one KV block.
        EngineError: this process was forked after the package had used JAX.
    """
    forks.note_jax()
    if config.ledger is None:
        return _assemble(config, on_record and Ledger(on_record=on_record))
    ledger, close = open_ledger(config.ledger, on_record)  # now rather than after loading
    try:
        made = _assemble(config, ledger)
    except BaseException:
        close()
        os.unlink(config.ledger)
        raise
    weakref.finalize(made.engine, close)
    return made


def _assemble(config: EngineConfig, ledger: Ledger | None) -> Assembly:
    started = time.perf_counter()
    folder, tokenizer_folder = _folders(config)
    default_params = default_sampling_params(folder)
    # Without effect where JAX has taken its memory already.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(memory.MEM_FRACTION))
    device = jax.devices()[0]
    _set_compilation_cache(config.compilation_cache_dir)
    hf_config = read_hf_config(folder)
    model_config = config_from_dict(hf_config, config.hf_overrides)
    dtype = settle_dtype(config, folder, hf_config, device.platform)
    itemsize, num_weight_bytes = ITEMSIZES[dtype], weight_bytes(model_config, dtype)
    memory.check_fits(device, num_weight_bytes, 0)
    defaults = memory.device_limits(device, model_config, itemsize, num_weight_bytes)
    max_num_seqs = config.max_num_seqs or defaults[0]
    max_num_batched_tokens = config.max_num_batched_tokens or max(defaults[1], max_num_seqs)

    max_model_len = config.max_model_len or model_config.default_max_model_len
    bounded = model_config.with_max_model_len(max_model_len)  # which refuses more than it has positions for
    shape = shape_of(model_config, Path(config.model).resolve().name, dtype)
    scheduling = make_scheduling(config.scheduler_policy, shape, device.device_kind, config.block_size)
    heads = model_config.num_heads, model_config.num_kv_heads, model_config.head_dim
    default, _ = pallas_kernels.settle_implementation(*heads, config.block_size)
    kernels = config.attention_implementation or default
    has_native_products = kernels == "native" and dtype == "float32"
    if config.attention_implementation not in (None, FASTEST):
        _check_attention(config, bounded, dtype)
    buckets = Buckets.make(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        decode_sizes=config.decode_buckets,
        prefill_sizes=config.prefill_buckets,
        is_padding_cheap=has_native_products,
    )
    bytes_per_block = memory.block_bytes(model_config, config.block_size, itemsize)
    temporaries = memory.temporary_bytes(model_config, max_num_batched_tokens, max_num_seqs, itemsize)
    temporaries += memory.slot_bytes(max_model_len, config.block_size, max_num_seqs)
    if scheduling.policy.may_swap and config.num_host_blocks != 0:
        temporaries += 2 * MAX_STAGED_BLOCKS * bytes_per_block
    needed_blocks = max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = memory.num_blocks_that_fit(
        device=device,
        weight_bytes=num_weight_bytes,
        bytes_per_block=bytes_per_block,
        temporaries=temporaries,
        needed_blocks=needed_blocks,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
    memory.check_fits(device, num_weight_bytes, num_blocks * bytes_per_block)
    max_model_len = _fit_length(max_model_len, num_blocks * config.block_size, config.max_model_len)
    has_files = config.prefix_cache_dir is not None
    num_host_blocks = scheduling.num_host_blocks(
        config.num_host_blocks, num_blocks, needed_blocks, bytes_per_block, is_needed=has_files
    )
    memory.check_host_fits(num_host_blocks * bytes_per_block)
    num_writing_blocks = -(-num_host_blocks // _WRITING_SHARE) if has_files else 0
    scheduler_config = SchedulerConfig(
        num_gpu_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_seqs=buckets.max_prefill_seqs,
        num_host_blocks=num_host_blocks - num_writing_blocks,
        enable_prefix_caching=(
            scheduling.policy.shares_prefixes
            if config.enable_prefix_caching is None
            else config.enable_prefix_caching
        ),
        program_sizes=() if has_native_products else buckets.sizes,
    )
    if config.prefix_cache_dir is not None:
        _check_files(config, scheduler_config)
    model_config = model_config.with_max_model_len(max_model_len)
    executor_config = ExecutorConfig(
        num_gpu_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        buckets=buckets,
        dtype=dtype,
        seed=config.seed,
        implementation=config.attention_implementation,
        packs_weights=has_native_products,
        num_host_blocks=num_host_blocks,
        max_decode_steps=config.num_scheduler_steps or min(MAX_DECODE_STEPS, config.block_size),
        warms_sampling=config.warm_up != "background",
        warms_everything=config.warm_up == "everything",
        logits_processors=load_processors(config.logits_processors, model_config.vocab_size, max_model_len),
    )
    programs = StepPrograms(model_config, executor_config, device)
    if config.attention_implementation != FASTEST:  # which is to be measured first
        programs.begin()
    try:
        tokenizer = None
        if not config.skip_tokenizer_init:  # transformers is imported beside the compiling
            tokenizer = tokenization.load_tokenizer(tokenizer_folder)
        eos_token_ids = tokenization.eos_token_ids(folder, tokenizer, config.hf_overrides)
        params = load_params(
            folder, model_config, dtype, load_format=config.load_format, seed=config.seed, device=device
        )
        if has_native_products:
            pack_linear_weights(model_config, params)
        executor = ModelExecutor(model_config, params, executor_config, device, programs)
        loaded = time.perf_counter()
        if config.warm_up != "background":
            _warm_up(executor)
    except BaseException:
        programs.close()
        raise
    load_times = LoadTimes(loaded - started, time.perf_counter() - loaded)
    costs_source = _settle_costs(config, executor, shape, scheduling)
    files = None
    if config.prefix_cache_dir is not None:
        files = _keep_files(config, folder, executor, model_config, kernels, num_writing_blocks)
    if ledger is not None:
        ledger.costs = None if costs_source is None else scheduling.costs
    engine = Engine(
        executor,
        Scheduler(scheduler_config, scheduling.policy, ledger=ledger, files=executor.file_index),
        observer=StepObserver(scheduling.costs, ledger),
        vocab_size=model_config.vocab_size,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        async_scheduling=config.async_scheduling,
        num_scheduler_steps=config.num_scheduler_steps,
        has_rotary_positions=ARCHITECTURES[model_config.architecture].has_rotary_positions,
    )
    return Assembly(
        engine,
        executor,
        tokenizer,
        model_config,
        dtype,
        scheduling.costs,
        costs_source,
        load_times,
        default_params,
        files,
    )


def _folders(config: EngineConfig) -> tuple[Path, Path]:
    """The model's, and the tokenizer's."""
    find = functools.partial(checkpoint_folder, download=config.download, cache_dir=config.download_dir)
    folder = find(config.model, revision=config.revision)
    return folder, folder if config.tokenizer is None else find(config.tokenizer)


def _check_attention(config: EngineConfig, model_config: ModelConfig, dtype: str) -> None:
    """Find out, by tracing it, whether an implementation that was asked for can be had of this model.

    Raises:
        ConfigError: it cannot.
    """
    heads, head_dim = model_config.num_kv_heads, model_config.head_dim
    q = jax.ShapeDtypeStruct((1, model_config.num_heads, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((1, 1, 2, heads, config.block_size, head_dim), dtype)
    tables, lengths = jax.ShapeDtypeStruct((1, 1), "int32"), jax.ShapeDtypeStruct((1,), "int32")
    attend = functools.partial(
        pallas_kernels.decode_attention,
        layer=0,
        scale=1.0,
        window=1 if model_config.has_bounds else None,
        implementation=config.attention_implementation,
    )
    jax.eval_shape(attend, q, pool, tables, lengths)


def _check_files(config: EngineConfig, limits: SchedulerConfig) -> None:
    """Verify that there can be files of the prefix cache.

    Raises:
        ConfigError: there is no prefix cache, no host memory to read into, or weights that are in no file.
    """
    folder = str(config.prefix_cache_dir)
    if not (limits.enable_prefix_caching and limits.num_host_blocks):
        raise ConfigError(
            f"prefix_cache_dir={folder!r} needs the prefix cache and host memory of two blocks or more, and "
            f"there are enable_prefix_caching={limits.enable_prefix_caching} and num_host_blocks="
            f"{config.num_host_blocks or 0}: set these, or leave the folder out"
        )
    if config.load_format == "dummy":
        raise ConfigError(
            f'prefix_cache_dir={folder!r} cannot keep blocks of load_format="dummy": weights that are in no '
            "file are not known again; leave one of them out"
        )


def _keep_files(
    config: EngineConfig,
    folder: Path,
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
    about = {
        "weights": weights_fingerprint(folder),
        "load_format": config.load_format,
        "overrides": sorted((config.hf_overrides or {}).items()),
        "rope": hashlib.blake2b(frequencies, digest_size=16).hexdigest(),
        "dtype": executor.config.dtype,
        "block": list(executor.block_shape),
        "kernels": f"{kernels} on {executor.device_kind}",
        "matmul_precision": getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009, mypy
        "versions": {"jaxllm": jaxllm.__version__, "jax": jax.__version__, "numerics": _NUMERICS_VERSION},
    }
    return executor.keep_files(
        Path(config.prefix_cache_dir).expanduser(),
        json.dumps(about, default=str),
        config.prefix_cache_dir_bytes or _FILE_BYTES,
        most_writing,
    )


def _settle_costs(
    config: EngineConfig, executor: ModelExecutor, shape: ModelShape, scheduling: Scheduling
) -> str | None:
    """Replace estimated costs by a brief profile, if asked to or if there is none; returns their source.

    Raises:
        ConfigError: `profile_seconds` is set, and nothing would use what it measures.
    """
    seconds = config.profile_seconds
    has_swaps = executor.config.num_host_blocks > 0
    is_idle = scheduling.is_ready_made and config.ledger is None
    if seconds and (is_idle or not has_swaps):
        raise ConfigError(
            f"profile_seconds={seconds:g} would measure costs that nobody weighs: give a "
            "scheduler_policy by name, or a ledger, and num_host_blocks"
        )
    source = scheduling.source
    estimated = scheduling.costs.model
    padding_share = estimated.padding_share if isinstance(estimated, TableCostModel) else 1.0
    scheduling.costs.model = ProgramCosts(estimated, executor.config.buckets.program_sizes(padding_share))
    if not has_swaps:
        return source
    if seconds is None:
        seconds = _BRIEF_PROFILE_SECONDS if scheduling.needs_measuring else 0.0
    if seconds and not (source or "").startswith("profile"):
        _logger.info("measuring costs for %g s; `jaxllm profile` does it once and for all", seconds)
        profiler = Profiler(executor, shape)
        samples = profiler.samples(seconds)
        profile = profiler.profile(samples, profiler.fit(samples, is_brief=True))
        scheduling.costs.model = profiler.costs_of(profile)
        return f"profile of {seconds:g} s at start"
    if scheduling.weighs_costs and (source or "").startswith("roofline"):
        is_chosen = scheduling.is_chosen or config.num_host_blocks is not None
        level = logging.WARNING if is_chosen else logging.INFO
        _logger.log(level, "predicted costs are a %s, not measured; `jaxllm profile` measures them", source)
    return source


def _warm_up(executor: ModelExecutor) -> None:
    """Compile and run every program, with a progress bar on a terminal."""
    from tqdm import tqdm

    with tqdm(desc="Compiling programs", unit="program", disable=None, leave=False) as bar:

        def show(progress: CompileProgress) -> None:
            bar.total, bar.n = progress.num_programs, progress.num_compiled
            bar.refresh()

        executor.warm_up(show)


def settle_dtype(config: EngineConfig, folder: Path, hf_config: Mapping[str, Any], platform: str) -> str:
    """The dtype of weights and KV on a platform.

    Raises:
        ConfigError: config.json names one that is not supported, and the settings none.
    """
    hf_config = {**hf_config, **(config.hf_overrides or {})}
    dtype = resolve_dtype(folder, config.dtype, load_format=config.load_format, hf_config=hf_config)
    return "float32" if config.dtype == "auto" and platform == "cpu" else dtype


def _fit_length(max_model_len: int, pool_tokens: int, asked: int | None) -> int:
    """The longest sequence must fit the pool: shorten the default, refuse an explicit length."""
    if max_model_len <= pool_tokens:
        return max_model_len
    if asked is not None:
        raise ConfigError(
            f"max_model_len={asked} does not fit the KV pool of {pool_tokens} tokens; lower max_model_len "
            "or enlarge the pool (num_gpu_blocks_override, kv_cache_memory or gpu_memory_utilization)"
        )
    _logger.warning(
        "max_model_len is %d, the KV pool's size, and not the checkpoint's %d; enlarge the pool for more",
        pool_tokens,
        max_model_len,
    )
    return pool_tokens


def _set_compilation_cache(folder: str | os.PathLike[str] | None) -> None:
    """Turn on JAX's persistent compilation cache, unless the user has set one up already."""
    if folder is None or (folder == "auto" and jax.config.values["jax_compilation_cache_dir"]):
        return
    if folder == "auto":
        folder = str(cache_folder(f"xla-{jax.__version__}"))
    else:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"compilation_cache_dir={folder!r} cannot be made: {error.strerror}; name a folder, or None"
            ) from error
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
