"""A device that computes nothing, and checks every read of the KV pool.

What is written to a cell depends on all tokens before it, as keys and values do, so that whoever reads the
blocks of others reads what it would have written, or is found out. Only requests that are cut may read what
others that were cut wrote, of the same tokens, those that are gone included.
"""

import array

from jaxllm.types import NO_TOKEN, WRONG_DRAFT, host_blocks_of

VOCAB_SIZE = 31


def next_token(token_ids):
    """A stand-in for a model: depends on every token and its position."""
    state = 7
    for token_id in token_ids:
        state = (state * 33 + token_id + 1) % 10007
    return state % VOCAB_SIZE


def chained(token_ids, state=None, first=0):
    """What the KV of tokens at positions from `first` on depends on, after tokens of `state`."""
    for position, token_id in enumerate(token_ids, first):
        state = hash((state, position, token_id))
    return state


class FakeDevice:
    """A KV pool whose cells know what was written to them, copies on the host, a newest token per slot.

    Unless requests share blocks these are wiped as they are copied out, so that only the copy can bring them
    back. A row that has sampled one of its end tokens computes nothing any more. It forgives nothing: what is
    copied under a name must hold what the name says, and only what is there can be dropped.
    """

    def __init__(self, block_size, is_shared=False):
        self.block_size = block_size
        self.is_shared = is_shared
        self.cells = {}
        self.slots = {}  # slot -> request, newest token, number of tokens
        self.verified = {}  # slot -> by number of tokens, those of the last verification
        self.files = {}  # name -> cells
        self.reads = []
        self.host = {}  # block of the host -> its cells
        self.handles = set()
        self.loading = {}  # handle -> whether its blocks are filled only when it joins
        self.contents = {}  # name -> what blocks of it hold

    def execute(self, scheduled):
        """The sampled token of each sampled request, one iteration after another."""
        for handle in scheduled.discarded:
            self.loading.pop(handle)
        self.drop(scheduled.dropped)
        for swap in scheduled.joined:
            if self.loading.pop(swap.handle):
                self._bring_back(swap)
            self._resume(swap)
        for swap in scheduled.swap_out:
            assert (True, swap.handle) not in self.handles, "a handle is used twice"
            self.handles.add((True, swap.handle))
            assert list(swap.host_blocks) == host_blocks_of(swap.handle, len(swap.block_ids))
            copies = map(self._take_block, swap.block_ids)
            self.host.update(zip(swap.host_blocks, copies, strict=True))
            for name, place in zip(swap.names, swap.host_blocks, strict=True):
                if name is not None:
                    self._check_named(name, self.host[place])
                    self.files[name] = self.host[place]
        for swap in scheduled.swap_in:
            self._use(swap)
            self._bring_back(swap)
            self._resume(swap)
        for swap in scheduled.load:
            self._use(swap)
            self.loading[swap.handle] = swap.handle % 2 == 0
            if not self.loading[swap.handle]:
                self._bring_back(swap)
        sampled = []
        num_steps = scheduled.num_decode_steps
        assert num_steps == 1 or not scheduled.prefill, "several iterations beside a prompt"
        if scheduled.num_lookups:
            of_requests = [self._look_up(request, scheduled) for request in scheduled.decode]
            return [token for turn in zip(*of_requests, strict=True) for places in turn for token in places]
        for num_left in reversed(range(num_steps)):
            sampled += [self._decode(request, request.num_tokens - num_left) for request in scheduled.decode]
        for chunk in scheduled.prefill:
            stop = chunk.start + chunk.length
            token_ids = [*chunk.request.token_ids(chunk.start, stop), *chunk.drafts]
            assert len(token_ids) == chunk.length, "prefills a token that is not known"
            if chunk.is_first:
                self.slots[chunk.request.slot] = chunk.request, None, chunk.start
            assert self.slots[chunk.request.slot][0] is chunk.request, "goes on in a slot it did not open"
            self._write(chunk.request, chunk.start, token_ids)
        for chunk in scheduled.prefill:
            if chunk.is_last:
                stop = chunk.start + chunk.length + 1
                rows = range(stop - len(chunk.drafts), stop + 1)
                tokens = [self._sample(chunk.request, num_tokens) for num_tokens in rows]
                self.verified[chunk.request.slot] = dict(zip(rows, tokens, strict=True))
                sampled += tokens
        return sampled

    def drop(self, pieces):
        """Lose copies on the host."""
        for piece in pieces:
            blocks = [block for block in self.host if block.piece == piece]
            assert blocks, "drops what is not there"
            for block in blocks:
                del self.host[block]

    def read(self, read, is_lost):
        """Read a file into host memory; returns what was there, of which `is_lost` says what is not."""
        there = [name in self.files and not is_lost(number) for number, name in enumerate(read.names)]
        places = host_blocks_of(read.handle, len(read.names))
        for name, place, is_there in zip(read.names, places, there, strict=True):
            self.host[place] = self.files[name] if is_there else [None] * self.block_size
        return read.handle, there

    def _decode(self, request, num_tokens):
        """The token after the newest one, which the host may not know yet."""
        owner, newest, count = self.slots[request.slot]
        if count > num_tokens - 1:  # after drafts that were wrong
            newest, count = self.verified[request.slot][num_tokens - 1], num_tokens - 1
        assert (owner, count) == (request, num_tokens - 1), "goes on from a token that is not there"
        if newest in request.end_token_ids and count > request.num_prompt_tokens:
            self.slots[request.slot] = request, newest, num_tokens
            return 0  # nobody reads it
        self._write(request, num_tokens - 2, [newest])
        return self._sample(request, num_tokens)

    def _look_up(self, request, scheduled):
        """What a request samples in iterations in which the device drafts, with as many places in each."""
        most, width = scheduled.num_lookups, scheduled.num_lookups + 1
        tokens, turns = request.token_ids(0, request.num_known_tokens), []
        for turn in range(scheduled.num_decode_steps):
            has_ended = tokens[-1] in request.end_token_ids and len(tokens) > request.num_prompt_tokens
            if has_ended or len(tokens) == request.num_tokens:
                turns.append([NO_TOKEN] * width)
                continue
            draw = hash((request.arrival_index, len(tokens), turn))
            count = min(most, request.num_tokens - len(tokens) - 1) if draw % 5 else 0
            drafts = []
            for place in range(count):
                right = next_token([*tokens, *drafts])
                drafts.append(right if place < draw % (most + 2) else (right + 1) % VOCAB_SIZE)
            self._write(request, len(tokens) - 1, [tokens[-1], *drafts])
            sampled = [self._sample(request, len(tokens) + 1 + place) for place in range(count + 1)]
            kept = []
            for draft, token in zip([*drafts, None], sampled, strict=True):
                kept.append(token)
                if draft != token or token in request.end_token_ids:
                    break
            others = [WRONG_DRAFT] * (count + 1 - len(kept)) + [NO_TOKEN] * (width - 1 - count)
            turns.append([*kept, *others])
            tokens += kept
            self.slots[request.slot] = request, tokens[-1], len(tokens)
        return turns

    def _use(self, swap):
        assert (False, swap.handle) not in self.handles, "a handle is used twice"
        self.handles.add((False, swap.handle))

    def _bring_back(self, swap):
        assert len(swap.host_blocks) == len(swap.block_ids)
        for block_id, place in zip(swap.block_ids, swap.host_blocks, strict=True):
            cells = enumerate(self.host[place])
            self.cells.update({(block_id, row): cell for row, cell in cells if cell})

    def _resume(self, swap):
        request = swap.request
        if request.slot is not None:  # else it was preempted again at once
            known = request.token_ids(0, request.max_total_tokens)
            self.slots[request.slot] = request, known[-1], len(known)

    def _take_block(self, block_id):
        take = self.cells.get if self.is_shared else self.cells.pop
        return [take((block_id, row), None) for row in range(self.block_size)]

    def _check_named(self, name, cells):
        token_ids = [None if cell is None else cell[0] for cell in cells]
        assert token_ids == list(array.array("i", name.tokens)), "copies what is not filled yet"
        assert self.contents.setdefault(name, cells) == cells, "copies the KV of other tokens"

    def _cell(self, request, position):
        return request.block_ids[position // self.block_size], position % self.block_size

    def _write(self, request, start, token_ids):
        dropped = request.dropped_token_ids
        state = self.cells[self._cell(request, start - 1)][1] if start else chained(dropped)
        for place, token_id in enumerate(token_ids, start):
            state = chained([token_id], state, len(dropped) + place)
            self.cells[self._cell(request, place)] = token_id, state, bool(dropped)

    def _sample(self, request, num_tokens):
        dropped = request.dropped_token_ids
        context, expected = [], chained(dropped)
        for place in range(num_tokens - 1):
            token_id, state, is_cut = self.cells[self._cell(request, place)]
            expected = chained([token_id], expected, len(dropped) + place)
            assert state == expected, "attends to KV of other tokens"
            assert dropped or not is_cut, "attends to KV of a cut conversation"
            context.append(token_id)
        known = request.token_ids(0, num_tokens - 1)
        assert context[: len(known)] == known, "attends to another's KV"
        token_id = next_token(context)
        self.slots[request.slot] = request, token_id, num_tokens
        return token_id
