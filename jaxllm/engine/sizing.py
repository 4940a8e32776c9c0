"""What an engine is made of, before anything is loaded: choices, and sizes."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax

from jaxllm import pallas_kernels
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.costs import shape_of
from jaxllm.engine.models import Model, stores_kv
from jaxllm.engine.scheduling import Scheduling, make_scheduling
from jaxllm.errors import ConfigError, shown
from jaxllm.executor import memory
from jaxllm.executor.buckets import Buckets
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.decode_steps import Lookup
from jaxllm.executor.fastest import FASTEST
from jaxllm.executor.parts import most_rows
from jaxllm.models.architecture import ModelConfig
from jaxllm.pallas_kernels.kv_layout import KVLayout
from jaxllm.predictors.base import ModelShape
from jaxllm.sampling.logits_processors import load_processors
from jaxllm.sched.config import SchedulerConfig
from jaxllm.system.dtypes import KV_CAPABILITIES
from jaxllm.types import MAX_DECODE_STEPS, MAX_STAGED_BLOCKS

_logger = logging.getLogger(__name__)
_WRITING_SHARE = 4  # one in so many host blocks is for blocks on their way to files that nobody else holds


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the settings and the device decide: policy, kernels, and limits of a step.

    Attributes:
        shape: the model's sizes, which predicted costs depend on.
        scheduling: policy and costs.
        kernels: name of the attention's implementation.
        has_native_products: whether linear layers are native, too.
        max_num_seqs: most sequences of a step.
        max_num_batched_tokens: most prompt tokens of it.
        max_model_len: longest sequence, unless the pool is smaller.
        max_drafts: most drafts of a step.
        buckets: sizes of programs.
    """

    shape: ModelShape
    scheduling: Scheduling
    kernels: str
    has_native_products: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_drafts: int
    buckets: Buckets


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Pool, host memory and programs, as scheduler and executor take them.

    Attributes:
        model_config: for sequences that fit the pool.
        scheduler: the scheduler's limits.
        executor: the executor's.
        num_writing_blocks: host blocks that are set aside for what is on its way to files.
    """

    model_config: ModelConfig
    scheduler: SchedulerConfig
    executor: ExecutorConfig
    num_writing_blocks: int


def choose(config: EngineConfig, model: Model) -> Choices:
    """Choose policy, kernels and limits.

    Raises:
        ConfigError: a setting is unsupported with this model.
        ProfileError: see `make_scheduling`.
    """
    weights = model.dtype, model.num_weight_bytes
    defaults = memory.device_limits(model.device, model.own, *weights, model.kv_dtype)
    max_num_seqs = config.max_num_seqs or defaults[0]
    max_num_batched_tokens = config.max_num_batched_tokens or max(defaults[1], max_num_seqs)
    max_model_len = config.max_model_len or model.config.default_max_model_len
    bounded = model.config.with_max_model_len(max_model_len)  # which refuses more than it has positions for
    name = Path(config.model).resolve().name
    layout: Any = {
        "tensor_parallel": config.tensor_parallel_size,
        "pipeline_parallel": config.pipeline_parallel_size,
        "prefill_context_parallel": config.prefill_context_parallel_size,
    }
    shape = shape_of(model.config, name, model.dtype, model.formats, model.kv_dtype, **layout)
    where = model.device.device_kind, config.block_size
    scheduling = make_scheduling(config.scheduler_policy, shape, *where, own=config.costs, **layout)
    heads = model.own.num_heads, model.own.num_kv_heads, model.own.head_dim
    default, _ = pallas_kernels.settle_implementation(*heads, config.block_size, kv_dtype=model.kv_dtype)
    kernels = config.attention_implementation or default
    _check_kv_dtype(kernels, model)
    has_native_products = kernels == "native" and model.dtype == "float32"
    if config.attention_implementation not in (None, FASTEST):
        _check_attention(config, model.placement.share(bounded), model)
    buckets = Buckets.make(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        decode_sizes=config.decode_buckets,
        prefill_sizes=config.prefill_buckets,
        is_padding_cheap=has_native_products,
    )
    contexts = model.placement.num_contexts
    if odd := [size for size in buckets.sizes if size % contexts]:
        raise ConfigError(
            f"prefill_context_parallel_size={contexts} does not divide steps of {odd[0]} rows: take "
            f"max_num_batched_tokens (now {max_num_batched_tokens}) and prefill_buckets (now "
            f"{', '.join(map(str, buckets.sizes))}) that it divides"
        )
    max_drafts, stages = 0, model.placement.num_stages
    if stages > 1:
        drafts = config.speculative_config
        most = most_rows(
            max_num_batched_tokens, stages, max_num_seqs, drafts.num_speculative_tokens if drafts else 0
        )
        buckets = buckets.up_to(most)
    if config.speculative_config is not None:
        sizes = max_num_seqs, max_num_batched_tokens, model.config.vocab_size
        max_drafts = config.speculative_config.max_drafts(*sizes)
    limits = max_num_seqs, max_num_batched_tokens, max_model_len, max_drafts
    return Choices(shape, scheduling, kernels, has_native_products, *limits, buckets)


def _check_kv_dtype(kernels: str, model: Model) -> None:
    """Verify that an implementation that is measured, and a device, have keys and values of a dtype.

    Raises:
        ConfigError: they have none.
    """
    dtype = model.kv_dtype
    if kernels == FASTEST and dtype != model.dtype:
        raise ConfigError(
            f"kv_cache_dtype={dtype!r} and attention_implementation={kernels!r}: what is measured has "
            f"KV of {model.dtype}; name an implementation, or leave one of them out"
        )
    if not stores_kv(model.device, dtype):
        least = ".".join(map(str, KV_CAPABILITIES[dtype]))
        raise ConfigError(
            f"kv_cache_dtype={dtype!r} needs a GPU of compute capability {least}, and this is "
            f"{model.device.compute_capability}: take 'int8' or 'bfloat16'"
        )


def size(
    config: EngineConfig,
    model: Model,
    chosen: Choices,
    *,
    has_weights: bool = False,
    beside: memory.Beside | None = None,
) -> Sizes:
    """Size pool, host memory and programs; `has_weights` says that the checkpoint's are not used.

    Raises:
        ConfigError: they contradict each other, or there cannot be files.
        CapacityError: device or host cannot hold them.
    """
    bytes_per_block = memory.block_bytes(model.own, config.block_size, model.kv_dtype)
    needed_blocks = chosen.max_num_seqs * -(-chosen.max_model_len // config.block_size)
    beside = beside or memory.Beside()
    num_weight_bytes = model.num_weight_bytes + beside.weight_bytes
    num_blocks = memory.num_blocks_that_fit(
        device=memory.tightest(model.placement.local.devices),
        weight_bytes=num_weight_bytes,
        bytes_per_block=bytes_per_block + beside.bytes_per_block,
        temporaries=_temporary_bytes(config, model, chosen, bytes_per_block) + beside.temporary_bytes,
        needed_blocks=needed_blocks,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
    )
    memory.check_fits(model.device, num_weight_bytes, num_blocks * (bytes_per_block + beside.bytes_per_block))
    pool_tokens = num_blocks * config.block_size
    max_model_len = _fit_length(chosen.max_model_len, pool_tokens, config.max_model_len)
    has_files = config.prefix_cache_dir is not None
    host_bytes = bytes_per_block * len(model.placement.local.devices)
    num_host_blocks = chosen.scheduling.num_host_blocks(
        config.num_host_blocks, num_blocks, needed_blocks, host_bytes, is_needed=has_files
    )
    memory.check_host_fits(num_host_blocks * host_bytes * config.data_parallel_size)
    num_writing_blocks = -(-num_host_blocks // _WRITING_SHARE) if has_files else 0
    caches, has_stages = config.enable_prefix_caching, model.placement.num_stages > 1
    scheduler = SchedulerConfig(
        num_gpu_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_prefill_seqs=chosen.buckets.max_prefill_seqs,
        num_host_blocks=num_host_blocks - num_writing_blocks,
        enable_prefix_caching=chosen.scheduling.policy.shares_prefixes if caches is None else caches,
        program_sizes=() if chosen.has_native_products or has_stages else chosen.buckets.sizes,
    )
    if has_files:
        _check_files(config, scheduler, has_weights=has_weights)
    model_config = model.config.with_max_model_len(max_model_len)
    executor = dataclasses.replace(
        _executor_config(config, model, chosen, scheduler, num_host_blocks),
        num_hidden=beside.num_hidden,
        kept_layers=beside.kept_layers,
    )
    return Sizes(model_config, scheduler, executor, num_writing_blocks)


def _temporary_bytes(config: EngineConfig, model: Model, chosen: Choices, bytes_per_block: int) -> int:
    """Device memory beside weights and pool."""
    most = chosen.buckets.sizes[-1]
    rows = -(-most // model.placement.num_contexts)
    found = memory.temporary_bytes(model.own, rows, chosen.max_num_seqs + chosen.max_drafts, model.itemsize)
    if rows < most:  # what the last layer gives is gathered
        found += 2 * most * model.config.num_features * model.itemsize
    if model.placement.num_stages > 1:  # parts of two iterations, and their copies for the next stage
        found += 8 * chosen.max_num_batched_tokens * model.config.num_features * model.itemsize
    found += memory.slot_bytes(chosen.max_model_len, config.block_size, chosen.max_num_seqs)
    if chosen.scheduling.policy.may_swap and config.num_host_blocks != 0:
        found += 2 * MAX_STAGED_BLOCKS * bytes_per_block
    return found


def _executor_config(
    config: EngineConfig, model: Model, chosen: Choices, limits: SchedulerConfig, num_host_blocks: int
) -> ExecutorConfig:
    vocab_size, longest = model.config.vocab_size, limits.max_model_len
    lookup, drafts = None, config.speculative_config
    if drafts is not None and drafts.method == "ngram" and chosen.max_drafts:
        lookup = Lookup(drafts.num_speculative_tokens, drafts.prompt_lookup_min, drafts.prompt_lookup_max)
    elif drafts is not None and drafts.is_computed and chosen.max_drafts:
        lookup = Lookup(drafts.num_speculative_tokens)
    has_stages, most = model.placement.num_stages > 1, min(MAX_DECODE_STEPS, config.block_size)
    return ExecutorConfig(
        num_gpu_blocks=limits.num_gpu_blocks,
        block_size=config.block_size,
        max_model_len=longest,
        max_num_seqs=chosen.max_num_seqs,
        buckets=chosen.buckets,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        seed=config.seed,
        implementation=config.attention_implementation,
        formats=dataclasses.replace(model.formats, is_native=chosen.has_native_products),
        num_host_blocks=num_host_blocks,
        max_drafts=chosen.max_drafts,
        lookup=lookup,
        max_decode_steps=1 if has_stages else config.num_scheduler_steps or most,
        warms_sampling=config.warm_up != "background",
        warms_everything=config.warm_up == "everything",
        logits_processors=load_processors(config.logits_processors, vocab_size, longest),
    )


def _check_attention(config: EngineConfig, model_config: ModelConfig, model: Model) -> None:
    """Find out, by tracing it, whether an implementation that was asked for can be had of this model.

    Raises:
        ConfigError: it cannot.
    """
    heads, head_dim = model_config.num_kv_heads, model_config.head_dim
    layout = KVLayout(model.kv_dtype, head_dim)
    q = jax.ShapeDtypeStruct((1, model_config.num_heads, head_dim), model.dtype)
    pool = jax.ShapeDtypeStruct((1, 1, 2, heads, config.block_size, layout.width), layout.array_dtype)
    tables, lengths = jax.ShapeDtypeStruct((1, 1), "int32"), jax.ShapeDtypeStruct((1,), "int32")
    attend = functools.partial(
        pallas_kernels.decode_attention,
        layer=0,
        scale=1.0,
        window=1 if model_config.has_bounds else None,
        implementation=config.attention_implementation,
    )
    try:
        found = jax.eval_shape(attend, q, pool, tables, lengths)
    except TypeError as error:
        raise ConfigError(
            f"attention_implementation={shown(config.attention_implementation)} cannot be called: {error}"
        ) from error
    if (getattr(found, "shape", None), getattr(found, "dtype", None)) != (q.shape, q.dtype):
        raise ConfigError(
            f"attention_implementation={shown(config.attention_implementation)} returns {found} of queries "
            f"{q.shape} {q.dtype}: it must return that shape and dtype"
        )


def _check_files(config: EngineConfig, limits: SchedulerConfig, *, has_weights: bool) -> None:
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
    if has_weights or config.load_format == "dummy":
        what = "params" if has_weights else 'load_format="dummy"'
        raise ConfigError(
            f"prefix_cache_dir={folder!r} cannot keep blocks of {what}: weights that are in no file are not "
            "known again; leave one of them out"
        )


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
