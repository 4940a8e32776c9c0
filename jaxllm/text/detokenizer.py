"""Turning a request's growing token ids into text, and finding stop strings in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from jaxllm.text.vocabulary import REPLACEMENT, decode_function, decoded_bytes, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_PARTIAL = 3  # bytes, hence tokens, of an incomplete UTF-8 character
_MARKERS = range(0xD800, 0xE000)  # surrogates, which no decoded text has


class IncrementalDetokenizer:
    """The text of one request's output, and its streaming.

    `append` stores tokens, `flush` decodes what was stored in one go and returns the text to show.
    What is shown depends on the tokens alone, not on how they were split over calls: it is all text so
    far, except an incomplete character, and except an end that may turn out to be the start of a stop
    string. The text continues the prompt, so that a leading space survives:
    `decode(prompt) + text == decode(prompt + output)`. The two differ in invalid UTF-8 only. Of a
    `byte_fallback` tokenizer, text already shown stays, where `decode` would turn the whole run of bytes
    into replacement characters. Where the prompt ends inside a character, the text begins with that
    replaced.

    The first stop string to be complete ends the text, unless `flush` was told not to stop there; of
    several that end at the same character, the longest. Later tokens are ignored. Special tokens count
    where stop strings name them, whether or not the text shows them: "<|im_end|>" stops at that token.

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
        hidden = vocabulary_of(tokenizer).special_ids if skip_special_tokens and stop else {}
        markers = _markers(hidden.values(), stop)
        by_id = {token_id: markers[name] for token_id, name in hidden.items() if name in markers}
        self._decoder = _TokenDecoder(tokenizer, prompt_token_ids, skip_special_tokens, by_id)
        self._matcher = _StopMatcher(stop, include_stop_str_in_output, markers)
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


class TokenNames:
    """What tokens are called, one place after another: the text that each would add there.

    Tokens of whole characters are their text. One that holds a part of a character is "" until a token
    completes the character, and that one is the whole character, as in vLLM.

    Args:
        tokenizer: the checkpoint's tokenizer.
        prompt_token_ids: what precedes.
        skip_special_tokens: special tokens are not in the text; they have names all the same.
    """

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary_of(tokenizer)
        self._skip_special = skip_special_tokens
        self._partial = b""
        self._is_start = all(map(self._is_skipped, prompt_token_ids))

    def name(self, token_id: int) -> str:
        """What a token would be called at this place."""
        spelling = self._vocabulary.spelling(self._tokenizer, token_id)
        if spelling.part is not None:
            return decoded_bytes(self._partial + spelling.part, False)[0]
        return spelling.first if self._is_start else spelling.text

    def append(self, token_id: int) -> None:
        """Go on to the place after a token."""
        if self._is_skipped(token_id):
            return
        self._is_start = False
        part = self._vocabulary.spelling(self._tokenizer, token_id).part
        self._partial = b"" if part is None else decoded_bytes(self._partial + part, False)[1]

    def _is_skipped(self, token_id: int) -> bool:
        return self._vocabulary.is_skipped(token_id, self._skip_special)


def token_bytes(tokenizer: Any, token_id: int, name: str | None) -> bytes:
    """The bytes of a token that is called so: its own where its text is no whole characters."""
    spelling = vocabulary_of(tokenizer).spelling(tokenizer, token_id)
    if spelling.part is not None:
        return spelling.part
    return (spelling.text if name is None else name).encode("utf-8", "replace")


