"""A device that computes nothing, and checks every read of the KV pool."""

VOCAB_SIZE = 31


def next_token(token_ids):
    """A stand-in for a model: depends on every token and its position."""
    state = 7
    for token_id in token_ids:
        state = (state * 33 + token_id + 1) % 10007
    return state % VOCAB_SIZE


class FakeDevice:
    """A KV pool whose cells know what was written to them, copies on the host, a newest token per slot.

    `forgets` wipes blocks as they are copied out, so that only the copy can bring them back. Several decode
    iterations end with the first request that does; those scheduled to follow them compute nothing.
    """

    def __init__(self, block_size, forgets):
        self.block_size = block_size
        self.forgets = forgets
        self.cells = {}
        self.newest_token = {}
        self.num_tokens = {}
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
            self._resume(swap, scheduled.num_decode_steps)
        for swap in scheduled.swap_out:
            assert swap.handle not in self.handles, "a handle is used twice"
            self.handles.add(swap.handle)
            self.host[swap.handle] = [self._take_block(block_id) for block_id in swap.block_ids]
        prefilled = {chunk.request for chunk in scheduled.prefill}
        for swap in scheduled.swap_in:
            self._bring_back(swap)
            if swap.request in prefilled:
                del self.host[swap.handle]
            else:
                self._resume(swap, scheduled.num_decode_steps)
        for swap in scheduled.load:
            self.loading[swap.handle] = swap.handle % 2 == 0
            if not self.loading[swap.handle]:
                self._bring_back(swap)
        sampled = []
        num_steps = scheduled.num_decode_steps if scheduled.decode else 0
        behind = {r for r in scheduled.decode if self.num_tokens[r.slot] != r.num_tokens - num_steps}
        if behind:
            assert behind == set(scheduled.decode), "some go on from tokens that are not there"
            return sampled
        going_on = [r for r in scheduled.decode if self.newest_token[r.slot] not in r.end_token_ids]
        for num_left in reversed(range(num_steps if going_on else 0)):
            for request in scheduled.decode:
                if request not in going_on:
                    sampled.append(0)  # it has ended, and nobody reads this
                    continue
                # It feeds its newest token, which the host may not know yet.
                num_tokens = request.num_tokens - num_left
                self._write(request, num_tokens - 2, [self.newest_token[request.slot]])
                sampled.append(self._sample(request, num_tokens))
            if any(self.newest_token[r.slot] in r.end_token_ids for r in going_on):
                break
        if not going_on or len(sampled) == num_steps * len(scheduled.decode):
            self.num_tokens.update({r.slot: r.num_tokens for r in scheduled.decode if r not in going_on})
        for chunk in scheduled.prefill:
            stop = chunk.start + chunk.length
            token_ids = chunk.request.token_ids(chunk.start, stop)
            assert len(token_ids) == chunk.length, "prefills a token that is not known"
            self._write(chunk.request, chunk.start, token_ids)
        last = [chunk.request for chunk in scheduled.prefill if chunk.is_last]
        return sampled + [self._sample(request, request.num_tokens) for request in last]

    def _bring_back(self, swap):
        copies = self.host[swap.handle]
        assert len(copies) == len(swap.block_ids)
        missing = slice(swap.num_intact, None)
        for block_id, cells in zip(swap.block_ids[missing], copies[missing], strict=True):
            self.cells.update({(block_id, row): cell for row, cell in enumerate(cells) if cell})

    def _resume(self, swap, num_steps):
        del self.host[swap.handle]
        request = swap.request
        if request.slot is not None:  # else it was preempted again at once
            known = request.token_ids(0, request.num_tokens)
            num_computed = request.num_computed_tokens - (num_steps - 1)  # before this iteration's
            assert len(known) >= num_computed, "resumes with a token in flight"
            self.newest_token[request.slot] = known[-1]
            self.num_tokens[request.slot] = len(known)

    def _take_block(self, block_id):
        take = self.cells.pop if self.forgets else self.cells.get
        return [take((block_id, row), None) for row in range(self.block_size)]

    def _cell(self, request, position):
        return request.block_ids[position // self.block_size], position % self.block_size

    def _write(self, request, start, token_ids):
        for position, token_id in enumerate(token_ids, start):
            self.cells[self._cell(request, position)] = (request.request_id, position, token_id)

    def _sample(self, request, num_tokens):
        context = []
        for position in range(num_tokens - 1):
            owner, written_position, token_id = self.cells[self._cell(request, position)]
            assert (owner, written_position) == (request.request_id, position), "attends to another's KV"
            context.append(token_id)
        token_id = next_token(context)
        self.newest_token[request.slot] = token_id
        self.num_tokens[request.slot] = num_tokens
        return token_id
