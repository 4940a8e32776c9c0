"""Which tokens a request may sample next: a bit for each token of the vocabulary.

A row of masks has bit `i % 32` of its int32 number `i // 32` set where token `i` is allowed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import Collection, Iterable, Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.errors import SamplingParamsError
from jaxllm.sampling.grammar_child import STACK_BYTES
from jaxllm.sampling.grammar_processes import MOST
from jaxllm.sampling.grammars import Grammar, Grammars
from jaxllm.sampling.params import SamplingParams
from jaxllm.sampling.structured_outputs import mask_width, problem_of
from jaxllm.system.threads import NativeThreads, be_nice
from jaxllm.text.tokenizer import encode

if TYPE_CHECKING:
    from llguidance import LLExecutor
    from transformers import PreTrainedTokenizerBase

PATIENCE_SECONDS = 0.02
"""How long a step waits for masks, and for each of them `_PATIENCE_OF_ONE`; those that are late sit out."""
_PATIENCE_OF_ONE = 0.00025
_SLOW_SECONDS = 0.005
_NUM_CHECKS = 16  # masks that one which was late is made apart from others


def _row_of(token_ids: Collection[int], vocab_size: int) -> np.ndarray:
    """[mask_width] int32 with the bits of these tokens."""
    bits = np.zeros(mask_width(vocab_size) * 32, bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


class BadWords:
    """Which tokens would end a word, after those of an output; all words are followed at once.

    An automaton of Aho and Corasick: its states are the beginnings of words that an output may end with.

    Args:
        words: token ids each, none empty.
        vocab_size: the model's.

    Attributes:
        single: tokens that are words by themselves.
        others: [mask_width] int32, all tokens but these.
        has_several: whether any word is of several tokens.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], vocab_size: int) -> None:
        self.single = {word[0] for word in words if len(word) == 1}
        self.others = ~_row_of(self.single, vocab_size)
        self.has_several = any(len(word) > 1 for word in words)
        self._next: list[dict[int, int]] = [{}]
        ends: list[set[int]] = [set()]  # of each state the tokens that end a word after it
        for word in words:
            state = 0
            for token in word[:-1]:
                following = self._next[state].setdefault(token, len(self._next))
                if following == len(self._next):
                    self._next.append({})
                    ends.append(set())
                state = following
            if len(word) > 1:
                ends[state].add(word[-1])
        self._shorter = [0] * len(self._next)  # the state of the longest ending that is one, too
        states = collections.deque(self._next[0].values())
        while states:
            state = states.popleft()
            ends[state] |= ends[self._shorter[state]]
            for token, following in self._next[state].items():
                self._shorter[following] = self.after(self._shorter[state], token)
                states.append(following)
        self._ends = [_without(tokens) for tokens in ends]

    def after(self, state: int, token: int) -> int:
        """The state after another token; 0 is that of the beginning."""
        while state and token not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(token, 0)

    def ends(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that would end a word of several: numbers of a row, and what of each is left without one."""
        return self._ends[state]


def _without(token_ids: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(sorted(token_ids), np.int64)
    return ids // 32, ~np.left_shift(1, ids % 32).astype(np.uint32)


class GrammarState:
    """Where an output is in its grammar, and the mask of its next token.

    Attributes:
        matcher: llguidance's.
        row: [mask width] int32; of the next token, if `is_ready`.
        is_ready: whether the mask is made.
        problem: why it cannot go on.
        tokens: the newest ones, which the matcher has not taken.
        num_checks: masks that are to be made apart, as one was late.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.matcher = grammar.matcher()
        self.row, self.is_ready = grammar.first_row, True
        self.problem: str | None = None
        self.num_checks = _NUM_CHECKS if grammar.mask_seconds > _SLOW_SECONDS else 0
        self.tokens: list[int] = []

    def append(self, token_id: int) -> None:
        """Take a sampled token; `MaskThreads` follow it."""
        self.is_ready = False
        self.tokens.append(token_id)

    def allowed(self, drafts: Sequence[int]) -> Sequence[int]:
        """The first of these drafts, as far as they may follow; none while masks are late."""
        if not self.is_ready or self.num_checks or self.problem is not None:
            return ()
        return drafts[: mask_threads().num_allowed(self, drafts)]


class MaskThreads:
    """Threads that follow grammars, so that whoever waits for a slow one can go on without it."""

    def __init__(self) -> None:
        from llguidance import LLExecutor

        stack = 2 * STACK_BYTES
        self._quick = NativeThreads(1, stack, "jaxllm-masks")
        self._slow = NativeThreads(MOST, stack, "jaxllm-slow-masks", be_nice)
        # Threads of an executor are as nice as the one that makes it.
        self._quick_executor = self._quick.submit(LLExecutor).result()
        self._slow_executor = self._slow.submit(LLExecutor, MOST).result()
        self._news = threading.Condition()

    def begin(self, states: Iterable[GrammarState]) -> concurrent.futures.Future[None] | None:
        """Let states follow their tokens; what it returns is done when all quick ones have."""
        quick: list[GrammarState] = []
        for state in states:
            if state.num_checks:
                self._slow.submit(self._follow, [state], self._slow_executor)
            else:
                quick.append(state)
        return self._quick.submit(self._follow, quick, self._quick_executor) if quick else None

    def wait(self, states: Collection[GrammarState], seconds: float) -> None:
        """Wait until one of the states is ready, at most so long."""
        with self._news:
            self._news.wait_for(lambda: any(state.is_ready for state in states), seconds)

    def num_allowed(self, state: GrammarState, drafts: Sequence[int]) -> int:
        """How many of these drafts the grammar allows, each after those before it."""
        return self._quick.submit(state.matcher.validate_tokens, list(drafts)).result()

    def fill_after(self, places: Sequence[tuple[GrammarState, Sequence[int], np.ndarray]]) -> None:
        """Write the masks after drafts that states allow to rows; the states stay where they are.

        Neighbours that are of one state each have the drafts of the one before, and more.
        """
        self._quick.submit(_fill_after, places).result()

    def _follow(self, states: Sequence[GrammarState], executor: LLExecutor) -> None:
        began = time.perf_counter()
        rows = np.zeros((len(states), len(states[0].row)), np.int32)
        problem = None
        try:
            self._fill(states, rows, executor)
        except BaseException as error:  # a panic of native code is no Exception
            problem = f"its grammar could not be followed: {error}"
        seconds = time.perf_counter() - began
        is_late = seconds > patience(len(states)) if len(states) > 1 else seconds > _SLOW_SECONDS
        with self._news:
            for state, row in zip(states, rows, strict=True):
                state.row, state.tokens = row, []
                state.problem = problem or problem_of(state.matcher)
                state.num_checks = _num_checks(state.num_checks, is_late, len(states))
                state.is_ready = True
            self._news.notify_all()

    def _fill(self, states: Sequence[GrammarState], rows: np.ndarray, executor: LLExecutor) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        matchers = [state.matcher for state in states]
        several = [state for state in states if len(state.tokens) > 1]
        for state in several:  # of drafts that were right
            state.matcher.consume_tokens(state.tokens[:-1])
        executor.consume_token_par([(state.matcher, state.tokens[-1]) for state in states])
        places = list(zip(matchers, range(len(matchers)), strict=True))
        fill_next_token_bitmask_par(executor, places, rows)


def _fill_after(places: Sequence[tuple[GrammarState, Sequence[int], np.ndarray]]) -> None:
    from llguidance.numpy import fill_next_token_bitmask

    buffer = np.zeros((1, len(places[0][0].row)), np.int32)
    following: GrammarState | None = None
    num_taken = 0
    for state, drafts, row in places:
        if state is not following:
            if following is not None:
                following.matcher.rollback(num_taken)
            following, num_taken = state, 0
        state.matcher.consume_tokens(list(drafts[num_taken:]))
        num_taken = len(drafts)
        fill_next_token_bitmask(state.matcher, buffer)
        row[:] = buffer[0, : len(row)]
    assert following is not None  # there is one place at least
    following.matcher.rollback(num_taken)


def _num_checks(before: int, is_late: bool, num_states: int) -> int:
    """How many more masks are to be made apart, after one that was made with so many others."""
    if is_late:
        return 1 if num_states > 1 else _NUM_CHECKS
    return max(0, before - 1)


def patience(num_masks: int) -> float:
    """Seconds that a step waits for so many masks."""
    return PATIENCE_SECONDS + num_masks * _PATIENCE_OF_ONE


@functools.cache
def mask_threads() -> MaskThreads:
    """Those of the process."""
    return MaskThreads()


class TokenMask:
    """The tokens that one request may sample next.

    Args:
        allowed: [mask_width] int32, tokens that are allowed at all; None allows each.
        bad_words: the last token of one is not allowed after the others.
        grammar: follows a grammar.

    Attributes:
        depends_on_outputs: whether it is another one after each token.
        grammar: see above.
    """

    def __init__(
        self,
        allowed: np.ndarray | None = None,
        bad_words: BadWords | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self._allowed, self.grammar, self._bad_words = allowed, grammar, bad_words
        self._num_followed = self._state = 0
        self.depends_on_outputs = grammar is not None or (bad_words is not None and bad_words.has_several)

    def fill(self, row: np.ndarray, output_token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Write the mask after these outputs, which begin with those of the last time, to `row`.

        That is [mask_width] int32, all ones. `drafts` come after the outputs, for this once; `MaskThreads`
        follow those of grammars.
        """
        if self.grammar is not None:
            row[:] = self.grammar.row[: len(row)]
            return
        if self._allowed is not None:
            row[:] = self._allowed
        words = self._bad_words
        if words is None:
            return
        for place in range(self._num_followed, len(output_token_ids)):
            self._state = words.after(self._state, output_token_ids[place])
        self._num_followed = len(output_token_ids)
        state = self._state
        for token in drafts:
            state = words.after(state, token)
        before = row.copy()
        row &= words.others
        places, kept = words.ends(state)
        if len(places):
            np.bitwise_and.at(row.view(np.uint32), places, kept)
        if not row.any():
            row[:] = before  # something has to be sampled


def fill_masks(
    masks: Sequence[tuple[TokenMask | None, Sequence[int], Sequence[int]]], rows: np.ndarray
) -> None:
    """Write masks to `rows` [at least as many, mask_width] int32, all ones, each after its tokens and drafts.

    Rows of no mask stay as they are.
    """
    after = []
    for row, (mask, outputs, drafts) in zip(rows, masks, strict=False):
        if mask is not None and mask.grammar is not None and drafts:
            after.append((mask.grammar, drafts, row))
        elif mask is not None:
            mask.fill(row, outputs, drafts)
    if after:
        mask_threads().fill_after(after)


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

    def clear(self) -> None:
        """Let go of what is kept for later requests."""
        self._grammars.clear()
        self._words.cache_clear()

    def takes_long(self, params: SamplingParams) -> bool:
        """Whether making a mask compiles a grammar."""
        grammar = params.structured_outputs
        return grammar is not None and not self._grammars.knows(grammar)

    def make(self, params: SamplingParams) -> TokenMask | None:
        """The mask at the beginning of an output; None where every token is allowed.

        Raises:
            SamplingParamsError: a grammar or words cannot be turned into masks, or nothing is allowed.
        """
        if params.structured_outputs is not None:
            return TokenMask(grammar=GrammarState(self._grammars.get(params.structured_outputs)))
        if not (params.allowed_token_ids or params.bad_words):
            return None
        allowed = None
        bad_words = self._words(params.bad_words) if params.bad_words else None
        if params.allowed_token_ids:
            self._check_left(params, bad_words)
            allowed = _row_of(params.allowed_token_ids, self._vocab_size)
        return TokenMask(allowed, bad_words)

    def _spelled(self, texts: tuple[str, ...]) -> BadWords:
        return BadWords([word for text in texts for word in self._spellings(text)], self._vocab_size)

    def _check_left(self, params: SamplingParams, bad_words: BadWords | None) -> None:
        left = set(params.allowed_token_ids) - (set() if bad_words is None else bad_words.single)
        if not left:
            raise SamplingParamsError("bad_words leave none of allowed_token_ids: drop one of them.")
        ends = self._eos_token_ids | set(params.stop_token_ids)
        if params.min_tokens and left <= ends:
            raise SamplingParamsError(
                f"min_tokens={params.min_tokens} contradicts allowed_token_ids, which hold only tokens that "
                "end the output: drop one of them."
            )

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """A word's tokens, at the beginning of a text and after a space.

        vLLM leaves the latter out where they are more or fewer.
        """
        if self._tokenizer is None:
            raise SamplingParamsError(f"bad_words={word!r} need a tokenizer; use logit_bias with this engine")
        found: list[tuple[int, ...]] = []
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(encode(self._tokenizer, text, add_special_tokens=False))
            if ids and ids not in found:
                found.append(ids)
        if not found:
            raise SamplingParamsError(f"bad_words: {word!r} has no tokens; leave it out")
        if any(token_id >= self._vocab_size for ids in found for token_id in ids):
            raise SamplingParamsError(f"bad_words: {word!r} has tokens that the model does not know")
        return found
