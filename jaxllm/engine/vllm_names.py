"""vLLM's arguments that this engine has no setting for: values that change nothing, and what else to do."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, JaxllmError, RequestError, nearest, shown

_logger = logging.getLogger(__name__)

_FILES = "safetensors, configuration and tokenizer are all that is read; leave it out"
_NO_CODE = "no code of checkpoints is ever run; leave it out"
_MULTIMODAL = "models of text only are supported; leave it out"
_NO_KV_SCALES = (
    "int8 has scales of its own, fp8 those of a checkpoint or none; set kv_cache_dtype, or leave it out"
)
_NO_LORA = "there are no LoRA adapters; merge them into the weights (peft: merge_and_unload, save_pretrained)"
_BUCKETS = "programs are compiled for sizes, which decode_buckets and prefill_buckets name; leave it out"
_GRAMMARS = "grammars are llguidance's, and a request's structured_outputs say what to follow; leave it out"
_DRAFTS = "use speculative_config"
_NO_EXPERTS = "there are no models with experts; leave it out"
_DEVICES = "use data_parallel_size, tensor_parallel_size, pipeline_parallel_size or nnodes"
_PREFILLS = "max_num_batched_tokens bounds a step, and scheduler_policy says what is in it; leave it out"
_NO_TRANSFER = "KV is not sent between engines; num_host_blocks and prefix_cache_dir keep it, or leave it out"
_SCHEDULER = "use scheduler_policy: a preset's name such as 'vllm_v1' or 'priority', or a class of your own"

SETTINGS: Mapping[str, tuple[Sequence[Any], str]] = {
    "enable_expert_parallel": ((False,), _NO_EXPERTS),
    "enable_eplb": ((False,), _NO_EXPERTS),
    "distributed_executor_backend": ((None,), "processes are those of nnodes; leave it out"),
    "disable_custom_all_reduce": ((False, True), "sums are XLA's; leave it out"),
    "calculate_kv_scales": ((False,), _NO_KV_SCALES),
    "cpu_offload_gb": ((0,), "weights stay on the device; leave it out"),
    "trust_remote_code": ((False,), _NO_CODE),
    "safetensors_load_strategy": (("lazy",), _FILES),
    "use_tqdm_on_load": ((False, True), "loading shows no progress bar; leave it out"),
    "tokenizer_pool_size": ((0,), "tokenizers run where requests come in; leave it out"),
    "tokenizer_mode": (("auto", "hf"), "tokenizers are those of transformers; leave it out"),
    "code_revision": ((None,), _NO_CODE),
    "tokenizer_revision": ((None,), "a tokenizer's id has the revision 'main'; give the folder of another"),
    "hf_token": ((None,), "set the environment's HF_TOKEN; leave it out"),
    "hf_config_path": ((None,), "use hf_overrides for fields of config.json"),
    "config_format": (("auto", "hf"), "config.json is Hugging Face's; leave it out"),
    "rope_scaling": ((None,), "use hf_overrides={'rope_scaling': ...}"),
    "rope_theta": ((None,), "use hf_overrides={'rope_theta': ...}"),
    "ignore_patterns": ((None,), _FILES),
    "model_loader_extra_config": ((None, {}), _FILES),
    "task": (("auto", "generate"), "models only generate; leave it out"),
    "runner": (("auto", "generate"), "models only generate; leave it out"),
    "convert": (("auto", "none"), "models only generate; leave it out"),
    "enforce_eager": ((False, True), "programs are always compiled; leave it out"),
    "compilation_config": ((None,), "programs are always compiled; leave it out"),
    "max_seq_len_to_capture": ((None, 8192), _BUCKETS),
    "max_context_len_to_capture": ((None, 8192), _BUCKETS),
    "cuda_graph_sizes": ((None, []), _BUCKETS),
    "cudagraph_capture_sizes": ((None, []), _BUCKETS),
    "max_cudagraph_capture_size": ((None,), _BUCKETS),
    "disable_async_output_proc": ((False,), "use async_scheduling=False"),
    "optimization_level": ((None,), "programs are always compiled; leave it out"),
    "disable_cascade_attn": ((False, True), "use attention_implementation; leave it out"),
    "swap_space": ((4,), "use num_host_blocks"),
    "kv_offloading_size": ((None,), "use num_host_blocks"),
    "kv_transfer_config": ((None,), _NO_TRANSFER),
    "prefix_caching_hash_algo": (("builtin", "sha256"), "blocks are known by BLAKE2b digests; leave it out"),
    "disable_sliding_window": ((False,), "max_model_len up to the window has the same effect"),
    "num_lookahead_slots": ((0,), _DRAFTS),
    "speculative_model": ((None,), _DRAFTS),
    "num_speculative_tokens": ((None,), _DRAFTS),
    "guided_decoding_backend": ((None, "auto", "guidance"), _GRAMMARS),
    "structured_outputs_config": ((None, {}), _GRAMMARS),
    "logits_processor_pattern": ((None,), "use logits_processors, which requests cannot name"),
    "generation_config": (("auto",), "defaults are those of the checkpoint's generation_config.json"),
    "override_generation_config": ((None, {}), "give SamplingParams; leave it out"),
    "model_impl": (("auto",), "models are implemented here; leave it out"),
    "logprobs_mode": (("raw_logprobs",), "log-probabilities are of the model's own logits; leave it out"),
    "worker_cls": (("auto",), "there are no workers; leave it out"),
    "worker_use_ray": ((False,), "jaxllm serve has --replicas for a Ray cluster; leave it out"),
    "data_parallel_backend": (("mp",), "jaxllm serve has --replicas for a Ray cluster; leave it out"),
    "data_parallel_size_local": ((None,), _DEVICES),
    "decode_context_parallel_size": ((1,), _DEVICES),
    "max_parallel_loading_workers": ((None,), "weights are read one after another; leave it out"),
    "max_num_partial_prefills": ((1,), _PREFILLS),
    "max_long_partial_prefills": ((1,), _PREFILLS),
    "long_prefill_token_threshold": ((0,), _PREFILLS),
    "scheduler_delay_factor": ((0,), _PREFILLS),
    "stream_interval": ((1,), "what is new is given at once; leave it out"),
    "enable_reasoning": ((False,), "what a model thinks is not told apart from what it says; leave it out"),
    "reasoning_parser": ((None, ""), "what a model thinks is not told apart from what it says; leave it out"),
    "enable_chunked_prefill": ((True, None), "use scheduler_policy='vllm', which prefills whole prompts"),
    "scheduling_policy": ((), _SCHEDULER),
    "scheduler_cls": ((None,), _SCHEDULER),
    "preemption_mode": ((None,), _SCHEDULER),
    "enable_lora": ((False,), _NO_LORA),
    "lora_modules": ((None,), _NO_LORA),
    "max_loras": ((1,), _NO_LORA),
    "lora_extra_vocab_size": ((256,), _NO_LORA),
    "max_cpu_loras": ((None,), _NO_LORA),
    "fully_sharded_loras": ((False,), _NO_LORA),
    "lora_dtype": (("auto",), _NO_LORA),
    "max_lora_rank": ((16,), _NO_LORA),
    "enable_sleep_mode": ((False, True), "LLM.sleep is always there; leave it out"),
    "enable_prompt_adapter": ((False,), "there are no adapters; leave it out"),
    "enable_prompt_embeds": ((False,), "prompts are text or token ids; leave it out"),
    "limit_mm_per_prompt": ((None, {}), _MULTIMODAL),
    "mm_processor_kwargs": ((None, {}), _MULTIMODAL),
    "mm_processor_cache_gb": ((None, 0, 4), _MULTIMODAL),
    "skip_mm_profiling": ((False, True), _MULTIMODAL),
    "allowed_local_media_path": (("",), _MULTIMODAL),
    "disable_log_stats": ((True,), "read RequestOutput.metrics instead"),
    "served_model_name": ((None,), "there is no server in an LLM; leave it out"),
    "device": (("auto",), "JAX_PLATFORMS chooses the device; leave it out"),
    "max_logprobs": ((20,), "at most 20 log-probabilities are returned; leave it out"),
    "use_v2_block_manager": ((True,), "leave it out"),
}
"""By name: values that change nothing, and the way out from others."""

CALL_ARGUMENTS: Mapping[str, tuple[Sequence[Any], str]] = {
    "lora_request": ((None,), _NO_LORA),
    "mm_processor_kwargs": ((None, {}), _MULTIMODAL),
    "tokenization_kwargs": ((None, {}), "use generate with token ids; leave it out"),
    "concurrency_limit": ((None,), "max_num_seqs is how many sequences run at a time; leave it out"),
}
"""The same of `LLM.generate`, `chat` and `beam_search`."""

CHAT_ARGUMENTS: Mapping[str, tuple[Sequence[Any], str]] = {
    "tool_choice": (
        (None, "auto", "none"),
        "the model chooses by itself among tools; 'none' shows it none of them",
    ),
}
"""The same of `LLM.chat` alone."""

_OTHER_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks": "num_gpu_blocks_override",
    "max_seq_len": "max_model_len",
    "max_batch_size": "max_num_seqs",
    "scheduler": "scheduler_policy",
    "attention_backend": "attention_implementation",
}
RENAMED = ("kv_cache_memory_bytes",)


def translate(settings: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Settings of this engine from what a script for vLLM gives.

    Args:
        settings: names and values as the user gave them.
        known: this engine's names.

    Raises:
        ConfigError: a name is unknown, or a value of vLLM's asks for what there is not; the message says what
            to do.
    """
    translated = {}
    for name, value in settings.items():
        if name in known:
            translated[name] = value
        elif name in RENAMED:
            if _OTHER_NAMES[name] in settings:
                raise ConfigError(
                    f"{name} and {_OTHER_NAMES[name]} are the same setting: leave one of them out"
                )
            translated[_OTHER_NAMES[name]] = value
        elif name in SETTINGS:
            _check_neutral(name, value, SETTINGS, ConfigError)
            if name == "enforce_eager" and value:
                _logger.warning("enforce_eager=True changes nothing: %s", SETTINGS[name][1])
        else:
            raise ConfigError(_unknown("setting", name, known))
    return translated


