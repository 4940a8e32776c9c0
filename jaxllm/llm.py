"""`LLM`: a model, its tokenizer and an engine behind three calls."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax

from jaxllm import tokenizer as tokenization
from jaxllm.config import EngineConfig
from jaxllm.costs import shape_of
from jaxllm.engine.engine import Engine, Prompt
from jaxllm.engine.observer import StepObserver
from jaxllm.errors import ConfigError, RequestError
from jaxllm.executor import memory
from jaxllm.executor.buckets import Buckets
from jaxllm.executor.model_executor import ExecutorConfig, ModelExecutor
from jaxllm.loading import load_params
from jaxllm.models.config import LlamaConfig, OPTConfig, config_from_dict, read_hf_config
from jaxllm.outputs import RequestOutput
from jaxllm.predictors.base import ModelShape
from jaxllm.sampling_params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import open_ledger
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.scheduler import Scheduler
from jaxllm.scheduling import Scheduling, make_scheduling
from jaxllm.types import MAX_DECODE_STEPS, MAX_STAGED_BLOCKS

_logger = logging.getLogger(__name__)
_DEFAULT_LIMITS = {"cpu": (64, 512)}  # max_num_seqs, max_num_batched_tokens by platform
_OTHER_LIMITS = (256, 2048)
_ID_PREFIX = "llm-"  # of requests made here, so that ids queued on the engine itself stay the user's
_BRIEF_PROFILE_SECONDS = 10.0
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

Prompts = str | Mapping[str, Any] | Sequence[Prompt] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class LoadTimes:
    """Seconds spent before the first request: reading weights, and compiling and warming up."""

    load_seconds: float
    warm_up_seconds: float


class LLM:
    """Offline inference with one model.

    >>> from jaxllm import LLM, SamplingParams
    >>> llm = LLM("path/to/checkpoint")                                                # doctest: +SKIP
    >>> outputs = llm.generate(["def add(a, b):"], SamplingParams(temperature=0))      # doctest: +SKIP
    >>> print(outputs[0].outputs[0].text)                                              # doctest: +SKIP

    Args:
        model: folder of a checkpoint; the embedded demo model if None.
        scheduler_policy: which request is next, whom to preempt and how, when to admit: a preset's name
            ("adaptive", the default, "paper", "vllm", "vllm_swap"; its predicted costs are those of `jaxllm
            profile`, or a roofline), the import path "module:attribute" of your own, or a `SchedulerPolicy`.
        **settings: the fields of `EngineConfig`.

    Raises:
        ConfigError: a setting or the checkpoint's configuration is invalid or unsupported.
        WeightsError: the weights are missing, truncated or do not match.
        CapacityError: the device cannot hold the model and one KV block.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        scheduler_policy: SchedulerPolicy | str | None = None,
        **settings: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ConfigError(f"unknown settings {unknown}; known settings: {', '.join(sorted(known))}")
        folder = demo_model_path() if model is None else Path(model)
        config = EngineConfig(model=str(folder), **settings)
        self.config = config
        self._ids = itertools.count()
        self._mailboxes: dict[str, collections.deque[RequestOutput]] = {}
        self._unclaimed: list[RequestOutput] = []

        started = time.perf_counter()
        device = jax.devices()[0]
        _set_compilation_cache(config.compilation_cache_dir)
        hf_config = read_hf_config(folder)
        model_config = config_from_dict(hf_config, config.hf_overrides)
        dtype = _resolve_dtype(config.dtype, {**hf_config, **(config.hf_overrides or {})}, device.platform)
        defaults = _DEFAULT_LIMITS.get(device.platform, _OTHER_LIMITS)
        max_num_seqs = config.max_num_seqs or defaults[0]
        max_num_batched_tokens = config.max_num_batched_tokens or defaults[1]

        self.tokenizer = None
        if not config.skip_tokenizer_init:
            self.tokenizer = tokenization.load_tokenizer(config.tokenizer or folder)
        eos_token_ids = tokenization.eos_token_ids(folder, self.tokenizer, config.hf_overrides)

        max_model_len = config.max_model_len or model_config.default_max_model_len
        model_config.with_max_model_len(max_model_len)
        shape = shape_of(model_config, folder.resolve().name, dtype)
        scheduling = make_scheduling(scheduler_policy, shape, device.device_kind, config.block_size)
        params = load_params(
            folder, model_config, dtype, load_format=config.load_format, seed=config.seed, device=device
        )
        buckets = Buckets.make(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            decode_sizes=config.decode_buckets,
            prefill_sizes=config.prefill_buckets,
        )
        bytes_per_block = memory.block_bytes(model_config, config.block_size, _ITEMSIZE[dtype])
        temporaries = memory.temporary_bytes(
            model_config,
            max_num_batched_tokens,
            max(max_num_seqs, buckets.max_prefill_seqs),
            _ITEMSIZE[dtype],
        )
        if scheduling.may_swap and config.num_host_blocks != 0:
            temporaries += 2 * MAX_STAGED_BLOCKS * bytes_per_block
        needed_blocks = max_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = memory.num_blocks_that_fit(
            device=device,
            bytes_per_block=bytes_per_block,
            temporaries=temporaries,
            needed_blocks=needed_blocks,
            num_gpu_blocks_override=config.num_gpu_blocks_override,
            kv_cache_memory=config.kv_cache_memory,
            gpu_memory_utilization=config.gpu_memory_utilization,
        )
        max_model_len = _fit_length(max_model_len, num_blocks * config.block_size, config.max_model_len)
        num_host_blocks = scheduling.num_host_blocks(
            config.num_host_blocks, num_blocks, needed_blocks, bytes_per_block
        )
        if config.host_bandwidth_limit is not None and not num_host_blocks:
            raise ConfigError(
                f"host_bandwidth_limit={config.host_bandwidth_limit:g} slows swaps down, and there are none: "
                "set num_host_blocks"
            )
        self.model_config: LlamaConfig | OPTConfig = model_config.with_max_model_len(max_model_len)  # type: ignore[assignment]
        self.dtype = dtype
        self.executor = ModelExecutor(
            self.model_config,
            params,
            ExecutorConfig(
                num_gpu_blocks=num_blocks,
                block_size=config.block_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                buckets=buckets,
                dtype=dtype,
                seed=config.seed,
                implementation=config.attention_implementation,
                num_host_blocks=num_host_blocks,
                host_bandwidth_limit=config.host_bandwidth_limit,
                max_decode_steps=config.num_scheduler_steps or min(MAX_DECODE_STEPS, config.block_size),
            ),
            device,
        )
        loaded = time.perf_counter()
        self.executor.warm_up()
        self.load_times = LoadTimes(loaded - started, time.perf_counter() - loaded)
        scheduler_config = SchedulerConfig(
            num_gpu_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_seqs=buckets.max_prefill_seqs,
            num_host_blocks=num_host_blocks,
        )
        self.costs, self.costs_source = scheduling.costs, scheduling.source
        self._settle_costs(shape, scheduling, has_swaps=num_host_blocks > 0)
        ledger = None
        if config.ledger is not None:
            ledger, close = open_ledger(config.ledger, None if self.costs_source is None else self.costs)
            weakref.finalize(self, close)
        self.engine = Engine(
            self.executor,
            Scheduler(scheduler_config, scheduling.policy, ledger=ledger),
            observer=StepObserver(self.costs, ledger),
            vocab_size=model_config.vocab_size,
            tokenizer=self.tokenizer,
            eos_token_ids=eos_token_ids,
            async_scheduling=config.async_scheduling,
            num_scheduler_steps=config.num_scheduler_steps,
        )

    def _settle_costs(self, shape: ModelShape, scheduling: Scheduling, *, has_swaps: bool) -> None:
        """Replace estimated costs by a brief profile, if asked to or if there is no estimate.

        Raises:
            ConfigError: `profile_seconds` is set, and nothing would use what it measures.
        """
        seconds = self.config.profile_seconds
        is_idle = scheduling.is_ready_made and self.config.ledger is None
        if seconds and (is_idle or not has_swaps):
            raise ConfigError(
                f"profile_seconds={seconds:g} would measure costs that nobody weighs: give a "
                "scheduler_policy by name, or a ledger, and num_host_blocks"
            )
        if not has_swaps:
            return
        if seconds is None:
            seconds = _BRIEF_PROFILE_SECONDS if scheduling.needs_measuring else 0.0
        source = scheduling.source or ""
        if seconds and not source.startswith("profile"):
            from jaxllm.bench.profile import Profiler

            _logger.info("measuring costs for %g s; `jaxllm profile` does it once and for all", seconds)
            profiler = Profiler(self.executor, shape)
            samples = profiler.samples(seconds)
            scheduling.costs.model = profiler.profile(samples, profiler.fit(samples, is_brief=True)).table
            self.costs_source = f"profile of {seconds:g} s at start"
        elif scheduling.weighs_costs and source.startswith("roofline"):
            _logger.warning("predicted costs are a %s, not measured; `jaxllm profile` measures them", source)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self.executor.config.max_model_len

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, and return the outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list of them; each is text, a list of token ids, or
                `{"prompt_token_ids": ids}`.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Raises:
            RequestError, SamplingParamsError: an input is invalid; nothing was run.
        """
        request_ids = self._add(_as_prompts(prompts), sampling_params, stream=False)
        finished: dict[str, RequestOutput] = {}
        for output in self._run(request_ids, use_tqdm):
            finished[output.request_id] = output
        return [
            dataclasses.replace(finished[request_id], request_id=request_id.removeprefix(_ID_PREFIX))
            for request_id in request_ids
        ]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, rendered by the checkpoint's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            add_generation_prompt: open the assistant's turn.
            **template_variables: passed to the template.
        """
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer; this LLM was made with skip_tokenizer_init=True")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(
                "messages must be a list like [{'role': 'user', 'content': '...'}], or a list of such lists, "
                f"not {type(messages).__name__}"
            )
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            tokenization.apply_chat_template(
                self.tokenizer, conversation, add_generation_prompt, **template_variables
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[RequestOutput]:
        """Yield each request's output so far, after every step it advanced in.

        `request_id` is the prompt's place in the input, as a string. The prompts are checked and queued at
        the call; closing the iterator aborts what is left.
        """
        return self._stream(self._add(_as_prompts(prompts), sampling_params, stream=True))

    def _stream(self, request_ids: Sequence[str]) -> Iterator[RequestOutput]:
        places = {request_id: str(place) for place, request_id in enumerate(request_ids)}
        for output in self._run(request_ids, use_tqdm=False):
            yield dataclasses.replace(output, request_id=places[output.request_id])

    def _add(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        stream: bool,
    ) -> list[str]:
        """Queue all prompts, or none if one of them is refused."""
        params = (
            sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        )
        if len(params) != len(prompts):
            raise RequestError(
                f"{len(params)} sampling_params for {len(prompts)} prompts; pass one for all or one for each"
            )
        request_ids: list[str] = []
        try:
            for place, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                request_id = f"{_ID_PREFIX}{next(self._ids)}"
                try:
                    self.engine.add_request(request_id, prompt, param, stream=stream)
                except RequestError as error:
                    raise type(error)(f"prompt {place}: {error}") from error
                request_ids.append(request_id)
        except BaseException:
            self._abort(request_ids)
            raise
        return request_ids

    def _run(self, request_ids: Sequence[str], use_tqdm: bool) -> Iterator[RequestOutput]:
        """Step the engine until the requests have finished; abort the rest if the caller stops early.

        Several calls may be under way at once (streams, taken in turns): each step's outputs go to the
        mailbox of the call they belong to.
        """
        mailbox: collections.deque[RequestOutput] = collections.deque()
        unfinished = set(request_ids)
        self._mailboxes.update(dict.fromkeys(request_ids, mailbox))
        progress = None
        if use_tqdm:
            from tqdm import tqdm

            progress = tqdm(total=len(request_ids), desc="Processed prompts", unit="prompt")
        try:
            while unfinished:
                while not mailbox:
                    self._step()
                output = mailbox.popleft()
                if output.finished:
                    unfinished.discard(output.request_id)
                    del self._mailboxes[output.request_id]
                    if progress is not None:
                        progress.update()
                yield output
        finally:
            self._abort(unfinished)
            if progress is not None:
                progress.close()

    def _step(self) -> None:
        for output in self.engine.step():
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.append(output)
            elif not output.request_id.startswith(_ID_PREFIX):
                self._unclaimed.append(output)

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Abort what is still running of these requests, and forget all of them."""
        for request_id in list(request_ids):
            if self.engine.is_live(request_id):
                self.engine.abort(request_id)
            self._mailboxes.pop(request_id, None)
        while not self._mailboxes and not self.engine.num_live and self.engine.has_unfinished_requests:
            self._step()  # nobody else is waiting: read back what is in flight
        # Requests that the user queued on the engine itself: the user's next step reports them.
        self.engine.put_back(self._unclaimed)
        self._unclaimed.clear()


def demo_model_path() -> Path:
    """Folder of the small Llama that comes with the package."""
    return Path(__file__).parent / "demo_model"


def _as_prompts(prompts: Prompts) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be one prompt or a list of them, not {type(prompts).__name__}")
    if isinstance(prompts, bytes | bytearray | Set):
        raise RequestError(f"prompts must be a list, not {type(prompts).__name__}: their order matters")
    items = list(prompts)
    if not items:
        raise RequestError("no prompts; pass at least one")
    is_one = all(hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0 for item in items)
    return [items] if is_one else items


def _resolve_dtype(dtype: str, hf_config: Mapping[str, Any], platform: str) -> str:
    if dtype != "auto":
        return dtype
    stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32")
    return stored if platform != "cpu" and stored in _ITEMSIZE else "float32"


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
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = str(Path(base) / "jaxllm" / f"xla-{jax.__version__}")
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
