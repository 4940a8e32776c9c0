"""Which tokens a request may sample next: a bit for each token of the vocabulary.

A row of masks has bit `i % 32` of its int32 number `i // 32` set where token `i` is allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.errors import SamplingParamsError
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs import Grammars
from jaxllm.tokenizer import encode

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher
    from transformers import PreTrainedTokenizerBase


def mask_width(vocab_size: int) -> int:
    """Numbers in a row of masks."""
    return -(-vocab_size // 32)


class TokenMask:
    """The tokens that one request may sample next.

    Args:
        allowed: [mask_width] int32, tokens that are allowed at all; None allows each.
        bad_words: token ids each; the last token of one is not allowed after the others.
        matcher: follows a grammar.

    Attributes:
        depends_on_outputs: whether it is another one after each token.
        matcher: see above.
    """

    def __init__(
        self,
        allowed: np.ndarray | None = None,
        bad_words: Sequence[tuple[int, ...]] = (),
        matcher: LLMatcher | None = None,
    ) -> None:
        self._allowed, self.matcher = allowed, matcher
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for *start, last in bad_words:
            self._bad_words.setdefault(last, []).append(tuple(start))
        self.depends_on_outputs = matcher is not None or any(len(word) > 1 for word in bad_words)

    def append(self, token_id: int) -> str | None:
        """Take a sampled token; returns what is wrong if the grammar cannot go on, as it is too complex."""
        if self.matcher is None or self.matcher.consume_token(token_id):
            return None
        return self.matcher.get_error() or f"the grammar does not allow token {token_id}"

    def fill(self, row: np.ndarray, output_token_ids: Sequence[int]) -> None:
        """Write all but what the matcher says to `row` [mask_width] int32, after these outputs."""
        if self._allowed is not None:
            row[:] = self._allowed
        before = row.copy() if self._bad_words else None
        bits = row.view(np.uint32)
        for last, starts in self._bad_words.items():
            if any(not start or tuple(output_token_ids[-len(start) :]) == start for start in starts):
                bits[last // 32] &= ~np.uint32(1 << last % 32)
        if before is not None and not row.any():
            row[:] = before  # something has to be sampled


def fill_masks(masks: Sequence[tuple[TokenMask | None, Sequence[int]]], rows: np.ndarray) -> None:
    """Write masks to `rows` [at least as many, mask_width] int32, each after its output tokens.

    Rows of no mask stay as they are.
    """
    matchers = []
    for index, (mask, outputs) in enumerate(masks):
        if mask is None:
            continue
        if mask.matcher is not None:
            matchers.append((mask.matcher, index))
        else:
            mask.fill(rows[index], outputs)
    if matchers:
        from llguidance.numpy import fill_next_token_bitmask_par

        fill_next_token_bitmask_par(_executor(), matchers, rows)


@functools.cache
def _executor() -> LLExecutor:
    """Threads of the process for masks of several requests."""
    from llguidance import LLExecutor

    return LLExecutor()


class TokenMasks:
    """Makes requests' masks of their parameters.

    Args:
        tokenizer: None takes no words and no grammars.
        vocab_size: the model's.
        eos_token_ids: tokens that end an output.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Set[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._grammars = Grammars(tokenizer, vocab_size, eos_token_ids)
        self._words = functools.lru_cache(maxsize=64)(self._spelled)  # samples of a prompt have the same

    def make(self, params: SamplingParams) -> TokenMask | None:
        """The mask at the beginning of an output; None where every token is allowed.

        Raises:
            SamplingParamsError: a grammar or words cannot be turned into masks, or nothing is allowed.
        """
        if params.structured_outputs is not None:
            return TokenMask(matcher=self._grammars.matcher(params.structured_outputs))
        if not (params.allowed_token_ids or params.bad_words):
            return None
        allowed = None
        bad_words = self._words(params.bad_words)
        if params.allowed_token_ids:
            self._check_left(params, bad_words)
            bits = np.zeros(mask_width(self._vocab_size) * 32, bool)
            bits[list(params.allowed_token_ids)] = True
            allowed = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)
        return TokenMask(allowed, bad_words)

    def _spelled(self, texts: tuple[str, ...]) -> list[tuple[int, ...]]:
        return [word for text in texts for word in self._spellings(text)]

    def _check_left(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> None:
        left = set(params.allowed_token_ids) - {word[0] for word in bad_words if len(word) == 1}
        if not left:
            raise SamplingParamsError("bad_words leave none of allowed_token_ids: drop one of them.")
        ends = self._eos_token_ids | set(params.stop_token_ids)
        if params.min_tokens and left <= ends:
            raise SamplingParamsError(
                f"min_tokens={params.min_tokens} contradicts allowed_token_ids, which hold only tokens that "
                "end the output: drop one of them."
            )

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word's tokens, and if they are others as many after a space; as in vLLM."""
        if self._tokenizer is None:
            raise SamplingParamsError(f"bad_words={word!r} need a tokenizer; use logit_bias with this engine")
        found: list[tuple[int, ...]] = []
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(encode(self._tokenizer, text, add_special_tokens=False))
            if ids and (not found or (ids[0] != found[0][0] and len(ids) == len(found[0]))):
                found.append(ids)
        if not found:
            raise SamplingParamsError(f"bad_words: {word!r} has no tokens; leave it out")
        if any(token_id >= self._vocab_size for ids in found for token_id in ids):
            raise SamplingParamsError(f"bad_words: {word!r} has tokens that the model does not know")
        return found
