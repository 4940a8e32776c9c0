"""What a process does of an executor, on its own devices: weights, pool, programs and copies.

Its `operation`s take numbers and names alone, so that of several processes one decides, and the others do the
same in the same order: programs of all devices have to be started by every process (`executor.processes`).
"""

from __future__ import annotations

import collections
import functools
import pathlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CapacityError, EngineError
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.executor.kv.file_io import FileTransfers
from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.executor.others import Others
from jaxllm.executor.placement import Placement
from jaxllm.executor.programs import STATE_SPECS, CompiledProgram, EngineState, ProgramKey, state_shapes
from jaxllm.executor.sampler import SampledRows
from jaxllm.executor.sampling_programs import RowsKey, TakeKey
from jaxllm.executor.slot_params import PackedSlotParams
from jaxllm.executor.stages import BegunStep, StagedProgram
from jaxllm.executor.step import StepOutputs
from jaxllm.executor.step_programs import CompileProgress, Key, Program, StepPrograms
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.registry import Params, abstract_params
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.types import MAX_PIECE_BLOCKS, BlockName, HostBlock, HostPiece, Read

_P = ParamSpec("_P")
_R = TypeVar("_R")
_W = TypeVar("_W", bound="Worker")
OPERATIONS: dict[str, Callable[..., Any]] = {}
"""What may be asked of a worker, by name."""


