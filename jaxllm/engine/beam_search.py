"""Beam search: vLLM's names, and the hypotheses and scores of `transformers`.

The search runs on the host. In every step each beam is a request for one token, with the log-probabilities
of the most likely ones; the prefix cache holds what beams have in common, so that little is computed anew.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxllm.engine.outputs import RequestOutput
from jaxllm.errors import SamplingParamsError
from jaxllm.sampling.param_checks import MAX_LOGPROBS, check_boolean, check_integer, check_number
from jaxllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Largest `beam_width` of a model with one end-of-sequence token."""
MAX_PENALTY = 40.0
"""Largest `length_penalty`: the longest sequence to this power is still a number of 64 bits."""
_MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search, as in vLLM.

    Args:
        beam_width: hypotheses that are kept and returned, 1..10; fewer where a model has several
            end-of-sequence tokens.
        max_tokens: most output tokens, 1 or more.
        ignore_eos: go on past end-of-sequence tokens.
        temperature: only 0; the search samples nothing.
        length_penalty: a hypothesis's score is the sum of its log-probabilities over its output tokens, the
            last one included, to this power, -40..40.
        early_stopping: True ends the search when `beam_width` hypotheses have ended; False when no beam would
            beat the worst of these if it ended now; "never" when none could, however long it became.

    Raises:
        SamplingParamsError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, _MAX_INT32)
        check_boolean("ignore_eos", self.ignore_eos)
        check_number("temperature", self.temperature, 0, 0, "the search samples nothing")
        check_number("length_penalty", self.length_penalty, -MAX_PENALTY, MAX_PENALTY)
        if self.early_stopping != "never":
            check_boolean("early_stopping", self.early_stopping)


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One hypothesis.

    `tokens` are the prompt's and the output's, and `text` is of all of them but special ones, as in vLLM.
    `cum_logprob` is the sum over the output's, `score` that over its length to the power of the penalty.
    `stop_reason` is the end-of-sequence token that ended it, or what was wrong: with an "error" nothing can
    follow a beam, and the hypotheses are the beams so far.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str
    finish_reason: Literal["stop", "length", "error"]
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, the best first.

    `num_blocks` is how many KV blocks the beams held, summed over the steps, and `num_blocks_unshared` how
    many they would have held if each had its own.
    """

    sequences: list[BeamSearchSequence]
    num_blocks: int
    num_blocks_unshared: int


class Hypothesis(NamedTuple):
    """Output tokens, the sum of their log-probabilities, and the score; a running one's score is that sum."""

    score: float
    tokens: tuple[int, ...]
    cum_logprob: float


