"""Medusa heads: each guesses a token further ahead from what the newest token was sampled from.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024, arXiv
2401.10774), section 2.1: residual layers with SiLU, and an output layer. Each head drafts its likeliest
token; there are no trees of candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.drafted import DraftBatch, Drafted, warm_up_filling
from jaxllm.executor.drafter import CompiledAhead, DraftTimes, placed, seconds_of
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


class _Programs(CompiledAhead[int]):
    """One for each size of a batch."""

    def __init__(self, heads: MedusaConfig, config: ExecutorConfig, most: int, device: jax.Device) -> None:
        self._heads, self._config, self._most, self._device = heads, config, most, device
        super().__init__([*reversed(config.buckets.decode)])

    def lower(self, key: int) -> jax.stages.Lowered:
        """See `CompiledAhead`."""
        config, dtype = self._config, jnp.dtype(self._config.dtype)
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.int32 if name == TOKEN_MAP else dtype)
            for name, shape in self._heads.shapes().items()
        }
        kept = (config.max_num_seqs + 1, config.num_hidden, self._heads.hidden_size)
        arguments = params, jax.ShapeDtypeStruct(kept, dtype), jax.ShapeDtypeStruct((2, key), jnp.int32)
        run = functools.partial(run_heads, self._heads, self._most, self._config.buckets.decode[-1])
        return jax.jit(run).lower(*placed(arguments, self._device))


class MedusaHeads:
    """Proposes what heads say, of all requests of an iteration together.

    Steps leave what their tokens were sampled from on the device. A request that was preempted drafts again
    once it has got a token.

    Args:
        heads: their sizes.
        load: reads their weights.
        config: sizes of the executor's batches.
        most: most tokens of a request, at most as many as there are heads.
        hidden: the executor's hidden states.
        device: where.
    """

    def __init__(
        self,
        heads: MedusaConfig,
        load: Callable[[], dict[str, jax.Array]],
        config: ExecutorConfig,
        most: int,
        hidden: Callable[[], jax.Array | None],
        device: jax.Device,
    ) -> None:
        self.heads, self.most = heads, most
        self._load, self._config, self._hidden = load, config, hidden
        self._sizes = config.buckets.decode
        self._params: Mapping[str, jax.Array] = load()
        self._programs = _Programs(heads, config, most, device)
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
        self._hidden = lambda: None

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
        warm_up_filling(self._config, self._run(size, np.zeros((2, size), np.int32)))
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
        if self._is_released or not self._programs.is_ready:
            return found
        if not self._is_warm:
            self.warm_up()
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

    def _is_newest_known(self, request: Request) -> bool:
        """Whether the newest token was sampled in the request's present slot."""
        num_preempted, length = request.metrics.num_preemptions, request.num_known_tokens
        before, since = self._resumed.get(request.request_id, (0, 0))
        if num_preempted != before:
            self._resumed[request.request_id] = num_preempted, length
            return False
        return request.slot is not None and length > since

    def _run(self, size: int, places: np.ndarray) -> jax.Array:
        return self._programs.get(size)(self._params, self._hidden(), places)

    def _read(self, size: int, places: np.ndarray) -> np.ndarray:
        return np.asarray(self._run(size, places))
