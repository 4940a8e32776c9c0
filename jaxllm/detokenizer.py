"""Turning a request's growing token ids into text, and finding stop strings in it."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_PARTIAL = 3  # bytes, hence tokens, of an incomplete UTF-8 character


class IncrementalDetokenizer:
    """The text of one request's output, and its streaming.

    `append` stores tokens, `flush` decodes what was stored in one go and returns the text to show.
    What is shown depends on the tokens alone, not on how they were split over calls: it is all text so
    far, except an incomplete character, and except an end that may turn out to be the start of a stop
    string. The text continues the prompt, so that a leading space survives:
    `decode(prompt) + text == decode(prompt + output)`. (Only for invalid UTF-8 from a `byte_fallback`
    tokenizer the two differ: text already shown stays, where `decode` would turn the whole run of bytes
    into replacement characters.)

    The first stop string to be complete ends the text, unless `flush` was told not to stop there; of
    several that end at the same character, the longest. Later tokens are ignored.

    Args:
        tokenizer: the checkpoint's tokenizer.
        prompt_token_ids: the prompt, read once.
        skip_special_tokens: leave special tokens out of the text.
        stop: non-empty strings that end the text.
        include_stop_str_in_output: end the text after the stop string instead of before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._decoder = _TokenDecoder(tokenizer, prompt_token_ids, skip_special_tokens)
        self._matcher = _StopMatcher(stop, include_stop_str_in_output)
        self._pending: list[int] = []
        self._parts: list[str] = []

    def append(self, token_ids: Sequence[int]) -> None:
        """Stores output tokens. Decodes nothing."""
        self._pending.extend(token_ids)

    def flush(self, finished: bool = False, *, may_stop: bool = True) -> str:
        """Decodes the stored tokens and returns the text that can be shown now, `""` if none.

        Args:
            finished: no token follows, so nothing is held back.
            may_stop: whether stop strings that end in this text count; others never will.
        """
        if self._matcher.matched is not None:
            self._pending.clear()
            return ""
        shown = self._matcher.feed(self._decoder.decode(self._pending, finished), finished, may_stop)
        self._pending.clear()
        if shown:
            self._parts.append(shown)
        return shown

    def check_stop(self) -> str | None:
        """The stop string that ended the text flushed so far, or None."""
        return self._matcher.matched

    @property
    def text(self) -> str:
        """All text that `flush` has returned."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class TextOffsets:
    """Where in a text its tokens begin, as it grows.

    A token that ends a character which tokens before it began is where that character is.

    Args:
        tokenizer: the checkpoint's tokenizer; without one there is no text.
        prompt_token_ids: what the text continues.
        start: characters before the first token.
        skip_special_tokens: special tokens are not in the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_token_ids: Sequence[int] = (),
        start: int = 0,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._offset = start
        self._decoder: _TokenDecoder | None = None
        if tokenizer is not None:
            self._decoder = _TokenDecoder(tokenizer, prompt_token_ids, skip_special_tokens)

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """Characters before each of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if self._decoder is not None:
                self._offset += len(self._decoder.decode([token_id], False))
        return offsets


class _TokenDecoder:
    """Tokens to text, piece by piece. The pieces joined do not depend on where they were cut.

    The tokenizer decodes the pending tokens behind an anchor, one token that is known to be text, since
    many decoders strip the space of whatever comes first:

        | anchor | pending tokens: shown characters, then perhaps one incomplete character |
                                   |<- num_shown ->|<- decoded as U+FFFD, held back    ->|

    An incomplete character is at most three bytes, hence at most the last three tokens; once the text
    before it is shown, only those stay pending. `byte_fallback` tokenizers mark their bytes as tokens
    of their own, and turn a whole run of them into U+FFFD if any is invalid, so that shown text would
    change; their bytes are decoded here instead.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special: bool) -> None:
        self._vocabulary = _vocabulary(tokenizer)
        self._decode_function = _decode_function(tokenizer)
        self._skip_special = skip_special
        self._pending: tuple[int, ...] = ()
        self._num_shown = 0
        self._partial_bytes = b""
        self._anchor: tuple[int, ...] = ()
        self._num_anchor = 0
        candidates = (i for i in reversed(prompt_token_ids) if not self._is_skipped(i))
        for token_id in itertools.islice(candidates, _LONGEST_PARTIAL + 1):
            if self._set_anchor(token_id):
                break

    def decode(self, token_ids: Sequence[int], finished: bool) -> str:
        """Text that the tokens complete; all that is left with `finished`."""
        byte_of = self._vocabulary.byte_of
        kept = [i for i in token_ids if not self._is_skipped(i)]
        if not byte_of:
            return self._decode_tokens(kept, finished)
        pieces = []
        for is_byte, run in itertools.groupby(kept, byte_of.__contains__):
            if is_byte:
                pieces.append(self._decode_tokens((), True))
                run_ids = list(run)
                pieces.append(self._decode_bytes(bytes(byte_of[i] for i in run_ids), False))
                if not self._anchor:
                    self._anchor = (run_ids[-1],)
                    self._num_anchor = len(self._decode_ids(self._anchor))
            else:
                pieces.append(self._decode_bytes(b"", True))
                pieces.append(self._decode_tokens(list(run), False))
        if finished:
            pieces.append(self._decode_bytes(b"", True))
            pieces.append(self._decode_tokens((), True))
        return "".join(pieces)

    def _decode_tokens(self, token_ids: Sequence[int], finished: bool) -> str:
        pending = (*self._pending, *token_ids)
        if not pending or not (token_ids or finished):
            return ""
        text = self._decode_anchored(pending)
        new = text[self._num_shown :]
        if not finished and new.endswith(_REPLACEMENT):
            self._pending = pending[-_LONGEST_PARTIAL:]
            shown = text if self._pending == pending else self._decode_anchored(self._pending)
            self._num_shown = len(shown) - 1
            return new[:-1]
        self._pending = ()
        self._num_shown = 0
        if not self._anchor:
            self._set_anchor(pending[-1])
        return new

    def _decode_anchored(self, token_ids: tuple[int, ...]) -> str:
        text = self._decode_ids(self._anchor + token_ids)
        return text[self._num_anchor :]

    def _decode_bytes(self, data: bytes, finished: bool) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._partial_bytes + data, finished)
        self._partial_bytes = decoder.getstate()[0]
        return text

    def _set_anchor(self, token_id: int) -> bool:
        """Takes a token as the anchor unless it may end inside a character."""
        text = self._decode_ids((token_id,))
        if text.endswith(_REPLACEMENT):
            return False
        self._anchor = (token_id,)
        self._num_anchor = len(text)
        return True

    def _decode_ids(self, token_ids: tuple[int, ...]) -> str:
        return self._decode_function(token_ids, self._skip_special)

    def _is_skipped(self, token_id: int) -> bool:
        """Whether a token has no text: skipped, or beyond the tokenizer (models pad their vocabulary)."""
        if token_id >= self._vocabulary.size:
            return True
        return self._skip_special and token_id in self._vocabulary.special_ids


