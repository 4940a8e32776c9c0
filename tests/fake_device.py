"""A device that computes nothing, and checks every read of the KV pool.

What is written to a cell depends on all tokens before it, as keys and values do, so that whoever reads the
blocks of others reads what it would have written, or is found out.
"""

VOCAB_SIZE = 31


def next_token(token_ids):
    """A stand-in for a model: depends on every token and its position."""
    state = 7
    for token_id in token_ids:
        state = (state * 33 + token_id + 1) % 10007
    return state % VOCAB_SIZE


class FakeDevice:
    """A KV pool whose cells know what was written to them, copies on the host, a newest token per slot.

    Unless requests share blocks these are wiped as they are copied out, so that only the copy can bring them
    back. A row that has sampled
    one of its end tokens computes nothing any more.
    """

    def __init__(self, block_size, is_shared=False):
        self.block_size = block_size
        self.is_shared = is_shared
        self.cells = {}
        self.slots = {}  # slot -> request, newest token, number of tokens
        self.host = {}
        self.handles = set()
        self.loading = {}  # handle -> whether its blocks are filled only when it joins

    def execute(self, scheduled):
        """The sampled token of each sampled request, one iteration after another."""
        for handle in scheduled.discarded:
            del self.host[handle]
            self.loading.pop(handle, None)
        for swap in scheduled.joined:
            if self.loading.pop(swap.handle):
                self._bring_back(swap)
            self._resume(swap)
        for swap in scheduled.swap_out:
            assert swap.handle not in self.handles, "a handle is used twice"
            self.handles.add(swap.handle)
            self.host[swap.handle] = [self._take_block(block_id) for block_id in swap.block_ids]
        for swap in scheduled.swap_in:
            self._bring_back(swap)
            self._resume(swap)
        for swap in scheduled.load:
            self.loading[swap.handle] = swap.handle % 2 == 0
            if not self.loading[swap.handle]:
                self._bring_back(swap)
        sampled = []
        num_steps = scheduled.num_decode_steps
        assert num_steps == 1 or not scheduled.prefill, "several iterations beside a prompt"
        for num_left in reversed(range(num_steps)):
            sampled += [self._decode(request, request.num_tokens - num_left) for request in scheduled.decode]
        for chunk in scheduled.prefill:
            stop = chunk.start + chunk.length
            token_ids = chunk.request.token_ids(chunk.start, stop)
            assert len(token_ids) == chunk.length, "prefills a token that is not known"
            if chunk.is_first:
                self.slots[chunk.request.slot] = chunk.request, None, chunk.start
            assert self.slots[chunk.request.slot][0] is chunk.request, "goes on in a slot it did not open"
            self._write(chunk.request, chunk.start, token_ids)
        last = [chunk.request for chunk in scheduled.prefill if chunk.is_last]
        return sampled + [self._sample(request, request.num_tokens) for request in last]

    def _decode(self, request, num_tokens):
        """The token after the newest one, which the host may not know yet."""
        owner, newest, count = self.slots[request.slot]
        assert (owner, count) == (request, num_tokens - 1), "goes on from a token that is not there"
        if newest in request.end_token_ids and count > request.num_prompt_tokens:
            self.slots[request.slot] = request, newest, num_tokens
            return 0  # nobody reads it
        self._write(request, num_tokens - 2, [newest])
        return self._sample(request, num_tokens)

    def _bring_back(self, swap):
        copies = self.host[swap.handle]
        assert len(copies) == len(swap.block_ids)
        for block_id, cells in zip(swap.block_ids, copies, strict=True):
            self.cells.update({(block_id, row): cell for row, cell in enumerate(cells) if cell})

    def _resume(self, swap):
        del self.host[swap.handle]
        request = swap.request
        if request.slot is not None:  # else it was preempted again at once
            known = request.token_ids(0, request.max_total_tokens)
            self.slots[request.slot] = request, known[-1], len(known)

    def _take_block(self, block_id):
        take = self.cells.get if self.is_shared else self.cells.pop
        return [take((block_id, row), None) for row in range(self.block_size)]

    def _cell(self, request, position):
        return request.block_ids[position // self.block_size], position % self.block_size

    def _write(self, request, start, token_ids):
        state = self.cells[self._cell(request, start - 1)][1] if start else None
        for position, token_id in enumerate(token_ids, start):
            state = hash((state, position, token_id))
            self.cells[self._cell(request, position)] = token_id, state

    def _sample(self, request, num_tokens):
        context, expected = [], None
        for position in range(num_tokens - 1):
            token_id, state = self.cells[self._cell(request, position)]
            expected = hash((expected, position, token_id))
            assert state == expected, "attends to KV of other tokens"
            context.append(token_id)
        known = request.token_ids(0, num_tokens - 1)
        assert context[: len(known)] == known, "attends to another's KV"
        token_id = next_token(context)
        self.slots[request.slot] = request, token_id, num_tokens
        return token_id
