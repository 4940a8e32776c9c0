"""A draft model: a small checkpoint of the same vocabulary that says what may come next.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023, arXiv 2211.17192); Chen
et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023, arXiv 2302.01318). Here
it drafts its likeliest tokens, and those are kept that the model itself would have sampled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import CapacityError
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.draft_programs import DraftCore, DraftInputs, DraftKey, DraftPrograms
from jaxllm.executor.drafted import DraftBatch, Drafted
from jaxllm.executor.drafter import DraftTimes, Feed, seconds_of, shapes_of
from jaxllm.executor.programs import EngineState
from jaxllm.models.registry import Params
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.types import BlockName, Request, RequestStatus


@dataclasses.dataclass(slots=True, eq=False)
class _Held:
    """The KV of a request: its blocks, how many of its tokens are in them, and drafts behind them.

    These were computed, too, and are right as far as they are what came from place `num_tokens` on. With
    `is_chained` it drafts in iterations of which the host does not know yet what they kept. The first
    `num_named` blocks are found by others.
    """

    request: Request
    blocks: list[int]
    num_tokens: int = 0
    drafts: Sequence[int] = ()
    is_chained: bool = False
    num_named: int = 0


class DraftModel:
    """Proposes what is likeliest by a small model, or by heads, of all requests of an iteration together.

    It has a KV pool of its own, with blocks for each request, and computes what it has not seen before it
    drafts: at first the prompt, then what came since. KV of wrong drafts is written over. Where blocks are
    missing those go who draft nothing now, the longest unused first; who is preempted or ends holds none.
    Full blocks are found by their names, those that the engine's own pool gives them, until they are needed.

    Args:
        core: what drafts (`draft_programs`).
        load: reads its weights.
        config: sizes of its pool, and of the batches that it drafts for.
        most: most tokens of a request.
        device: where.
        carried: the executor's state without its pool; None to draft for one iteration at a time.

    Raises:
        CapacityError: its pool does not fit.
    """

    @under_jax_defaults
    def __init__(
        self,
        core: DraftCore,
        load: Callable[[], Params],
        config: ExecutorConfig,
        most: int,
        device: jax.Device,
        carried: Callable[[], EngineState] | None = None,
    ) -> None:
        self.core, self.config, self.most = core, config, most
        self._device, self._load, self._carried = device, load, carried
        self._programs = DraftPrograms(core, config, most, device, carried and shapes_of(carried()))
        self._times = DraftTimes(most)
        self._held: dict[str, _Held] = {}  # who has drafted last comes last
        self._is_warm = self._is_released = False
        self._params: Params = {}
        self._blocks = BlockPool(config.num_gpu_blocks, config.block_size)
        self._pool: jax.Array | None = None
        try:
            self.take_back()
        except BaseException:
            self._programs.close()
            raise

    def __repr__(self) -> str:
        return f"DraftModel({type(self.core).__name__}, most={self.most})"

    # What it holds on the device

    @under_jax_defaults
    def take_back(self) -> None:
        """Have weights and pool, where they were let go of.

        Raises:
            CapacityError: the pool does not fit.
        """
        if not self._params:
            self._params = self._load()
        if self._pool is None:
            self._pool = self._make_pool()
            self._blocks = BlockPool(self.config.num_gpu_blocks, self.config.block_size)

    def _make_pool(self) -> jax.Array:
        shape = self.core.pool()
        try:
            with jax.default_device(self._device):
                make = jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype))
                return jax.block_until_ready(make())
        except jax.errors.JaxRuntimeError as error:
            raise CapacityError(
                f"the draft model's KV pool of {self.config.num_gpu_blocks} blocks does not fit in device "
                "memory beside that of the model; lower num_gpu_blocks_override, kv_cache_memory or "
                f"gpu_memory_utilization: {error}"
            ) from error

    def let_go(self, *, weights: bool) -> None:
        """Give the memory of the pool back, and with `weights` theirs; nobody is being drafted for."""
        self._held.clear()
        self._pool = None
        if weights:
            self._params = {}

    def release(self) -> None:
        """Let go of everything: nothing will be drafted any more."""
        self._is_released = True
        self._programs.close()
        self._held.clear()
        self._params, self._pool, self._carried = {}, None, None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._blocks.num_free

    @under_jax_defaults
    def warm_up(self) -> None:
        """Wait for the programs, and run each; what they take is what `seconds` says from now on.

        Raises:
            Exception: what XLA raised, if one cannot be compiled.
        """
        self._programs.wait()
        for key in self._programs.catching_up:
            self._run(key, DraftInputs.zeros(key, self.config.max_blocks))
        for key in self._programs.drafting:
            inputs = DraftInputs.zeros(key, self.config.max_blocks)
            inputs.starts[:] = range(key.seqs + 1)
            inputs.lengths[:], inputs.num_seqs[0] = 1, key.seqs  # all in a block that nobody holds
            took = []
            for count in (1, self.most):
                inputs.counts[:] = count
                took.append(seconds_of(functools.partial(self._read, key, inputs)))
            self._times.measured(key.seqs, *took)
        for size, chain in self._programs.chains.items():
            tables = np.zeros((chain.num_rows, self.config.max_blocks), np.int32)
            self._feed(size, tables, *(np.zeros(one.shape, np.int32) for one in chain.shapes()))
        self._blocks.forget_names()  # the first block holds something else
        self._is_warm = True

    # A proposer

    def seconds(self, num_requests: int, num_tokens: int) -> float:
        """See `jaxllm.sched.proposers.Proposer`; 0 until it is measured."""
        return self._times.seconds(num_requests, num_tokens)

    def forget(self, request: Request) -> None:
        """See `jaxllm.sched.proposers.Proposer`."""
        held = self._held.pop(request.request_id, None)
        if held is not None:
            self._blocks.release(held.blocks)

    def forget_prefixes(self) -> None:
        """See `jaxllm.sched.proposers.ChainedProposer`."""
        self._blocks.forget_names()

    @under_jax_defaults
    def propose(self, asked: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """See `jaxllm.sched.proposers.Proposer`; nothing until the programs are compiled."""
        found: list[Sequence[int]] = [()] * len(asked)
        if not self._is_ready():
            return found
        names = {request.request_id for request, _ in asked}
        drafted: list[tuple[int, _Held, int]] = []
        for place, (request, wanted) in enumerate(asked):
            count = min(wanted, self.most, self.config.max_model_len + 1 - request.num_known_tokens)
            if count <= 0 or self._num_seen(request) <= 0 or not self.core.follows(request):
                continue
            room = self._room_for(request, self._num_seen(request) + count - 1, names)
            if room is not None:
                drafted.append((place, room, count))
        if not drafted:
            return found
        self._catch_up([held for _, held, _ in drafted])
        drafts = self._draft([(held, count) for _, held, count in drafted])
        for number, (place, held, count) in enumerate(drafted):
            found[place] = tokens = Drafted(drafts, number, count)
            held.num_tokens = self._num_seen(held.request)
            held.drafts = tokens[:-1] if self.core.keeps_drafts else ()
        return found

    def _is_ready(self) -> bool:
        """Whether it can draft, now that nothing is held of those who do not run."""
        if self._is_released or not self._programs.is_ready:
            return False
        for held in list(self._held.values()):
            if held.request.status is not RequestStatus.RUNNING:
                self.forget(held.request)
        if not self._is_warm:
            self.warm_up()
        return True

    # Iterations that follow one another

    @under_jax_defaults
    def prepare(self, asked: Sequence[tuple[Request, int]]) -> bool:
        """See `jaxllm.sched.proposers.ChainedProposer`."""
        if not (self._is_ready() and self._programs.chains):
            return False
        for request, stop in asked:
            follows = self._num_seen(request) > 0 and self.core.follows(request)
            if not follows or stop > self.config.max_model_len:
                return False
        names = {request.request_id for request, _ in asked}
        own = {block for name, held in self._held.items() if name in names for block in held.blocks}
        if sum([self._num_missing(*one) for one in asked]) > self._blocks.num_blocks - len(own):
            return False  # nobody has more than it needs then
        return all(self._room_for(request, stop, names) for request, stop in asked)

    @under_jax_defaults
    def begin(self, requests: Sequence[Request], size: int) -> Feed:
        """See `Drafter`."""
        helds = [self._held[request.request_id] for request in requests]
        self._catch_up(helds)
        tables = np.zeros((self._programs.chains[size].num_rows, self.config.max_blocks), np.int32)
        for number, held in enumerate(helds):
            held.is_chained = True
            tables[number, : len(held.blocks)] = held.blocks
        return functools.partial(self._feed, size, jax.device_put(tables, self._device))

    def kept(self, request: Request) -> None:
        """See `jaxllm.sched.proposers.ChainedProposer`."""
        held = self._held.get(request.request_id)
        if held is not None and held.is_chained:
            held.num_tokens = max(held.num_tokens, self._num_seen(request) - self.core.num_new)
            held.is_chained = False

    def _feed(
        self,
        size: int,
        tables: jax.Array | np.ndarray,
        packed: jax.Array | np.ndarray,
        lengths: jax.Array | np.ndarray,
    ) -> jax.Array:
        assert self._carried is not None
        program = self._programs.get(self._programs.chains[size])
        self._pool, inputs = program(self._params, self._pool, self._carried(), tables, packed, lengths)
        return inputs

    # Its computing

    def _num_seen(self, request: Request) -> int:
        """How many of a request's tokens are to be in the pool before any are drafted."""
        return request.num_known_tokens - self.core.num_behind

    def _room_for(self, request: Request, num_tokens: int, others: Iterable[str]) -> _Held | None:
        """What is held of a request, with blocks for so many tokens; None if there are too few."""
        held = self._held.pop(request.request_id, None) or self._found(request)
        self._held[request.request_id] = held
        missing = self._num_missing(request, num_tokens)
        if missing > self._blocks.num_free:
            for one in [one for name, one in self._held.items() if name not in others]:
                self.forget(one.request)
                if missing <= self._blocks.num_free:
                    break
            else:
                return None
        if missing > 0:
            held.blocks += self._blocks.allocate(missing)
            self._blocks.reclaimed.clear()
        return held

    def _found(self, request: Request) -> _Held:
        """What a request begins with that is in the pool."""
        size = self._blocks.block_size
        blocks = self._blocks.find(self._names(request)[: max(0, self._num_seen(request) - 1) // size])
        self._blocks.acquire(blocks)
        return _Held(request, blocks, len(blocks) * size, num_named=len(blocks))

    def _names(self, request: Request, first: int = 0) -> Sequence[BlockName]:
        """Names of its blocks from the `first` on; none without prefix caching, or where it was cut."""
        # Of what is some tokens behind, a block depends on the first tokens of the next one, too.
        return () if request.dropped_token_ids else request.block_names[first + (self.core.num_behind > 0) :]

    def _name(self, held: _Held) -> None:
        """Let others find its full blocks; what they hold is computed now, or is there."""
        count = held.num_tokens // self._blocks.block_size - held.num_named
        if count > 0:
            names = self._names(held.request, held.num_named)
            for block, name in zip(held.blocks[held.num_named :][:count], names, strict=False):
                self._blocks.name(block, name)
                held.num_named += 1
            self._blocks.unfilled.clear()

    def _num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that so many of its tokens take beyond those that it has."""
        held = self._held.get(request.request_id)
        return max(0, -(-num_tokens // self.config.block_size) - len(held.blocks if held else ()))

    def _catch_up(self, drafted: Sequence[_Held]) -> None:
        """Find out what is right of what is held, and compute all that is missing but for the newest."""
        waiting: list[tuple[_Held, int, int]] = []
        for held in drafted:
            num_seen = self._num_seen(held.request)
            known = held.request.token_ids(held.num_tokens, held.num_tokens + len(held.drafts))
            pairs = zip(known, held.drafts, strict=False)
            right = next((at for at, (one, other) in enumerate(pairs) if one != other), len(known))
            held.num_tokens, held.drafts = min(held.num_tokens + right, num_seen - 1), ()
            if num_seen - held.num_tokens > self.core.num_new:
                waiting.append((held, held.num_tokens, num_seen - 1))
                held.num_tokens = num_seen - 1
            self._name(held)
        if not waiting:
            return
        keys = self._programs.catching_up
        while waiting:
            now: list[tuple[_Held, int, int, int]] = []
            num_rows = 0
            while waiting and len(now) < keys[-1].seqs and num_rows < keys[-1].rows:
                held, start, stop = waiting.pop()
                end = min(stop, start + keys[-1].rows - num_rows)
                now.append((held, start, end, 0))
                num_rows += end - start
                if end < stop:
                    waiting.append((held, end, stop))
            self._compute(next(key for key in keys if key.rows >= num_rows and key.seqs >= len(now)), now)

    def _draft(self, drafted: Sequence[tuple[_Held, int]]) -> DraftBatch:
        """Tokens of each."""
        key = next(key for key in self._programs.drafting if key.seqs >= len(drafted))
        chunks = [(held, held.num_tokens, self._num_seen(held.request), count) for held, count in drafted]
        return DraftBatch(self._compute(key, chunks))

    def _read(self, key: DraftKey, inputs: DraftInputs) -> np.ndarray:
        return np.asarray(self._run(key, inputs))

    def _compute(self, key: DraftKey, chunks: Sequence[tuple[_Held, int, int, int]]) -> jax.Array:
        """Compute from one place to another of each, and draft so many after that."""
        inputs, end = DraftInputs.zeros(key, self.config.max_blocks), 0
        for number, (held, start, stop, count) in enumerate(chunks):
            rows, behind = slice(end, end + stop - start), self.core.num_behind
            inputs.tokens[rows] = held.request.token_ids(start + behind, stop + behind)
            if behind:
                places, size = np.arange(start, stop), self.config.block_size
                blocks = np.array(held.request.block_ids, np.int32)
                inputs.sources[rows] = blocks[places // size] * size + places % size
            end += stop - start
            inputs.starts[number + 1 :] = end
            inputs.lengths[number], inputs.counts[number] = stop, count
            inputs.block_tables[number, : len(held.blocks)] = held.blocks
        inputs.num_seqs[0] = len(chunks)
        return self._run(key, inputs)

    def _run(self, key: DraftKey, inputs: DraftInputs) -> jax.Array:
        layers = None if self._carried is None else self._carried().layers
        self._pool, drafts = self._programs.get(key)(self._params, self._pool, layers, inputs)
        return drafts
