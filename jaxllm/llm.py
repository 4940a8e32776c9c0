"""`LLM`: a model, its tokenizer and an engine behind three calls."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.engine.assembly import LoadTimes, assemble_replicas
from jaxllm.engine.beam_search import BeamSearchOutput, BeamSearchParams, search_all
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.conversations import as_token_prompts
from jaxllm.engine.inputs import (
    Deadlines,
    Messages,
    Params,
    Priorities,
    Prompts,
    as_prompts,
    as_requests,
)
from jaxllm.engine.outputs import RequestOutput
from jaxllm.engine.replicas import Replicas, thread_of
from jaxllm.engine.residence import Residence
from jaxllm.engine.rows import Row, answers, checked_rows
from jaxllm.engine.thread import OutputStream
from jaxllm.engine.vllm_names import CHAT_ARGUMENTS, check_call_arguments, translate
from jaxllm.errors import ConfigError, SamplingParamsError, shown
from jaxllm.executor.step_programs import CompileProgress
from jaxllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLM:
    """Offline inference with one model. Several threads may use it at once.

    >>> from jaxllm import LLM, SamplingParams
    >>> llm = LLM("path/to/checkpoint")                                                # doctest: +SKIP
    >>> outputs = llm.generate(["def add(a, b):"], SamplingParams(temperature=0))      # doctest: +SKIP
    >>> print(outputs[0].outputs[0].text)                                              # doctest: +SKIP

    If a step fails all calls under way raise `EngineError`, and so do later ones; a new `LLM` works. Where
    one of several replicas fails, calls go on that have no requests there.

    Args:
        model, tokenizer, **settings: the fields of `EngineConfig`; vLLM's others are taken with the values
            that change nothing (`jaxllm.engine.vllm_names`).
        params: weights by name instead of those of `model`, of which then only the configuration and the
            tokenizer are read; `jaxllm.loading.load_params` gives their names and shapes. They are copied.

    Attributes:
        engine: runs the requests; a loop of your own may use it while no call is under way.
        replicas: each engine with what it was made of, `data_parallel_size` of them; `engine`, `executor` and
            `costs` are of the first.

    Raises:
        ConfigError: a setting or the checkpoint's configuration is invalid or unsupported.
        WeightsError: the weights are missing, truncated or do not match.
        CapacityError: the device cannot hold the model and one KV block.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        known = [field.name for field in dataclasses.fields(EngineConfig)]
        self.config = EngineConfig(**translate({"model": model, "tokenizer": tokenizer, **settings}, known))
        self.replicas = assemble_replicas(self.config, params=params)
        made = self.replicas[0]
        self.engine, self.executor, self.tokenizer = made.engine, made.executor, made.tokenizer
        self.model_config, self.dtype = made.model_config, made.dtype
        self.costs, self.costs_source = made.costs, made.costs_source
        self.load_times = LoadTimes(
            sum(one.load_times.load_seconds for one in self.replicas),
            sum(one.load_times.warm_up_seconds for one in self.replicas),
        )
        self._default_params = made.default_params
        self._thread = thread_of([one.engine for one in self.replicas])
        threads = self._thread.threads if isinstance(self._thread, Replicas) else [self._thread]
        self._residences = [
            Residence(one.engine, thread, one.executor, one.device, one.reload, one.is_other)
            for one, thread in zip(self.replicas, threads, strict=True)
        ]
        self._ids = itertools.count()

    def __repr__(self) -> str:
        """The model, and what it runs on."""
        config, limits = self.model_config, self.engine.scheduler.config
        num_live = sum(one.engine.num_live for one in self.replicas)
        parts = [
            repr(self.config.model),
            f"{type(config).__name__.removesuffix('Config')} of {config.num_layers} layers in {self.dtype}",
            f"max_model_len={limits.max_model_len}",
            f"max_num_seqs={limits.max_num_seqs}",
            f"{limits.num_gpu_blocks} blocks of {limits.block_size} tokens",
            "closed" if self.engine.is_closed else f"{num_live} requests",
        ]
        if len(self.replicas) > 1:
            parts.insert(1, f"{len(self.replicas)} replicas")
        return f"LLM({', '.join(parts)})"

    def __enter__(self) -> LLM:
        """Itself; leaving the block closes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """End the requests under way (as "abort"), complete the cache's files, and let go of the device.

        Later calls raise `EngineError`; closing again does nothing.

        Raises:
            EngineError: a thread runs requests of its own on `engine`.
        """
        self._thread.close()
        for one in self.replicas:
            one.executor.flush_files()
            one.executor.release()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ConfigError: there is none.
        """
        if self.tokenizer is None:
            raise ConfigError("this LLM was made with skip_tokenizer_init=True and has no tokenizer")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate`, `chat` and `stream` take without parameters: the checkpoint's, as in vLLM."""
        return self._default_params

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self.executor.config.max_model_len

    def compile_progress(self) -> CompileProgress:
        """How many programs are compiled, of how many, and for how many seconds."""
        found = [one.executor.compile_progress() for one in self.replicas]
        return CompileProgress(
            sum(one.num_compiled for one in found),
            sum(one.num_programs for one in found),
            max(one.seconds for one in found),
        )

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = None,
        deadline: Deadlines = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts, and return the outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list of them; each is text, a list of token ids, or
                `{"prompt_token_ids": ids}`, with options as in `Engine.add_request`.
            sampling_params: for all prompts, or one for each; `get_default_sampling_params` if None.
            use_tqdm: show a progress bar.
            priority: lower is more urgent, as in vLLM; for all prompts, or one for each. Only for policies
                that look at it, such as preset "priority".
            deadline: seconds from now by which a request should end; likewise, such as preset "deadline".
            **others: vLLM's other arguments are taken with the values that change nothing.

        Raises:
            RequestError, SamplingParamsError: an input is invalid; nothing was run.
            EngineError: the engine has failed, or a thread runs requests of its own on `engine`.
            UserCodeError: a scheduling policy or a predictor raised; the message names it.
        """
        if others:
            check_call_arguments(others, LLM.generate)
        stream = self._submit(prompts, sampling_params, priority, deadline, stream=False)
        outputs: dict[int, RequestOutput] = {}
        with (
            contextlib.closing(stream),
            _progress(stream.num_unfinished, "Processed prompts", "prompt", is_shown=use_tqdm) as advance,
        ):
            for output in stream:
                outputs[int(output.request_id)] = output
                advance()
        return [outputs[place] for place in range(len(outputs))]

    def generate_iter(
        self,
        rows: Iterable[Row],
        sampling_params: SamplingParams | None = None,
        *,
        in_order: bool = True,
        max_in_flight: int | None = None,
        first_place: int = 0,
    ) -> Iterator[RequestOutput]:
        """Complete any number of prompts, which are taken as they are needed, and yield each output once.

        Nothing is taken before the first output is asked for. Closing the iterator ends what is left.

        Args:
            rows: prompts as in `generate`, or one of them; of mappings `sampling_params`, `priority` and
                `deadline` are the row's own.
            sampling_params: of rows without; `get_default_sampling_params` if None.
            in_order: yield outputs in the order of the rows, and not as they end. Those that end early are
                kept, at most eight times as many as are in flight.
            max_in_flight: prompts that are queued or run at once; twice `max_num_seqs` of each engine if
                None, so that none is ever short of them.
            first_place: what the first row is called, if some were answered before: outputs have the places
                of rows as `request_id`. Give rows seeds where an interruption is to change nothing.

        Yields:
            Outputs. A row that is refused has one whose `finish_reason` is "error", and `stop_reason` why.

        Raises:
            ConfigError: `max_in_flight` or `first_place` is out of range, or there are no rows in `rows`.
            EngineError: the engine has failed, or a thread runs requests of its own on `engine`.
            Exception: what `rows` or a scheduling policy raised.
        """
        usual = 2 * self.executor.config.max_num_seqs * len(self.replicas)
        most = usual if max_in_flight is None else max_in_flight
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigError(f"max_in_flight={shown(most)} must be None or an integer of at least 1")
        rows = checked_rows(rows, first_place)
        params = self._default_params if sampling_params is None else sampling_params
        named = (
            (f"rows[{place}]/{next(self._ids)}", place, row) for place, row in enumerate(rows, first_place)
        )
        return answers(self._thread.open, named, params, most, first_place if in_order else None)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = None,
        deadline: Deadlines = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, rendered by a chat template.

        `prompt` of an output is the rendered text.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such lists. Content is text, or
                parts of it: `[{"type": "text", "text": "..."}]`.
            sampling_params: as in `generate`.
            use_tqdm: show a progress bar.
            priority, deadline: as in `generate`.
            chat_template: a template's text, instead of the checkpoint's; or the name of one of several.
            chat_template_content_format: whether a template gets content as a "string" (parts are joined by
                line breaks) or as a list of parts ("openai"); "auto" finds out what it reads.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: let the model go on with the last message; needs
                `add_generation_prompt=False`.
            tools: JSON schemas of functions, which the template shows to the model. Calls are in the text.
            tool_choice: None or "auto" leave it to the model, "none" shows it no tools.
            chat_template_kwargs: other variables of the template, such as `{"enable_thinking": False}`.
            **others: vLLM's other arguments are taken with the values that change nothing.

        Raises:
            RequestError: a conversation or an argument is invalid, or the template does not read it.
            ConfigError: there is no tokenizer or no template, or the template is broken.
            EngineError, SamplingParamsError: as `generate`.
        """
        check_call_arguments(others, LLM.chat)
        check_call_arguments({"tool_choice": tool_choice}, LLM.chat, CHAT_ARGUMENTS)
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer; this LLM was made with skip_tokenizer_init=True")
        prompts = as_token_prompts(
            self.tokenizer,
            messages,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tool_choice == "none" else tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority, deadline=deadline)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        use_tqdm: bool = False,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """The most likely completions of each prompt, as `transformers` finds them.

        Args:
            prompts: as in `generate`.
            params: how to search; outputs end at the model's length, too.
            use_tqdm: show a progress bar, over tokens.
            **others: as in `generate`.

        Raises:
            ConfigError: the engine drafts tokens.
            RequestError, SamplingParamsError: an input is invalid; nothing was run.
            EngineError: the engine has failed, or a thread runs requests of its own on `engine`.
        """
        check_call_arguments(others, LLM.beam_search)
        if self.config.speculative_config is not None:
            raise ConfigError(
                "speculative_config drafts tokens after others, and beam_search takes one token at a time: "
                "make an LLM without speculative_config"
            )
        if not isinstance(params, BeamSearchParams):
            raise SamplingParamsError(f"params must be BeamSearchParams, not {type(params).__name__}")
        items = as_prompts(prompts)
        with _progress(params.max_tokens, "Beam search", "token", is_shown=use_tqdm) as advance:
            searches = search_all(
                lambda items, step: self.generate(items, step, use_tqdm=False),
                items,
                params,
                self.engine.eos_token_ids,
                max_model_len=self.max_model_len,
                block_size=self.executor.config.block_size,
                on_token=advance,
            )
        return [search.output(self.tokenizer) for search in searches]

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
            compute is found again. Files (`prefix_cache_dir`) stay, and are found.
        """
        self._thread.reset_prefix_cache()
        return True

    def update_weights(self, params: Mapping[str, Any]) -> None:
        """Compute with other weights from now on, as after a step of training.

        Nothing is compiled anew. KV of the old weights is never found again, neither in memory nor in files;
        what is written to files (`prefix_cache_dir`) from now on is found by this `LLM` alone, until it ends.
        Takes at most one weight's memory beside the old ones. Where an engine holds weights as codes
        (`quantization`, quantised checkpoints) these are rounded like those that `quantization` rounds; where
        it holds a checkpoint's 16 bits (the default on CPUs) to these: `dtype="float32"` holds 32.

        Args:
            params: every weight by name, as `jaxllm.loading.load_params` returns, of any floating-point dtype
                and on any device. They are copied, so that the caller may donate them.

        Raises:
            WeightsError: they do not match the model; nothing was changed.
            EngineError: requests are under way, or the engine has failed.
        """
        with self._idle():
            for one in self._residences:
                one.update_weights(params)

    def sleep(self, level: int = 1) -> None:
        """Give device memory back until `wake_up`, with vLLM's levels. The prefix cache is forgotten.

        Args:
            level: 1 gives back the KV pool, 2 the weights as well. Compiled programs stay.

        Raises:
            ConfigError: there is no such level.
            EngineError: requests are under way, or the engine has failed.
        """
        with self._idle():
            for one in self._residences:
                one.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what `sleep` gave up; requests are refused until all of it is back.

        Args:
            tags: of what: "weights" (read from the checkpoint again) and "kv_cache"; both if None.

        Raises:
            ConfigError: a tag is unknown; or the weights, which were given (`params`, `update_weights`), are
                gone: call `update_weights` first.
            WeightsError: the checkpoint's weights cannot be read; the engine sleeps on.
            CapacityError: there is no room for the pool any more; the engine sleeps on.
            EngineError: the engine has failed.
        """
        with self._idle():
            for one in self._residences:
                one.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether the pool or the weights are given back, so that requests are refused."""
        return any(one.engine.is_asleep for one in self.replicas)

    def _idle(self) -> contextlib.AbstractContextManager[None]:
        """Lets no request come between changes of several engines; of one its own change refuses."""
        return self._thread.idle() if isinstance(self._thread, Replicas) else contextlib.nullcontext()

    def _submit(
        self, prompts: Prompts, params: Params, priority: Priorities, deadline: Deadlines, *, stream: bool
    ) -> OutputStream:
        """Queue all prompts, or none if one of them is refused."""
        params = self._default_params if params is None else params
        requests = as_requests(next(self._ids), prompts, params, priority, deadline)
        return self._thread.submit(requests, stream=stream)


@contextlib.contextmanager
def _progress(total: int, title: str, unit: str, *, is_shown: bool) -> Iterator[Callable[[], object]]:
    """Something to call at each step, which advances a bar if one is shown."""
    if not is_shown:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit=unit) as bar:
        yield bar.update
