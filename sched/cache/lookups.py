"""Names of requests' blocks, and where blocks of these names are."""

from __future__ import annotations

import itertools
import sys

from jaxllm.sched.cache.blocks import BlockPool
from jaxllm.sched.cache.host import HostPool
from jaxllm.sched.cache.names import BlockName, FileIndex, cut_name, names_of, root
from jaxllm.types import HostBlock, Request


class Lookups:
    """Gives requests' blocks names, and finds blocks by them.

    Args:
        pool: the device's blocks.
        host: blocks of host memory.
        is_on: whether there is a prefix cache; without one nothing has a name.

    Attributes:
        looks_past_gaps: whether a request may find blocks after others that are nowhere, as where heads of
            sequences may be evicted before the rest.
        filled: blocks that got names since somebody emptied the list, if `collects_filled`.
    """

    def __init__(self, pool: BlockPool, host: HostPool, *, is_on: bool, looks_past_gaps: bool) -> None:
        self._pool, self._host, self._is_on = pool, host, is_on
        self._block_size = pool.block_size
        self.looks_past_gaps = looks_past_gaps
        self.collects_filled = False
        self.filled: list[tuple[int, BlockName]] = []

    def learn_names(self, request: Request, num_tokens: int) -> list[BlockName]:
        """Names of a request's full blocks, at least those of its first `num_tokens` if these are known.

        Nothing without prefix caching.
        """
        if self._is_on:
            learn_names(request, num_tokens, self._block_size)
        return request.block_names

    def name_blocks(self, request: Request, limit: int = sys.maxsize, tail: list[int] | None = None) -> None:
        """Let others find a holder's full blocks whose tokens are known, of its first `limit` tokens.

        `tail` are its blocks behind those that have names, if it has given back the others.
        """
        num_computed, first = min(request.num_computed_tokens, limit), request.num_named_blocks
        if self._is_on:
            learn_names(request, num_computed, self._block_size)
        names = request.block_names
        stop = min(len(names), num_computed // self._block_size)
        if stop <= first:
            return
        block_ids, offset = (request.block_ids, 0) if tail is None else (tail, first)
        for place in range(first, stop):
            block_id, name = block_ids[place - offset], names[place]
            self._pool.name(block_id, name)
            if self.collects_filled:
                self.filled.append((block_id, name))
        request.num_named_blocks = stop

    def may_look_up(self, request: Request) -> bool:
        """Whether a waiting request may find blocks: not if it asks how likely its prompt is."""
        return self._is_on and request.sampling_params.prompt_logprobs is None

    def findable(self, request: Request, files: FileIndex = ()) -> list[BlockName]:
        """Names that a waiting request looks up: not of its last token, which is to be computed.

        A cut request finds a block by either of two names: it looks up the one that is there, on the device,
        the host or in `files`, the uncut one if both are.
        """
        if not self.may_look_up(request):
            return []
        names = self.learn_names(request, request.num_tokens - 1)
        num_blocks = (request.num_tokens - 1) // self._block_size
        names = names if len(names) == num_blocks else names[:num_blocks]
        if not request.uncut_names:
            return names
        tiers = self._pool.names.places, self._host.names.places, files
        either = zip(request.uncut_names, names, strict=False)
        return [next((one for tier in tiers for one in both if one in tier), both[1]) for both in either]

    def names_to_keep(self, request: Request) -> list[BlockName | None]:
        """What a holder's blocks with computed KV hold; None for those that only it can use."""
        # A row that sampled an end token may not have computed it.
        num_computed = request.num_computed_tokens
        num_named = min(num_computed, request.num_known_tokens - 1) // self._block_size
        names: list[BlockName | None] = [*self.learn_names(request, num_computed)[:num_named]]
        return names + [None] * (self._pool.blocks_for(num_computed) - len(names))

    def held_on_host(self, request: Request) -> list[HostBlock]:
        """Copies of a holder's blocks that are in host memory already."""
        if not (self._is_on and self._host.names.places):
            return []
        places = [self._host.names.first(name) for name in self.names_to_keep(request) if name is not None]
        return [place for place in places if place is not None]

    def locate(self, request: Request, *, on_host: bool = True) -> list[int | HostBlock | None]:
        """Where a queued request's first blocks are: on the device, or else on the host, or nowhere (None).

        All blocks of a swapped one; of a waiting one those up to the last one that is somewhere, or on the
        device if `on_host` is False.
        """
        first, first_on_host = self._pool.names.first, self._host.names.first
        if request.host_blocks:
            places = request.host_blocks
            both = itertools.zip_longest(places, map(first, request.block_names[: len(places)]))
            return [place if block_id is None else block_id for place, block_id in both]
        found: list[int | HostBlock | None] = []
        count = 0
        for number, name in enumerate(self.findable(request), 1):
            block_id = first(name)
            at = first_on_host(name) if block_id is None and on_host else block_id
            found.append(at)
            if at is not None:
                count = number
            elif not self.looks_past_gaps:
                break
        return found[:count]


def learn_names(request: Request, num_tokens: int, block_size: int) -> None:
    """Name a request's full blocks, at least those of its first `num_tokens` if these are known."""
    names = request.block_names
    if len(names) >= num_tokens // block_size:
        return
    num_blocks = min(num_tokens, request.num_known_tokens) // block_size
    if len(names) >= num_blocks:
        return
    token_ids = request.token_ids(len(names) * block_size, num_blocks * block_size)
    if not request.dropped_token_ids:
        before = names[-1].digest if names else root(request.cache_salt)
        names += names_of(token_ids, block_size, before, len(names))
        return
    dropped = request.dropped_token_ids
    cut = request.uncut_names or names_of(dropped, block_size, root(request.cache_salt))
    new = names_of(token_ids, block_size, cut[-1].digest, cut[-1].number + 1)
    request.uncut_names += new
    names += [cut_name(name) for name in new]  # what they are called as it computes them