class _StopMatcher:
    """Finds the first complete stop string in a text that comes in pieces.

    Text is released once no stop string can start in it, so a match always lies in the held text.
    """

    def __init__(self, stop: tuple[str, ...], include: bool) -> None:
        self.stop = stop
        self.matched: str | None = None
        self._held = ""
        self._include = include
        self._first_characters = frozenset(string[0] for string in stop)
        self._max_held = max(map(len, stop), default=1) - 1

    def feed(self, new: str, finished: bool, may_stop: bool) -> str:
        """Takes text and returns what can be shown; a match must end in `new`, and `may_stop` allow it."""
        if not self.stop:
            return new
        held, text = len(self._held), self._held + new
        best: tuple[int, int, str] | None = None  # the first to end; then the longest
        for string in self.stop if may_stop else ():
            start = text.find(string, max(0, held - len(string) + 1))
            if start >= 0:
                found = (start + len(string), start, string)
                best = found if best is None else min(best, found)
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[: end if self._include else start]
        split = len(text) if finished else self._num_free(text)
        self._held = text[split:]
        return text[:split]

    def _num_free(self, text: str) -> int:
        """Length of the text before the first place where an unfinished stop string starts."""
        for start in range(max(0, len(text) - self._max_held), len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(string.startswith(tail) for string in self.stop):
                    return start
        return len(text)


_Decode = Callable[[Sequence[int], bool], str]
"""Text of token ids, with or without (True) skipping special tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What decoding needs to know of a tokenizer's tokens."""

    size: int
    special_ids: frozenset[int]
    byte_of: dict[int, int]
    """Byte tokens of a `byte_fallback` tokenizer; empty for others."""


_vocabularies: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()


_token_texts: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def token_text(tokenizer: Any, token_id: int) -> str:
    """The text of a token by itself, which is decoded once."""
    texts = _token_texts.setdefault(tokenizer, {})
    text = texts.get(token_id)
    if text is None:
        text = texts[token_id] = str(tokenizer.decode([token_id]))
    return text


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        special_ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        vocabulary = _Vocabulary(len(tokenizer), special_ids, _byte_tokens(tokenizer))
        _vocabularies[tokenizer] = vocabulary
    return vocabulary


def _decode_function(tokenizer: Any) -> _Decode:
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
