"""What the host knows of the device's slots, which program computes an iteration, and the inputs of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxllm.errors import EngineError
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.drafted import DraftPlaces
from jaxllm.executor.programs import PackedStep, ProgramKey
from jaxllm.executor.slot_params import FILTERED, PackedSlotParams, Sampling
from jaxllm.executor.step_programs import StepPrograms
from jaxllm.types import Request, SchedulerOutput

_SEED_MULTIPLIER = 0x9E3779B97F4A7C15


class _Growth(NamedTuple):
    """New blocks of tables, with their places in the flat tables; and slots of which all is new."""

    places: list[int]
    blocks: list[int]
    tables: list[tuple[int, np.ndarray]]


class Slots:
    """Sampling parameters of slots, and how much of their block tables the device knows.

    Attributes:
        sampling: `Sampling` of each slot's request.
    """

    def __init__(self, config: ExecutorConfig) -> None:
        self._config, self._max_blocks = config, config.max_blocks
        self._packed_params = PackedSlotParams.host_zeros(config.max_num_seqs)
        self._host_params = self._packed_params.unpack()
        self._params_changed = self._rare_params_changed = False
        self._table_sizes = np.zeros(config.max_num_seqs, np.int32)  # blocks of each that the device knows
        self.sampling = np.zeros(config.max_num_seqs, np.int32)

    def forget_tables(self) -> None:
        """The device knows none any more."""
        self._table_sizes[:] = 0

    def open(self, request: Request) -> None:
        """Note the sampling parameters, and the first position, of a request that has just got its slot."""
        seed = request.sampling_params.seed
        if seed is None:
            seed = (self._config.seed + 1) * _SEED_MULTIPLIER + request.arrival_index
        slot = slot_of(request)
        self._table_sizes[slot] = 0
        self.sampling[slot] = Sampling.of(request.sampling_params)
        self._rare_params_changed |= self._host_params.host_set(
            slot,
            request.sampling_params,
            seed=seed & 0xFFFFFFFFFFFFFFFF,
            prompt_length=request.num_prompt_tokens,
            eos_token_ids=request.eos_token_ids,
            end_token_ids=request.end_token_ids,
            first_position=len(request.dropped_token_ids),
        )
        self._params_changed = True

    def take_changed(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Sampling parameters that have changed since the last call, as `PackedSlotParams` has them."""
        common, rare = self._packed_params
        changed = common if self._params_changed else None, rare if self._rare_params_changed else None
        self._params_changed = self._rare_params_changed = False
        return changed

    def restored(
        self, slot: int, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """A slot, and its tokens and block table to be written on the device."""
        tokens = np.zeros(self._config.max_model_len + 1, np.int32)
        tokens[: len(token_ids)] = token_ids
        if slot < self._config.max_num_seqs:
            self._table_sizes[slot] = len(block_ids)
        return slot, tokens, self._row(block_ids)

    def _row(self, table: Sequence[int]) -> np.ndarray:
        row = np.zeros(self._max_blocks, np.int32)
        row[: len(table)] = table
        return row

    def pack(
        self, key: ProgramKey, scheduled: SchedulerOutput, slots: Sequence[int]
    ) -> tuple[np.ndarray | jax.Array, list[tuple[int, np.ndarray]]]:
        """The inputs of an iteration that decodes `slots`, see `programs.PackedStep`.

        Returns:
            They are on the device where drafts are. Beside them slots with tables that are to be written
            before: they grow by more than fits in there.
        """
        block_size = self._config.block_size
        packed = PackedStep(key, self._config.max_num_seqs, block_size)
        decodes, num_steps = scheduled.decode, scheduled.num_decode_steps
        count = len(decodes)
        stops, room = [request.num_tokens for request in decodes], 1
        lengths = [stop - num_steps for stop in stops]
        if scheduled.num_lookups:
            lengths = [request.num_known_tokens for request in decodes]
            packed.limits[:count], packed.num_drafts[0] = stops, scheduled.num_lookups
            room = key.new_blocks(block_size)
        packed.decode_slots[:count], packed.decode_lengths[:count] = slots, lengths
        if self._config.max_drafts:  # of rejected ones there may be blocks that were given back
            held = (packed.decode_lengths[:count] + (block_size - 2)) // block_size
            self._table_sizes[slots] = np.minimum(self._table_sizes[slots], held)
        needed = (np.array(stops, np.int32) + (block_size - 2)) // block_size
        growth = _Growth([], [], [])
        for row in np.flatnonzero(needed > self._table_sizes[slots]).tolist():
            self._grow_table(slots[row], decodes[row].block_ids[: needed[row]], room, growth)
        drafted = DraftPlaces() if scheduled.num_drafts else None
        if key.max_chunks:
            packed.sampled[:, :count] = range(count), slots, lengths
            self._pack_prompts(packed, scheduled, growth, drafted)
        else:
            packed.num_steps[0] = min(num_steps, key.max_decode_steps)
        packed.new_blocks[:, : len(growth.places)] = growth.places, growth.blocks
        inputs = packed.array if drafted is None else drafted.fill(packed.array)
        return inputs, growth.tables

    def _grow_table(self, slot: int, table: Sequence[int], room: int, growth: _Growth) -> None:
        """Add a table's new blocks to `growth`, if they are at most `room`; else all of it."""
        num_known = int(self._table_sizes[slot])
        self._table_sizes[slot] = len(table)
        if len(table) - num_known > room:
            growth.tables.append((slot, self._row(table)))
            return
        first = slot * self._max_blocks
        growth.places.extend(range(first + num_known, first + len(table)))
        growth.blocks.extend(table[num_known:])

    def _pack_prompts(
        self,
        packed: PackedStep,
        scheduled: SchedulerOutput,
        growth: _Growth,
        drafted: DraftPlaces | None,
    ) -> None:
        """Add an iteration's chunks, and to `growth` their tables' new blocks."""
        block_size = self._config.block_size
        tokens: list[int] = []
        targets: list[int] = []
        sampled: list[tuple[int, int, int]] = []
        first_row, count = len(scheduled.decode), len(scheduled.prefill)
        for chunk in scheduled.prefill:
            request, slot = chunk.request, slot_of(chunk.request)
            stop, table = chunk.start + chunk.length, request.block_ids
            ids = request.token_ids(chunk.start, stop + 1)
            if drafted is not None:
                ids += drafted.take(chunk.drafts, packed.first_token + first_row + len(tokens) + 1)
            if self._config.max_drafts:
                held = -(-chunk.start // block_size)
                self._table_sizes[slot] = min(self._table_sizes[slot], held)
            tokens += ids[: chunk.length]
            targets += ids[1:]
            targets += [0] * (len(tokens) - len(targets))
            needed = max(int(self._table_sizes[slot]), -(-stop // block_size))
            self._grow_table(slot, table[:needed], chunk.length // block_size + 1, growth)
            if chunk.is_last:
                row = first_row + len(tokens) - 1
                sampled += [(row - j, slot, stop - j) for j in range(len(chunk.drafts), -1, -1)]
        end = first_row + len(tokens)
        packed.tokens[first_row:end], packed.targets[first_row:end] = tokens, targets
        packed.query_starts[0] = first_row
        packed.query_starts[1:] = end
        lengths = [chunk.length for chunk in scheduled.prefill]
        packed.query_starts[1 : count + 1] = first_row + np.cumsum(lengths)
        packed.lengths[:count] = [chunk.start + chunk.length for chunk in scheduled.prefill]
        packed.slots[:count] = [slot_of(chunk.request) for chunk in scheduled.prefill]
        packed.num_seqs[0] = count
        if sampled:
            packed.sampled[:, first_row : first_row + len(sampled)] = np.array(sampled, np.int32).T


class ProgramChoice:
    """The smallest program that can do what an iteration's requests ask for, of those that are there.

    Args:
        config: the executor's.
        programs: its programs.
        slots: what requests ask for.
        note_filtered: is told of programs that would spare others what is sampled apart.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        programs: StepPrograms,
        slots: Slots,
        note_filtered: Callable[[ProgramKey], object],
    ) -> None:
        self._config, self._programs, self._slots = config, programs, slots
        self._note_filtered = note_filtered
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
        elif scheduled.num_lookups:
            key = self._config.lookup_key(buckets.decode_size(num_decodes))
        else:
            key = ProgramKey(buckets.decode_size(num_decodes))
            if num_steps > 1 or key not in self._programs.shapes:
                key = key._replace(max_decode_steps=self._config.max_decode_steps)
        is_short = num_steps > key.max_decode_steps and not key.takes_drafts
        if is_short or key not in self._programs.shapes:
            raise EngineError(f"no program computes a {key.name} with {num_steps} decode iterations")
        key = key._replace(sampling=self._sampling(scheduled, slots))
        if not prefill and self._only_filter(slots):
            filtering = key._replace(sampling=FILTERED)
            if num_steps > 1:
                return self._programs.fitting(filtering)
            if self._programs.has(filtering):
                return filtering
            self._note_filtered(filtering)
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


def slot_of(request: Request) -> int:
    """The slot of a request that is scheduled."""
    assert request.slot is not None  # whatever is scheduled holds one
    return request.slot
