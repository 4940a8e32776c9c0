"""Compiled grammars of one tokenizer: tried in a process of their own first, and kept within bounds."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import dataclasses
import functools
import threading
from collections.abc import Set
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.errors import SamplingParamsError, TryAgainError
from jaxllm.sampling.grammar_child import STACK_BYTES, Proof
from jaxllm.sampling.grammar_processes import MOST, GrammarProcesses
from jaxllm.sampling.structured_outputs import (
    StructuredOutputsParams,
    Vocabulary,
    compiled,
    mask_width,
    problem_of,
)
from jaxllm.system.threads import NativeThreads, be_nice

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

MAX_BYTES = 2**28
"""Of all grammars that are kept, as estimated when they were tried."""
_MAX_KEPT = 256  # grammars, refused ones included
_MIN_BYTES = 2**16  # of a grammar
_BYTES_OF_TEXT = 96  # of a grammar, for each character of its text


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A grammar that can be followed.

    Attributes:
        first_row: [mask width] int32, the mask of the first token.
        mask_seconds: the longest that a mask took when it was tried.
        num_bytes: memory, as estimated.
    """

    _matcher: LLMatcher
    first_row: np.ndarray
    mask_seconds: float
    num_bytes: int

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of an output."""
        return self._matcher.deep_copy()


class Grammars:
    """Compiles grammars for one tokenizer, for any thread that asks, and keeps the latest ones.

    A grammar may kill whoever compiles it, or take very long. It is tried in another process first, but for
    those that are known to be harmless.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size: the model's; it may be smaller than the tokenizer's.
        eos_token_ids: tokens that end an output, of which there is at least one.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Set[int]
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[StructuredOutputsParams, concurrent.futures.Future[Grammar]] = (
            collections.OrderedDict()
        )
        self._num_bytes = 0
        self._made: tuple[Vocabulary, GrammarProcesses] | None = None
        self._making = threading.Lock()

    def get(self, params: StructuredOutputsParams) -> Grammar:
        """A compiled grammar; who asks for one that somebody else has asked for waits for the same.

        Raises:
            SamplingParamsError: it is invalid or takes too much, or the tokenizer cannot be used.
            TryAgainError: it could not be tried.
        """
        while True:
            with self._lock:
                future = self._kept.get(params)
                is_first = future is None
                if future is None:
                    future = self._kept[params] = concurrent.futures.Future()
                self._kept.move_to_end(params)
            if is_first:
                self._settle(params, future)
            try:
                return future.result()
            except (SamplingParamsError, TryAgainError) as error:
                raise copy.copy(error) from None  # each raises one of its own
            except concurrent.futures.CancelledError:
                continue  # whoever compiled it was interrupted

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether `get` has an answer already."""
        with self._lock:
            future = self._kept.get(params)
            return future is not None and future.done()

    def clear(self) -> None:
        """Let go of all grammars and of the processes that try them; later ones are made anew."""
        with self._making:
            self._made = None
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of the grammars that are kept."""
        return self._num_bytes

    def _settle(self, params: StructuredOutputsParams, future: concurrent.futures.Future[Grammar]) -> None:
        """Compile what nobody has yet, and let go of the oldest ones if that is too much."""
        try:
            grammar = self._compile(params)
        except SamplingParamsError as error:
            future.set_exception(error)
            return
        except TryAgainError as error:  # not the grammar's fault: whoever asks later has it tried again
            with self._lock:
                self._kept.pop(params, None)
            future.set_exception(error)
            return
        except BaseException:
            with self._lock:
                self._kept.pop(params, None)
            future.cancel()
            raise
        with self._lock:
            self._num_bytes += grammar.num_bytes if params in self._kept else 0
            future.set_result(grammar)
            while len(self._kept) > 1 and (self._num_bytes > MAX_BYTES or len(self._kept) > _MAX_KEPT):
                _, oldest = self._kept.popitem(last=False)
                if oldest.done() and oldest.exception() is None:
                    self._num_bytes -= oldest.result().num_bytes

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        with self._making:
            if self._made is None:
                self._made = self._make_vocabulary()
        vocabulary, processes = self._made
        if params.is_harmless:
            return _compiled(vocabulary, Proof(params.grammar_text(), 0.0, 0))
        with processes.tried(params) as proof:
            return _compiled(vocabulary, proof)

    def _make_vocabulary(self) -> tuple[Vocabulary, GrammarProcesses]:
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise SamplingParamsError(
                "structured_outputs needs a tokenizer with a tokenizer.json: "
                f"{'none was loaded' if self._tokenizer is None else type(self._tokenizer).__name__}"
            )
        if not self._eos_token_ids:
            raise SamplingParamsError(
                "structured_outputs needs an end-of-sequence token, and the model's config.json has none: "
                "set eos_token_id there"
            )
        backend = copy.copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        size = max(self._vocab_size, highest + 1)
        vocabulary = Vocabulary(backend.to_str(), size, sorted(self._eos_token_ids))
        return vocabulary, GrammarProcesses(vocabulary)


def _compiled(vocabulary: Vocabulary, proof: Proof) -> Grammar:
    try:
        matcher, row = _threads().submit(_begin, vocabulary, proof.grammar).result()
    except ValueError as error:
        raise SamplingParamsError(f"structured_outputs cannot be compiled: {error}") from error
    num_bytes = max(proof.num_bytes, _MIN_BYTES + _BYTES_OF_TEXT * len(proof.grammar))
    return Grammar(matcher, row, proof.mask_seconds, num_bytes)


@functools.cache
def _threads() -> NativeThreads:
    """Threads that compile, one for slow and one for harmless ones, with more stack than those that try."""
    return NativeThreads(MOST + 2, 2 * STACK_BYTES, "jaxllm-grammars", be_nice)


def _begin(vocabulary: Vocabulary, grammar: str) -> tuple[LLMatcher, np.ndarray]:
    """A matcher, and the mask of its first token."""
    from llguidance.numpy import fill_next_token_bitmask

    matcher = compiled(vocabulary, grammar)
    rows = np.zeros((1, mask_width(vocabulary.size)), np.int32)
    fill_next_token_bitmask(matcher, rows)
    if problem := problem_of(matcher):
        raise ValueError(problem)
    return matcher, rows[0]
