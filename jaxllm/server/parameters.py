"""From a client's fields to prompts and `SamplingParams`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.errors import JaxllmError, RequestTooLargeError, shown
from jaxllm.loading.generation_config import MODEL_DEFAULTS
from jaxllm.sampling.param_checks import RequestOutputKind
from jaxllm.sampling.params import PARAMETER_NAMES, SamplingParams
from jaxllm.server.errors import ApiError, refused, too_long
from jaxllm.server.protocol import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from jaxllm.text.chat import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int]

_SAMPLING = tuple(name for name in PARAMETER_NAMES if name in GenerationRequest.model_fields)
_DEFAULTS = tuple(name for name in MODEL_DEFAULTS if name in _SAMPLING)


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """Bounds that prompts are held to before anything is tokenised.

    Attributes:
        max_prompts: most prompts of one request.
        max_tokens: longest prompt that is looked at, in tokens.
        max_characters: characters beyond which a text has more tokens than that, whatever it says.
        max_model_len: the model's length.
        takes_empty: whether a text of nothing has a token, that of the beginning.
    """

    max_prompts: int
    max_tokens: int
    max_characters: int
    max_model_len: int
    takes_empty: bool = False

    def check_text(self, text: str, param: str) -> str:
        """The text, if it may fit.

        Raises:
            ApiError: it is empty, or longer than any text the model takes.
        """
        if not text and not (self.takes_empty and param != "messages"):
            raise refused(f"{param} is empty: send text, or token ids", param)
        if len(text) > self.max_characters:
            raise too_long(
                f"{param} has {len(text)} characters, and {self.max_tokens} tokens are at most "
                f"{self.max_characters}: shorten it",
                param,
                self.max_model_len,
            )
        return text

    def prompts(self, value: object) -> list[Prompt]:
        """The prompts of a completion request.

        Raises:
            ApiError: there is none, or too many, or one is neither text nor token ids.
        """
        if isinstance(value, str):
            return [self.check_text(value, "prompt")]
        if not isinstance(value, list) or not value:
            raise refused(
                f"prompt={shown(value, 80)} must be text, a list of texts, a list of token ids, or a list of "
                "such lists",
                "prompt",
            )
        if _is_id(value[0]):
            return [self._token_ids(value, "prompt")]
        if len(value) > self.max_prompts:
            raise refused(
                f"prompt has {len(value)} entries; at most {self.max_prompts} are taken at once: send fewer",
                "prompt",
            )
        return [self._prompt(one, f"prompt[{place}]") for place, one in enumerate(value)]

    def _prompt(self, value: object, param: str) -> Prompt:
        if isinstance(value, str):
            return self.check_text(value, param)
        if isinstance(value, list) and value:
            return self._token_ids(value, param)
        raise refused(f"{param}={shown(value, 80)} must be text, or a list of token ids", param)

    def _token_ids(self, value: list[Any], param: str) -> list[int]:
        if len(value) > self.max_tokens:
            raise too_long(f"{param} has {len(value)} tokens: shorten it", param, self.max_model_len)
        for place, one in enumerate(value):
            if not _is_id(one):
                raise refused(f"{param}[{place}]={shown(one, 80)} must be a token id", param)
        return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """How to sample a completion; `max_tokens` of 0, which scores a prompt alone, computes one token.

    Raises:
        ApiError: a parameter is out of range.
    """
    values: dict[str, Any] = {"max_tokens": max(1, 16 if request.max_tokens is None else request.max_tokens)}
    if request.max_tokens == 0 and request.min_tokens:
        raise refused(f"min_tokens={request.min_tokens} is over max_tokens=0", "min_tokens")
    if request.best_of is not None:
        values["best_of"] = request.best_of
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            values["prompt_logprobs"] = request.logprobs
    return _params(request, defaults, values)


def chat_params(request: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """How to sample an answer; by default up to the model's length.

    Raises:
        ApiError: a parameter is out of range, or two contradict each other.
    """
    given = request.max_completion_tokens
    if given is not None and request.max_tokens is not None and given != request.max_tokens:
        raise refused(
            f"max_completion_tokens={given} and max_tokens={request.max_tokens} are the same limit: send one",
            "max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")
    values: dict[str, Any] = {"max_tokens": request.max_tokens if given is None else given}
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    return _params(request, defaults, values)


def _params(
    request: GenerationRequest, defaults: SamplingParams, values: Mapping[str, Any]
) -> SamplingParams:
    chosen: dict[str, Any] = {name: getattr(defaults, name) for name in _DEFAULTS}
    chosen |= {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    chosen |= values
    structured = _structured_outputs(request)
    if structured is not None:
        chosen["structured_outputs"] = structured
    chosen["output_kind"] = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(**chosen)
    except JaxllmError as error:
        raise refused(str(error), field_of(error, request)) from error
    if request.stream and params.num_samples > params.n:
        raise refused(
            f"best_of={params.best_of} above n={params.n} cannot be streamed: which samples are the best is "
            "known at the end",
            "best_of",
        )
    return params


def _structured_outputs(request: GenerationRequest) -> object:
    """What bounds the output, by either of the two names there are for it."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise refused('json_schema is for response_format of type "json_schema"', "response_format")
        return request.structured_outputs
    if request.structured_outputs is not None:
        raise refused(
            "response_format and structured_outputs both bound the output: send one", "response_format"
        )
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise refused('response_format of type "json_schema" needs json_schema.schema', "response_format")
    return {"json": wanted.json_schema.schema_}


