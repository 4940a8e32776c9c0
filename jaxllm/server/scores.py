"""Log-probabilities in OpenAI's two forms, and in vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.engine.outputs import Logprob, PositionLogprobs, positions_to_dicts
from jaxllm.text.detokenizer import token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOWEST = -9999.0
"""What stands for minus infinity, which JSON has no number for; as in vLLM."""


def _value(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _name(token_id: int, entry: Logprob | None, as_ids: bool) -> str:
    decoded = None if entry is None else entry.decoded_token
    return f"token_id:{token_id}" if as_ids or decoded is None else decoded


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    *,
    names: Sequence[str] | None = None,
    as_ids: bool = False,
) -> dict[str, Any]:
    """What /v1/completions has of tokens.

    Args:
        token_ids: the tokens.
        positions: their scores; None where there are none, as of a prompt's first token.
        offsets: characters of the text before each of them.
        names: what to call tokens without scores.
        as_ids: call tokens by their ids.
    """
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for place, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
        entry = None if position is None else position[token_id]
        name = names[place] if names is not None and position is None else _name(token_id, entry, as_ids)
        top: dict[str, float] | None = None
        if position is not None:
            top = {}
            for (
                one,
                scored,
            ) in position.items():  # of several of one name the sampled one, the first, keeps it
                called = _name(one, scored, as_ids)
                top[_name(one, scored, True) if called in top else called] = _value(scored.logprob)
        found["tokens"].append(name)
        found["token_logprobs"].append(None if entry is None else _value(entry.logprob))
        found["top_logprobs"].append(top)
    return {**found, "text_offset": list(offsets)}


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
    num_top: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """What /v1/chat/completions has of tokens, with the `num_top` most likely ones at each place."""

    def scored(token_id: int, entry: Logprob) -> dict[str, Any]:
        own = list(token_bytes(tokenizer, token_id, entry.decoded_token))
        return {"token": _name(token_id, entry, as_ids), "logprob": _value(entry.logprob), "bytes": own}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        ranked = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
        one = scored(token_id, position[token_id])
        content.append({**one, "top_logprobs": [scored(*item) for item in ranked]})
    return {"content": content}


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[Any] | None:
    """vLLM's form, by token id; the first token has none."""
    return positions_to_dicts(positions, _value)
