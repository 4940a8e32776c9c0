"""What requests ask of sampling that steps do not do: rows are sampled anew, by programs of their own."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Sequence

import numpy as np

from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.pending import Apart
from jaxllm.executor.programs import ProgramKey
from jaxllm.executor.sampler import SampledRows
from jaxllm.executor.sampling_programs import RowsKey, TakeKey, first_size, kind_of, padded, row_sizes
from jaxllm.executor.slot_params import FILTERED, Sampling
from jaxllm.executor.slots import slot_of
from jaxllm.executor.step_programs import Key, StepPrograms, shape_of
from jaxllm.executor.worker import Worker
from jaxllm.sampling.structured_outputs import mask_width
from jaxllm.sampling.token_masks import fill_masks
from jaxllm.types import MULTI_STEP_SEQS, PrefillChunk, Request, SchedulerOutput

_MANY_ITERATIONS = 64  # after which a program is compiled that spares the others what was sampled apart


class SamplingApart:
    """Which programs sample rows apart from their steps, or save that; and has them do it."""

    def __init__(self, config: ExecutorConfig, programs: StepPrograms, vocab_size: int) -> None:
        self._config, self._programs, self._vocab_size = config, programs, vocab_size
        self._num_filtered: collections.Counter[ProgramKey] = collections.Counter()

    def steps_together(self, flags: Collection[int], num_rows: int) -> bool:
        """Whether a program of several iterations of so many rows samples what such requests ask for."""
        if any(one & ~Sampling.FILTERED.value for one in flags) or num_rows > MULTI_STEP_SEQS:
            return False
        rows = self._config.buckets.decode_size(max(1, num_rows))
        return self._programs.has(ProgramKey(rows, 0, self._config.max_decode_steps, FILTERED))

    def note_filtered(self, key: ProgramKey) -> None:
        """Have a program compiled that filters, beside all else, if it would have served many iterations."""
        self._num_filtered[key] += 1
        if self._num_filtered[key] == _MANY_ITERATIONS:
            looping = key._replace(max_decode_steps=self._config.max_decode_steps)
            wanted = {key, looping} if shape_of(looping) in self._programs.shapes else {key}
            with contextlib.suppress(Exception):  # they are only faster
                self._programs.prepare(sorted(wanted), is_urgent=False)

    def is_ready(self, asked: Sampling) -> bool:
        """Whether no program is missing for what is asked for; if one is, it is compiled from now on."""
        needed: list[Key] = []
        if asked & Sampling.APART:
            size, kind = first_size(self._config.max_num_seqs), kind_of(asked & ~Sampling.PROMPT_LOGPROBS)
            complete = RowsKey(size, Sampling.COMPLETE)  # which others may wait for already
            serves = kind in Sampling.COMPLETE and self._programs.expects(complete)
            needed.append(complete if serves else RowsKey(size, kind))
            needed += [TakeKey(num_logits, size) for num_logits in self._config.logits_sizes]
        if Sampling.PROMPT_LOGPROBS in asked:
            size = self._config.buckets.sizes[-1]  # whatever prompts come together
            needed.append(self._config.prompt_key(size)._replace(sampling=Sampling.IN_STEPS))
        return self._programs.prepare(needed)

    def sample(
        self,
        worker: Worker,
        scheduled: SchedulerOutput,
        rows: list[int],
        slot_sampling: np.ndarray,
        num_logits: int,
    ) -> list[Apart]:
        """Sample rows of an iteration anew, of the logits that it has left.

        `slot_sampling` are `Slots.sampling`, and there are `num_logits`.
        """
        requests = scheduled.sampled
        asked = slot_sampling[[slot_of(requests[row]) for row in rows]]
        asked &= (Sampling.APART | Sampling.RANDOM).value
        kind = kind_of(Sampling(int(np.bitwise_or.reduce(asked))))
        drafts = _drafts_before(scheduled)
        if scheduled.num_drafts and (Sampling.ADJUSTED in kind or self._config.logits_processors):
            are_apart = {requests[row] for row in rows}  # what others have sampled stays
            self.write_drafts(worker, [chunk for chunk in scheduled.prefill if chunk.request in are_apart])
        apart: list[Apart] = []
        while rows:
            key = self._rows_key(len(rows), kind)
            now, rows = rows[: key.rows], rows[key.rows :]
            of_rows = [(requests[row], *drafts[row]) for row in now]
            apart.append(Apart(now, self._sample_rows(worker, key, now, of_rows, num_logits)))
        worker.forget_logits()
        return apart

    def write_drafts(self, worker: Worker, chunks: Sequence[PrefillChunk]) -> None:
        """Write drafts to the histories once more, where their steps wrote what they sampled instead."""
        padding = self._config.max_num_seqs, 0, 0
        written = [
            (slot_of(chunk.request), place, draft)
            for chunk in chunks
            for place, draft in enumerate(chunk.drafts, chunk.start + 1)
        ]
        written += [padding] * (self._config.max_drafts - len(written))
        worker.set_tokens(np.array(written, np.int32).T)

    def _rows_key(self, num_rows: int, kind: Sampling) -> RowsKey:
        """A program for as many rows as it can: the best one if it is compiled, or else one that is."""
        sizes = row_sizes(self._config.max_num_seqs)
        best = RowsKey(next((size for size in sizes if size >= num_rows), sizes[-1]), kind)
        if self._programs.has(best):
            return best
        place = sizes.index(best.rows)
        for size in (*sizes[place:], *reversed(sizes[:place])):
            for can_do in (kind, Sampling.COMPLETE):
                key = RowsKey(size, can_do)
                if kind in can_do and self._programs.has(key):
                    takes = [TakeKey(num_logits, best.rows) for num_logits in self._config.logits_sizes]
                    with contextlib.suppress(Exception):  # it is only faster
                        self._programs.prepare([*takes, best], is_urgent=False)
                    return key
        return best

    def _sample_rows(
        self,
        worker: Worker,
        key: RowsKey,
        rows: list[int],
        of_rows: Sequence[tuple[Request, int, Sequence[int]]],
        num_logits: int,
    ) -> SampledRows:
        """Sample rows of the `num_logits`, and store their tokens.

        `of_rows` are their requests, where their tokens belong from the end, and the drafts before these.
        """
        size, take = key.rows, TakeKey(num_logits, key.rows)
        for needed in (take, key):
            worker.program(needed)  # now, as in `ModelExecutor.execute`
        places = np.stack(
            [
                padded([slot_of(request) for request, _, _ in of_rows], size, self._config.max_num_seqs),
                padded([request.num_tokens - place for request, place, _ in of_rows], size, 0),
            ]
        )
        masks: list[np.ndarray] = []
        if Sampling.MASKED in key.sampling:
            masks = [np.full((size, mask_width(self._vocab_size)), -1, np.int32)]
            tokens = [(one.token_mask, one.output_token_ids, drafts) for one, _, drafts in of_rows]
            fill_masks(tokens, masks[0])
        return worker.sample_rows(key, take, padded(rows, size, 0), places, masks)


def _drafts_before(scheduled: SchedulerOutput) -> list[tuple[int, Sequence[int]]]:
    """Of each sampled row where its token belongs, from its request's end, and the drafts before it."""
    found: list[tuple[int, Sequence[int]]] = [(1, ())] * len(scheduled.decode)
    for chunk in scheduled.prefill:
        if chunk.is_last:
            count = len(chunk.drafts)
            found += [(1 + count - j, chunk.drafts[:j]) for j in range(count + 1)]
    return found
