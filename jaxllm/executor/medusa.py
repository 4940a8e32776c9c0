"""Medusa heads: each guesses a token further ahead from what the newest token was sampled from.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024, arXiv
2401.10774), section 2.1: residual layers with SiLU, and an output layer. Each head drafts its likeliest
token; there are no trees of candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import EngineError
from jaxllm.executor.chain import Chain, chains_of
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.drafted import DraftBatch, Drafted, warm_up_filling
from jaxllm.executor.drafter import CompiledAhead, DraftTimes, Feed, placed, seconds_of, shapes_of
from jaxllm.executor.programs import EngineState
from jaxllm.executor.sampler import largest
from jaxllm.models.linear_weights import product
from jaxllm.models.medusa import TOKEN_MAP, MedusaConfig
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.types import Request


def run_heads(
    config: MedusaConfig,
    most: int,
    width: int,
    params: Mapping[str, jax.Array],
    hidden: jax.Array,
    places: jax.Array,
) -> jax.Array:
    """What the first `most` heads draft.

    Args:
        config: sizes (static).
        most: heads to ask (static).
        width: columns of what is drafted, at least C (static).
        params: weights by the names of `MedusaConfig.shapes`.
        hidden: those of `step.DeviceState`.
        places: [2, C] int32, slots and positions of the newest hidden states.

    Returns:
        Tokens [most, width] int32, -1 where nothing is finite.
    """
    slots, positions = places
    newest = hidden[slots, positions % hidden.shape[1]]
    drafts = []
    for head, output in enumerate(config.output_names[:most]):
        x = newest
        for layer in range(config.num_layers):
            name = f"blocks.{head}.layers.{layer}"
            x += jax.nn.silu(product(x, params[f"{name}.weight"], None, bias=params.get(f"{name}.bias")))
        scores = product(x, params[output], None, out_dtype=jnp.dtype(jnp.float32))
        tokens = largest(scores, is_native=False)
        if TOKEN_MAP in params:
            tokens = jnp.where(tokens < 0, -1, params[TOKEN_MAP][tokens])
        drafts.append(tokens)
    return jnp.pad(jnp.stack(drafts), ((0, 0), (0, width - places.shape[1])))


def run_chained(
    config: MedusaConfig,
    most: int,
    chain: Chain,
    params: Mapping[str, jax.Array],
    carried: EngineState,
    packed: jax.Array,
    lengths: jax.Array,
) -> jax.Array:
    """Draft for one of several iterations that follow one another.

    Args:
        config, most, params: as of `run_heads`.
        chain: how its inputs lie (static).
        carried: an executor's state without its pool.
        packed, lengths: of `Chain.rows`.

    Returns:
        The inputs of the iteration with its drafts.
    """
    rows = chain.rows(carried.tables, packed, lengths)
    places = jnp.stack([rows.slots, jnp.maximum(lengths - 2, 0)])
    assert carried.hidden is not None
    drafts = run_heads(config, most, chain.num_rows, params, carried.hidden, places)
    return chain.filled(packed, lengths, drafts[: chain.key.num_lookups])


def _released() -> EngineState:
    raise EngineError("what drafts was released with its engine; make a new LLM")


class _Programs(CompiledAhead[int | Chain]):
    """One for each size of a batch, and for those in iterations that follow one another."""

    def __init__(
        self, heads: MedusaConfig, config: ExecutorConfig, most: int, carried: EngineState, device: jax.Device
    ) -> None:
        self._heads, self._config, self._most, self._device = heads, config, most, device
        self._carried, self.chains = carried, chains_of(config)
        super().__init__([*reversed(config.buckets.decode), *self.chains.values()])

    def lower(self, key: int | Chain) -> jax.stages.Lowered:
        """See `CompiledAhead`."""
        dtype = jnp.dtype(self._config.dtype)
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.int32 if name == TOKEN_MAP else dtype)
            for name, shape in self._heads.shapes().items()
        }
        arguments: tuple[Any, ...] = params, self._carried
        if isinstance(key, Chain):
            run: Callable[..., jax.Array] = functools.partial(run_chained, self._heads, self._most, key)
            arguments += key.shapes()
        else:
            run = functools.partial(run_heads, self._heads, self._most, self._config.buckets.decode[-1])
            arguments = params, self._carried.hidden, jax.ShapeDtypeStruct((2, key), jnp.int32)
        return jax.jit(run).lower(*placed(arguments, self._device))

    def finish(self) -> None:
        """See `CompiledAhead`."""
        warm_up_filling(self._config, self._most, self._device)


class MedusaHeads:
    """Proposes what heads say, of all requests of an iteration together.

    Steps leave what their tokens were sampled from on the device. A request that was preempted drafts again
    once it has got a token.

    Args:
        heads: their sizes.
        load: reads their weights.
        config: sizes of the executor's batches.
        most: most tokens of a request, at most as many as there are heads.
        carried: the executor's state without its pool.
        device: where.
    """

    def __init__(
        self,
        heads: MedusaConfig,
        load: Callable[[], dict[str, jax.Array]],
        config: ExecutorConfig,
        most: int,
        carried: Callable[[], EngineState],
        device: jax.Device,
    ) -> None:
        self.heads, self.most = heads, most
        self._load, self._config, self._carried = load, config, carried
        self._sizes = config.buckets.decode
        self._params: Mapping[str, jax.Array] = load()
        self._programs = _Programs(heads, config, most, shapes_of(carried()), device)
        self._times = DraftTimes(most)
        self._is_warm = self._is_released = False
        self._resumed: dict[
            str, tuple[int, int]
        ] = {}  # how often preempted, and its length when that was seen

    def __repr__(self) -> str:
        return f"MedusaHeads({self.heads.num_heads}, most={self.most})"

    def let_go(self, *, weights: bool) -> None:
        """See `Drafter`."""
        if weights:
            self._params = {}

    def take_back(self) -> None:
        """See `Drafter`."""
        self._params = self._params or self._load()

    def release(self) -> None:
        """See `Drafter`."""
        self._is_released, self._params = True, {}
        self._programs.close()
        self._carried = _released

    @under_jax_defaults
    def warm_up(self) -> None:
        """Wait for the programs, and run each; what they take is what `seconds` says from now on.

        Raises:
            Exception: what XLA raised, if one cannot be compiled.
        """
        self._programs.wait()
        for size in self._sizes:
            seconds = seconds_of(functools.partial(self._read, size, np.zeros((2, size), np.int32)))
            self._times.measured(size, seconds, seconds)
        for size, chain in self._programs.chains.items():
            self._feed(size, *(np.zeros(one.shape, np.int32) for one in chain.shapes()))
        self._is_warm = True

    def seconds(self, num_requests: int, num_tokens: int) -> float:
        """See `jaxllm.sched.proposers.Proposer`; 0 until it is measured."""
        return self._times.seconds(num_requests, num_tokens)

    def forget(self, request: Request) -> None:
        """See `jaxllm.sched.proposers.Proposer`."""
        self._resumed.pop(request.request_id, None)

    @under_jax_defaults
    def propose(self, asked: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        """See `jaxllm.sched.proposers.Proposer`; nothing until the programs are compiled."""
        found: list[Sequence[int]] = [()] * len(asked)
        if not self._is_ready():
            return found
        places = [place for place, (request, _) in enumerate(asked) if self._is_newest_known(request)]
        if not places:
            return found
        size = next(size for size in self._sizes if size >= len(places))
        newest = np.zeros((2, size), np.int32)
        for column, place in enumerate(places):
            request = asked[place][0]
            newest[0, column], newest[1, column] = request.slot or 0, request.num_known_tokens - 2
        drafts = DraftBatch(self._run(size, newest))
        for column, place in enumerate(places):
            found[place] = Drafted(drafts, column, min(asked[place][1], self.most))
        return found

    def _is_ready(self) -> bool:
        if self._is_released or not self._programs.is_ready:
            return False
        if not self._is_warm:
            self.warm_up()
        return True

    @under_jax_defaults
    def prepare(self, asked: Sequence[tuple[Request, int]]) -> bool:
        """See `jaxllm.sched.proposers.ChainedProposer`."""
        is_ready = self._is_ready() and bool(self._programs.chains)
        return is_ready and all(self._is_newest_known(request) for request, _ in asked)

    def kept(self, request: Request) -> None:
        """See `jaxllm.sched.proposers.ChainedProposer`; nothing is held of it."""

    def forget_prefixes(self) -> None:
        """See `jaxllm.sched.proposers.ChainedProposer`; there are none."""

    def begin(self, requests: Sequence[Request], size: int) -> Feed:
        """See `Drafter`."""
        return functools.partial(self._feed, size)

    def _feed(self, size: int, packed: jax.Array | np.ndarray, lengths: jax.Array | np.ndarray) -> jax.Array:
        program = self._programs.get(self._programs.chains[size])
        inputs: jax.Array = program(self._params, self._carried(), packed, lengths)
        return inputs

    def _is_newest_known(self, request: Request) -> bool:
        """Whether the newest token was sampled in the request's present slot."""
        num_preempted, length = request.metrics.num_preemptions, request.num_known_tokens
        before, since = self._resumed.get(request.request_id, (0, 0))
        if num_preempted != before:
            self._resumed[request.request_id] = num_preempted, length
            return False
        return request.slot is not None and length > since

    def _run(self, size: int, places: np.ndarray) -> jax.Array:
        return self._programs.get(size)(self._params, self._carried().hidden, places)

    def _read(self, size: int, places: np.ndarray) -> np.ndarray:
        return np.asarray(self._run(size, places))
