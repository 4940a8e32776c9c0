"""Runs steps on a JAX device: owns the weights, the KV pool and the compiled programs."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import pallas_kernels
from jaxllm.errors import CapacityError, ConfigError, EngineError
from jaxllm.executor import compile_stats
from jaxllm.executor.buckets import Buckets
from jaxllm.executor.fastest import FASTEST, AttentionShape, candidates, fastest
from jaxllm.executor.pending import PendingStep
from jaxllm.executor.programs import (
    CompiledProgram,
    PackedStep,
    ProgramKey,
    jitted_step,
    state_shapes,
)
from jaxllm.executor.sampler import Sampling, SlotParams
from jaxllm.executor.step import DeviceState, StepOutputs
from jaxllm.executor.swapper import BlockSwapper
from jaxllm.models.registry import AnyConfig, Params
from jaxllm.types import (
    NO_COPIES,
    CopyProgress,
    Request,
    SchedulerOutput,
)

_logger = logging.getLogger(__name__)
_COMPILE_THREADS = 4  # XLA compiles outside the interpreter lock
_SEED_MULTIPLIER = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class ExecutorConfig:
    """Sizes the executor's arrays and programs are built for."""

    num_gpu_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    buckets: Buckets
    dtype: str
    seed: int = 0
    implementation: str | None = None
    num_host_blocks: int = 0
    host_bandwidth_limit: float | None = None
    max_decode_steps: int = 1

    def program_keys(self, platform: str) -> list[ProgramKey]:
        """The programs of greedy and of random steps; those of other `sampling` have the same shapes.

        With prompts the random ones serve for greedy steps, too: noise is little beside so many tokens.

        A GPU's loop waits for the host to read its condition, so single steps have programs of their own
        there; on a CPU, where they cost a compilation more and gain nothing, the loop serves for them, too.
        """
        buckets = self.buckets
        loops = buckets.multi_step_sizes() if self.max_decode_steps > 1 else ()
        decodes = [ProgramKey(rows) for rows in buckets.decode if rows not in loops or platform != "cpu"]
        decodes += [ProgramKey(rows, 0, self.max_decode_steps) for rows in loops]
        shapes = [ProgramKey(size, buckets.max_chunks(size)) for size in buckets.sizes] + decodes
        return decodes + [shape._replace(sampling=Sampling.RANDOM) for shape in shapes]


class ModelExecutor:
    """Executes steps of one model on one device. One thread owns it: every step donates the pool."""

    def __init__(
        self,
        model_config: AnyConfig,
        params: Params,
        config: ExecutorConfig,
        device: jax.Device | None = None,
    ) -> None:
        compile_stats.start()
        self.model_config = model_config
        self.config = config
        self._params = params
        self._device = device or jax.devices()[0]
        self._max_blocks = -(-config.max_model_len // config.block_size)
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
        keys = config.program_keys(self._device.platform)
        self._shapes = frozenset(key._replace(sampling=Sampling.GREEDY) for key in keys)
        self._fastest: dict[AttentionShape, str] = {}
        self._default_implementation, self._why_default = pallas_kernels.settle_implementation(
            model_config.num_heads, model_config.num_kv_heads, model_config.head_dim, config.block_size
        )
        self._programs: dict[ProgramKey, jax.stages.Compiled] = {}
        self._program_seconds: dict[ProgramKey, float] = {}
        self.compile_seconds = 0.0

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
        return self._programs

    def compile_report(self) -> list[CompiledProgram]:
        """Every step's program, with seconds and memory. Threads compile side by side, so seconds overlap."""
        report = []
        for key, program in self._programs.items():
            analysis = program.memory_analysis()
            sizes = [
                None if analysis is None else int(getattr(analysis, f"{name}_size_in_bytes"))
                for name in ("argument", "alias", "temp", "output")
            ]
            seconds = self._program_seconds.get(key, 0.0)
            reason = None if self.config.implementation else self._why_default
            report.append(CompiledProgram(key, self._implementation(key), reason, seconds, *sizes))
        return report

    def warm_up(self) -> None:
        """Compile the programs of greedy and random steps and run each once, so that these never wait.

        Padding rows write nothing, so the pool and the history stay as they are.
        """
        started = time.perf_counter()
        keys = self.config.program_keys(self._device.platform)
        lowered = [self._lower(key) for key in keys]
        with concurrent.futures.ThreadPoolExecutor(_COMPILE_THREADS) as pool:
            for key, (program, seconds) in zip(keys, pool.map(_timed_compile, lowered), strict=True):
                self._programs[key], self._program_seconds[key] = program, seconds
        for key in keys:
            np.asarray(self._run(key, self._padding(key)).sampled.tokens)
        if self._swapper is not None:
            self._state = self._state._replace(pool=self._swapper.warm_up(self._state.pool))
        self._restore_history(self.config.max_num_seqs, [])
        self._slot_params = self._upload_params()
        self.compile_seconds = time.perf_counter() - started

    def execute(self, scheduled: SchedulerOutput) -> PendingStep:
        """Dispatch one step and return without waiting for the device.

        What no request has asked of sampling before is compiled first, unless `warm_up` has done so.

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
        return PendingStep(scheduled, self._run(key, packed), key.rows)

    def release(self) -> None:
        """Let go of weights, pool and programs: nothing will be executed any more."""
        self._is_released = True
        self._programs.clear()
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
            if num_steps > 1 or key not in self._shapes:
                key = key._replace(max_decode_steps=self.config.max_decode_steps)
        if key not in self._shapes or num_steps > key.max_decode_steps:
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

    def _run(self, key: ProgramKey, packed: np.ndarray) -> StepOutputs:
        program = self._programs.get(key)
        if program is None:
            program, seconds = _timed_compile(self._lower(key))
            self._programs[key], self._program_seconds[key] = program, seconds
            _logger.info("%s: compiled in %.1f s, when it was first needed", key.name, seconds)
        self._state, outputs = program(self._params, self._state, self._slot_params, packed)
        return outputs

    def _lower(self, key: ProgramKey) -> jax.stages.Lowered:
        max_num_seqs, max_blocks = self.config.max_num_seqs, self._max_blocks
        jitted = jitted_step(self.model_config, key, max_num_seqs, max_blocks, self._implementation(key))
        packed = jax.ShapeDtypeStruct(key.packed_shape(max_num_seqs, max_blocks), jnp.int32)
        return jitted.lower(self._params, self._state, self._slot_params, packed)

    def _implementation(self, key: ProgramKey) -> str:
        """Of the attention in a program."""
        config, model = self.config, self.model_config
        if config.implementation != FASTEST:
            return config.implementation or self._default_implementation
        if key.max_chunks:
            op = "prefill"
            shape = AttentionShape.prefill(key.rows, key.max_chunks, max_model_len=config.max_model_len)
        else:
            op = "decode"
            pool_tokens = config.num_gpu_blocks * config.block_size
            shape = AttentionShape.decode(
                key.rows, max_model_len=config.max_model_len, pool_tokens=pool_tokens
            )
        if shape not in self._fastest:
            default = self._default_implementation
            names = candidates(default, op, self._device, config.dtype, model.head_dim, config.block_size)
            scale = model.head_dim**-0.5
            self._fastest[shape] = fastest(names, shape, self._state.pool, model.num_heads, scale)
        return self._fastest[shape]

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


def _timed_compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
    started = time.perf_counter()
    return lowered.compile(), time.perf_counter() - started


def _slot(request: Request) -> int:
    assert request.slot is not None  # whatever is scheduled holds one
    return request.slot


def _set_history(history: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    return history.at[slot].set(row)
