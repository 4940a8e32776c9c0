"""What KV memory holds under contiguous allocation and under paging (vLLM, Kwon et al. 2023, Fig. 2).

Memory is counted in slots of one token. A request that has `k` outputs stores `prompt_len + k` tokens, and
`prompt_len + output_len` when it ends:

    a request's slots  |--- used ---|-- reserved --|-- internal --|-- rounding --|
                       0          stored         final          asked for       held
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from jaxllm.errors import ConfigError
from jaxllm.research.workloads.checks import check_choice, check_integer, check_number

Rule = Literal["oracle", "pow2", "max"]
RULES: tuple[Rule, ...] = ("oracle", "pow2", "max")
_MAX_SLOTS = 2**30


class Usage(NamedTuple):
    """What the slots of a pool are for. The five add up to the pool.

    Attributes:
        used: hold the KV of a token of a request that runs.
        reserved: will hold that of a token which is not generated yet.
        internal: asked for, and never to be used by the request they are for.
        rounding: held beyond what was asked for, because of the sizes an allocator gives.
        external: held by nobody. While requests wait, too few or too scattered for the first of them.
    """

    used: int
    reserved: int
    internal: int
    rounding: int
    external: int


@dataclasses.dataclass(eq=False, slots=True)
class SequenceState:
    """Lengths of a request in tokens; it has generated `num_outputs` of `output_len`."""

    prompt_len: int
    output_len: int
    num_outputs: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is stored while it runs."""
        return self.prompt_len + self.num_outputs

    @property
    def final_len(self) -> int:
        """Tokens whose KV is stored when it ends."""
        return self.prompt_len + self.output_len


class Memory(Protocol):
    """Who gets which slots of a pool."""

    num_slots: int

    def make_room(self, running: list[SequenceState]) -> list[SequenceState]:
        """Slots for the next token of each that runs, oldest first; returns those that lost theirs for it."""
        ...

    def admit(self, waiting: collections.deque[SequenceState]) -> list[SequenceState]:
        """Take from the left those that fit, up to the first that does not, with a slot for a next token."""
        ...

    def release(self, sequence: SequenceState) -> None:
        """It has ended."""
        ...

    def usage(self) -> Usage:
        """What the slots are for now."""
        ...


class BuddyAllocator:
    """Contiguous blocks whose sizes are powers of two; a free block is halved until it just fits.

    Orca's KV memory is taken to come from one (vLLM, Section 6.1). Of the smallest free blocks that suffice
    the one with the lowest address is taken; freed halves are joined at once.

    Args:
        num_slots: a power of two, at most 2**30.

    Raises:
        ConfigError: it is not.
    """

    def __init__(self, num_slots: int) -> None:
        check_integer("num_slots", num_slots, 1, _MAX_SLOTS)
        if num_slots & (num_slots - 1):
            raise ConfigError(f"num_slots={num_slots} must be a power of two: blocks are halved")
        self.num_slots = num_slots
        self._free: dict[int, list[int]] = {1 << bit: [] for bit in range(num_slots.bit_length())}
        self._free[num_slots].append(0)
        self._sizes: dict[int, int] = {}

    @property
    def blocks(self) -> dict[int, int]:
        """Sizes of the allocated blocks by their addresses."""
        return dict(self._sizes)

    def allocate(self, num_slots: int) -> int | None:
        """The address of a block of at least `num_slots`, or None where no free block is as large."""
        check_integer("num_slots", num_slots, 1, _MAX_SLOTS)
        wanted = power_of_two(num_slots)
        size = wanted
        while size <= self.num_slots and not self._free[size]:
            size *= 2
        if size > self.num_slots:
            return None
        address = self._free[size].pop(0)
        while size > wanted:
            size //= 2
            bisect.insort(self._free[size], address + size)
        self._sizes[address] = wanted
        return address

    def free(self, address: int) -> None:
        """Give back the block at an address that `allocate` returned."""
        size = self._sizes.pop(address)
        while size < self.num_slots and (address ^ size) in self._free[size]:
            self._free[size].remove(address ^ size)
            address &= ~size
            size *= 2
        bisect.insort(self._free[size], address)


