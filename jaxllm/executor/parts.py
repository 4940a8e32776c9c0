"""An iteration in parts, each a step of its own, so that stages of layers compute several at the same time.

    requests   0 2 4 | 1 3 5     each stays in its part, unless parts get uneven
    prompts    .... | ......     in parts of as many rows, wherever that cuts them

A part may begin before the one before it is sampled, and that of the next iteration, too: tokens stay on the
device. Only whoever such a part samples is waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.executor.pending import PendingStep
from jaxllm.executor.slots import slot_of
from jaxllm.models.architecture import ModelConfig
from jaxllm.predictors.pipeline import STAGED_ROWS, num_prompt_parts, parts_decodes
from jaxllm.types import PrefillChunk, SampledTokens, SchedulerOutput, TokenLogprobs

_FEW_TOKENS = 64
"""Prompt tokens of each part, below which all of an iteration are in one: a smaller kernel is no faster."""
_UNEVEN = 4
"""Requests leave: parts may differ by one of so many, until some are moved, which takes a wait."""


class Parts:
    """Which requests are decoded in which part.

    Args:
        model: whose layers are in stages.
        num_stages: how many.
        max_num_seqs: slots.
    """

    def __init__(self, model: ModelConfig, num_stages: int, max_num_seqs: int) -> None:
        self._model, self._num_stages = model, num_stages
        self._groups = np.full(max_num_seqs, -1)

    def split(self, scheduled: SchedulerOutput) -> list[tuple[SchedulerOutput, list[int]]]:
        """The parts of an iteration, with the places of their decodes in its own; one at least."""
        stages, decodes = self._num_stages, scheduled.decode
        num_tokens = scheduled.num_prefill_tokens
        count = num_prompt_parts(num_tokens, stages)
        is_parted = parts_decodes(self._model, stages, len(decodes), scheduled.num_context_tokens)
        count = max(count, stages) if is_parted else count
        places: list[list[int]] = [[] for _ in range(count)]
        first = count - stages
        if is_parted:
            slots = [slot_of(request) for request in decodes]
            for place, group in enumerate(self._grouped(slots).tolist()):
                places[first + group].append(place)
        else:
            self._groups[:] = -1
            places[-1] = list(range(len(decodes)))
        chunks = _shared_out(scheduled.prefill, num_tokens, [len(one) for one in places])
        parts = []
        for number, (own, prefill) in enumerate(zip(places, chunks, strict=True)):
            if not (own or prefill):
                continue
            if is_parted and number >= first:  # who goes on in this part need not be waited for
                self._groups[[slot_of(one.request) for one in prefill if one.is_last]] = number - first
            decode = tuple([decodes[place] for place in own])
            num_drafts = sum([len(chunk.drafts) for chunk in prefill])
            part = SchedulerOutput(
                scheduled.step_id, decode=decode, prefill=tuple(prefill), num_drafts=num_drafts
            )
            parts.append((part, own))
        return parts

    def _grouped(self, slots: Sequence[int]) -> np.ndarray:
        """The group of each request that decodes: as before, or the smallest."""
        groups = self._groups[slots]
        counts = np.bincount(groups[groups >= 0], minlength=self._num_stages)
        for place in np.flatnonzero(groups < 0):
            groups[place] = np.argmin(counts)
            counts[groups[place]] += 1
        most = max(1, len(slots) // (_UNEVEN * self._num_stages))
        while counts.max() - counts.min() > most:
            fullest, emptiest = np.argmax(counts), np.argmin(counts)
            groups[np.flatnonzero(groups == fullest)[-1]] = emptiest
            counts[fullest] -= 1
            counts[emptiest] += 1
        self._groups[:] = -1
        self._groups[slots] = groups
        return groups


def most_rows(num_rows: int, num_stages: int, max_num_seqs: int, num_drafts: int) -> int:
    """Most rows of a part of an iteration of so many, in which a request may have so many drafts."""
    of_prompts = max(
        2 * STAGED_ROWS, num_stages * _FEW_TOKENS, -(-num_rows // num_prompt_parts(num_rows, num_stages))
    )
    return min(num_rows, of_prompts + max_num_seqs + num_drafts)


def _shared_out(
    chunks: Sequence[PrefillChunk], num_tokens: int, num_decodes: Sequence[int]
) -> list[list[PrefillChunk]]:
    """Prompts' chunks for parts that have so many decodes, in order: as many rows in each, or all in one."""
    count = len(num_decodes)
    found: list[list[PrefillChunk]] = [[] for _ in num_decodes]
    if num_tokens < count * _FEW_TOKENS:
        found[int(np.argmin(num_decodes))] = list(chunks)
        return found
    size = -(-(num_tokens + sum(num_decodes)) // count)
    place, room = 0, size - num_decodes[0]
    for chunk in chunks:
        rest = chunk
        while place < count - 1 and (room <= 0 or (rest.length > room and not rest.drafts)):
            if room > 0:
                stop = rest.start + room
                found[place].append(dataclasses.replace(rest, length=room, is_last=False))
                rest = dataclasses.replace(rest, start=stop, length=rest.length - room, is_first=False)
            place += 1
            room = size - num_decodes[place]
        found[place].append(rest)
        room -= rest.length
    return found


class SentPart:
    """A part that has begun; `finish` has the first one sampled of those that have."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.pending: PendingStep | None = None
        self._finish = finish

    def sampled(self) -> PendingStep:
        """It, sampled."""
        while self.pending is None:
            self._finish()
        return self.pending


class StepInParts:
    """A dispatched iteration; `fetch` has all of it sampled, waits for it and reads back what the host needs.

    `parts` come with the places of their decodes among its `num_decodes`.
    """

    def __init__(self, parts: Sequence[tuple[SentPart, Sequence[int]]], num_decodes: int) -> None:
        self._parts, self._num_decodes = parts, num_decodes

    def is_ready(self) -> bool:
        """Whether the devices have finished it."""
        return all(part.pending is not None and part.pending.is_ready() for part, _ in self._parts)

    def fetch(self) -> SampledTokens:
        """Wait for the devices and return the iteration's tokens; call once."""
        tokens = [0] * self._num_decodes
        scores: list[TokenLogprobs | None] = [None] * self._num_decodes
        prompts: dict[str, list[TokenLogprobs]] = {}
        found = [(part.sampled(), places) for part, places in self._parts]
        for pending, places in found:
            part = pending.fetch()
            logprobs = part.logprobs or [None] * len(part.token_ids)
            for place, token, score in zip(places, part.token_ids, logprobs, strict=False):
                tokens[place], scores[place] = token, score
            tokens += part.token_ids[len(places) :]
            scores += logprobs[len(places) :]
            for name, of_prompt in (part.prompt_logprobs or {}).items():
                prompts.setdefault(name, []).extend(of_prompt)
        has_scores = any(score is not None for score in scores)
        return SampledTokens(tokens, scores if has_scores else None, prompts or None)
