"""Which program computes an iteration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.errors import EngineError
from jaxllm.executor.apart import FILTERED, SamplingApart
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.programs import ProgramKey
from jaxllm.executor.slot_params import Sampling
from jaxllm.executor.slots import Slots, slot_of
from jaxllm.executor.step_programs import StepPrograms
from jaxllm.types import SchedulerOutput


class ProgramChoice:
    """The smallest program that can do what an iteration's requests ask for, of those that are there.

    Args:
        config: the executor's.
        programs: its programs.
        slots: what requests ask for.
        apart: is told of iterations that a program of their own would spare what is sampled apart.
    """

    def __init__(
        self, config: ExecutorConfig, programs: StepPrograms, slots: Slots, apart: SamplingApart
    ) -> None:
        self._config, self._programs, self._slots, self._apart = config, programs, slots, apart
        self._prompt_keys = {size: config.prompt_key(size) for size in config.buckets.sizes}
        self._draft_keys = {size: config.draft_key(size) for size in config.buckets.sizes}

    def key(self, scheduled: SchedulerOutput, slots: Sequence[int]) -> ProgramKey:
        """The program of an iteration that decodes `slots`.

        Raises:
            EngineError: there is none.
        """
        buckets, prefill = self._config.buckets, scheduled.prefill
        num_decodes, num_steps = len(scheduled.decode), scheduled.num_decode_steps
        if prefill:
            size = buckets.size(num_decodes, scheduled.num_prefill_tokens, len(prefill))
            key = (self._draft_keys if scheduled.num_drafts else self._prompt_keys)[size]
            key = key._replace(max_decode_steps=num_steps)
        elif scheduled.lookups:
            key = self._config.lookup_key(buckets.decode_size(num_decodes))
        else:
            key = ProgramKey(buckets.decode_size(num_decodes))
            if num_steps > 1 or key not in self._programs.shapes:
                key = key._replace(max_decode_steps=self._config.max_decode_steps)
        if key not in self._programs.shapes or num_steps > key.max_decode_steps:
            raise EngineError(f"no program computes a {key.name} with {num_steps} decode iterations")
        key = key._replace(sampling=self._sampling(scheduled, slots))
        if not prefill and self._only_filter(slots):
            filtering = key._replace(sampling=FILTERED)
            if num_steps > 1:
                return self._programs.fitting(filtering)
            if self._programs.has(filtering):
                return filtering
            self._apart.note_filtered(filtering)
        return self._programs.fitting(key)

    def _only_filter(self, slots: Sequence[int]) -> bool:
        """Whether some rows filter, and none asks for more that is sampled apart."""
        asked = int(np.bitwise_or.reduce(self._slots.sampling[slots]))
        return asked & Sampling.APART.value == Sampling.FILTERED.value

    def _sampling(self, scheduled: SchedulerOutput, slots: Sequence[int]) -> Sampling:
        """What the requests of an iteration ask of its program."""
        found = int(np.bitwise_or.reduce(self._slots.sampling[slots])) & Sampling.RANDOM.value
        for chunk in scheduled.prefill:
            asked = int(self._slots.sampling[slot_of(chunk.request)])
            # The random programs with prompts serve for greedy steps, too.
            found |= asked & Sampling.RANDOM.value if chunk.drafts else asked | Sampling.RANDOM.value
        return Sampling(found) & Sampling.IN_STEPS

    def following(self, scheduled: SchedulerOutput, slots: Sequence[int]) -> tuple[ProgramKey, ...]:
        """Programs that are likely to be needed after an iteration with prompts."""
        if self._programs.is_settled or not scheduled.prefill:
            return ()
        all_slots = [*slots, *(slot_of(chunk.request) for chunk in scheduled.prefill)]
        found = int(np.bitwise_or.reduce(self._slots.sampling[all_slots])) & Sampling.RANDOM.value
        rows = self._config.buckets.decode_size(min(len(all_slots), self._config.max_num_seqs))
        steps = 1, self._config.max_decode_steps
        return tuple(ProgramKey(rows, 0, count, Sampling(found)) for count in steps)