class BeamSearch:
    """The beams of one prompt.

    Args:
        params: how to search.
        eos_token_ids: tokens that end a hypothesis.
        prompt: its tokens.
        num_dropped: how many of them, at its front, were cut.

    Attributes:
        running: hypotheses to be continued; none when the search has ended.
        finished: those that have ended, the best first.

    Raises:
        SamplingParamsError: the model has so many end-of-sequence tokens that the width is too large.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        eos_token_ids: Set[int],
        prompt: Sequence[int] = (),
        num_dropped: int = 0,
    ) -> None:
        self._params, self._prompt, self._num_dropped = params, list(prompt), num_dropped
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        # Should all of the best ones end, as many are left to go on with.
        self._num_candidates = max(2, 1 + len(self._ends)) * params.beam_width
        if self._num_candidates > MAX_LOGPROBS:
            raise SamplingParamsError(
                f"beam_width={params.beam_width} with {len(self._ends)} end-of-sequence tokens needs "
                f"{self._num_candidates} log-probabilities of {MAX_LOGPROBS}: lower beam_width to "
                f"{MAX_LOGPROBS * params.beam_width // self._num_candidates}, or set ignore_eos=True."
            )
        self.running = [Hypothesis(0.0, (), 0.0)]
        self.finished: list[Hypothesis] = []
        self._num_blocks = self._num_blocks_unshared = 0
        self._problem: int | str | None = None

    @property
    def step(self) -> SamplingParams:
        """What is asked for of each beam in a step."""
        return SamplingParams(
            temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=self._num_candidates
        )

    def prompts(self, block_size: int) -> list[list[int]]:
        """Those of the running beams for the next step; blocks of so many tokens are counted."""
        if self.running:
            num_prompt = len(self._prompt) - self._num_dropped
            num_tokens = num_prompt + len(self.running[0].tokens)
            num_full, num_each = num_tokens // block_size, -(-num_tokens // block_size)
            num_common = num_prompt // block_size
            others = {
                beam.tokens[: number * block_size - num_prompt]
                for beam in self.running
                for number in range(num_common + 1, num_full + 1)
            }
            self._num_blocks += num_common + len(others) + len(self.running) * (num_each - num_full)
            self._num_blocks_unshared += len(self.running) * num_each
        return [[*self._prompt, *beam.tokens] for beam in self.running]

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Go on by one token, by the outputs of the running beams' requests."""
        params, width = self._params, self._params.beam_width
        failed = next((output for output in outputs if output.finish_reason == "error"), None)
        if failed is not None:
            self._problem, self.finished, self.running = failed.stop_reason, self.running, []
            return
        candidates = heapq.nlargest(
            self._num_candidates,
            (
                (beam.cum_logprob + entry.logprob, -place, (*beam.tokens, token))
                for place, (beam, output) in enumerate(zip(self.running, outputs, strict=True))
                for position in output.logprobs or ()
                for token, entry in position.items()
            ),
            key=lambda candidate: candidate[:2],
        )
        length = len(self.running[0].tokens) + 1
        is_last = length == params.max_tokens
        running, ended = list[Hypothesis](), list[Hypothesis]()
        for rank, (cum_logprob, _, tokens) in enumerate(candidates):
            if not (is_last or tokens[-1] in self._ends):
                running.append(Hypothesis(cum_logprob, tokens, cum_logprob))
            elif rank < width:
                ended.append(Hypothesis(cum_logprob / length**params.length_penalty, tokens, cum_logprob))
        self.finished = sorted([*self.finished, *ended], key=lambda one: -one.score)[:width]
        self.running = running[:width]
        if self.running and len(self.finished) == width:
            may_grow = params.early_stopping == "never" and params.length_penalty > 0
            best_length = params.max_tokens if may_grow else length
            best_possible = self.running[0].cum_logprob / best_length**params.length_penalty
            if params.early_stopping is True or best_possible <= self.finished[-1].score:
                self.running = []

    def output(self, tokenizer: PreTrainedTokenizerBase | None) -> BeamSearchOutput:
        """What was found; without a tokenizer there is no text."""
        sequences = []
        for found in self.finished:
            tokens = [*self._prompt, *found.tokens]
            text = "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))
            ended_by: int | str | None = self._problem
            reason: Literal["stop", "length", "error"] = "error"
            if ended_by is None:
                ended_by = tokens[-1] if tokens[-1] in self._ends else None
                reason = "length" if ended_by is None else "stop"
            sequences.append(
                BeamSearchSequence(tokens, found.cum_logprob, found.score, text, reason, ended_by)
            )
        return BeamSearchOutput(sequences, self._num_blocks, self._num_blocks_unshared)


def search_all(
    generate: Callable[[list[Any], SamplingParams], list[RequestOutput]],
    prompts: list[Any],
    params: BeamSearchParams,
    eos_token_ids: Set[int],
    *,
    max_model_len: int,
    block_size: int,
    on_token: Callable[[], object],
) -> list[BeamSearch]:
    """Search for each prompt, all of them at once; `generate` runs the beams' requests of one token."""
    step = BeamSearch(params, eos_token_ids).step
    searches: list[tuple[BeamSearch, dict[str, Any]]] = []
    for item, first in zip(prompts, generate(prompts, step), strict=True):
        num_kept = len(first.prompt_token_ids) - first.num_dropped_tokens
        limited = dataclasses.replace(params, max_tokens=min(params.max_tokens, max_model_len - num_kept))
        search = BeamSearch(limited, eos_token_ids, first.prompt_token_ids, first.num_dropped_tokens)
        search.advance([first])
        given = dict(item) if isinstance(item, Mapping) else {}
        searches.append((search, {key: value for key, value in given.items() if key != "prompt"}))
    on_token()
    while following := [
        {**given, "prompt_token_ids": tokens}
        for search, given in searches
        for tokens in search.prompts(block_size)
    ]:
        outputs = iter(generate(following, step))
        for search, _ in searches:
            if search.running:
                search.advance([next(outputs) for _ in search.running])
        on_token()
    return [search for search, _ in searches]
