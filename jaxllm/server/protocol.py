"""What clients may send: OpenAI's fields, vLLM's further ones, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from jaxllm.errors import did_you_mean, shown
from jaxllm.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from jaxllm.server.errors import refused

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

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "text is only continued at its end"),
    "use_beam_search": ((None, False), "beams are searched offline, by LLM.beam_search"),
    "length_penalty": ((None, 1, 1.0), "it belongs to beam search, which is offline: LLM.beam_search"),
    "spaces_between_special_tokens": ((None, True), "special tokens are separated by spaces"),
    "store": ((None, False), "nothing is stored"),
    "service_tier": ((None, "auto", "default"), "there is one tier; use priority"),
    "verbosity": ((None, "medium"), "ask for it in the prompt"),
    "prompt_cache_retention": ((None, "in_memory"), "how long blocks are kept is an engine option"),
    "parallel_tool_calls": ((None, True), "calls are in the text, as the model writes them"),
    "modalities": ((None, ["text"]), "models of text only are supported"),
    "audio": ((None,), "models of text only are supported"),
    "mm_processor_kwargs": ((None, {}), "models of text only are supported"),
    "prediction": ((None,), "there is no speculative decoding"),
    "functions": ((None, []), "use tools"),
    "function_call": ((None, "auto", "none"), "use tool_choice"),
    "chat_template": ((None,), "no templates are taken from requests: the server has the checkpoint's"),
    "documents": ((None, []), "use chat_template_kwargs, if the template reads them"),
    "kv_transfer_params": ((None, {}), "KV is not sent between servers"),
    "vllm_xargs": ((None, {}), "there are no engine plug-ins"),
    "logits_processors": ((None, []), "the server's own are an engine option"),
    "guided_json": ((None,), "use structured_outputs, or response_format"),
    "guided_regex": ((None,), "use structured_outputs"),
    "guided_choice": ((None,), "use structured_outputs"),
    "guided_grammar": ((None,), "use structured_outputs"),
}
"""Fields of OpenAI and vLLM, the values of them that change nothing, and the way out from others."""


class _Body(BaseModel):
    """An object without unknown fields, whose values are of the type that they ought to be."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(_Body):
    """What a stream holds beside the output.

    Args:
        include_usage: end with a chunk that has the numbers of tokens.
        continuous_usage_stats: have them in each chunk (vLLM's).
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(_Body):
    """A JSON schema, as OpenAI wraps it."""

    name: _Name
    schema_: _Object = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Body):
    """What the output must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(_Body):
    """What completions and chats have in common; None is a field's default.

    Sampling parameters have the names and limits of `SamplingParams`, which checks them. `user`, its
    successor `safety_identifier`, `prompt_cache_key` and `metadata` are for the log: blocks are found by what
    they hold.
    """

    model: _Name | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    seed: int | None = None
    stop: _Texts = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: _Name | None = None
    safety_identifier: _Name | None = None
    prompt_cache_key: _Name | None = None
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
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

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        """Take fields that change nothing out, and refuse them where they would."""
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if name in cls.model_fields:
                kept[name] = value
                continue
            if name not in NEUTRAL:
                hint = did_you_mean(name, [*cls.model_fields, *NEUTRAL])
                raise refused(
                    f"unknown field {shown(name, 80)}: {hint}leave it out, or correct it", str(name)
                )
            neutral, way_out = NEUTRAL[name]
            if not any(type(value) is type(one) and value == one for one in neutral):
                raise refused(f"{name}={shown(value, 80)} is not supported: {way_out}; leave it out", name)
        return kept

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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: _Object = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None


class TokenizeRequest(_Body):
    """Body of /tokenize: `prompt`, or `messages`."""

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
