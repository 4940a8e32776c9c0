"""Runs steps on a JAX device: owns the weights, the KV pool and the compiled programs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import pallas_kernels
from jaxllm.errors import CapacityError, ConfigError, EngineError
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.fastest import FASTEST, AttentionShape, candidates, fastest
from jaxllm.executor.pending import PendingStep
from jaxllm.executor.programs import (
    CompiledProgram,
    PackedStep,
    ProgramKey,
    state_shapes,
)
from jaxllm.executor.sampler import Sampling, SlotParams
from jaxllm.executor.step import DeviceState, StepOutputs
from jaxllm.executor.step_programs import CompileProgress, StepPrograms
from jaxllm.executor.swapper import BlockSwapper
from jaxllm.models.registry import AnyConfig, Params
from jaxllm.types import (
    NO_COPIES,
    CopyProgress,
    Request,
    SchedulerOutput,
)

_SEED_MULTIPLIER = 0x9E3779B97F4A7C15


class ModelExecutor:
    """Executes steps of one model on one device. One thread owns it: every step donates the pool."""

    def __init__(
        self,
        model_config: AnyConfig,
        params: Params,
        config: ExecutorConfig,
        device: jax.Device,
        programs: StepPrograms | None = None,
    ) -> None:
        """`programs` of the same model, configuration and device may be compiling already."""
        self.model_config = model_config
        self.config = config
        self._params = params
        self._device = device
        self._max_blocks = config.max_blocks
        shapes = state_shapes(
            model_config,
            dtype=config.dtype,
            num_gpu_blocks=config.num_gpu_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        try:
            make = jax.jit(lambda: DeviceState(*(jnp.zeros(s.shape, s.dtype) for s in shapes)))
            with jax.default_device(self._device):
                self._state = jax.block_until_ready(make())
        except jax.errors.JaxRuntimeError as error:
            raise CapacityError(
                f"the KV pool of {config.num_gpu_blocks} blocks does not fit in device memory "
                f"beside the weights; lower num_gpu_blocks_override or kv_cache_memory: {error}"
            ) from error
        self._host_params = SlotParams.host_zeros(config.max_num_seqs)
        self._slot_params = self._upload_params()
        self._params_changed = False
        self._tables = np.zeros((config.max_num_seqs, self._max_blocks), np.int32)
        self._table_ends = [(0, -1)] * config.max_num_seqs  # size and last block of each
        self._slot_sampling = [int(Sampling.GREEDY)] * config.max_num_seqs
        self._is_released = False
        self._swapper = None
        if config.num_host_blocks:
            self._swapper = BlockSwapper(
                self._device, self._max_blocks, bandwidth_limit=config.host_bandwidth_limit
            )
        self._set_history = jax.jit(_set_history, donate_argnums=0)
        self._programs = programs or StepPrograms(model_config, config, device)
        if config.implementation == FASTEST:
            self._choose_fastest()
        self._programs.begin()
        weakref.finalize(self, self._programs.close).atexit = False
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
    def pool_bytes(self) -> int:
        """Size of the KV pool in bytes."""
        return self._state.pool.nbytes

    @property
    def programs(self) -> Mapping[ProgramKey, jax.stages.Compiled]:
        """The compiled programs, by shape; `memory_analysis()` of each tells what it needs."""
        return self._programs.compiled

    @property
    def is_undisturbed(self) -> bool:
        """Whether no program was being compiled when the last step was sent."""
        return self._is_undisturbed

    def compile_progress(self) -> CompileProgress:
        """How many programs are compiled, of how many, and for how long."""
        return self._programs.progress()

    def compile_report(self) -> list[CompiledProgram]:
        """Every compiled program, with seconds and memory."""
        return self._programs.report()

    def warm_up(self, on_progress: Callable[[CompileProgress], None] | None = None) -> None:
        """Compile the programs of greedy and random steps and run each once, so that these never wait.

        Padding rows write nothing, so the pool and the history stay as they are.
        """
        self._programs.wait(on_progress)
        for key in self._programs.keys:
            np.asarray(self._run(key, self._padding(key)).sampled.tokens)
        if self._swapper is not None:
            self._state = self._state._replace(pool=self._swapper.warm_up(self._state.pool))
        self._restore_history(self.config.max_num_seqs, [])
        self._slot_params = self._upload_params()

    def execute(self, scheduled: SchedulerOutput) -> PendingStep:
        """Dispatch one step and return without waiting for the device.

        A program that is not compiled yet is waited for.

        Raises:
            EngineError: it was released, as a failed engine does.
        """
        if self._is_released:
            raise EngineError("this executor was released when an engine on it failed; make a new LLM")
        if self._swapper is not None:
            self._swap(self._swapper, scheduled)
        elif scheduled.has_copies:
            raise ConfigError("the scheduler swaps, and the executor was built with num_host_blocks=0")
        for chunk in scheduled.prefill:
            self._set_table(_slot(chunk.request), chunk.request.block_ids)
            if chunk.is_first:
                self._open_slot(chunk.request)
                if chunk.start:
                    self._restore_history(_slot(chunk.request), chunk.request.token_ids(0, chunk.start))
        if self._params_changed:
            self._slot_params = self._upload_params()
            self._params_changed = False
        key = self._key(scheduled)
        packed = self._pack_step(key, scheduled) if scheduled.prefill else self._pack_decode(key, scheduled)
        return PendingStep(scheduled, self._run(key, packed, self._following(scheduled)), key.rows)

    def release(self) -> None:
        """Let go of weights, pool and programs: nothing will be executed any more."""
        self._is_released = True
        self._programs.close()
        self._params, self._swapper = {}, None
        for name in ("_state", "_slot_params"):
            vars(self).pop(name, None)

    def copies(self) -> CopyProgress:
        """How far the copies between device and host are."""
        return NO_COPIES if self._swapper is None else self._swapper.progress()

    def settle_copies(self) -> None:
        """Wait until no copy is really under way, whatever a limited link still has to carry."""
        if self._swapper is not None:
            self._swapper.settle()

    def limit_host_bandwidth(
        self, bytes_per_second: float | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Slow the link to the host down in each direction, for experiments; None lifts the limit.

        Args:
            bytes_per_second: what it seems to carry; it can only be less than it does.
            clock: seconds of the limited link's time.

        Raises:
            ConfigError: the executor has no host blocks or holds copies of requests, or the number is not
                positive.
        """
        if self._swapper is None:
            raise ConfigError("there is no link to limit: num_host_blocks=0 turns swaps off")
        if bytes_per_second is not None and not 0 < bytes_per_second < float("inf"):
            raise ConfigError(f"bytes_per_second={bytes_per_second!r} must be a positive number or None")
        if self._swapper.handles:
            raise ConfigError("the link cannot be changed while copies are held; finish all requests first")
        self._swapper.limit_bandwidth(bytes_per_second, clock)

    def time_swap(self, num_blocks: int) -> tuple[float, float]:
        """Seconds to copy `num_blocks` blocks of the pool (some twice if it has fewer) out and back.

        Raises:
            ConfigError: the executor has no host blocks.
        """
        if self._swapper is None:
            raise ConfigError("swaps cannot be timed: num_host_blocks=0 turns them off")
        handle, block_ids = -1, [number % self.num_gpu_blocks for number in range(num_blocks)]
        jax.block_until_ready(self._state.pool)
        started = time.perf_counter()
        self._swapper.swap_out(self._state.pool, handle, block_ids)
        self._swapper.wait(handle)
        copied_out = time.perf_counter()
        pool = jax.block_until_ready(self._swapper.swap_in(self._state.pool, handle, block_ids))
        self._state = self._state._replace(pool=pool)
        return copied_out - started, time.perf_counter() - copied_out

    # Programs

    def _padding(self, key: ProgramKey) -> np.ndarray:
        """Inputs of a step that computes nothing."""
        if key.max_chunks:
            return PackedStep(key, self.config.max_num_seqs, self._max_blocks).array
        return np.zeros(key.packed_shape(self.config.max_num_seqs, self._max_blocks), np.int32)

    def _key(self, scheduled: SchedulerOutput) -> ProgramKey:
        """The program of an iteration.

        Raises:
            EngineError: there is none.
        """
        buckets, prefill = self.config.buckets, scheduled.prefill
        num_decodes, num_steps = len(scheduled.decode), scheduled.num_decode_steps
        if prefill:
            size = buckets.size(num_decodes, scheduled.num_prefill_tokens, len(prefill))
            key = ProgramKey(size, buckets.max_chunks(size), num_steps)
        else:
            key = ProgramKey(buckets.decode_size(num_decodes))
            if num_steps > 1 or key not in self._programs.shapes:
                key = key._replace(max_decode_steps=self.config.max_decode_steps)
        if key not in self._programs.shapes or num_steps > key.max_decode_steps:
            raise EngineError(f"no program computes a {key.name} with {num_steps} decode iterations")
        return key._replace(sampling=self._sampling(scheduled))

    def _sampling(self, scheduled: SchedulerOutput) -> Sampling:
        """All that the requests of an iteration ask for."""
        found, of_slots = 0, self._slot_sampling
        for request in scheduled.decode:
            found |= of_slots[_slot(request)]
        found &= ~Sampling.PROMPT_LOGPROBS
        for chunk in scheduled.prefill:
            found |= of_slots[_slot(chunk.request)] | Sampling.RANDOM  # see `ExecutorConfig.program_keys`
        return Sampling(found)

    def _following(self, scheduled: SchedulerOutput) -> tuple[ProgramKey, ...]:
        """Programs that are likely to be needed after an iteration with prompts."""
        if self._programs.is_settled or not scheduled.prefill:
            return ()
        requests = [*scheduled.decode, *(chunk.request for chunk in scheduled.prefill)]
        sampling = 0
        for request in requests:
            sampling |= self._slot_sampling[_slot(request)] & ~Sampling.PROMPT_LOGPROBS
        rows = self.config.buckets.decode_size(min(len(requests), self.config.max_num_seqs))
        steps = 1, self.config.max_decode_steps
        return tuple(ProgramKey(rows, 0, count, Sampling(sampling)) for count in steps)

    def _run(self, key: ProgramKey, packed: np.ndarray, then: Sequence[ProgramKey] = ()) -> StepOutputs:
        self._is_undisturbed = self._programs.is_settled
        program = self._programs.get(key, then)
        self._state, outputs = program(self._params, self._state, self._slot_params, packed)
        return outputs

    def _choose_fastest(self) -> None:
        """Measure which attention is the fastest for each shape of a program."""
        config, model = self.config, self.model_config
        pool_tokens = config.num_gpu_blocks * config.block_size
        heads = model.num_heads, model.num_kv_heads, model.head_dim
        default, _ = pallas_kernels.settle_implementation(*heads, config.block_size)
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
                names = candidates(default, op, self._device, config.dtype, model.head_dim, config.block_size)
                scale = model.head_dim**-0.5
                found[shape] = fastest(names, shape, self._state.pool, model.num_heads, scale)
            self._programs.chosen[key] = found[shape]

    def _upload_params(self) -> SlotParams:
        # Copies: the CPU backend may alias host arrays, which change while steps are in flight.
        return jax.device_put(jax.tree.map(np.array, self._host_params), self._device)

    # Inputs

    def _open_slot(self, request: Request) -> None:
        """Note the sampling parameters of a request that has just got its slot."""
        seed = request.sampling_params.seed
        if seed is None:
            seed = (self.config.seed + 1) * _SEED_MULTIPLIER + request.arrival_index
        slot = _slot(request)
        self._slot_sampling[slot] = Sampling.of(request.sampling_params)
        self._host_params.host_set(
            slot,
            request.sampling_params,
            seed=seed & 0xFFFFFFFFFFFFFFFF,
            prompt_length=request.num_prompt_tokens,
            eos_token_ids=request.eos_token_ids,
            end_token_ids=request.end_token_ids,
        )
        self._params_changed = True

    def _swap(self, swapper: BlockSwapper, scheduled: SchedulerOutput) -> None:
        """Start the copies of one iteration; the device does them in order with its steps."""
        pool = self._state.pool
        for handle in scheduled.discarded:
            swapper.discard(handle)
        for swap in scheduled.joined:
            pool = swapper.join(pool, swap.handle)
        for swap in scheduled.swap_out:
            swapper.swap_out(pool, swap.handle, swap.block_ids)
        for swap in scheduled.swap_in:
            pool = swapper.swap_in(pool, swap.handle, swap.block_ids)
        for swap in scheduled.load:
            swapper.load(swap.handle, swap.block_ids)
        self._state = self._state._replace(pool=swapper.advance(pool))
        prefilled = {chunk.request for chunk in scheduled.prefill}
        for swap in (*scheduled.joined, *scheduled.swap_in):
            if swap.request.slot is None or swap.request in prefilled:
                continue  # preempted again in this very iteration, or opened with its chunk
            self._restore_history(swap.request.slot, swap.request.token_ids(0, swap.request.num_tokens))
            self._set_table(swap.request.slot, swap.request.block_ids)
            self._open_slot(swap.request)

    def _restore_history(self, slot: int, token_ids: Sequence[int]) -> None:
        row = np.zeros(self.config.max_model_len + 1, np.int32)
        row[: len(token_ids)] = token_ids
        self._state = self._state._replace(history=self._set_history(self._state.history, slot, row))

    def _set_table(self, slot: int, block_ids: Sequence[int]) -> None:
        self._tables[slot, : len(block_ids)] = block_ids
        self._table_ends[slot] = (len(block_ids), block_ids[-1])

    def _tables_of(self, requests: Sequence[Request]) -> tuple[list[int], np.ndarray]:
        """Slots of running requests, and their block tables."""
        ends = self._table_ends
        slots = [_slot(request) for request in requests]
        for slot, request in zip(slots, requests, strict=True):
            # A table grows by at most one block from step to step, at its end.
            if ends[slot] != (len(request.block_ids), request.block_ids[-1]):
                self._set_table(slot, request.block_ids)
        return slots, self._tables[slots]

    def _pack_decode(self, key: ProgramKey, scheduled: SchedulerOutput) -> np.ndarray:
        """`[rows, 3 + max_blocks]` int32: slot, length, iterations, block table."""
        num_steps, requests = scheduled.num_decode_steps, scheduled.decode
        packed = self._padding(key)
        count = len(requests)
        packed[:, 2] = num_steps
        packed[:count, 0], packed[:count, 3:] = self._tables_of(requests)
        packed[:count, 1] = [request.num_tokens - num_steps for request in requests]
        return packed

    def _pack_step(self, key: ProgramKey, scheduled: SchedulerOutput) -> np.ndarray:
        """A flat int32 array; see `programs.PackedStep`."""
        packed = PackedStep(key, self.config.max_num_seqs, self._max_blocks)
        row = count = len(scheduled.decode)
        if count:
            slots, packed.decode_tables[:count] = self._tables_of(scheduled.decode)
            lengths = [request.num_tokens - 1 for request in scheduled.decode]
            packed.decode_slots[:count], packed.decode_lengths[:count] = slots, lengths
            packed.sampled[:, :count] = range(count), slots, lengths
        packed.starts[:] = row
        for i, chunk in enumerate(scheduled.prefill):
            request, stop = chunk.request, chunk.start + chunk.length
            slot, end = _slot(request), row + chunk.length
            ids = request.token_ids(chunk.start, stop + 1)
            packed.tokens[row:end] = ids[: chunk.length]
            packed.targets[row : row + len(ids) - 1] = ids[1:]
            row = end
            packed.starts[i + 1 :] = row
            packed.lengths[i], packed.slots[i], packed.tables[i] = stop, slot, self._tables[slot]
            if chunk.is_last:
                packed.sampled[:, count] = row - 1, slot, stop
                count += 1
        packed.num_seqs[0] = len(scheduled.prefill)
        return packed.array


def _slot(request: Request) -> int:
    assert request.slot is not None  # whatever is scheduled holds one
    return request.slot


def _set_history(history: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    return history.at[slot].set(row)
