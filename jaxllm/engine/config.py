"""Settings of an engine, with vLLM's names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, did_you_mean, shown

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_IMPLEMENTATIONS = ("native", "xla", "triton", "mosaic", "fastest")
WARM_UPS = ("background", "all", "everything")
_MAX_PATH, _MAX_NAME = 4095, 255  # bytes, as Linux has it
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to load and run a model.

    Args:
        model: folder of a Hugging Face or converted checkpoint, or the id of one in the local Hugging Face
            cache, such as "organisation/name".
        tokenizer: folder or id of the tokenizer; the model's by default.
        revision: branch, tag or commit of an id; "main" by default.
        download: fetch what the cache lacks of an id: weights in safetensors, configuration and tokenizer.
        download_dir: that cache; by default the environment's (HF_HUB_CACHE, HF_HOME).
        skip_tokenizer_init: run without a tokenizer, on token ids only.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on CPUs (which emulate the others), the
            checkpoint's dtype elsewhere.
        load_format: "auto", "safetensors", "orbax", or "dummy" for random weights made on the device.
        hf_overrides: fields of config.json to replace; None drops one.
        seed: of dummy weights, and of requests that name no seed.
        max_model_len: longest sequence, prompt and output, in tokens; by default the checkpoint's, or the
            pool's size if that is less (with a warning).
        max_num_seqs: most requests running at once (default 64 on CPUs; 1024, 512 or 256 on GPUs, as many as
            have 512 tokens each in the pool).
        max_num_batched_tokens: most tokens in one step, of decodes and prompts together (default 512 on CPUs;
            8192 on GPUs, 2048 on those with room for 256 requests).
        block_size: tokens per KV block.
        num_gpu_blocks_override: size of the KV pool in blocks.
        kv_cache_memory: size of the KV pool in bytes.
        num_host_blocks: blocks of pinned host memory for requests that the scheduling policy swaps out, and
            for what of the prefix cache the device has no room for; 0 turns both off. By default what 4 GiB
            hold, at most as many as the pool has, and none if the policy copies nothing or the pool cannot
            run out.
        enable_prefix_caching: let requests find the KV of earlier ones whose tokens begin alike, instead of
            computing it. By default they do, unless the scheduling policy is a system that did not.
        prefix_cache_dir: folder in which the prefix cache outlives the engine, in files that other engines of
            the same model and weights may read and write at the same time. Every full block is copied to the
            host, and from there to a file; a quarter of `num_host_blocks` is for those on that way.
            `LLM.reset_prefix_cache` leaves the files alone.
        prefix_cache_dir_bytes: most bytes of these files, 16 GiB by default; the least recently used ones go
            first.
        host_bandwidth_limit: for experiments only: bytes per second that the link to the host is slowed down
            to, in each direction.
        profile_seconds: measure costs for so long at start if no profile of this model and device is stored.
            By default 10 s on devices nothing is known of, else the roofline of their data sheet is used.
        gpu_memory_utilization: fraction for weights, temporaries and pool of what JAX takes of a GPU's memory
            (default 0.95; JAX takes 0.95 unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).
        attention_implementation: "native" (CPUs), "xla", "triton", "mosaic" (Hopper, 16 bits), or None for
            what the device takes (`pallas_kernels.default_implementation`); "fastest" measures at start which
            is the fastest for each program, and the compile report names it, such as
            "triton:k32,q64,w4,s2": those names are taken, too.
        async_scheduling: let the host run one step ahead of the device.
        num_scheduler_steps: most decode iterations to compute in one device program while at most 16 requests
            run and none of them needs a decision; the host then has less to do, and streams advance by
            several tokens. At most `block_size`; by default as many as take 50 ms, up to 8; 1 turns it off,
            with fewer programs.
        logits_processors: pure JAX functions that change the logits of every request before all else, by
            import path "module:function" or themselves (`jaxllm.sampling.logits_processors`); they are
            compiled into the programs.
        ledger: new file to write the scheduler's decisions to, as JSON lines (`jaxllm.sched.ledger`).
        decode_buckets: batch sizes to compile decode programs for; a ladder up to max_num_seqs by default.
        prefill_buckets: token counts to compile programs of steps with prompts for, likewise.
        warm_up: "background" compiles programs in the order of need beside an engine that already serves: a
            step waits for its own only, and a request whose options need another program waits until that is
            there, while others go on. "all" compiles every program of steps, filters, penalties, masks and
            log-probabilities and runs those of steps once before the first request, for measurements.
            "everything" adds what `prompt_logprobs` and `logprobs=-1` take, so that nothing compiles later.
        compilation_cache_dir: folder of JAX's persistent compilation cache; None leaves JAX's settings alone.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    download: bool = False
    download_dir: str | os.PathLike[str] | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    load_format: str = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory: int | None = None
    num_host_blocks: int | None = None
    enable_prefix_caching: bool | None = None
    prefix_cache_dir: str | os.PathLike[str] | None = None
    prefix_cache_dir_bytes: int | None = None
    host_bandwidth_limit: float | None = None
    profile_seconds: float | None = None
    gpu_memory_utilization: float | None = None
    attention_implementation: str | None = None
    async_scheduling: bool = True
    num_scheduler_steps: int | None = None
    logits_processors: Sequence[str | Callable[..., Any]] | None = None
    ledger: str | None = None
    decode_buckets: Sequence[int] | None = None
    prefill_buckets: Sequence[int] | None = None
    warm_up: str = "background"
    compilation_cache_dir: str | os.PathLike[str] | None = "auto"

    def __post_init__(self) -> None:
        paths = ("tokenizer", "download_dir", "compilation_cache_dir", "ledger", "prefix_cache_dir")
        for name in ("model", *paths):
            value = getattr(self, name)
            if value is not None or name == "model":
                object.__setattr__(self, name, _path(name, value))
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(
                f"hf_overrides={self.hf_overrides!r} must be a dictionary of config.json fields"
            )
        for name in ("decode_buckets", "prefill_buckets"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Sequence) or isinstance(value, str)):
                raise ConfigError(f"{name}={shown(value)} must be a list of sizes")
        processors = self.logits_processors
        if processors is not None and (not isinstance(processors, Sequence) or isinstance(processors, str)):
            raise ConfigError(
                f"logits_processors={processors!r} must be a list of functions, or of paths 'module:function'"
            )
        _choice("dtype", self.dtype, ("auto", *DTYPES))
        _choice("load_format", self.load_format, LOAD_FORMATS)
        _choice("warm_up", self.warm_up, WARM_UPS)
        implementation = self.attention_implementation
        if implementation is not None and ":" not in str(implementation):
            _choice("attention_implementation", implementation, ATTENTION_IMPLEMENTATIONS)
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise ConfigError(f"revision={shown(self.revision)} must be the name of a branch, tag or commit")
        _integer("seed", self.seed, 0, 2**63 - 1)
        _integer("block_size", self.block_size, 1, 1024)
        _integer("max_model_len", self.max_model_len, 2, 2**24)
        _integer("max_num_seqs", self.max_num_seqs, 1, 2**14)
        _integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        _integer("num_gpu_blocks_override", self.num_gpu_blocks_override, 1, 2**31 - 1)
        _integer("kv_cache_memory", self.kv_cache_memory, 1, 2**50)
        _integer("num_scheduler_steps", self.num_scheduler_steps, 1, self.block_size)
        _integer("num_host_blocks", self.num_host_blocks, 0, 2**31 - 1)
        _integer("prefix_cache_dir_bytes", self.prefix_cache_dir_bytes, 1, 2**60)
        if self.prefix_cache_dir is None and self.prefix_cache_dir_bytes is not None:
            raise ConfigError(
                f"prefix_cache_dir_bytes={self.prefix_cache_dir_bytes} limits files, and prefix_cache_dir "
                "names no folder for any: set it, or leave both out"
            )
        _number("host_bandwidth_limit", self.host_bandwidth_limit, 1.0, 1e15)
        _number("profile_seconds", self.profile_seconds, 0.0, 3600.0)
        for name in ("download", "skip_tokenizer_init", "async_scheduling", "enable_prefix_caching"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name != "enable_prefix_caching"):
                raise ConfigError(f"{name}={shown(value)} must be True or False")


def _path(name: str, value: object) -> str:
    """A path, with the user's home for a tilde at its front."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"{name}={shown(value)} must be a path")
    path = os.path.expanduser(path)
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}={path[:80]!r} holds characters that no path has") from error
    if len(os.fsencode(path)) > _MAX_PATH or any(len(os.fsencode(p)) > _MAX_NAME for p in path.split(os.sep)):
        raise ConfigError(
            f"{name} is a path of {len(path)} characters ({path[:40]!r}...); at most {_MAX_PATH} bytes, and "
            f"{_MAX_NAME} between two slashes, can be one"
        )
    return path


def _choice(name: str, value: str, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{name}={shown(value)} is not supported; {did_you_mean(value, choices)}use one of "
            f"{', '.join(choices)}"
        )


def _integer(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high
    ):
        raise ConfigError(f"{name}={shown(value)} must be an integer from {low} to {high}")


def _number(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high
    ):
        raise ConfigError(f"{name}={shown(value)} must be a number from {low:g} to {high:g}")
