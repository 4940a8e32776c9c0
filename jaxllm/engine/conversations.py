"""Conversations as prompts: rendered by a chat template, as text and as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.engine.inputs import Messages
from jaxllm.errors import RequestError
from jaxllm.text import tokenizer as tokenization
from jaxllm.text.chat import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_token_prompts(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages | Sequence[Messages],
    chat_template_kwargs: Mapping[str, Any] | None,
    **options: Any,
) -> list[dict[str, Any]]:
    """One conversation, or each of a list of them; `options` are those of `render`.

    Raises:
        RequestError: a conversation or an argument is invalid, or the template does not read it.
        ConfigError: there is no template, or it is broken.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(
            "messages must be a list like [{'role': 'user', 'content': '...'}], or a list of such lists, "
            f"not {type(messages).__name__}"
        )
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise RequestError(
            f"chat_template_kwargs={chat_template_kwargs!r} must be a dictionary of template variables"
        )
    conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
    prompts = []
    for place, conversation in enumerate(conversations):
        try:
            text = render(tokenizer, conversation, template_variables=chat_template_kwargs, **options)
            token_ids = tokenization.encode(tokenizer, text, add_special_tokens=False)
        except RequestError as error:
            if conversations is not messages:
                raise
            raise RequestError(f"conversation {place}: {error}") from error
        prompts.append({"prompt": text, "prompt_token_ids": token_ids})
    return prompts