class Reservations:
    """Orca as vLLM's evaluation has it: each request reserves all its slots at once, in one piece.

    Args:
        num_slots: of the pool, a power of two.
        rule: how many outputs a request reserves slots for beside its prompt: `"oracle"` knows how many it
            will have, `"pow2"` takes the next power of two from there, `"max"` all up to `max_model_len`.
        max_model_len: most tokens of a request.

    Raises:
        ConfigError: an argument is out of range or unknown.
    """

    def __init__(self, num_slots: int, rule: Rule, max_model_len: int) -> None:
        check_choice("rule", rule, RULES)
        check_integer("max_model_len", max_model_len, 1, _MAX_SLOTS)
        self.num_slots, self.rule, self.max_model_len = num_slots, rule, max_model_len
        self._buddies = BuddyAllocator(num_slots)
        self._addresses: dict[SequenceState, int] = {}

    def asked(self, sequence: SequenceState) -> int:
        """Slots that a request reserves; never fewer than it needs."""
        if self.rule == "oracle":
            return sequence.final_len
        if self.rule == "max":
            return max(self.max_model_len, sequence.final_len)
        most = max(self.max_model_len - sequence.prompt_len, sequence.output_len)
        return sequence.prompt_len + min(power_of_two(sequence.output_len), most)

    def make_room(self, running: list[SequenceState]) -> list[SequenceState]:
        """Nobody: everything is reserved."""
        return []

    def admit(self, waiting: collections.deque[SequenceState]) -> list[SequenceState]:
        """See `Memory.admit`."""
        admitted = []
        while waiting and (address := self._buddies.allocate(self.asked(waiting[0]))) is not None:
            admitted.append(waiting.popleft())
            self._addresses[admitted[-1]] = address
        return admitted

    def release(self, sequence: SequenceState) -> None:
        """Free its block."""
        self._buddies.free(self._addresses.pop(sequence))

    def usage(self) -> Usage:
        """See `Usage`."""
        used, final = _stored(self._addresses)
        asked, held = sum(map(self.asked, self._addresses)), sum(self._buddies.blocks.values())
        return Usage(used, final - used, asked - final, held - asked, self.num_slots - held)


class StaticBatches:
    """FasterTransformer, as we read it: one batch at a time, in one tensor.

    Every request of a batch has as many slots as the longest of the batch needs in the end, which is known;
    a batch is as many of those that wait as fit that way, and ends with its last request.

    Args:
        num_slots: of the pool.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = check_integer("num_slots", num_slots, 1, _MAX_SLOTS)
        self._batch: list[SequenceState] = []
        self._running: set[SequenceState] = set()

    def make_room(self, running: list[SequenceState]) -> list[SequenceState]:
        """Nobody: everything is reserved."""
        return []

    def admit(self, waiting: collections.deque[SequenceState]) -> list[SequenceState]:
        """The next batch, once the last one has ended."""
        if self._running:
            return []
        self._batch, longest = [], 0
        while waiting:
            longest = max(longest, waiting[0].final_len)
            if (len(self._batch) + 1) * longest > self.num_slots:
                break
            self._batch.append(waiting.popleft())
        self._running = set(self._batch)
        return list(self._batch)

    def release(self, sequence: SequenceState) -> None:
        """Its slots stay its batch's."""
        self._running.remove(sequence)

    def usage(self) -> Usage:
        """See `Usage`; slots of requests that have ended are `internal`."""
        if not self._running:
            return Usage(0, 0, 0, 0, self.num_slots)
        used, final = _stored(self._running)
        held = len(self._batch) * max(sequence.final_len for sequence in self._batch)
        return Usage(used, final - used, held - final, 0, self.num_slots - held)


