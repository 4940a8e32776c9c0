"""Runs steps on JAX devices: owns the weights, the KV pool and the compiled programs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import jax
import numpy as np

from jaxllm.errors import ConfigError, EngineError
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.drafter import Drafter
from jaxllm.executor.fastest import FASTEST, AttentionShape, candidates, fastest
from jaxllm.executor.kv.agreement import AgreedFiles
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.executor.pending import Apart, PendingStep
from jaxllm.executor.placement import Placement
from jaxllm.executor.programs import (
    CompiledProgram,
    PackedStep,
    ProgramKey,
)
from jaxllm.executor.sampler import SampledRows
from jaxllm.executor.sampling_programs import RowsKey, TakeKey, first_size, kind_of, padded, row_sizes
from jaxllm.executor.slot_params import PackedSlotParams, Sampling
from jaxllm.executor.step_programs import CompileProgress, Key, StepPrograms, shape_of
from jaxllm.executor.worker import Others, Worker
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.registry import Params, abstract_params
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.sampling.params import SamplingParams
from jaxllm.sampling.structured_outputs import mask_width
from jaxllm.sampling.token_masks import fill_masks
from jaxllm.sched.cache.names import FileIndex
from jaxllm.types import (
    MULTI_STEP_SEQS,
    NO_COPIES,
    CopyProgress,
    HostPiece,
    PrefillChunk,
    Read,
    Request,
    SchedulerOutput,
    host_blocks_of,
    piece_sizes,
)

_SEED_MULTIPLIER = 0x9E3779B97F4A7C15
_FILTERED = Sampling.RANDOM | Sampling.FILTERED
_MANY_ITERATIONS = 64  # after which a program is compiled that spares the others what was sampled apart


class ModelExecutor(Worker):
    """Executes steps of one model, on one device or several, also of other processes.

    Attributes:
        drafter: proposes tokens, and lives and goes with it, if there is one.
    """

    @under_jax_defaults
    def __init__(
        self,
        model_config: ModelConfig,
        params: Params,
        config: ExecutorConfig,
        placement: Placement,
        programs: StepPrograms | None = None,
        others: Others | None = None,
    ) -> None:
        """`programs` of the same model, configuration and placement may be compiling already."""
        programs = programs or StepPrograms(model_config, config, placement)
        super().__init__(model_config, params, config, placement, programs, others)
        self._packed_params = PackedSlotParams.host_zeros(config.max_num_seqs)
        self._host_params = self._packed_params.unpack()
        self._params_changed = self._rare_params_changed = False
        self._table_sizes = np.zeros(config.max_num_seqs, np.int32)  # blocks of each that the device knows
        self._slot_sampling = np.zeros(config.max_num_seqs, np.int32)  # `Sampling` of each
        self._is_released = False
        self._files: AgreedFiles | None = None
        self._prompt_keys = {size: config.prompt_key(size) for size in config.buckets.sizes}
        self._draft_keys = {size: config.draft_key(size) for size in config.buckets.sizes}
        if config.implementation == FASTEST:
            self._choose_fastest()
        self._programs.begin()
        self.drafter: Drafter | None = None
        self._is_undisturbed = False
        self._num_filtered: collections.Counter[ProgramKey] = collections.Counter()

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks in the KV pool."""
        return self.config.num_gpu_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.config.block_size

    @property
    def max_decode_steps(self) -> int:
        """Most decode iterations of one `execute`."""
        return self.config.max_decode_steps

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of a block of the KV pool, over all layers."""
        return self._state.pool.shape[1:]

    @property
    def hidden(self) -> jax.Array | None:
        """What the newest tokens of each slot were sampled from; see `step.DeviceState`."""
        return self._on_first(self._state.hidden)

    @property
    def layers(self) -> jax.Array | None:
        """What some layers were given; see `step.DeviceState`."""
        return self._on_first(self._state.layers)

    def _on_first(self, array: jax.Array | None) -> jax.Array | None:
        """The first device's copy, which what drafts computes with."""
        if array is None or len(self._placement.devices) == 1:
            return array
        return array.addressable_data(0)

    @property
    def device_kind(self) -> str:
        """What JAX calls the device, or each of several."""
        return self._device.device_kind

    @property
    def pool_bytes(self) -> int:
        """Size of the KV pool in bytes, on all devices."""
        return self._state.pool.nbytes * self._placement.num_contexts

    @property
    def is_lost(self) -> bool:
        """Whether a process that it needs is gone, so that the next step fails."""
        return self.others is not None and self.others.is_lost

    @property
    def is_undisturbed(self) -> bool:
        """Whether no program was being compiled when the last step was sent, nor had to be for it."""
        return self._is_undisturbed

    def compile_progress(self) -> CompileProgress:
        """How many programs are compiled, of how many, and for how long."""
        return self._programs.progress()

    def compile_report(self) -> list[CompiledProgram]:
        """Every compiled program, with seconds and memory."""
        return self._programs.report()

    @under_jax_defaults
    def warm_up(self, on_progress: Callable[[CompileProgress], None] | None = None) -> None:
        """Compile the programs known to be needed and run each once, so that steps do not wait for these.

        Padding rows write nothing, so the pool and the history stay as they are.
        """
        self._programs.wait(on_progress)
        for key in self._programs.keys:
            if isinstance(key, ProgramKey):
                self.program(key)  # before `run`, as in `execute`
                np.asarray(self.run(key, self._padding(key), False).sampled.tokens)
        if self.swapper is not None:
            self.warm_up_copies()
        self._restore(self.config.max_num_seqs, [], [])
        if self.config.max_drafts:
            self._write_drafts(())
        if self.drafter is not None:
            self.drafter.warm_up()

    @under_jax_defaults
    def execute(self, scheduled: SchedulerOutput) -> PendingStep:
        """Dispatch one step and return without waiting for the device.

        A program that is not compiled yet is waited for.

        Raises:
            EngineError: it was released, as a failed engine does.
        """
        if self._is_released:
            raise EngineError("this executor was released when an engine on it failed; make a new LLM")
        if self.swapper is not None:
            self._swap(self.swapper, scheduled)
        elif scheduled.has_copies:
            raise ConfigError("the scheduler swaps, and the executor was built with num_host_blocks=0")
        for chunk in scheduled.prefill:
            if chunk.is_first:
                request, slot = chunk.request, _slot(chunk.request)
                self._open_slot(request)
                self._table_sizes[slot] = 0
                stop = chunk.start + chunk.length
                skips = bool(request.kept_ranges) or request.num_computed_tokens > stop
                if chunk.start or skips:
                    num_tokens = request.num_known_tokens if skips else chunk.start
                    self._restore(slot, request.token_ids(0, num_tokens), request.block_ids)
        if self._params_changed or self._rare_params_changed:
            common, rare = self._packed_params
            self.set_params(
                common if self._params_changed else None, rare if self._rare_params_changed else None
            )
            self._params_changed = self._rare_params_changed = False
        slots = [_slot(request) for request in scheduled.decode]
        key = self._key(scheduled, slots)
        packed = self._pack(key, scheduled, slots)
        rows = self._rows_apart(scheduled, key.sampling)
        self._is_undisturbed = self._programs.is_settled and self._programs.has(key)
        self.program(key, self._following(scheduled, slots))  # before `run`: others would wait for it in vain
        outputs = self.run(key, packed, bool(rows))
        apart = self._sample_apart(scheduled, rows, len(outputs.logits)) if rows else ()
        wait = None if self.others is None else self.others.wait
        return PendingStep(scheduled, outputs, key.rows, apart, key.num_lookups + 1, wait)

    @property
    def has_pool(self) -> bool:
        """Whether it holds the KV pool."""
        return not self._state.pool.is_deleted()

    @property
    def has_weights(self) -> bool:
        """Whether it holds the weights."""
        return len(self._params) == len(abstract_params(self.model_config, self.config.dtype))

    @under_jax_defaults
    def replace_weights(self, weights: Iterable[tuple[str, jax.Array]]) -> None:
        """Take other weights, one after another, each in place of the one before it.

        Args:
            weights: all of the model's, of the executor's dtype and on its first device; its own from now on.
        """
        for name, weight in weights:
            self.set_weight(name, weight)

    def let_go(self, *, weights: bool) -> None:
        """Give the memory of the pool back, and with `weights` theirs; nobody may hold a block of it."""
        self.delete(weights)
        if self.drafter is not None:
            self.drafter.let_go(weights=weights)

    @under_jax_defaults
    def remake_pool(self) -> None:
        """Make the pool anew, all of it empty.

        Raises:
            CapacityError: it does not fit any more.
        """
        if self.drafter is not None:
            self.drafter.take_back()
        self.make_pool()
        self._table_sizes[:] = 0

    def release(self) -> None:
        """Let go of weights, pool and programs: nothing will be executed any more."""
        self._is_released = True
        if self.transfers is not None:
            self.transfers.close()
        if self.drafter is not None:
            self.drafter.release()
        self.let_go_of_all()
        if self.others is not None:
            self.others.end()

    def keep_files(
        self, folder: pathlib.Path, fingerprint: str, max_bytes: int, most_writing: int
    ) -> BlockFiles:
        """Write what of the prefix cache is copied to the host to files, too, and read these when told to.

        Each process of an engine has files of its part of blocks.

        Args:
            folder: where they are, with those of others; the other processes have folders of their own.
            fingerprint: of all that makes these blocks others than those of another engine.
            max_bytes: most bytes of all of them.
            most_writing: blocks of host memory that may wait to be written; of more than that some never are.

        Raises:
            ConfigError: the folder cannot be made, or describes other blocks.
            EngineError: that of another process.
        """
        if self.others is not None:
            self.others.tell("keep_files", [fingerprint, max_bytes, most_writing])
        files = self.open_files(folder, fingerprint, max_bytes, most_writing)
        assert self.transfers is not None
        self._files = AgreedFiles(self.transfers, self.others)
        return files

    def forget_files(self, fingerprint: str) -> None:
        """Read none of the blocks that are in files; what follows has another fingerprint, of this run."""
        if self._files is not None:
            self._files.forget()
            self.begin_files_anew(fingerprint)

    @property
    def file_index(self) -> FileIndex | None:
        """What can be read from files; None without."""
        return self._files

    @under_jax_defaults
    def transfer(self, scheduled: SchedulerOutput) -> None:
        """Do what an iteration that computes nothing has to copy and to let go of, and give up all reads."""
        if self.swapper is not None:
            self._swap(self.swapper, scheduled)
        if self._files is not None:
            self._files.forget_reads()
            self.cancel_reads()

    def read(self, reads: Sequence[Read]) -> None:
        """Start to read blocks from files; `copies` tells when they are in host memory."""
        assert self._files is not None  # whoever asks knows of files
        for read in reads:
            self._files.expect(read)
            self.read_files(read.handle, read.names)

    @property
    def write_room(self) -> int | None:
        """Blocks that may be copied out to be written to files, as `copies` says; None without files."""
        return None if self._files is None else self._files.write_room

    def wait_for_files(self, seconds: float) -> None:
        """Wait until a read has ended, or if there is none something is written; at most so long."""
        if self._files is not None:
            self._files.wait(seconds)

    def flush_files(self) -> None:
        """Wait until all blocks that were copied to the host are in files, or the disk does nothing."""
        if self._files is not None:
            self._files.flush()

    @under_jax_defaults
    def drop(self, pieces: Collection[HostPiece]) -> None:
        """Let go of host memory that nobody will read."""
        if self.swapper is not None and pieces:
            self.copy((), tuple(pieces), (), (), (), ())

    @under_jax_defaults
    def copies(self) -> CopyProgress:
        """How far the copies between device and host are."""
        if self.swapper is None:
            return NO_COPIES
        if self._files is None:
            return self.swapper.progress()
        read = self._files.ended()
        for handle, _ in read:
            self.put(handle)
        progress = self.swapper.progress()
        return dataclasses.replace(progress, read=read, write_room=self._files.write_room)

    @under_jax_defaults
    def settle_copies(self) -> None:
        """Wait until no copy is under way."""
        self.settle()

    @under_jax_defaults
    def time_swap(self, num_blocks: int) -> tuple[float, float]:
        """Seconds to copy `num_blocks` blocks of the pool (some twice if it has fewer) out and back.

        Raises:
            ConfigError: the executor has no host blocks.
        """
        if self.swapper is None:
            raise ConfigError("swaps cannot be timed: num_host_blocks=0 turns them off")
        handle, block_ids = -1, [number % self.num_gpu_blocks for number in range(num_blocks)]
        jax.block_until_ready(self._state.pool)
        started = time.perf_counter()
        self.copy((), (), (), [(handle, block_ids)], (), ())
        self.swapper.wait(handle)
        copied_out = time.perf_counter()
        host_blocks = host_blocks_of(handle, num_blocks)
        self.copy((), (), (), (), [(block_ids, host_blocks)], ())
        jax.block_until_ready(self._state.pool)
        seconds = copied_out - started, time.perf_counter() - copied_out
        self.copy((), [HostPiece(handle, one) for one in range(len(piece_sizes(num_blocks)))], (), (), (), ())
        return seconds

    # Programs

    def _padding(self, key: ProgramKey) -> np.ndarray:
        """Inputs of a step that computes nothing."""
        return PackedStep(key, self.config.max_num_seqs, self.block_size).array

    def _key(self, scheduled: SchedulerOutput, slots: Sequence[int]) -> ProgramKey:
        """The program of an iteration that decodes `slots`.

        Raises:
            EngineError: there is none.
        """
        buckets, prefill = self.config.buckets, scheduled.prefill
        num_decodes, num_steps = len(scheduled.decode), scheduled.num_decode_steps
        if prefill:
            size = buckets.size(num_decodes, scheduled.num_prefill_tokens, len(prefill))
            key = (self._draft_keys if scheduled.num_drafts else self._prompt_keys)[size]
            key = key._replace(max_decode_steps=num_steps)
        elif scheduled.lookups:
            key = self.config.lookup_key(buckets.decode_size(num_decodes))
        else:
            key = ProgramKey(buckets.decode_size(num_decodes))
            if num_steps > 1 or key not in self._programs.shapes:
                key = key._replace(max_decode_steps=self.config.max_decode_steps)
        if key not in self._programs.shapes or num_steps > key.max_decode_steps:
            raise EngineError(f"no program computes a {key.name} with {num_steps} decode iterations")
        key = key._replace(sampling=self._sampling(scheduled, slots))
        if not prefill and self._only_filter(slots):
            filtering = key._replace(sampling=_FILTERED)
            if num_steps > 1:
                return self._programs.fitting(filtering)
            if self._programs.has(filtering):
                return filtering
            self._note_filtered(filtering)
        return self._programs.fitting(key)

    def _only_filter(self, slots: Sequence[int]) -> bool:
        """Whether some rows filter, and none asks for more that is sampled apart."""
        asked = int(np.bitwise_or.reduce(self._slot_sampling[slots]))
        return asked & Sampling.APART.value == Sampling.FILTERED.value

    def _note_filtered(self, key: ProgramKey) -> None:
        """Have a program compiled that filters, beside all else, if it would have served many iterations."""
        self._num_filtered[key] += 1
        if self._num_filtered[key] == _MANY_ITERATIONS:
            looping = key._replace(max_decode_steps=self.config.max_decode_steps)
            wanted = {key, looping} if shape_of(looping) in self._programs.shapes else {key}
            with contextlib.suppress(Exception):  # they are only faster
                self._programs.prepare(sorted(wanted), is_urgent=False)

    def _sampling(self, scheduled: SchedulerOutput, slots: Sequence[int]) -> Sampling:
        """What the requests of an iteration ask of its program."""
        found = int(np.bitwise_or.reduce(self._slot_sampling[slots])) & Sampling.RANDOM.value
        for chunk in scheduled.prefill:
            asked = int(self._slot_sampling[_slot(chunk.request)])
            # The random programs with prompts serve for greedy steps, too.
            found |= asked & Sampling.RANDOM.value if chunk.drafts else asked | Sampling.RANDOM.value
        return Sampling(found) & Sampling.IN_STEPS

    def _following(self, scheduled: SchedulerOutput, slots: Sequence[int]) -> tuple[ProgramKey, ...]:
        """Programs that are likely to be needed after an iteration with prompts."""
        if self._programs.is_settled or not scheduled.prefill:
            return ()
        all_slots = [*slots, *(_slot(chunk.request) for chunk in scheduled.prefill)]
        found = int(np.bitwise_or.reduce(self._slot_sampling[all_slots])) & Sampling.RANDOM.value
        rows = self.config.buckets.decode_size(min(len(all_slots), self.config.max_num_seqs))
        steps = 1, self.config.max_decode_steps
        return tuple(ProgramKey(rows, 0, count, Sampling(found)) for count in steps)

    # What is sampled apart

    def beyond_steps(self, params: SamplingParams) -> int:
        """What requests of these parameters ask for that is sampled apart from their steps."""
        return (Sampling.of(params) & Sampling.APART).value

    def steps_together(self, flags: Collection[int], num_rows: int) -> bool:
        """Whether a program of several iterations of so many rows samples what such requests ask for."""
        if any(one & ~Sampling.FILTERED.value for one in flags) or num_rows > MULTI_STEP_SEQS:
            return False
        rows = self.config.buckets.decode_size(max(1, num_rows))
        return self._programs.has(ProgramKey(rows, 0, self.config.max_decode_steps, _FILTERED))

    def looks_up(self, num_rows: int) -> bool:
        """Whether programs of several iterations of so many rows are there that draft by themselves."""
        size = next((size for size in self.config.lookup_sizes if size >= num_rows), None)
        if size is None:
            return False
        key = self.config.lookup_key(size)
        return all(self._programs.has(one) for one in (key, key._replace(sampling=Sampling.RANDOM)))

    def is_ready_for(self, request: Request) -> bool:
        """Whether no step waits for a program because of what a request asks of sampling.

        If one would, it is compiled from now on, beside the steps.
        """
        asked = Sampling.of(request.sampling_params)
        needed: list[Key] = []
        if asked & Sampling.APART:
            size, kind = first_size(self.config.max_num_seqs), kind_of(asked & ~Sampling.PROMPT_LOGPROBS)
            complete = RowsKey(size, Sampling.COMPLETE)  # which others may wait for already
            serves = kind in Sampling.COMPLETE and self._programs.expects(complete)
            needed.append(complete if serves else RowsKey(size, kind))
            needed += [TakeKey(num_logits, size) for num_logits in self.config.logits_sizes]
        if Sampling.PROMPT_LOGPROBS in asked:
            size = self.config.buckets.sizes[-1]  # whatever prompts come together
            needed.append(self.config.prompt_key(size)._replace(sampling=Sampling.IN_STEPS))
        return not needed or self._programs.prepare(needed)

    def wait_for_programs(self, seconds: float) -> None:
        """Wait until a program is compiled that a request may need, at most so long."""
        self._programs.wait_for_any(seconds)

    def _rows_apart(self, scheduled: SchedulerOutput, in_step: Sampling) -> list[int]:
        """Which rows of an iteration ask for more than its program does, `in_step`."""
        asked = self._slot_sampling[[_slot(request) for request in scheduled.sampled]]
        rows: list[int] = np.flatnonzero(asked & (Sampling.APART & ~in_step).value).tolist()
        if rows and scheduled.num_decode_steps > 1:
            raise EngineError("requests that are sampled apart were scheduled for several iterations")
        return rows

    def _sample_apart(self, scheduled: SchedulerOutput, rows: list[int], num_logits: int) -> list[Apart]:
        """Sample such rows anew, of the logits that the iteration has left."""
        requests = scheduled.sampled
        asked = self._slot_sampling[[_slot(requests[row]) for row in rows]]
        asked &= (Sampling.APART | Sampling.RANDOM).value
        kind = kind_of(Sampling(int(np.bitwise_or.reduce(asked))))
        drafts = _drafts_before(scheduled)
        if scheduled.num_drafts and (Sampling.ADJUSTED in kind or self.config.logits_processors):
            are_apart = {requests[row] for row in rows}  # what others have sampled stays
            self._write_drafts([chunk for chunk in scheduled.prefill if chunk.request in are_apart])
        apart: list[Apart] = []
        while rows:
            key = self._rows_key(len(rows), kind)
            now, rows = rows[: key.rows], rows[key.rows :]
            of_rows = [(requests[row], *drafts[row]) for row in now]
            apart.append(Apart(now, self._sample_rows(key, now, of_rows, num_logits)))
        self.forget_logits()
        return apart

    def _write_drafts(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write drafts to the histories once more, where their steps wrote what they sampled instead."""
        padding = self.config.max_num_seqs, 0, 0
        written = [
            (_slot(chunk.request), place, draft)
            for chunk in chunks
            for place, draft in enumerate(chunk.drafts, chunk.start + 1)
        ]
        written += [padding] * (self.config.max_drafts - len(written))
        self.set_tokens(np.array(written, np.int32).T)

    def _rows_key(self, num_rows: int, kind: Sampling) -> RowsKey:
        """A program for as many rows as it can: the best one if it is compiled, or else one that is."""
        sizes = row_sizes(self.config.max_num_seqs)
        best = RowsKey(next((size for size in sizes if size >= num_rows), sizes[-1]), kind)
        if self._programs.has(best):
            return best
        place = sizes.index(best.rows)
        for size in (*sizes[place:], *reversed(sizes[:place])):
            for can_do in (kind, Sampling.COMPLETE):
                key = RowsKey(size, can_do)
                if kind in can_do and self._programs.has(key):
                    takes = [TakeKey(num_logits, best.rows) for num_logits in self.config.logits_sizes]
                    with contextlib.suppress(Exception):  # it is only faster
                        self._programs.prepare([*takes, best], is_urgent=False)
                    return key
        return best

    def _sample_rows(
        self,
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
            self.program(needed)  # now, as in `execute`
        places = np.stack(
            [
                padded([_slot(request) for request, _, _ in of_rows], size, self.config.max_num_seqs),
                padded([request.num_tokens - place for request, place, _ in of_rows], size, 0),
            ]
        )
        masks: list[np.ndarray] = []
        if Sampling.MASKED in key.sampling:
            masks = [np.full((size, mask_width(self.model_config.vocab_size)), -1, np.int32)]
            tokens = [(one.token_mask, one.output_token_ids, drafts) for one, _, drafts in of_rows]
            fill_masks(tokens, masks[0])
        return self.sample_rows(key, take, padded(rows, size, 0), places, masks)

    def _choose_fastest(self) -> None:
        """Measure which attention is the fastest for each shape of a program."""
        config, model = self.config, self.model_config
        pool_tokens = config.num_gpu_blocks * config.block_size
        found: dict[AttentionShape, str] = {}
        for key in self._programs.shapes:
            if key.max_chunks:
                op = "prefill"
                shape = AttentionShape.prefill(key.rows, key.max_chunks, max_model_len=config.max_model_len)
            else:
                op = "decode"
                shape = AttentionShape.decode(
                    key.rows, max_model_len=config.max_model_len, pool_tokens=pool_tokens
                )
            if shape not in found:
                sizes = config.dtype, model.head_dim, config.block_size
                names = candidates(self._programs.default, op, self._device, *sizes)
                if model.has_bounds:  # windows or soft caps
                    names = tuple(name for name in names if name != "mosaic")
                scale = model.head_dim**-0.5
                found[shape] = fastest(names, shape, self._state.pool, model.num_heads, scale)
            self._programs.chosen[key] = found[shape]

    # Inputs

    def _open_slot(self, request: Request) -> None:
        """Note the sampling parameters, and the first position, of a request that has just got its slot."""
        seed = request.sampling_params.seed
        if seed is None:
            seed = (self.config.seed + 1) * _SEED_MULTIPLIER + request.arrival_index
        slot = _slot(request)
        self._slot_sampling[slot] = Sampling.of(request.sampling_params)
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

    def _swap(self, swapper: BlockSwapper, scheduled: SchedulerOutput) -> None:
        """Start the copies of one iteration; the device does them in order with its steps."""
        if scheduled.has_copies or scheduled.discarded or scheduled.dropped or swapper.loads:
            self.copy(
                tuple(scheduled.discarded),
                tuple(scheduled.dropped),
                [swap.handle for swap in scheduled.joined],
                [(swap.handle, swap.block_ids) for swap in scheduled.swap_out],
                [(swap.block_ids, swap.host_blocks) for swap in scheduled.swap_in],
                [(swap.handle, swap.block_ids, swap.host_blocks) for swap in scheduled.load],
            )
        if self._files is not None:
            for swap in scheduled.swap_out:
                self.write_files(swap.handle, swap.names)
        opened = {chunk.request for chunk in scheduled.prefill if chunk.is_first}
        for swap in (*scheduled.joined, *scheduled.swap_in):
            request = swap.request
            if request is None or request.slot is None or request in opened:
                continue  # preempted again in this very iteration, or opened with its chunk
            slot = request.slot
            self._restore(slot, request.token_ids(0, request.num_tokens), request.block_ids)
            self._open_slot(request)

    def _restore(self, slot: int, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Write a slot's tokens and block table on the device."""
        tokens = np.zeros(self.config.max_model_len + 1, np.int32)
        tokens[: len(token_ids)] = token_ids
        table = np.zeros(self._max_blocks, np.int32)
        table[: len(block_ids)] = block_ids
        self.set_slot(slot, tokens, table)
        if slot < self.config.max_num_seqs:
            self._table_sizes[slot] = len(block_ids)

    def _pack(self, key: ProgramKey, scheduled: SchedulerOutput, slots: Sequence[int]) -> np.ndarray:
        """The inputs of an iteration that decodes `slots`; see `programs.PackedStep`."""
        packed = PackedStep(key, self.config.max_num_seqs, self.block_size)
        decodes, num_steps = scheduled.decode, scheduled.num_decode_steps
        count = len(decodes)
        stops, room = [request.num_tokens for request in decodes], 1
        lengths = [stop - num_steps for stop in stops]
        if scheduled.lookups:
            lengths = [request.num_known_tokens for request in decodes]
            packed.limits[:count], packed.num_drafts[:] = stops, scheduled.lookups
            room = key.new_blocks(self.block_size)
        packed.decode_slots[:count], packed.decode_lengths[:count] = slots, lengths
        if self.config.max_drafts:  # of rejected ones there may be blocks that were given back
            held = (packed.decode_lengths[:count] + (self.block_size - 2)) // self.block_size
            self._table_sizes[slots] = np.minimum(self._table_sizes[slots], held)
        needed = (np.array(stops, np.int32) + (self.block_size - 2)) // self.block_size
        places: list[int] = []
        blocks: list[int] = []
        for row in np.flatnonzero(needed > self._table_sizes[slots]).tolist():
            self._grow_table(slots[row], decodes[row].block_ids[: needed[row]], room, places, blocks)
        if key.max_chunks:
            packed.sampled[:, :count] = range(count), slots, lengths
            self._pack_prompts(packed, scheduled, places, blocks)
        else:
            packed.num_steps[0] = num_steps
        packed.new_blocks[:, : len(places)] = places, blocks
        return packed.array

    def _grow_table(
        self, slot: int, table: Sequence[int], room: int, places: list[int], blocks: list[int]
    ) -> None:
        """Add a table's new blocks to `places` and `blocks`, if they are at most `room`; else write it."""
        num_known = int(self._table_sizes[slot])
        self._table_sizes[slot] = len(table)
        if len(table) - num_known > room:
            row = np.zeros(self._max_blocks, np.int32)
            row[: len(table)] = table
            self.set_slot(slot, None, row)
            return
        first = slot * self._max_blocks
        places += range(first + num_known, first + len(table))
        blocks += table[num_known:]

    def _pack_prompts(
        self, packed: PackedStep, scheduled: SchedulerOutput, places: list[int], blocks: list[int]
    ) -> None:
        """Add an iteration's chunks, and to `places` and `blocks` their tables' new ones."""
        tokens: list[int] = []
        targets: list[int] = []
        sampled: list[tuple[int, int, int]] = []
        first_row, count = len(scheduled.decode), len(scheduled.prefill)
        for chunk in scheduled.prefill:
            request, slot = chunk.request, _slot(chunk.request)
            stop, table = chunk.start + chunk.length, request.block_ids
            ids = request.token_ids(chunk.start, stop + 1)
            ids += chunk.drafts
            if self.config.max_drafts:
                held = -(-chunk.start // self.block_size)
                self._table_sizes[slot] = min(self._table_sizes[slot], held)
            tokens += ids[: chunk.length]
            targets += ids[1:]
            targets += [0] * (len(tokens) - len(targets))
            self._grow_table(slot, table, chunk.length // self.block_size + 1, places, blocks)
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
        packed.slots[:count] = [_slot(chunk.request) for chunk in scheduled.prefill]
        packed.num_seqs[0] = count
        if sampled:
            packed.sampled[:, first_row : first_row + len(sampled)] = np.array(sampled, np.int32).T


def _drafts_before(scheduled: SchedulerOutput) -> list[tuple[int, Sequence[int]]]:
    """Of each sampled row where its token belongs, from its request's end, and the drafts before it."""
    found: list[tuple[int, Sequence[int]]] = [(1, ())] * len(scheduled.decode)
    for chunk in scheduled.prefill:
        if chunk.is_last:
            count = len(chunk.drafts)
            found += [(1 + count - j, chunk.drafts[:j]) for j in range(count + 1)]
    return found


def _slot(request: Request) -> int:
    assert request.slot is not None  # whatever is scheduled holds one
    return request.slot
