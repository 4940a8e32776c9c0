"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import JaxllmError
from jaxllm.server.errors import refused
from jaxllm.server.parameters import conversation
from jaxllm.server.protocol import DetokenizeRequest, TokenizeRequest
from jaxllm.server.service import Service
from jaxllm.text import tokenizer as tokenization


def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a prompt, or of a conversation.

    Raises:
        ApiError: neither or both are given, or it is refused.
    """
    service.check_model(body.model)
    tokenizer = service.needed_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise refused("send either prompt or messages", "prompt")
    if body.messages is None:
        text, adds = body.prompt or "", body.add_special_tokens is not False
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                raise refused(f"{name} is for messages: leave it out", name)
    else:
        text, adds = conversation(tokenizer, body), bool(body.add_special_tokens)
    service.prompt_limits.check_text(text, "prompt" if body.messages is None else "messages")
    try:
        token_ids = tokenization.encode(tokenizer, text, add_special_tokens=adds)
    except JaxllmError as error:
        raise refused(str(error), "prompt") from error
    names = tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": service.core.limits.max_model_len,
        "tokens": token_ids,
        "token_strs": names,
    }


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids.

    Raises:
        ApiError: one is none of the model's.
    """
    service.check_model(body.model)
    tokenizer = service.needed_tokenizer()
    most = service.made.model_config.vocab_size - 1
    for place, token_id in enumerate(body.tokens):
        if token_id > most:
            raise refused(f"tokens[{place}]={token_id} is out of range; ids are 0 to {most}", "tokens")
    return {"prompt": str(tokenizer.decode(body.tokens))}
