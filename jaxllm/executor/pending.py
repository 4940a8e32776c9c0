"""A step under way, and what is read back of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.executor.sampler import Logprobs, SampledRows
from jaxllm.executor.step import StepOutputs
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.types import PrefillChunk, SampledTokens, SchedulerOutput, TokenLogprobs


class Apart(NamedTuple):
    """Rows of a step that were sampled apart from it, in order, and what they are then."""

    rows: Sequence[int]
    sampled: SampledRows


class PendingStep:
    """A dispatched step; `fetch` waits for it and reads back what the host needs."""

    def __init__(
        self,
        scheduled: SchedulerOutput,
        outputs: StepOutputs,
        num_rows: int,
        apart: Sequence[Apart] = (),
        width: int = 1,
        wait: Callable[[Any], object] | None = None,
        before: Sequence[jax.Array] = (),
    ) -> None:
        """Each decode iteration, if there are several, has `num_rows` requests of `width` sampled rows.

        `before` are the tokens of those iterations before the last one that were programs of their own.
        `wait` waits for arrays of which the device's error may never come.
        """
        self._wait = wait
        self._requests, self._num_steps = scheduled.sampled, scheduled.num_decode_steps
        self._num_rows, self._width = num_rows * width, width
        self._prompt_chunks: list[tuple[PrefillChunk, int]] = []
        row = len(scheduled.decode)
        for chunk in scheduled.prefill:
            if chunk.request.sampling_params.prompt_logprobs is not None and not chunk.drafts:
                self._prompt_chunks.append((chunk, row))
            row += chunk.length
        self._sampled: SampledRows | None = outputs.sampled
        self._apart, self._before = apart, before
        self._prompt: Logprobs | None = outputs.prompt_logprobs
        for tokens in self._tokens():
            tokens.copy_to_host_async()

    @under_jax_defaults
    def is_ready(self) -> bool:
        """Whether the device has finished the step."""
        return all(tokens.is_ready() for tokens in self._tokens())

    def _tokens(self) -> list[Any]:
        """The arrays of sampled tokens."""
        assert self._sampled is not None, "a step is fetched once"
        return [*self._before, self._sampled.tokens, *(apart.sampled.tokens for apart in self._apart)]

    @under_jax_defaults
    def fetch(self) -> SampledTokens:
        """Wait for the device and return the step's tokens; call once."""
        assert self._sampled is not None, "a step is fetched once"
        if self._wait is not None:
            self._wait((self._sampled, [apart.sampled for apart in self._apart], self._prompt))
        tokens, count = np.concatenate([*self._before, self._sampled.tokens]), len(self._requests)
        starts = [step * self._num_rows for step in range(self._num_steps)]
        token_ids = [
            token for start in starts for token in tokens[start : start + count * self._width].tolist()
        ]
        logprobs: list[TokenLogprobs | None] | None = None
        for rows, sampled in self._apart:
            asked = [self._requests[row].sampling_params.logprobs for row in rows]
            scores = None
            if any(num_top is not None for num_top in asked):
                scores = [np.asarray(x) for x in sampled.logprobs or ()]
                logprobs = logprobs or [None] * count
            for place, (row, token) in enumerate(
                zip(rows, np.asarray(sampled.tokens)[: len(rows)].tolist(), strict=True)
            ):
                token_ids[row] = token
                if scores and logprobs and (num_top := asked[place]) is not None:
                    logprobs[row] = _token_logprobs(scores, token, place, num_top)
        prompt_logprobs: dict[str, list[TokenLogprobs]] | None = None
        if self._prompt is not None:
            prompt = [np.asarray(x) for x in self._prompt]
            prompt_logprobs = {
                chunk.request.request_id: _prompt_logprobs(prompt, chunk, start)
                for chunk, start in self._prompt_chunks
            }
        self._sampled, self._apart, self._before, self._prompt = None, (), (), None
        return SampledTokens(token_ids, logprobs, prompt_logprobs)


def _token_logprobs(arrays: Sequence[np.ndarray], token: int, row: int, num_top: int) -> TokenLogprobs:
    logprob, rank, top_ids, top_logprobs = arrays
    if num_top < 0:
        num_top = top_ids.shape[1]
    return TokenLogprobs(
        token,
        float(logprob[row]),
        int(rank[row]),
        tuple(top_ids[row, :num_top].tolist()),
        tuple(top_logprobs[row, :num_top].tolist()),
    )


def _prompt_logprobs(arrays: Sequence[np.ndarray], chunk: PrefillChunk, start: int) -> list[TokenLogprobs]:
    """Scores of the prompt tokens that follow the chunk's rows."""
    request = chunk.request
    stop = min(chunk.start + chunk.length, request.num_prompt_tokens - 1)
    targets = request.prompt_token_ids[chunk.start + 1 : stop + 1]
    num_top = request.sampling_params.prompt_logprobs or 0
    return [_token_logprobs(arrays, token, row, num_top) for row, token in enumerate(targets, start)]