def operation(do: Callable[Concatenate[_W, _P], _R]) -> Callable[Concatenate[_W, _P], _R]:
    """What all processes of an engine do when one is asked to; arguments go by their places."""
    name = do.__name__

    @functools.wraps(do)
    def ask(self: _W, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        assert not kwargs
        if self.others is None:
            return do(self, *args, **kwargs)
        self.others.tell(name, args)
        try:
            return do(self, *args, **kwargs)
        except Exception as error:
            self.others.blame(error)
            raise

    OPERATIONS[name] = do
    return ask


class Worker:
    """Owns weights, KV pool and compiled programs. One thread owns it: every step donates the pool.

    Args:
        model_config: the model.
        params: its weights, as `placement` places them; its own.
        config: sizes of its arrays and programs.
        placement: the devices of all processes.
        programs: of the same model, configuration and placement, which may be compiling already.
        others: do what it does; None if there are none, or another process decides.
    """

    @under_jax_defaults
    def __init__(
        self,
        model_config: ModelConfig,
        params: Params,
        config: ExecutorConfig,
        placement: Placement,
        programs: StepPrograms,
        others: Others | None = None,
    ) -> None:
        self.model_config, self.config, self.others = model_config, config, others
        self._params = params
        self._placement, self._device = placement, placement.device
        self._max_blocks = config.max_blocks
        self._state = self._make_state()
        self._slot_params = PackedSlotParams(
            *map(placement.stages[0].put, PackedSlotParams.host_zeros(config.max_num_seqs))
        )
        self._logits: jax.Array | None = None
        self._begun: collections.deque[BegunStep] = collections.deque()
        self.transfers: FileTransfers | None = None
        self.swapper: BlockSwapper | None = None
        if config.num_host_blocks:
            most = max(self._max_blocks, MAX_PIECE_BLOCKS)  # the prefix cache's go together
            wait = jax.block_until_ready if others is None else others.wait
            self.swapper = BlockSwapper(placement.local, most, wait)
        self._set_row = jax.jit(lambda rows, place, row: rows.at[place].set(row), donate_argnums=0)
        self._set_tokens = jax.jit(lambda rows, at: rows.at[at[0], at[1]].set(at[2]), donate_argnums=0)
        self._programs = programs
        weakref.finalize(self, programs.close).atexit = False

    def _make_state(self) -> EngineState:
        """The pool, histories and tables, all of them empty.

        Raises:
            CapacityError: they do not fit.
        """
        config = self.config
        parts = state_shapes(
            self._placement.part(self.model_config),
            dtype=config.dtype,
            num_gpu_blocks=config.num_gpu_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            kv_dtype=config.kv_dtype,
            num_hidden=config.num_hidden,
            num_kept_layers=len(config.kept_layers),
        )
        pool = self._placement.structs(parts.pool, STATE_SPECS.pool)
        rest = self._placement.stages[0].structs(parts, STATE_SPECS)._replace(pool=None)
        try:
            state: EngineState = jax.block_until_ready(_zeros(rest)._replace(pool=_zeros(pool)))
        except jax.errors.JaxRuntimeError as error:
            raise CapacityError(
                f"the KV pool of {config.num_gpu_blocks} blocks does not fit in device memory "
                f"beside the weights; lower num_gpu_blocks_override or kv_cache_memory: {error}"
            ) from error
        if self._device.platform == "cpu":
            for shard in state.pool.addressable_shards:
                native.use_huge_pages(shard.data, is_zero=True)
        return state

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of a block of the KV pool, over all layers."""
        return self._state.pool.shape[1:]

    @property
    def carried(self) -> EngineState:
        """All of the state but the pool; of several devices the first one's copy, to draft with."""
        rest: EngineState = self._state._replace(pool=None)  # type: ignore[arg-type]
        if len(self._placement.devices) == 1:
            return rest
        return jax.tree.map(lambda array: array.addressable_data(0), rest)

    @property
    def device_kind(self) -> str:
        """What JAX calls the device, or each of several."""
        return self._device.device_kind

    @property
    def pool_bytes(self) -> int:
        """Size of the KV pool in bytes, on all devices."""
        return self._state.pool.nbytes * self._placement.num_contexts

    def compile_progress(self) -> CompileProgress:
        """How many programs are compiled, of how many, and for how long."""
        return self._programs.progress()

    def compile_report(self) -> list[CompiledProgram]:
        """Every compiled program, with seconds and memory."""
        return self._programs.report()

    @property
    def has_pool(self) -> bool:
        """Whether it holds the KV pool."""
        return not self._state.pool.is_deleted()

    @property
    def has_weights(self) -> bool:
        """Whether it holds the weights."""
        return len(self._params) == len(abstract_params(self.model_config, self.config.dtype))

    @property
    def programs(self) -> Mapping[Key, Program]:
        """The compiled programs, by shape; `memory_analysis()` of each tells what it needs."""
        return self._programs.compiled

    def program(self, key: Key, then: Sequence[Key] = ()) -> Callable[..., Any]:
        """The program of a key, waited for if need be; `then` are those likely to be needed next."""
        return self._programs.get(key, then)

    # Steps

    @operation
    def run(self, key: ProgramKey, packed: np.ndarray | jax.Array, keeps_logits: bool) -> StepOutputs:
        """Start a step. `packed` is that of a `PackedStep`; its logits are kept for `sample_rows`, or not."""
        self._logits = None  # before there are others
        if self._begun:
            self.sample_begun()
        self._state, outputs = self.program(key)(self._params, self._state, self._slot_params, packed)
        if keeps_logits:
            self._logits = outputs.logits
        return outputs

    def begin(
        self,
        key: ProgramKey,
        packed: np.ndarray | jax.Array,
        sampled: Collection[int],
        others: Collection[int],
        then: Callable[[StepOutputs], object],
    ) -> None:
        """Start a step of several stages, which samples rows of some slots and computes rows of others.

        `then` is told what has been sampled. It is once other stages have something to do: when as many steps
        more have begun as there are of these, or one with rows of a slot that is to be sampled, or where
        such a slot is written.
        """
        self.sample_begun({*sampled, *others})
        program = self.program(key)
        assert isinstance(program, StagedProgram)
        inputs = self._params, self._state, self._slot_params, packed
        self._state, step = program.begin(*inputs, frozenset(sampled), then)
        self._begun.append(step)
        while len(self._begun) >= self._placement.num_stages:
            self.sample_first()

    def sample_begun(self, slots: Collection[int] | None = None) -> None:
        """Have steps sampled that have begun: all of them, or up to the last one that samples of `slots`."""
        count = len(self._begun)
        if slots is not None:
            while count and self._begun[count - 1].slots.isdisjoint(slots):
                count -= 1
        for _ in range(count):
            self.sample_first()

    def sample_first(self) -> None:
        """Have the first step sampled that has begun.

        Raises:
            EngineError: there is none, since it was released.
        """
        if not self._begun:
            raise EngineError("this executor was released before its last step was read; make a new LLM")
        step = self._begun.popleft()
        self._state, outputs = step.sample(self._state)
        step.then(outputs)

    @operation
    def sample_rows(
        self, key: RowsKey, take: TakeKey, rows: np.ndarray, places: np.ndarray, masks: Sequence[np.ndarray]
    ) -> SampledRows:
        """Sample rows of the last step's logits anew, and store their tokens; see `rows_program`."""
        assert self._logits is not None
        logits = self.program(take)(self._logits, rows)
        history, sampled = self.program(key)(self._state.history, self._slot_params, logits, places, *masks)
        self._state = self._state._replace(history=history)
        return sampled

    @operation
    def forget_logits(self) -> None:
        """Nothing more of the last step is sampled."""
        self._logits = None

    @operation
    def set_params(self, common: Any, rare: Any) -> None:
        """Upload sampling parameters of all slots, as `PackedSlotParams` has them; None has not changed."""
        # Copies: the CPU backend may alias host arrays, which change while steps are in flight.
        put = self._placement.stages[0].put
        if common is not None:
            self._slot_params = self._slot_params._replace(common=put(common.copy()))
        if rare is not None:
            self._slot_params = self._slot_params._replace(rare=put(rare.copy()))

    @operation
    def set_slot(self, slot: int, tokens: np.ndarray | None, table: np.ndarray) -> None:
        """Write a slot's tokens, if they are given, and its block table."""
        if tokens is not None:
            self.sample_begun((slot,))
            self._state = self._state._replace(history=self._set_row(self._state.history, slot, tokens))
        self._state = self._state._replace(tables=self._set_row(self._state.tables, slot, table))

    @operation
    def set_tokens(self, places: np.ndarray) -> None:
        """Write tokens to histories: `places` [3, N] int32 are slots, places there, and the tokens."""
        self.sample_begun(places[0].tolist())
        self._state = self._state._replace(history=self._set_tokens(self._state.history, places))

    # Copies

    @operation
    def copy(
        self,
        discarded: Sequence[int],
        dropped: Sequence[HostPiece],
        joined: Sequence[int],
        out: Sequence[tuple[int, Sequence[int]]],
        back: Sequence[tuple[Sequence[int], Sequence[HostBlock]]],
        loads: Sequence[tuple[int, Sequence[int], Sequence[HostBlock]]],
    ) -> None:
        """Start copies between the pool and the host, in this order; the device does them among its steps.

        Arguments are those of `BlockSwapper`'s `discard`, `drop`, `join`, `swap_out`, `swap_in` and `load`.
        """
        swapper, pool = self.swapper, self._placement.local_part(self._state.pool)
        assert swapper is not None
        for handle in discarded:
            swapper.discard(handle)
        for piece in dropped:
            swapper.drop(piece)
        for handle in joined:
            pool = swapper.join(pool, handle)
        for handle, block_ids in out:
            swapper.swap_out(pool, handle, block_ids)
        for block_ids, host_blocks in back:
            pool = swapper.swap_in(pool, block_ids, host_blocks)
        for handle, block_ids, host_blocks in loads:
            swapper.load(handle, block_ids, host_blocks)
        self._keep(swapper.advance(pool))

    def _keep(self, pool: jax.Array) -> None:
        """Take what has become of the pool on this process's devices."""
        self._state = self._state._replace(pool=self._placement.with_local_part(self._state.pool, pool))

    @operation
    def warm_up_copies(self) -> None:
        """Compile every program that copies."""
        if self.swapper is not None:
            self._keep(self.swapper.warm_up(self._placement.local_part(self._state.pool)))

    # Files

    def open_files(
        self, folder: pathlib.Path, fingerprint: str, max_bytes: int, most_writing: int
    ) -> BlockFiles:
        """Have files of blocks, or of this process's part of them; see `ModelExecutor.keep_files`."""
        pool = self._placement.local_part(self._state.pool)
        fingerprint = self._of_part(fingerprint)
        files = BlockFiles(folder, fingerprint, pool.shape[1:], np.dtype(pool.dtype), max_bytes)
        self.transfers = FileTransfers(files, most_writing).open()
        return files

    def _of_part(self, fingerprint: str) -> str:
        """Of what this process has of blocks: nobody has the same who shares them otherwise."""
        if self._placement.local is self._placement:
            return fingerprint
        part = f"part {jax.process_index()} of {jax.process_count()}, of {self._placement.width} devices"
        return f"{fingerprint} {part}, on {self._device.device_kind}"

    @operation
    def begin_files_anew(self, fingerprint: str) -> None:
        """See `FileTransfers.begin_anew`."""
        assert self.transfers is not None
        self.transfers.begin_anew(self._of_part(fingerprint))

    @operation
    def write_files(self, handle: int, names: Sequence[BlockName | None]) -> None:
        """Write what was copied out to files."""
        assert self.swapper is not None
        assert self.transfers is not None
        self.transfers.write(self.swapper.held(handle), names)

    @operation
    def read_files(self, handle: int, names: Sequence[BlockName]) -> None:
        """Start to read blocks from files."""
        assert self.transfers is not None
        self.transfers.read(Read(handle, tuple(names)))

    @operation
    def put(self, handle: int) -> None:
        """Keep blocks in host memory that were read from files, as far as they were there."""
        assert self.swapper is not None
        assert self.transfers is not None
        self.swapper.put(handle, self.transfers.take(handle))

    @operation
    def cancel_reads(self) -> None:
        """Forget what is being read from files, and what was read and is not `put`."""
        assert self.transfers is not None
        self.transfers.cancel_reads()

    def close_files(self) -> None:
        """Write what is under way, unless the disk does nothing, and no more."""
        if self.transfers is not None:
            self.transfers.close()
            self.transfers.flush()

    # Memory

    @operation
    def set_weight(self, name: str, weight: Any) -> None:
        """Take another weight in place of one."""
        self.sample_begun()
        self._params.pop(name, None)
        here = weight if isinstance(weight, jax.Array) else jax.device_put(weight, self._device)
        self._params[name] = self._placement.placed(self.model_config, self.config.formats, name, here)

    @operation
    def delete(self, weights: bool) -> None:
        """Give the memory of the pool back, and with `weights` theirs, once nothing is copied any more."""
        self.sample_begun()
        self.settle()
        kept = () if self._state.layers is None else (self._state.layers,)
        for array in (self._state.pool, *kept, *(jax.tree.leaves(self._params) if weights else ())):
            array.delete()
        if weights:
            self._params = {}

    def settle(self) -> None:
        """Wait until no copy is under way."""
        if self.swapper is not None:
            self.swapper.settle()

    @operation
    def make_pool(self) -> None:
        """Make the pool anew, all of it empty.

        Raises:
            CapacityError: it does not fit any more.
        """
        self._state = self._make_state()

    def let_go_of_all(self) -> None:
        """Do nothing any more."""
        self._programs.close()
        self._params, self.swapper, self._logits = {}, None, None
        self._begun.clear()
        for name in ("_state", "_slot_params", "_set_row", "_set_tokens"):
            vars(self).pop(name, None)


def _zeros(shapes: Any) -> Any:
    """Arrays of these shapes, made where they belong."""
    make = jax.jit(
        lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
    )
    return make()
