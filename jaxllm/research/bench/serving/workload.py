"""What is sent: traces from the command line's options, and the bodies of their requests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.bench.serving.answers import Answer
from jaxllm.research.workloads import (
    ArrivalProcess,
    PromptDataset,
    Trace,
    UniformLengths,
    make_trace,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCAB_SIZE = 1000  # models have at least as many tokens
_MAX_VOCAB_SIZE = 2**31


def drawn_trace(
    prompts: tuple[int, int] | PromptDataset,
    num_prompts: int,
    output_len: tuple[int, int],
    arrivals: ArrivalProcess,
    seed: int,
) -> Trace:
    """Requests whose lengths are uniform in inclusive ranges, or whose prompts are a data set's.

    Raises:
        ConfigError: a number is out of range, or the data set has too few prompts.
    """
    lengths = (
        UniformLengths(shortest=prompts[0], longest=prompts[1]) if isinstance(prompts, tuple) else prompts
    )
    outputs = UniformLengths(shortest=output_len[0], longest=output_len[1])
    return make_trace(lengths, num_prompts, outputs.longest, outputs=outputs, arrivals=arrivals, seed=seed)


def with_new_prompts(trace: Trace, number: int) -> Trace:
    """The same arrivals and lengths with other prompts, which no prefix cache knows; 0 changes nothing.

    Raises:
        ConfigError: the trace has prompts of its own.
    """
    if not number:
        return trace
    if _has_prompts(trace):
        raise ConfigError(
            "several runs on one server would send the prompts of the file again, which its prefix cache "
            "knows; give one value of --arrivals, or use --sweep, which starts a server for each run"
        )
    return dataclasses.replace(trace, seed=trace.seed + number)


def _has_prompts(trace: Trace) -> bool:
    return trace.prompt_token_ids is not None or trace.prompt_texts is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestFields:
    """What all requests of a run have in common.

    Args:
        endpoint: "completions" or "chat".
        temperature: of sampling.
        ignore_eos: whether outputs are as long as the trace says, whatever the model says.
        as_text: send text rather than token ids; chats always do.
        vocab_size: token ids lie below it; None is 1000 for random ones, and any for others.
        tokenizer: makes text of token ids.
        extra_body: further fields, which go before all others.

    Raises:
        ConfigError: `vocab_size` is below 1.
    """

    endpoint: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    as_text: bool = False
    vocab_size: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"vocab_size={self.vocab_size} must be at least 1")

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages."""
        return self.endpoint == "chat"


class Requests:
    """Bodies of the requests of `trace`; all are made beforehand but those that go on after an answer.

    Args:
        trace: its prompts and output lengths.
        fields: of all requests.
        model: the model's name on the server.

    Raises:
        ConfigError: text is to be sent and there is none, or conversations are to be sent as text or with
            outputs of any length.
        RequestError: the trace's token ids do not fit the vocabulary.
    """

    def __init__(self, trace: Trace, fields: RequestFields, model: str) -> None:
        self.trace, self._fields, self._model = trace, fields, model
        self._followed = set() if trace.follows is None else {int(one) for one in trace.follows if one >= 0}
        self._check()
        self._prompts: dict[int, Sequence[int]] = {}
        self._bodies = {
            index: self._body(index, self._prompt(index))
            for index in range(len(trace))
            if trace.followed(index) < 0
        }

    def body(self, index: int, answers: Sequence[Answer]) -> bytes:
        """The body of a request.

        Args:
            index: of the request in the trace.
            answers: those of all requests, as far as they are there.

        Raises:
            RequestError: the answer that it goes on after is not as the trace has it.
        """
        if index in self._bodies:
            return self._bodies[index]
        followed = self.trace.followed(index)
        said, expected = answers[followed].token_ids, int(self.trace.output_lens[followed])
        if answers[followed].error or len(said) != expected:
            raise RequestError(
                f"the turn before it brought {len(said)} of {expected} token ids "
                "(the server must know return_token_ids)"
            )
        return self._body(index, self._prompt(index, [*self._prompts.pop(followed), *said]))

    def warm_up_body(self) -> bytes:
        """The first request with its prompt backwards, so that nobody has it in a cache afterwards."""
        prompt = self._prompt(0)
        return self._body(0, prompt[::-1])

    def _check(self) -> None:
        fields, trace = self._fields, self.trace
        if fields.is_chat or fields.as_text:
            if self._followed:
                raise ConfigError(
                    "conversations are sent as token ids: use the endpoint completions, without text"
                )
            if trace.prompt_texts is None and fields.tokenizer is None:
                raise ConfigError(
                    "prompts are token ids, and text is to be sent: name the model's tokenizer with "
                    "--tokenizer, or use the endpoint completions, which takes token ids"
                )
        if self._followed and not fields.ignore_eos:
            raise ConfigError("conversations need outputs as long as the trace says: drop --no-ignore-eos")

    def _prompt(self, index: int, before: Sequence[int] = ()) -> Sequence[int] | str:
        fields, trace = self._fields, self.trace
        if trace.prompt_texts is not None:
            return trace.prompt_texts[index]
        default = _VOCAB_SIZE if trace.prompt_token_ids is None else _MAX_VOCAB_SIZE
        token_ids = trace.token_ids(index, fields.vocab_size or default, before)
        if index in self._followed:
            self._prompts[index] = token_ids
        if not (fields.is_chat or fields.as_text):
            return token_ids
        assert fields.tokenizer is not None
        return str(fields.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _body(self, index: int, prompt: Sequence[int] | str) -> bytes:
        fields, max_tokens = self._fields, int(self.trace.output_lens[index])
        body: dict[str, Any] = {"model": self._model}
        if fields.is_chat:
            body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": max_tokens}
        else:
            body |= {"prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": fields.temperature, "stream": True, "stream_options": {"include_usage": True}}
        if fields.ignore_eos:
            body["ignore_eos"] = True
        if index in self._followed:
            body["return_token_ids"] = True
        return json.dumps({**body, **fields.extra_body}, separators=(",", ":")).encode()
