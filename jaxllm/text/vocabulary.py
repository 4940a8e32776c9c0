"""What a tokenizer's tokens are written as, one by one."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decoded_bytes(data: bytes, finished: bool) -> tuple[str, bytes]:
    """The text of bytes, and an incomplete character at their end, which is replaced with `finished`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(data, finished), decoder.getstate()[0]


_Decode = Callable[[Sequence[int], bool], str]
"""Text of token ids, with or without (True) skipping special tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spelling:
    """A token's text after others, and at the start of a text; its bytes if they are no whole characters."""

    text: str
    first: str
    part: bytes | None


class Vocabulary:
    """What decoding needs to know of a tokenizer's tokens.

    Attributes:
        special_ids: special tokens and their names.
        byte_of: tokens of a `byte_fallback` tokenizer that are bytes of longer characters; empty for others.
        letter: a token that is a letter, if there is one.
    """

    def __init__(self, tokenizer: Any) -> None:
        ids = set(tokenizer.get_vocab().values())
        self._size = max(ids, default=-1) + 1
        self._holes = frozenset(range(self._size)) - ids if len(ids) < self._size else frozenset()
        added = tokenizer.added_tokens_decoder.items()
        self.special_ids = {token_id: token.content for token_id, token in added if token.special}
        byte_of = _byte_tokens(tokenizer)
        self.byte_of = {token_id: byte for token_id, byte in byte_of.items() if byte >= 0x80}
        self.letter = _letter(tokenizer, byte_of)
        self._spellings: dict[int, Spelling] = {}

    def is_skipped(self, token_id: int, skip_special: bool) -> bool:
        """Whether a token has no text: skipped, or none of the tokenizer (models pad their vocabulary)."""
        if token_id >= self._size or token_id in self._holes:
            return True
        return skip_special and token_id in self.special_ids

    def spelling(self, tokenizer: Any, token_id: int) -> Spelling:
        """How one of its tokens is written, which is found out once."""
        found = self._spellings.get(token_id)
        if found is None:
            found = self._spellings[token_id] = self._spell(tokenizer, token_id)
        return found

    def _spell(self, tokenizer: Any, token_id: int) -> Spelling:
        if self.is_skipped(token_id, False):
            return Spelling("", "", None)
        decode = decode_function(tokenizer)
        first = text = decode((token_id,), False)
        if token_id not in self.special_ids and self.letter:
            text = decode((*self.letter, token_id), False)[1:]
        part = None
        if token_id in self.byte_of:
            part = bytes((self.byte_of[token_id],))
        elif REPLACEMENT in first:
            part = _byte_level(tokenizer.convert_ids_to_tokens(token_id))
        # Of what is no part of a character there is nothing that the text does not tell.
        return Spelling(text, first, None if part is None or not _is_partial(part, first) else part)


_vocabularies: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """That of a tokenizer, made once."""
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        vocabulary = _vocabularies[tokenizer] = Vocabulary(tokenizer)
    return vocabulary


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(shown))
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _byte_level(name: str) -> bytes | None:
    """The bytes that a byte-level tokenizer's token is written for; None if it is of another tokenizer."""
    alphabet = byte_alphabet()
    return bytes(map(alphabet.__getitem__, name)) if alphabet.keys() >= set(name) else None


def _is_partial(data: bytes, text: str) -> bool:
    """Whether bytes that are shown as a text are no whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return decoded_bytes(data, True)[0] == text
    return False


def _letter(tokenizer: Any, byte_of: Mapping[int, int]) -> tuple[int, ...]:
    decode = decode_function(tokenizer)
    of_bytes = [token_id for token_id, byte in byte_of.items() if byte == ord("A")]
    for token_id in of_bytes or tokenizer.convert_tokens_to_ids(["a", "A"]):
        if token_id is not None and decode((token_id,), False) in ("a", "A"):
            return (token_id,)
    return ()


def decode_function(tokenizer: Any) -> _Decode:
    """What gives the text of its tokens."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if isinstance(tokenizer, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode):
        backend = tokenizer.backend_tokenizer  # the same text, five times faster than through the wrapper
        return lambda token_ids, skip_special: backend.decode(token_ids, skip_special_tokens=skip_special)
    return lambda token_ids, skip_special: tokenizer.decode(
        token_ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
    )


def _byte_tokens(tokenizer: Any) -> dict[int, int]:
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    found = {
        token_id: byte
        for byte, token_id in enumerate(tokenizer.convert_tokens_to_ids(names))
        if token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == names[byte]
    }
    letter = next((token_id for token_id, byte in found.items() if byte == ord("A")), None)
    return found if letter is not None and tokenizer.decode([letter]) == "A" else {}