def check_call_arguments(
    arguments: Mapping[str, Any],
    method: Callable[..., Any],
    neutral: Mapping[str, tuple[Sequence[Any], str]] = CALL_ARGUMENTS,
) -> None:
    """Verify that arguments of a method of `LLM` are vLLM's `neutral` ones, and change nothing.

    Raises:
        RequestError: one is not, or does; the message says what to do.
    """
    for name, value in arguments.items():
        if name not in neutral:
            own = [name for name in inspect.signature(method).parameters if name not in ("self", "others")]
            message = _unknown("argument", name, [*own, *neutral])
            if "chat_template_kwargs" in own:
                message += "; variables of the template go into chat_template_kwargs"
            raise RequestError(message)
        _check_neutral(name, value, neutral, RequestError)


def _check_neutral(
    name: str,
    value: Any,
    neutral: Mapping[str, tuple[Sequence[Any], str]],
    error: type[JaxllmError],
) -> None:
    values, way_out = neutral[name]
    if not any(type(value) in (type(one), int, float) and value == one for one in values):
        raise error(f"{name}={shown(value)} is not supported: {way_out}")


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    hint = _OTHER_NAMES.get(name) if what == "setting" else None
    hint = hint or nearest(name, known)
    meant = "" if hint is None else f"did you mean {hint}? "
    return f"unknown {what} {name!r}; {meant}known {what}s: {', '.join(sorted({*known}))}"
