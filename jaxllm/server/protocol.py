"""What clients may send: OpenAI's fields, vLLM's further ones, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model, model_validator

from jaxllm.errors import did_you_mean, shown
from jaxllm.sampling.param_checks import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from jaxllm.sampling.params import SamplingParams
from jaxllm.server.errors import refused
from jaxllm.system.options import declarations

MAX_N = 128
"""Largest `n`, as OpenAI's."""
MAX_MESSAGES = 4096
_MAX_TEXT = 256

_Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "title": "Prompt",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ],
        }
    ),
]
_Objects = Annotated[
    Any, WithJsonSchema({"type": "array", "items": {"type": "object"}, "maxItems": MAX_MESSAGES})
]
_Object = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]
_Name = Annotated[str, Field(max_length=_MAX_TEXT)]
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_Texts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ]
        }
    ),
]

_TEXT_ONLY = "models of text only are supported"
_NO_REASONING = "what a model thinks is not told apart from what it says; ask for less in the prompt"
_RENDERED = "it is for vLLM's routes that only render prompts"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "text is only continued at its end"),
    "use_beam_search": ((False,), "beams are searched offline, by LLM.beam_search"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which is offline: LLM.beam_search"),
    "early_stopping": ((False,), "it belongs to beam search, which is offline: LLM.beam_search"),
    "spaces_between_special_tokens": ((True,), "special tokens are separated by spaces"),
    "store": ((False,), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier; use priority"),
    "verbosity": (("medium",), "ask for it in the prompt"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "how long blocks are kept is an engine option"),
    "parallel_tool_calls": ((True, False), "it is for chats with tools"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "media_io_kwargs": (({},), _TEXT_ONLY),
    "prompt_embeds": (([],), "prompts are text or token ids"),
    "prediction": (
        (),
        "drafts are of what the prompt holds; put it there, with the engine's speculative_config",
    ),
    "web_search_options": ((), "there is no search; put what it found into the prompt"),
    "functions": (([],), "use tools"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "chat_template": ((), "no templates are taken from requests: the server has the checkpoint's"),
    "documents": (([],), "use chat_template_kwargs, if the template reads them"),
    "include_reasoning": ((True,), _NO_REASONING),
    "thinking_token_budget": ((-1,), _NO_REASONING),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps a prompt's last tokens"),
    "logprob_token_ids": (([],), "use allowed_token_ids with logprobs"),
    "repetition_detection": ((), "use repetition_penalty, or stop"),
    "watermarking": ((False,), "outputs have no watermarks"),
    "stream_interval": ((1,), "what is new is sent at once; a slow reader gets it put together"),
    "return_prompt_text": ((False,), "use echo for completions, return_token_ids for chats"),
    "return_token_offsets": ((False,), _RENDERED),
    "return_mm_kwargs": ((True,), _RENDERED),
    "routed_experts_prompt_start": ((0,), "experts are not returned"),
    "kv_transfer_params": (({},), "KV is not sent between servers"),
    "ec_transfer_params": (({},), _TEXT_ONLY),
    "vllm_xargs": (({},), "there are no engine plug-ins"),
    "logits_processors": (([],), "the server's own are an engine option"),
    "guided_json": ((), "use structured_outputs, or response_format"),
    "guided_regex": ((), "use structured_outputs"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "guided_decoding_backend": (("auto", "guidance"), "grammars are llguidance's"),
    "guided_whitespace_pattern": ((), "use structured_outputs"),
}
"""Fields of OpenAI and vLLM, the values beside null that change nothing, and the way out from others."""
_NEUTRAL_OF_STREAMS: dict[str, tuple[tuple[Any, ...], str]] = {
    "include_obfuscation": ((False,), "chunks are as long as what they say"),
}


class _Body(BaseModel):
    """An object without unknown fields, whose values are of the type that they ought to be.

    Unknown fields that are null say nothing, and are taken.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    neutral: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {}
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        """Take fields that change nothing out, and refuse them where they would."""
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in values.items():
            if name in known:
                kept[name] = value
            elif value is not None:
                cls._check_neutral(name, value, known)
        return kept

    @classmethod
    def _check_neutral(cls, name: str, value: Any, known: set[str]) -> None:
        param = f"{cls.place}{name}"
        if name not in cls.neutral:
            hint = did_you_mean(name, [*known, *cls.neutral])
            raise refused(f"unknown field {shown(param, 80)}: {hint}leave it out, or correct it", param)
        neutral, way_out = cls.neutral[name]
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise refused(f"{param}={shown(value, 80)} is not supported: {way_out}; leave it out", param)


class StreamOptions(_Body):
    """What a stream holds beside the output.

    Args:
        include_usage: end with a chunk that has the numbers of tokens.
        continuous_usage_stats: have them in each chunk (vLLM's).
    """

    neutral = _NEUTRAL_OF_STREAMS
    place = "stream_options."

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(_Body):
    """A JSON schema, as OpenAI wraps it."""

    place = "response_format.json_schema."

    name: _Name
    schema_: _Object = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """What the output must be."""

    place = "response_format."

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


_ELSEWHERE = ("max_tokens", "logprobs", "best_of", "detokenize")
if TYPE_CHECKING:
    _Parameters = _Body
else:  # numbers and switches of `SamplingParams`, those that each route has of its own apart
    _Parameters = create_model(
        "Parameters",
        __base__=_Body,
        **{
            name: (kind | None, None)
            for name, (_, kinds) in declarations(SamplingParams).items()
            for kind in kinds & {bool, int, float}
            if name not in _ELSEWHERE
        },
    )


class GenerationRequest(_Parameters):
    """What completions and chats have in common; None is a field's default.

    Sampling parameters have the names and limits of `SamplingParams`, which checks them. `user`, its
    successor `safety_identifier`, `prompt_cache_key`, `session_id` and `metadata` are for the log: blocks
    are found by what they hold.
    """

    neutral = NEUTRAL

    model: _Name | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    stop: _Texts = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: _Name | None = None
    safety_identifier: _Name | None = None
    prompt_cache_key: _Name | None = None
    session_id: _Name | None = None
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    response_format: ResponseFormat | None = None

    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: (
        Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: _Object = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    deadline: float | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=_MAX_TEXT)] | None = None
    request_id: _Name | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise refused(
                "stream_options is for streams: set stream to true, or leave it out", "stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise refused(
                "prompt_logprobs are not sent in streams: set stream to false, or use echo with logprobs",
                "prompt_logprobs",
            )
        return self


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: _Prompt
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(default=None, ge=0)


class ChatCompletionRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: _Objects
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: _Objects = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: _Object = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None


class TokenizeRequest(_Body):
    """Body of /tokenize: `prompt`, or `messages`."""

    neutral = {name: NEUTRAL[name] for name in ("chat_template", "mm_processor_kwargs", "media_io_kwargs")}

    model: _Name | None = None
    prompt: str | None = None
    messages: _Objects = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: _Objects = None
    chat_template_kwargs: _Object = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(_Body):
    """Body of /detokenize."""

    model: _Name | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=2**20, fail_fast=True)]
