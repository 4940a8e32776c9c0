"""KV blocks in host memory."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence

from jaxllm.errors import Faults, KVCacheError
from jaxllm.sched.cache.eviction import EvictionOrder, Piece, RecencyOrder, ValueOrder
from jaxllm.sched.cache.names import BlockName, NameIndex
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.policies.retention import IdlePiece, LeastRecentlyUsed, RetentionPolicy
from jaxllm.types import HostBlock, HostPiece, host_blocks_of

_LEAST_RECENTLY_USED = LeastRecentlyUsed()
# Of this process: executors may serve one scheduler after another.
_handles = itertools.count()


class _Piece:
    """Blocks that are kept, and let go of, together."""

    __slots__ = ("blocks", "idle_since", "key", "num_held", "num_uses", "size", "stored_at")

    def __init__(self, key: HostPiece, now: float) -> None:
        self.key = key
        self.blocks: set[HostBlock] = set()  # those that hold something
        self.size = self.num_held = self.num_uses = 0
        self.idle_since = self.stored_at = now


class _Block:
    """What a block holds, and how many hold it."""

    __slots__ = ("name", "num_references", "piece")

    def __init__(self, name: BlockName | None, piece: _Piece) -> None:
        self.name, self.piece, self.num_references = name, piece, 1


class HostPool:
    """A number of blocks of host memory, in pieces of several that were copied there together.

    A block has a name, or is private to the request it was stored for. It is held by requests that count on
    it and by iterations that read it, until they have ended. A private one that nobody holds is gone; one
    with a name stays until its room is needed: pieces none of whose blocks is held go whole, in the order of
    a retention policy. A piece takes its room until its last block is gone. A copy
    has a handle that is never used again, so that whatever is still under way for one cannot be taken for
    another.

    Attributes:
        num_blocks: of host memory; 0 is a machine without any to copy to.
        num_free: those in no piece.
        names: where the blocks of names are.
        now: the engine's clock, in seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        retention: RetentionPolicy = _LEAST_RECENTLY_USED,
        faults: Faults | None = None,
    ) -> None:
        """Nothing in it; blocks have `block_size` tokens, and `retention` says which ones go.

        `faults` keeps what it raises: what nobody used for longest goes then.
        """
        self._faults = Faults() if faults is None else faults
        self.num_blocks = self.num_free = num_blocks
        self.now = 0.0
        self._block_size, self._retention = block_size, watched(retention)
        self.names: NameIndex[HostBlock] = NameIndex()
        self._order: EvictionOrder = ValueOrder(self._values)
        if isinstance(retention, LeastRecentlyUsed):
            self._order = RecencyOrder(self._is_awaited if retention.looks_ahead else None)
            if retention.looks_ahead:
                self.names.collect_unwatched()
        self._collects_lost = False
        self._lost: list[BlockName] = []
        self._blocks: dict[HostBlock, _Block] = {}
        self._idle: collections.OrderedDict[HostBlock, _Piece] = collections.OrderedDict()
        self._num_idle = 0  # blocks in pieces of which nobody holds a block
        self._dropped: list[HostPiece] = []
        self._read: list[HostBlock] = []  # by the next iteration
        self._reading: collections.deque[tuple[int, list[HostBlock]]] = collections.deque()  # step id, blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be stored: free ones, and those in pieces nobody holds anything of."""
        return self.num_free + self._num_idle

    @property
    def num_reading(self) -> int:
        """Blocks that iterations read which have not ended, each as often as it is read."""
        return len(self._read) + sum(len(blocks) for _, blocks in self._reading)

    def num_available_beside(self, blocks: Iterable[HostBlock]) -> int:
        """Blocks that could be stored if these were held, too."""
        pieces = {self._blocks[block].piece for block in blocks}
        return self.num_available - sum([piece.size for piece in pieces if not piece.num_held])

    def num_moved(self, blocks: Iterable[HostBlock]) -> int:
        """Blocks that are copied to bring these to the device: pieces come as a whole."""
        return sum([piece.size for piece in {self._blocks[block].piece for block in blocks}])

    def hold(self, blocks: Iterable[HostBlock]) -> None:
        """Keep blocks that were found."""
        for place in blocks:
            block = self._blocks[place]
            if not block.num_references:
                del self._idle[place]
                self._order.remove(place)
                piece = block.piece
                if not piece.num_held:
                    self._num_idle -= piece.size
                    with self._faults:
                        self._retention.observe(self._describe(piece), is_used=True)
                    piece.num_uses += 1
                piece.num_held += 1
            block.num_references += 1

    def release(self, blocks: Sequence[HostBlock]) -> None:
        """Let go of a sequence's blocks; its last ones are the first to go then."""
        for place in reversed(blocks):
            block = self._blocks[place]
            block.num_references -= 1
            if block.num_references:
                continue
            piece = block.piece
            piece.num_held -= 1
            if not piece.num_held:
                self._num_idle += piece.size
                piece.idle_since = self.now
                self._order.free(piece)
            self._idle[place] = piece
            self._order.add(place, piece)
            if block.name is None:
                self._forget(place)

    def touch(self, place: HostBlock) -> None:
        """Take a block that was found to be as if just let go of."""
        block = self._blocks[place]
        if not block.num_references:
            self._idle.move_to_end(place)
            block.piece.idle_since = self.now
            self._order.add(place, block.piece)

    def store(self, names: Sequence[BlockName | None]) -> list[HostBlock]:
        """Room for a copy of blocks of these names, which whoever asks holds; None is a private one.

        Raises:
            KVCacheError: there is none; nothing has changed.
        """
        num_blocks = len(names)
        if not 0 < num_blocks <= self.num_available:
            problem = f"{self.num_available} of {self.num_blocks} are free or idle"
            raise KVCacheError(f"cannot take {num_blocks} host blocks: {problem}")
        if self.num_free < num_blocks:
            self._order.stop_waiting(self._pieces_of(self.names.take_unwatched()))
        while self.num_free < num_blocks:
            old = self._order.next(self.now)
            assert isinstance(old, _Piece)
            with self._faults:
                self._retention.observe(self._describe(old), is_used=False)
            for place in list(old.blocks):
                self._forget(place)
        self.num_free -= num_blocks
        places = host_blocks_of(next(_handles), num_blocks)
        piece: _Piece | None = None
        for place, name in zip(places, names, strict=True):
            if piece is None or piece.key != place.piece:
                piece = _Piece(place.piece, self.now)
            self._blocks[place] = _Block(name, piece)
            piece.blocks.add(place)
            piece.size += 1
            piece.num_held += 1
            if name is not None:
                self.names.add(name, place)
        return places

    def name(self, place: HostBlock, name: BlockName) -> None:
        """Let a held private block be found, unless another of its name is."""
        block = self._blocks[place]
        if block.name is None and self.names.first(name) is None:
            block.name = name
            self.names.add(name, place)

    def forget_names(self) -> None:
        """Find none of the present blocks again."""
        for place in list(self._idle):
            self._forget(place)
        for block in self._blocks.values():
            block.name = None
        self.names.clear()

    # Iterations

    def read(self, blocks: Iterable[HostBlock]) -> None:
        """Let the iteration that is being decided read blocks; whoever held them for that does no longer."""
        self._read += blocks

    @property
    def has_dropped(self) -> bool:
        """Whether pieces are gone that executors were not told of."""
        return bool(self._dropped)

    def give_up(self, blocks: Sequence[HostBlock]) -> None:
        """Release blocks that were never written, so that executors need not be told."""
        self.release(blocks)
        pieces = {block.piece for block in blocks}
        self._dropped = [piece for piece in self._dropped if piece not in pieces]

    def take_dropped(self) -> tuple[HostPiece, ...]:
        """Pieces that are gone, and executors were not told of."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def emit(self, step_id: int) -> tuple[HostPiece, ...]:
        """What to tell executors with a step: pieces that are gone."""
        dropped = self.take_dropped() if self._dropped else ()
        if self._read:
            self._reading.append((step_id, self._read))
            self._read = []
        return dropped

    def complete(self, step_id: int) -> None:
        """Let go of what `step_id` and the steps before it have read."""
        while self._reading and self._reading[0][0] <= step_id:
            self.release(self._reading.popleft()[1])

    def collect_lost(self) -> None:
        """Remember from now on what is lost, until `take_lost`."""
        self._collects_lost = True

    def take_lost(self) -> list[BlockName]:
        """Names of blocks that have gone since the last time."""
        lost, self._lost = self._lost, []
        return lost

    def _pieces_of(self, names: Iterable[BlockName]) -> list[_Piece]:
        found = (place for name in names for place in self.names.places.get(name, ()))
        return [self._blocks[place].piece for place in found]

    def _is_awaited(self, piece: Piece) -> bool:
        return any(self.names.is_watched(self._blocks[place].name) for place in piece.blocks)

    def _values(self, pieces: Sequence[Piece]) -> Sequence[float]:
        described = [self._describe(piece) for piece in pieces if isinstance(piece, _Piece)]
        with self._faults:
            return self._retention.values(described, self.now)
        return [-piece.idle_seconds for piece in described]

    def _describe(self, piece: _Piece) -> IdlePiece:
        names = [name for place in piece.blocks if (name := self._blocks[place].name) is not None]
        position = sum([name.number for name in names]) / len(names) * self._block_size
        seconds = self.now - piece.idle_since, self.now - piece.stored_at
        return IdlePiece(names, position, len(names) * self._block_size, *seconds, piece.num_uses)

    def _forget(self, place: HostBlock) -> None:
        """Take out a block that nobody holds."""
        block = self._blocks.pop(place)
        del self._idle[place]
        self._order.remove(place)
        if block.name is not None:
            self.names.remove(block.name, place)
            if self._collects_lost:
                self._lost.append(block.name)
        piece = block.piece
        piece.blocks.remove(place)
        if not piece.blocks:
            self._num_idle -= piece.size
            self.num_free += piece.size
            self._dropped.append(piece.key)

    def check(self) -> None:
        """Verify that the blocks add up.

        Raises:
            KVCacheError: they do not.
        """
        pieces = {block.piece for block in self._blocks.values()}
        num_idle = sum(piece.size for piece in pieces if not piece.num_held)
        num_used = sum(piece.size for piece in pieces)
        if self.num_free + num_used != self.num_blocks or self.num_free < 0 or self._num_idle != num_idle:
            raise KVCacheError(
                f"{self.num_free} free and {num_used} used host blocks are not the {self.num_blocks} there "
                f"are, or {self._num_idle} are not the {num_idle} idle ones"
            )
        idle = {place for place, block in self._blocks.items() if not block.num_references}
        named = {place: block.name for place, block in self._blocks.items() if block.name is not None}
        found = {place: name for name, places in self.names.places.items() for place in places}
        if idle != self._idle.keys() or not idle <= named.keys() or named != found:
            raise KVCacheError(
                f"idle host blocks {idle}, named ones {named}, found ones {found} do not agree"
            )
        for piece in pieces:
            num_held = len(piece.blocks - idle)
            if piece.num_held != num_held or not self.names.is_consistent():
                raise KVCacheError(
                    f"{num_held} blocks of host piece {piece.key} are held, not {piece.num_held}"
                )

    def check_references(self, held: Iterable[HostBlock]) -> None:
        """Verify that blocks are held by those who hold `held`, and by iterations, and by nobody else.

        Raises:
            KVCacheError: a block is not.
        """
        counts = collections.Counter(
            [*held, *self._read, *itertools.chain(*(one for _, one in self._reading))]
        )
        for place, block in self._blocks.items():
            if block.num_references != counts.pop(place, 0):
                raise KVCacheError(f"{place} has {block.num_references} references")
        if counts:
            raise KVCacheError(f"{sorted(counts)} are held, and not in host memory")