class Paging:
    """vLLM: blocks of equal size, taken when a token needs them.

    When there is none left the newest request loses its blocks and waits in front; it starts again with all
    the tokens it had. A request is admitted if after it `watermark` of the blocks stay free, or if nobody
    runs.

    Args:
        num_slots: of the pool; a remainder smaller than a block is left out of it.
        block_size: tokens of a block.
        watermark: share of the blocks that an admission leaves free (vLLM 0.2.5: 0.01).

    Raises:
        ConfigError: an argument is out of range, or no block fits.
    """

    def __init__(self, num_slots: int, block_size: int = 16, watermark: float = 0.01) -> None:
        check_integer("block_size", block_size, 1, 1024)
        check_number("watermark", watermark, 0.0, 1.0)
        check_integer("num_slots", num_slots, block_size, _MAX_SLOTS)
        self.block_size, self.num_blocks = block_size, num_slots // block_size
        self.num_slots = self.num_blocks * block_size
        self._num_kept = int(watermark * self.num_blocks)
        self._num_free = self.num_blocks
        self._held: dict[SequenceState, int] = {}

    def make_room(self, running: list[SequenceState]) -> list[SequenceState]:
        """See `Memory.make_room`; the newest lose theirs."""
        preempted: list[SequenceState] = []
        for sequence in running:
            while sequence in self._held and (missing := self._missing(sequence)) > self._num_free:
                newest = running[len(running) - 1 - len(preempted)]
                self.release(newest)
                preempted.append(newest)
            if sequence in self._held:
                self._held[sequence] += missing
                self._num_free -= missing
        return preempted

    def admit(self, waiting: collections.deque[SequenceState]) -> list[SequenceState]:
        """See `Memory.admit`."""
        admitted = []
        while waiting:
            missing = self._missing(waiting[0])
            if missing + (self._num_kept if self._held else 0) > self._num_free:
                break
            admitted.append(waiting.popleft())
            self._held[admitted[-1]] = missing
            self._num_free -= missing
        return admitted

    def release(self, sequence: SequenceState) -> None:
        """Free its blocks."""
        self._num_free += self._held.pop(sequence)

    def usage(self) -> Usage:
        """See `Usage`; what the last blocks hold too much is `reserved` or `internal`."""
        used = stays = 0
        for sequence, num_blocks in self._held.items():
            used += sequence.num_tokens
            stays += min(num_blocks * self.block_size, sequence.final_len)
        held = self.num_slots - self._num_free * self.block_size
        return Usage(used, stays - used, held - stays, 0, self._num_free * self.block_size)

    def _missing(self, sequence: SequenceState) -> int:
        """Blocks that its next token takes beside those it holds."""
        return -(-(sequence.num_tokens + 1) // self.block_size) - self._held.get(sequence, 0)


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Averages over the steps at whose end requests waited.

    Attributes:
        shares: of the pool, by the fields of `Usage`; they add up to 1.
        mean_batch: requests that ran.
        num_steps: of the whole run.
        num_waiting_steps: steps that were averaged over.
        num_preemptions: how often a request lost its blocks.
    """

    shares: dict[str, float]
    mean_batch: float
    num_steps: int
    num_waiting_steps: int
    num_preemptions: int


def occupancy(lengths: Iterable[tuple[int, int]], memory: Memory) -> Occupancy:
    """Serve requests that are all there at the start, first come first served.

    A step gives every request that runs its next token; one that was just admitted computes its prompt in
    the same step. There is no limit to the batch but memory.

    Args:
        lengths: prompt and output tokens of each request, in order of arrival.
        memory: an empty pool.

    Raises:
        ConfigError: a request fits not even alone, or none ever waits.
    """
    waiting = collections.deque(SequenceState(*pair) for pair in lengths)
    running: list[SequenceState] = []
    totals, batch = [0] * len(Usage._fields), 0
    num_steps = num_waiting_steps = num_preemptions = 0
    while waiting or running:
        preempted = memory.make_room(running)
        running = running[: len(running) - len(preempted)]
        waiting.extendleft(preempted)
        if not preempted:
            running += memory.admit(waiting)
        if not running:
            raise ConfigError(
                f"a request of {waiting[0].prompt_len} + {waiting[0].output_len} tokens does not fit into "
                f"{memory.num_slots} slots; enlarge the pool"
            )
        for sequence in running:
            sequence.num_outputs += 1
        num_steps += 1
        num_preemptions += len(preempted)
        if waiting:
            totals = [total + slots for total, slots in zip(totals, memory.usage(), strict=True)]
            batch, num_waiting_steps = batch + len(running), num_waiting_steps + 1
        for sequence in running:
            if sequence.num_outputs == sequence.output_len:
                memory.release(sequence)
        running = [sequence for sequence in running if sequence.num_outputs < sequence.output_len]
    if not num_waiting_steps:
        raise ConfigError("no request ever waited; take more of them, or a smaller pool")
    whole = num_waiting_steps * memory.num_slots
    return Occupancy(
        {name: total / whole for name, total in zip(Usage._fields, totals, strict=True)},
        batch / num_waiting_steps,
        num_steps,
        num_waiting_steps,
        num_preemptions,
    )


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`, which is 1 or more."""
    return 1 << (number - 1).bit_length()


def _stored(sequences: Iterable[SequenceState]) -> tuple[int, int]:
    """Tokens stored now, and when they end, of all together."""
    used = final = 0
    for sequence in sequences:
        used += sequence.num_tokens
        final += sequence.final_len
    return used, final