class _TokenDecoder:
    """Tokens to text, piece by piece. The pieces joined do not depend on where they were cut.

    The tokenizer decodes the pending tokens behind an anchor, one token that is known to be text, since
    many decoders strip the space of whatever comes first. It is the last token before them, or a letter if
    that may end inside a character:

        | anchor | pending tokens: shown characters, then perhaps one incomplete character |
                                   |<- num_shown ->|<- decoded as U+FFFD, held back    ->|

    An incomplete character is at most three bytes, hence at most the last three tokens; once the text
    before it is shown, only those stay pending. `byte_fallback` tokenizers mark their bytes as tokens
    of their own, and turn a whole run of them into U+FFFD if any is invalid, so that shown text would
    change; their bytes are decoded here instead.

    Tokens that are not in the text leave a marker where they are to be noticed.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        skip_special: bool,
        markers: Mapping[int, str] | None = None,
    ) -> None:
        self._vocabulary = vocabulary_of(tokenizer)
        self._markers = markers or {}
        self._decode_function = decode_function(tokenizer)
        self._skip_special = skip_special
        self._pending: tuple[int, ...] = ()
        self._num_shown = 0
        self._partial_bytes = b""
        self._anchor: tuple[int, ...] = ()
        self._num_anchor = 0
        before = (i for i in reversed(prompt_token_ids) if not self._is_skipped(i))
        for token_id in itertools.islice(before, 1):
            self._set_anchor(token_id)

    def decode(self, token_ids: Sequence[int], finished: bool) -> str:
        """Text that the tokens complete, and markers; all that is left with `finished`."""
        pieces: list[str] = []
        for is_marked, run in itertools.groupby(token_ids, self._markers.__contains__):
            if is_marked:
                pieces.extend(self._markers[i] for i in run)
            else:
                pieces.append(self._decode_run([i for i in run if not self._is_skipped(i)]))
        if finished:
            pieces.append(self._decode_bytes(b"", True))
            pieces.append(self._decode_tokens((), True))
        return "".join(pieces)

    def _decode_run(self, token_ids: list[int]) -> str:
        byte_of = self._vocabulary.byte_of
        if not byte_of:
            return self._decode_tokens(token_ids, False)
        pieces = []
        for is_byte, run in itertools.groupby(token_ids, byte_of.__contains__):
            if is_byte:
                pieces.append(self._decode_tokens((), True))
                pieces.append(self._decode_bytes(bytes(byte_of[i] for i in run), False))
                if not self._anchor:
                    self._set_anchor(None)
            else:
                pieces.append(self._decode_bytes(b"", True))
                pieces.append(self._decode_tokens(list(run), False))
        return "".join(pieces)

    def _decode_tokens(self, token_ids: Sequence[int], finished: bool) -> str:
        pending = (*self._pending, *token_ids)
        if not pending or not (token_ids or finished):
            return ""
        text = self._decode_anchored(pending)
        new = text[self._num_shown :]
        if not finished and new.endswith(REPLACEMENT):
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
        text, self._partial_bytes = decoded_bytes(self._partial_bytes + data, finished)
        return text

    def _set_anchor(self, token_id: int | None) -> None:
        """Takes a token as the anchor, or a letter if there is none or it may end inside a character."""
        anchor: tuple[int, ...] = () if token_id is None else (token_id,)
        if not anchor or self._decode_ids(anchor).endswith(REPLACEMENT):
            anchor = self._vocabulary.letter
        self._anchor, self._num_anchor = anchor, len(self._decode_ids(anchor))

    def _decode_ids(self, token_ids: tuple[int, ...]) -> str:
        return self._decode_function(token_ids, self._skip_special)

    def _is_skipped(self, token_id: int) -> bool:
        return self._vocabulary.is_skipped(token_id, self._skip_special)


class _StopMatcher:
    """Finds the first complete stop string in a text that comes in pieces.

    Text is released once no stop string can start in it, so a match always lies in the held text. Markers
    of tokens that are not shown are never released. A stop string that names such tokens is looked for with
    their markers in it, and any as if there were none; the others' markers are passed over.
    """

    def __init__(self, stop: tuple[str, ...], include: bool, markers: Mapping[str, str]) -> None:
        self.matched: str | None = None
        self._held = ""
        self._include = include
        self._hidden = frozenset(map(ord, markers.values()))
        forms = dict.fromkeys((form, one) for one in stop for form in (one, _marked(one, markers)))
        self._forms = [(form, one, self._hidden.difference(map(ord, form))) for form, one in forms]
        self._first_characters = frozenset(form[0] for form, _ in forms)
        self._max_held = max((len(form) for form, _, _ in self._forms), default=1) - 1

    def feed(self, new: str, finished: bool, may_stop: bool) -> str:
        """Takes text and returns what can be shown; a match must end in `new`, and `may_stop` allow it."""
        if not self._forms:
            return new
        text = self._held + new
        best = self._first_match(text) if may_stop else None
        if best is not None:
            _, start, self.matched = best
            self._held = ""
            return self._shown(text[:start]) + (self.matched if self._include else "")
        split = len(text) if finished else self._num_free(text)
        self._held = text[split:]
        return self._shown(text[:split])

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """End, start and string of the match that ends first, the longest of several."""
        best: tuple[int, int, str] | None = None
        for form, string, hidden in self._forms:
            held, within = len(_without(self._held, hidden)), _without(text, hidden)
            start = within.find(form, max(0, held - len(form) + 1))
            if start >= 0:
                places: Sequence[int] = range(len(text))
                if len(within) < len(text):
                    places = [place for place in places if ord(text[place]) not in hidden]
                found = (places[start + len(form) - 1] + 1, places[start], string)
                best = found if best is None else min(best, found)
        return best

    def _shown(self, text: str) -> str:
        return _without(text, self._hidden)

    def _num_free(self, text: str) -> int:
        """Length of the text before the first place where an unfinished stop string starts."""
        num_hidden = len(text) - len(self._shown(text))
        for start in range(max(0, len(text) - self._max_held - num_hidden), len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(form.startswith(_without(tail, hidden)) for form, _, hidden in self._forms):
                    return start
        return len(text)


def _markers(names: Iterable[str], stop: tuple[str, ...]) -> dict[str, str]:
    """A character for each of the names that stop strings hold, which they do not hold."""
    free = (chr(code) for code in _MARKERS if not any(chr(code) in string for string in stop))
    found = [name for name in names if name and any(name in string for string in stop)]
    return dict(zip(found, free, strict=False))


def _without(text: str, hidden: Set[int]) -> str:
    """A text without characters of these codes."""
    return text.translate(dict.fromkeys(hidden)) if hidden else text


def _marked(string: str, markers: Mapping[str, str]) -> str:
    """A stop string with the markers of the tokens that it names."""
    names = sorted(markers, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, names)), lambda m: markers[m[0]], string) if names else string
