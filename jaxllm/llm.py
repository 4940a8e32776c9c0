"""`LLM`: a model, its tokenizer and an engine behind three calls."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from jaxllm import tokenizer as tokenization
from jaxllm.assembly import assemble
from jaxllm.config import EngineConfig
from jaxllm.engine.thread import EngineThread, OutputStream
from jaxllm.errors import ConfigError, RequestError
from jaxllm.executor.step_programs import CompileProgress
from jaxllm.inputs import Prompt
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.sched.policies import SchedulingPolicy

_ID_PREFIX = "llm-"  # of requests made here, so that ids queued on the engine itself stay the user's

Prompts = str | Mapping[str, Any] | Sequence[Prompt] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None
Priorities = int | Sequence[int] | None
Deadlines = float | Sequence[float] | None


class LLM:
    """Offline inference with one model. Several threads may use it at once.

    >>> from jaxllm import LLM, SamplingParams
    >>> llm = LLM("path/to/checkpoint")                                                # doctest: +SKIP
    >>> outputs = llm.generate(["def add(a, b):"], SamplingParams(temperature=0))      # doctest: +SKIP
    >>> print(outputs[0].outputs[0].text)                                              # doctest: +SKIP

    If a step fails all calls under way raise `EngineError`, and so do later ones; a new `LLM` works.

    Args:
        model: folder of a checkpoint; the embedded demo model if None.
        scheduler_policy: which request is next, whom to preempt and how, when to admit: a preset's name
            ("adaptive", the default, "paper", "vllm", "vllm_v1" and others, see `jaxllm.sched.presets`; its
            predicted costs are those of `jaxllm profile`, or a roofline), the import path "module:attribute"
            of your own, or a `SchedulerPolicy`.
        **settings: the fields of `EngineConfig`.

    Attributes:
        engine: runs the requests; a loop of your own may use it while no call is under way.

    Raises:
        ConfigError: a setting or the checkpoint's configuration is invalid or unsupported.
        WeightsError: the weights are missing, truncated or do not match.
        CapacityError: the device cannot hold the model and one KV block.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        scheduler_policy: SchedulingPolicy | str | None = None,
        **settings: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ConfigError(f"unknown settings {unknown}; known settings: {', '.join(sorted(known))}")
        folder = demo_model_path() if model is None else Path(model)
        self.config = EngineConfig(model=str(folder), **settings)
        made = assemble(self.config, scheduler_policy)
        self.engine, self.executor, self.tokenizer = made.engine, made.executor, made.tokenizer
        self.model_config, self.dtype = made.model_config, made.dtype
        self.costs, self.costs_source = made.costs, made.costs_source
        self.load_times = made.load_times
        self._thread = EngineThread(self.engine)
        self._ids = itertools.count()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self.executor.config.max_model_len

    def compile_progress(self) -> CompileProgress:
        """How many programs are compiled, of how many, and for how many seconds."""
        return self.executor.compile_progress()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = None,
        deadline: Deadlines = None,
    ) -> list[RequestOutput]:
        """Complete prompts, and return the outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list of them; each is text, a list of token ids, or
                `{"prompt_token_ids": ids}`.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar.
            priority: lower is more urgent, as in vLLM; for all prompts, or one for each. Only for policies
                that look at it, such as preset "priority".
            deadline: seconds from now by which a request should end; likewise, such as preset "deadline".

        Raises:
            RequestError, SamplingParamsError: an input is invalid; nothing was run.
            EngineError: the engine has failed, or a thread runs requests of its own on `engine`.
            Exception: what a scheduling policy raised.
        """
        stream = self._submit(prompts, sampling_params, priority, deadline, stream=False)
        outputs: dict[int, RequestOutput] = {}
        progress = None
        if use_tqdm:
            from tqdm import tqdm

            progress = tqdm(total=stream.num_unfinished, desc="Processed prompts", unit="prompt")
        try:
            for output in stream:
                outputs[int(output.request_id)] = output
                if progress is not None:
                    progress.update()
        finally:
            stream.close()
            if progress is not None:
                progress.close()
        return [outputs[place] for place in range(len(outputs))]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = None,
        deadline: Deadlines = None,
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, rendered by the checkpoint's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such lists.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            priority, deadline: as in `generate`.
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
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority, deadline=deadline)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        priority: Priorities = None,
        deadline: Deadlines = None,
    ) -> OutputStream:
        """Each request's output so far, after every step it advanced in.

        `request_id` is the prompt's place in the input, as a string. The prompts are checked and queued at
        the call. Closing the iterator ends what is left, and so does dropping it.

        Args and errors: as `generate`.
        """
        return self._submit(prompts, sampling_params, priority, deadline, stream=True)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of earlier requests, so that later ones compute all of their prompts.

        Returns:
            True, as vLLM does where it could; requests under way keep what they have found, and what they
            compute is found again.
        """
        self._thread.reset_prefix_cache()
        return True

    def _submit(
        self, prompts: Prompts, params: Params, priority: Priorities, deadline: Deadlines, *, stream: bool
    ) -> OutputStream:
        """Queue all prompts, or none if one of them is refused."""
        items = _as_prompts(prompts)
        columns = {
            "prompt": items,
            "sampling_params": _one_each("sampling_params", params, len(items)),
            "priority": _one_each("priority", priority, len(items)),
            "deadline": _one_each("deadline", deadline, len(items)),
        }
        requests = [
            (f"{_ID_PREFIX}{next(self._ids)}", dict(zip(columns, row, strict=True)))
            for row in zip(*columns.values(), strict=True)
        ]
        return self._thread.submit(requests, stream=stream)


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


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    """What is given for each of `count` prompts."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{len(values)} {name} for {count} prompts; pass one for all or one for each")
    return list(values)
