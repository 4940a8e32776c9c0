"""Settings of an engine, with vLLM's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.engine.speculation import SpeculativeConfig, speculative_config
from jaxllm.errors import ConfigError, shown
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.loading.load import LOAD_FORMATS, check_load_format
from jaxllm.models.linear_formats import QUANTIZATIONS
from jaxllm.models.quantisation import HOW_TO_DEQUANTISE, METHODS
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.own import check_costs
from jaxllm.sched.policies import SchedulingPolicy
from jaxllm.sched.presets import PRESETS
from jaxllm.system.dtypes import DTYPES, KV_DTYPES, dtype_or_auto, kv_dtype_of
from jaxllm.system.options import (
    Kept,
    byte_count,
    check_choice,
    check_options,
    check_range,
    checked_path,
    json_object,
    list_of,
    option,
    sizes,
    texts,
    with_options,
)

ATTENTION_IMPLEMENTATIONS = ("native", "xla", "triton", "mosaic", "reference", "fastest")
WARM_UPS = ("background", "all", "everything")


def _model(name: str, value: object) -> str:
    return checked_path(name, demo_model_path() if value is None else value)


def _revision(name: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={shown(value)} must be the name of a branch, tag or commit")
    return value


def _overrides(name: str, value: object) -> object:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be a dictionary of config.json fields")
    return value


def _implementation(name: str, value: object) -> object:
    if ":" not in str(value):
        check_choice(name, value, ATTENTION_IMPLEMENTATIONS)
    return value


def _quantization(name: str, value: object) -> object:
    if isinstance(value, str) and value in HOW_TO_DEQUANTISE:
        raise ConfigError(
            f"{name}={shown(value)} is not supported: take a checkpoint in 16 bits, which "
            f"{', '.join(QUANTIZATIONS)} round while it is loaded{HOW_TO_DEQUANTISE[value]}"
        )
    if isinstance(value, str) and value.removesuffix("_marlin") in METHODS and value not in QUANTIZATIONS:
        raise ConfigError(
            f"{name}={shown(value)} is how a checkpoint says that it is quantised, and needs no option: "
            "leave it out"
        )
    if value == "int4":
        raise ConfigError(f"{name}='int4' rounds weights alone: its name is int4_weight")
    check_choice(name, value, tuple(QUANTIZATIONS))
    return value


def _costs(name: str, value: object) -> object:
    if isinstance(value, str) and ":" in value:
        return value
    return checked_path(name, value) if isinstance(value, str | os.PathLike) else check_costs(value, name)


def _host(name: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name}={shown(value)} must be a host name or an address")
    return value


def _cache_folder(text: str) -> str | None:
    return None if text == "none" else text


@with_options
class EngineConfig:
    """How to load and run a model: what `LLM` takes, and, with dashes, the commands that load a model.

    Args:
        model: Folder of a Hugging Face or converted checkpoint, or the id of one ("organisation/name") in the
            local Hugging Face cache; by default the embedded demo model.
        tokenizer: Folder or id of the tokenizer; by default the model's.
        scheduler_policy: Which request is next, whom to preempt and how, when to admit: {scheduler_policy},
            or module:attribute of your own; by default adaptive. `jaxllm.sched.presets` tells what each does.
            In Python a `SchedulerPolicy` is taken, too, and a class or object that answers one question.
        costs: What the policy predicts seconds by: module:attribute of a predictor of your own, or the path
            of what `jaxllm profile` stored. By default it is the stored profile of this model and device,
            else kernels measured on such a GPU, or a roofline. In Python an object is taken, too
            (`jaxllm.predictors.base.CostModel`). The engine corrects it while it runs.
        revision: Branch, tag or commit of an id; by default main.
        download: Fetch what the cache lacks of an id: weights in safetensors, configuration and tokenizer.
        download_dir: Cache of models by id; by default the environment's (HF_HUB_CACHE, HF_HOME).
        skip_tokenizer_init: Run without a tokenizer, on token ids only.
        dtype: Of weights and activations; auto is float32 on CPUs, which emulate the others, and the
            checkpoint's elsewhere.
        quantization: Round weights of a 16- or 32-bit checkpoint while they are loaded. Products of int8 and
            fp8 take eight bits on both sides: weights by a scale for each output, activations by one for each
            token, as vLLM's W8A8. int8_weight (a scale for each output) and int4_weight (for 128 inputs) are
            of weights alone. Checkpoints that are quantised need no option.
        quantize_lm_head: With `quantization` quantise the output head, too, and embeddings that are tied to
            it; it is a fifth of a small model's time.
        kv_cache_dtype: What keys and values are stored as; by default the dtype. Of the demo model's
            predictions 99.8 % are float32's with bfloat16 (KL divergence 4e-6 nats), 99.2 to 99.7 % with
            int8, which has a scale for each head of a token (4e-5 to 7e-5), 98 % with fp8_e4m3 (1e-3) and
            95 % with fp8_e5m2 (4e-3).
        load_format: Of weights; dummy makes random ones on the device.
        hf_overrides: Fields of config.json to replace; null drops one.
        seed: Of dummy weights, and of requests that name no seed.
        tensor_parallel_size: So many devices, the first of JAX's, share each layer. Each has some heads with
            their KV, and its part of most weights, so that the model need not fit one of them.
        pipeline_parallel_size: So many stages of layers, one after another, each on `tensor_parallel_size`
            devices of its own: for models that fit no device, where devices have no fast link. One stage
            works at a time.
        prefill_context_parallel_size: So many groups of `tensor_parallel_size` devices share the rows of
            prompts. Each group has all weights and the whole pool: for prompts that take too long on one,
            where devices have no link that is fast enough for `tensor_parallel_size`.
        data_parallel_size: So many engines, each on devices of its own with a pool and a queue of its
            own. A request goes to the one at which it costs least, with what that has cached.
        nnodes: So many processes, each with its part of the `tensor_parallel_size` devices, on hosts of their
            own or not. The first one leads: it has the scheduler and answers requests. The others run
            `jaxllm serve` with the same settings and do what it says.
        node_rank: Which of these this process is; 0 leads.
        master_addr: Host name or address of the leader, which the others connect to. Whoever can connect is
            trusted, as with NCCL and gloo: name one of a network of your own.
        master_port: Port there.
        max_model_len: Longest sequence, prompt and output, in tokens; by default the checkpoint's, or the
            pool's size if that is less (with a warning).
        max_num_seqs: Most requests running at once; by default 64 on CPUs, and 1024, 512 or 256 on GPUs, as
            many as have 512 tokens each in the pool.
        max_num_batched_tokens: Most tokens in one step, of decodes and prompts together; by default 512 on
            CPUs, and 8192 on GPUs, 2048 on those with room for 256 requests.
        block_size: Tokens per KV block.
        num_gpu_blocks_override: Size of the KV pool in blocks, on any device.
        kv_cache_memory: Size of the KV pool in bytes, on each device; the command line takes KiB, MiB,
            GiB.
        num_host_blocks: Blocks of pinned host memory for requests that are swapped out, and for what of the
            prefix cache the device has no room for; 0 turns both off. By default what 4 GiB hold, at most as
            many as the pool has, and none if the policy copies nothing or the pool cannot run out.
        enable_prefix_caching: Let requests find the KV of earlier ones whose tokens begin alike, instead of
            computing it; by default they do, unless the scheduling policy is a system that did not.
        prefix_cache_dir: Folder in which the prefix cache outlives the engine, in files that other engines of
            the same model and weights may read and write at the same time. Every full block is copied to the
            host, and from there to a file; a quarter of `num_host_blocks` is for those on that way.
            `LLM.reset_prefix_cache` leaves the files alone. Each process of an engine (`nnodes`) names a
            folder for its part of each block: the same on a shared disk, or one of its own.
        prefix_cache_dir_bytes: Most bytes of all these files in a folder, whoever keeps them there; by
            default 16GiB. The least recently used ones go first.
        profile_seconds: Measure costs for so long at start if no profile of this model and device is stored;
            by default 10 s on devices nothing is known of. For the others there are kernels measured by
            others, or the roofline of their data sheet.
        gpu_memory_utilization: Fraction for weights, temporaries and pool of what JAX takes of a GPU's
            memory; by default 0.95. JAX takes 0.95 unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
        attention_implementation: One of {attention_implementation} (measured at start, program by program),
            or a tiling of triton's such as triton:k32,q64,w4,s2; by default what the device takes
            (`pallas_kernels.default_implementation`). CPUs take native, GPUs triton. The compile report
            names the tiling that was the fastest.
        async_scheduling: Let the host run one step ahead of the device.
        num_scheduler_steps: Most decode iterations in one device program, at most `block_size`; by default as
            many as take 50 ms, up to 8. It runs while at most 16 requests do and none of them needs a
            decision: the host then has less to do, and streams advance by several tokens. 1 turns it off,
            with fewer programs.
        speculative_config: Draft tokens and verify several in one step, as
            {"method": "ngram", "num_speculative_tokens": 4} (`jaxllm.engine.speculation.SpeculativeConfig`
            has all). Outputs stay the same.
        logits_processors: Pure JAX functions that change the logits of every request before all else, by
            import path module:function or themselves. They are compiled into the programs
            (`jaxllm.sampling.logits_processors`).
        ledger: New file to write the scheduler's decisions to, as JSON lines; see `jaxllm explain`.
        decode_buckets: Batch sizes to compile decode programs for; by default a ladder up to `max_num_seqs`.
        prefill_buckets: Token counts to compile programs of steps with prompts for; by default a ladder up to
            `max_num_batched_tokens`.
        warm_up: Compile programs beside an engine that already serves, all of them first, or everything,
            those of rare sampling as well. In the background a step waits for its own program only, and a
            request whose options need another waits until that is there, while others go on. All are those of
            steps, filters, penalties, masks and log-probabilities, and those of steps run once before the
            first request, for measurements. Everything adds what `prompt_logprobs` and `logprobs=-1` take, so
            that nothing compiles later.
        compilation_cache_dir: Folder of JAX's persistent compilation cache; auto is a user cache folder, and
            none (in Python None) leaves JAX's settings alone.

    Raises:
        ConfigError: a value is out of range.
    """

    model: Kept[str, str | os.PathLike[str] | None] = option(None, check=_model)
    tokenizer: str | None = option(None, check=checked_path)
    scheduler_policy: SchedulingPolicy | str | None = option(None, names=tuple(PRESETS))
    costs: CostModel | str | os.PathLike[str] | None = option(None, check=_costs)
    revision: str | None = option(None, check=_revision)
    download: bool = option(False)
    download_dir: str | os.PathLike[str] | None = option(None)
    skip_tokenizer_init: bool = option(False, flag=None)
    dtype: str = option("auto", choices=("auto", *DTYPES), check=dtype_or_auto)
    quantization: str | None = option(None, names=tuple(QUANTIZATIONS), check=_quantization)
    quantize_lm_head: bool = option(True)
    kv_cache_dtype: str = option("auto", names=("auto", *KV_DTYPES), check=kv_dtype_of)
    load_format: str = option("auto", choices=LOAD_FORMATS, check=check_load_format)
    hf_overrides: Mapping[str, Any] | None = option(None, check=_overrides, parse=json_object)
    seed: int = option(0, within=(0, 2**63 - 1), flag=None)
    tensor_parallel_size: int = option(1, within=(1, 1024), short=("-tp",))
    pipeline_parallel_size: int = option(1, within=(1, 1024), short=("-pp",))
    prefill_context_parallel_size: int = option(1, within=(1, 1024), short=("-pcp",))
    data_parallel_size: int = option(1, within=(1, 1024), short=("-dp",))
    nnodes: int = option(1, within=(1, 1024))
    node_rank: int = option(0, within=(0, 1023))
    master_addr: str = option("127.0.0.1", check=_host)
    master_port: int = option(29501, within=(1, 65535))
    max_model_len: int | None = option(None, within=(2, 2**24))
    max_num_seqs: int | None = option(None, within=(1, 2**14))
    max_num_batched_tokens: int | None = option(None, within=(1, 2**20))
    block_size: int = option(16, within=(1, 1024))
    num_gpu_blocks_override: int | None = option(None, within=(1, 2**31 - 1))
    kv_cache_memory: int | None = option(None, within=(1, 2**50), parse=byte_count)
    num_host_blocks: int | None = option(None, within=(0, 2**31 - 1))
    enable_prefix_caching: bool | None = option(None)
    prefix_cache_dir: str | os.PathLike[str] | None = option(None)
    prefix_cache_dir_bytes: int | None = option(None, within=(1, 2**60), parse=byte_count)
    profile_seconds: float | None = option(None, within=(0.0, 3600.0))
    gpu_memory_utilization: float | None = option(None)
    attention_implementation: str | None = option(
        None, names=ATTENTION_IMPLEMENTATIONS, check=_implementation
    )
    async_scheduling: bool = option(True)
    num_scheduler_steps: int | None = option(None, within=(1, 1024))
    speculative_config: Kept[SpeculativeConfig | None, Mapping[str, Any] | None] = option(
        None, check=speculative_config, parse=json_object
    )
    logits_processors: Sequence[str | Callable[..., Any]] | None = option(
        None, check=list_of("functions, or of paths 'module:function'"), parse=texts
    )
    ledger: str | None = option(None, check=checked_path)
    decode_buckets: Sequence[int] | None = option(None, check=list_of("sizes"), parse=sizes)
    prefill_buckets: Sequence[int] | None = option(None, check=list_of("sizes"), parse=sizes)
    warm_up: str = option("background", choices=WARM_UPS)
    compilation_cache_dir: str | os.PathLike[str] | None = option("auto", parse=_cache_folder)

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_scheduler_steps is not None:
            check_range("num_scheduler_steps", self.num_scheduler_steps, 1, self.block_size)
        if self.costs is not None and self.profile_seconds is not None:
            raise ConfigError(
                f"costs={shown(self.costs)} says what is predicted, and profile_seconds="
                f"{self.profile_seconds:g} would measure it: leave one of them out"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"):
            if getattr(self, name) > 1 and self.attention_implementation == "fastest":
                raise ConfigError(
                    f"attention_implementation='fastest' measures on one device, and {name}="
                    f"{getattr(self, name)}: name an implementation, or leave it out"
                )
        if self.pipeline_parallel_size > 1:
            self._check_stages()
        if self.prefill_context_parallel_size > 1:
            self._check_contexts()
        if self.data_parallel_size > 1:
            self._check_replicas()
        self._check_rank()
        if self.quantization is None and not self.quantize_lm_head:
            raise ConfigError(
                "quantize_lm_head=False leaves the output head out of a quantization, and there is none: set "
                "quantization, or leave it out"
            )
        if self.prefix_cache_dir is None and self.prefix_cache_dir_bytes is not None:
            raise ConfigError(
                f"prefix_cache_dir_bytes={self.prefix_cache_dir_bytes} limits files, and prefix_cache_dir "
                "names no folder for any: set it, or leave both out"
            )

    def _check_stages(self) -> None:
        """Verify that layers on several stages can have the settings."""
        count, steps, drafts = self.pipeline_parallel_size, self.num_scheduler_steps, self.speculative_config
        if steps is not None and steps > 1:
            raise ConfigError(
                f"num_scheduler_steps={steps} are of one device program, and pipeline_parallel_size={count} "
                "has one for each stage: leave it out"
            )
        if drafts is not None and drafts.method in ("medusa", "eagle3"):
            raise ConfigError(
                f"heads ({drafts.method}) draft from what layers on one device give, and "
                f"pipeline_parallel_size={count}: draft by lookup or with a model"
            )

    def _check_contexts(self) -> None:
        """Verify that prompts on several groups of devices can have the settings."""
        given = f"prefill_context_parallel_size={self.prefill_context_parallel_size}"
        if self.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{given} is of one stage, and pipeline_parallel_size={self.pipeline_parallel_size}: leave "
                "one of them out"
            )
        if self.nnodes > 1:
            raise ConfigError(f"{given} is of one process, and nnodes={self.nnodes}: leave one of them out")
        if self.speculative_config is not None:
            raise ConfigError(
                f"{given} shares prompts, and drafts ({self.speculative_config.method}) are verified as "
                "prompts on one device: leave one of them out"
            )

    def _check_rank(self) -> None:
        """Verify that a process is one of its engine's, and that these have somewhere to meet."""
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank={self.node_rank} is none of the {self.nnodes} processes of nnodes={self.nnodes}, "
                f"which are 0 to {self.nnodes - 1}"
            )
        if self.nnodes > 1:
            self._check_processes()
            return
        for name in ("master_addr", "master_port"):
            if getattr(self, name) != getattr(EngineConfig, name):
                raise ConfigError(
                    f"{name}={shown(getattr(self, name))} is where several processes meet, and nnodes=1: set "
                    "nnodes, or leave it out"
                )

    def _check_processes(self) -> None:
        """Verify that an engine of several processes can have the settings."""
        count, drafts = self.nnodes, self.speculative_config
        if self.tensor_parallel_size % count:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} is of all processes, and nnodes={count} "
                "does not divide it: each process has as many devices"
            )
        for name in ("pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is of one process, and nnodes={count}: leave one of them "
                    "out, or share layers (tensor_parallel_size)"
                )
        if drafts is not None and drafts.method not in ("ngram", "suffix"):
            raise ConfigError(
                f"what drafts ({drafts.method}) is on one device of one process, and nnodes={count}: draft "
                "by lookup (ngram, suffix)"
            )
        for one in self.logits_processors or ():
            if not isinstance(one, str):
                raise ConfigError(
                    f"logits_processors={shown(one)} is a function of this process, and nnodes={count}: name "
                    "it as 'module:function', which all of them can import"
                )

    def _check_replicas(self) -> None:
        """Verify that several engines can have the settings."""
        count, policy = self.data_parallel_size, self.scheduler_policy
        if self.ledger is not None:
            raise ConfigError(
                f"ledger={shown(self.ledger)} is of one engine's decisions, and data_parallel_size={count}: "
                "leave one of them out"
            )
        for name, value in (("scheduler_policy", policy), ("costs", self.costs)):
            if not isinstance(value, str | os.PathLike | type | None):
                raise ConfigError(
                    f"{name}={shown(value)} would be asked by {count} engines at once (data_parallel_size): "
                    "give a name or a class, of which each makes its own"
                )