_BECOME_GRAMMARS = "response_format", "tools"


def refusal(error: JaxllmError, request: GenerationRequest, max_model_len: int) -> ApiError:
    """What a client is told of what the engine refuses."""
    given = getattr(request, "prompt", None)
    has_several = isinstance(given, list) and bool(given) and not _is_id(given[0])
    message = re.sub(r"^prompts(\[\d+\]): ", r"prompt\1: " if has_several else "", str(error))
    field = field_of(error, request)
    if field in _BECOME_GRAMMARS:
        message = re.sub(r"^structured_outputs\b", field, message)
    return (
        too_long(message, field, max_model_len)
        if isinstance(error, RequestTooLargeError)
        else refused(message, field)
    )


def field_of(error: JaxllmError, request: GenerationRequest) -> str:
    """Which field an error is about: messages begin with it."""
    found = re.match(r"(?:prompts\[\d+\]: )?(\w+)", str(error))
    name = found.group(1) if found else ""
    if name == "structured_outputs" and request.structured_outputs is None:
        name = "tools" if request.response_format is None else "response_format"  # which became that
    if isinstance(error, RequestTooLargeError) or name not in type(request).model_fields:
        name = "prompt" if "prompt" in type(request).model_fields else "messages"
    return name


def extras(request: GenerationRequest) -> dict[str, Any]:
    """What else the engine is told of each prompt: its urgency."""
    found = {"priority": request.priority, "deadline": request.deadline}
    return {name: value for name, value in found.items() if value is not None}


def conversation(tokenizer: PreTrainedTokenizerBase, request: ChatCompletionRequest | TokenizeRequest) -> str:
    """The text that the checkpoint's template makes of a conversation.

    Raises:
        ApiError: the messages or an option are refused, or there is no template.
    """
    messages, tools = request.messages, request.tools
    for name, value in (("messages", messages), ("tools", tools)):
        if isinstance(value, Sequence) and len(value) > MAX_MESSAGES:
            raise refused(f"{name} has {len(value)} entries; at most {MAX_MESSAGES} are taken", name)
    variables = request.chat_template_kwargs
    if variables is not None and not isinstance(variables, dict):
        raise refused(
            f"chat_template_kwargs={shown(variables, 80)} must be an object of template variables",
            "chat_template_kwargs",
        )
    variables = dict(variables or {})
    continues = bool(request.continue_final_message)
    opens = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    optional: dict[str, Any] = {}
    if isinstance(request, ChatCompletionRequest):
        if request.tool_choice == "none":
            tools = None
        elif request.tool_choice not in (
            None,
            "auto",
        ):  # what the output must be does not hang on the template
            tools, optional["tools"] = None, tools
        if request.reasoning_effort is not None and "reasoning_effort" not in variables:
            optional["reasoning_effort"] = request.reasoning_effort
    try:
        return render(
            tokenizer,
            messages,
            add_generation_prompt=opens,
            continue_final_message=continues,
            tools=tools,
            template_variables=variables,
            optional_variables=optional,
        )
    except ApiError:
        raise
    except JaxllmError as error:
        raise refused(str(error), _field_of(str(error))) from error


def _field_of(message: str) -> str:
    """Which field of a conversation an error is about, by what it names."""
    if message.startswith("tools=") or "does not read 'tools'" in message:
        return "tools"
    is_variable = "does not read" in message or message.startswith("chat_template_kwargs")
    return "chat_template_kwargs" if is_variable else "messages"
