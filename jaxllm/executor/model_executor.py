"""Runs steps on JAX devices: owns the weights, the KV pool and the compiled programs."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import jax
import numpy as np

from jaxllm.errors import ConfigError, EngineError
from jaxllm.executor.apart import SamplingApart
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.drafter import Drafter
from jaxllm.executor.fastest import FASTEST, fastest_of_each
from jaxllm.executor.kv.agreement import AgreedFiles
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.executor.others import Others
from jaxllm.executor.parts import Parts, SentPart, StepInParts
from jaxllm.executor.pending import Apart, PendingStep
from jaxllm.executor.placement import Placement
from jaxllm.executor.programs import PackedStep, ProgramKey
from jaxllm.executor.slot_params import FILTERED, Sampling
from jaxllm.executor.slots import ProgramChoice, Slots, slot_of
from jaxllm.executor.step import StepOutputs
from jaxllm.executor.step_programs import CompileProgress, StepPrograms
from jaxllm.executor.worker import Worker
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.registry import Params
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.cache.names import FileIndex
from jaxllm.types import (
    NO_COPIES,
    CopyProgress,
    HostPiece,
    Read,
    Request,
    SchedulerOutput,
    StepResult,
    host_blocks_of,
    piece_sizes,
)


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
        self._slots = Slots(config)
        self._apart = SamplingApart(config, programs, model_config.vocab_size)
        self._parts: Parts | None = None
        if placement.num_stages > 1:
            self._parts = Parts(model_config, placement.num_stages, config.max_num_seqs)
        self._is_released = False
        self._files: AgreedFiles | None = None
        self._choice = ProgramChoice(config, programs, self._slots, self._apart.note_filtered)
        if config.implementation == FASTEST:
            pool, shapes, default = self._state.pool, programs.shapes, programs.default
            programs.chosen |= fastest_of_each(shapes, default, self._device, model_config, config, pool)
        self._programs.begin()
        self.drafter: Drafter | None = None
        self._is_undisturbed = False

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
    def is_lost(self) -> bool:
        """Whether a process that it needs is gone, so that the next step fails."""
        return self.others is not None and self.others.is_lost

    @property
    def is_undisturbed(self) -> bool:
        """Whether no program was being compiled when the last step was sent, nor had to be for it."""
        return self._is_undisturbed

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
        self.set_slot(*self._slots.restored(self.config.max_num_seqs, [], []))
        if self.config.max_drafts:
            self._apart.write_drafts(self, ())
        if self.drafter is not None:
            self.drafter.warm_up()

    @under_jax_defaults
    def execute(self, scheduled: SchedulerOutput) -> StepResult:
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
                request = chunk.request
                self._slots.open(request)
                stop = chunk.start + chunk.length
                skips = bool(request.kept_ranges) or request.num_computed_tokens > stop
                if chunk.start or skips:
                    num_tokens = request.num_known_tokens if skips else chunk.start
                    self._restore(request, num_tokens)
        self._is_undisturbed = True
        common, rare = self._slots.take_changed()
        if common is not None:
            self.set_params(common, rare)
        if self._parts is not None:
            parts = [(self._begin(part), places) for part, places in self._parts.split(scheduled)]
            return StepInParts(parts, len(scheduled.decode))
        key, packed, rows, _ = self._prepare(scheduled)
        if scheduled.num_lookups and key.takes_drafts:
            return self._run_chained(scheduled, key, packed)
        outputs = self.run(key, packed, bool(rows))
        apart = self._sample_apart(scheduled, rows, outputs) if rows else ()
        wait = None if self.others is None else self.others.wait
        return PendingStep(scheduled, outputs, key.rows, apart, key.num_lookups + 1, wait)

    def _run_chained(
        self, scheduled: SchedulerOutput, key: ProgramKey, packed: np.ndarray | jax.Array
    ) -> PendingStep:
        """Start iterations whose drafts are computed between them."""
        assert self.drafter is not None
        feed = self.drafter.begin(scheduled.decode, key.rows)
        num_rows = key.num_decodes(self.config.max_num_seqs)
        known = [request.num_known_tokens for request in scheduled.decode]
        padded = np.pad(np.array(known, np.int32), (0, num_rows - len(known)))
        first, lengths = jax.device_put((packed, padded), self._device)
        found = []
        for _ in range(scheduled.num_decode_steps):
            inputs = jax.device_put(feed(first, lengths), self._placement.sharding())
            outputs = self.run(key, inputs, False)
            assert outputs.lengths is not None
            lengths = outputs.lengths.addressable_data(0)
            found.append(outputs.sampled.tokens)
        return PendingStep(scheduled, outputs, num_rows, width=key.num_lookups + 1, before=found[:-1])

    def _begin(self, scheduled: SchedulerOutput) -> SentPart:
        """Start a step of several stages; it is sampled at once if rows are sampled apart from it."""
        key, packed, rows, slots = self._prepare(scheduled)
        part = SentPart(self.sample_first)

        def sampled(outputs: StepOutputs) -> None:
            self._logits = outputs.logits if rows else None
            apart = self._sample_apart(scheduled, rows, outputs) if rows else ()
            part.pending = PendingStep(scheduled, outputs, key.rows, apart)

        of_chunks = [(slot_of(chunk.request), chunk.is_last) for chunk in scheduled.prefill]
        ending, others = [[slot for slot, is_last in of_chunks if is_last is kind] for kind in (True, False)]
        self.begin(key, packed, [*slots, *ending], others, sampled)
        if rows:
            self.sample_begun()
        return part

    def _prepare(
        self, scheduled: SchedulerOutput
    ) -> tuple[ProgramKey, np.ndarray | jax.Array, list[int], list[int]]:
        """A step's program and inputs, which of its rows are sampled apart, and the slots that it decodes."""
        slots = [slot_of(request) for request in scheduled.decode]
        key = self._choice.key(scheduled, slots)
        packed, tables = self._slots.pack(key, scheduled, slots)
        if isinstance(packed, jax.Array):
            packed = jax.device_put(packed, self._placement.stages[0].sharding())
        for slot, table in tables:
            self.set_slot(slot, None, table)
        asked = self._slots.sampling[[slot_of(request) for request in scheduled.sampled]]
        rows: list[int] = np.flatnonzero(asked & (Sampling.APART & ~key.sampling).value).tolist()
        if rows and scheduled.num_decode_steps > 1:
            raise EngineError("requests that are sampled apart were scheduled for several iterations")
        self._is_undisturbed &= self._programs.is_settled and self._programs.has(key)
        self.program(
            key, self._choice.following(scheduled, slots)
        )  # before `run`: others would wait for it in vain
        return key, packed, rows, slots

    def _sample_apart(
        self, scheduled: SchedulerOutput, rows: list[int], outputs: StepOutputs
    ) -> Sequence[Apart]:
        """Sample rows of a step apart from it."""
        return self._apart.sample(self, scheduled, rows, self._slots.sampling, len(outputs.logits))

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
        self._slots.forget_tables()

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

    # What is sampled apart

    def beyond_steps(self, params: SamplingParams) -> int:
        """What requests of these parameters ask for that is sampled apart from their steps."""
        return (Sampling.of(params) & Sampling.APART).value

    def steps_together(self, flags: Collection[int], num_rows: int) -> bool:
        """Whether a program of several iterations of so many rows samples what such requests ask for."""
        return self._apart.steps_together(flags, num_rows)

    def looks_up(self, flags: Collection[int], num_rows: int) -> bool:
        """Whether programs of iterations of so many rows are there that draft by themselves.

        `flags` is what requests ask for that is sampled apart from steps; programs may filter. One that is
        missed for many iterations is compiled beside them.
        """
        size = next((size for size in self.config.lookup_sizes if size >= num_rows), None)
        if size is None or any(one & ~Sampling.FILTERED.value for one in flags):
            return False
        key = self.config.lookup_key(size)
        if flags and not self._programs.has(filtering := key._replace(sampling=FILTERED)):
            self._apart.note_filtered(filtering)
            return False
        return all(self._programs.has(one) for one in (key, key._replace(sampling=Sampling.RANDOM)))

    def is_ready_for(self, request: Request) -> bool:
        """Whether no step waits for a program because of what a request asks of sampling.

        If one would, it is compiled from now on, beside the steps.
        """
        asked = Sampling.of(request.sampling_params)
        is_plain = not asked & (Sampling.APART | Sampling.PROMPT_LOGPROBS)
        return is_plain or self._apart.is_ready(asked)

    def wait_for_programs(self, seconds: float) -> None:
        """Wait until a program is compiled that a request may need, at most so long."""
        self._programs.wait_for_any(seconds)

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
            self._slots.open(request)
            self._restore(request, request.num_tokens)

    def _restore(self, request: Request, num_tokens: int) -> None:
        """Write the first tokens and the table of a request that has got its slot on the device."""
        token_ids = request.token_ids(0, num_tokens)
        self.set_slot(*self._slots.restored(slot_of(request), token_ids, request.block_ids))
