"""What prompts begin with, as chains of hashes that a router compares without a tokenizer.

A key names everything from a prompt's beginning up to where it ends, so two prompts share a key if and only
if they begin alike that far (but for collisions of 64 bits, which cost a recomputation and nothing else).
Keys end after each block of 16 tokens at first, and later after every eighth of the length so far:

    tokens  16 32 48 ... 128 144 ... 256 288 ... 512 576 ... 4096 4608 ...

so that a prompt of n tokens has about 8 ln(n / 16) keys, and what two prompts have in common is known to a
ninth.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

_BLOCK = 16
_STEP = 8
_MOST_TOKENS = 2**24
BYTES_PER_TOKEN = 4
"""Of a token id, and of English text on average in vocabularies of 32,000 and more."""
_ROOT_FIELDS = (
    "model",
    "cache_salt",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
)
"""What of a request changes its first tokens, or keeps it apart from others of the same tokens."""


def _key_ends() -> list[int]:
    ends = [_BLOCK]
    while ends[-1] < _MOST_TOKENS:
        ends.append(ends[-1] + max(_BLOCK, ends[-1] // _STEP // _BLOCK * _BLOCK))
    return ends


_ENDS = _key_ends()


@dataclasses.dataclass(frozen=True, slots=True)
class PromptKeys:
    """The keys of a prompt.

    Args:
        keys: from the shortest beginning to the longest.
        num_tokens: of the whole prompt; of texts an estimate.
    """

    keys: tuple[int, ...]
    num_tokens: int

    def tokens_at(self, place: int) -> int:
        """How many tokens the key at a place names."""
        return _ENDS[place]


def segment_tokens(place: int) -> int:
    """How many tokens a key at this place names that the one before it does not."""
    return _ENDS[place] - (_ENDS[place - 1] if place else 0)


def keys_of_token_ids(token_ids: Sequence[int], root: str = "") -> PromptKeys:
    """Keys of token ids; those of another `root` are others."""
    return _chain(f"ids {root}", array.array("i", token_ids).tobytes())


def keys_of_text(text: str, root: str = "") -> PromptKeys:
    """Keys of a text; lengths in tokens are estimated from its bytes."""
    return _chain(f"text {root}", text.encode("utf-8", "surrogatepass"))


def keys_of_request(body: Mapping[str, Any]) -> PromptKeys:
    """Keys of the body of a completion or chat request, as OpenAI's API has them.

    Of several prompts the first is what they are routed by, and all count as tokens. What is malformed has no
    keys: whoever it is sent to refuses it in words.
    """
    root = json.dumps([body.get(name) for name in _ROOT_FIELDS], sort_keys=True, default=str)
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        return keys_of_text("".join(map(_message_text, messages)), root)
    prompts = prompt if isinstance(prompt, list) and prompt and not _is_token_id(prompt[0]) else [prompt]
    try:
        found = [
            keys_of_text(one, root) if isinstance(one, str) else keys_of_token_ids(one or (), root)
            for one in prompts
        ]
    except (TypeError, OverflowError):
        return PromptKeys((), 0)
    return dataclasses.replace(found[0], num_tokens=sum(one.num_tokens for one in found))


def _chain(root: str, data: bytes) -> PromptKeys:
    num_tokens = len(data) // BYTES_PER_TOKEN
    digest = hashlib.blake2b(root.encode("utf-8", "surrogatepass"), digest_size=8, person=b"jaxllm")
    keys: list[int] = []
    start, view = 0, memoryview(data)
    for end in _ENDS[: bisect.bisect_right(_ENDS, num_tokens)]:
        digest.update(view[start * BYTES_PER_TOKEN : end * BYTES_PER_TOKEN])
        keys.append(int.from_bytes(digest.digest(), "little"))
        start = end
    return PromptKeys(tuple(keys), num_tokens)


def _message_text(message: object) -> str:
    """A message, with ends that no text can imitate."""
    if not isinstance(message, Mapping):
        return ""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    return f"\0{message.get('role')}\0{text}"


def _is_token_id(value: object) -> bool:
    return isinstance(value, int)
