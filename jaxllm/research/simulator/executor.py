"""`SimulatedExecutor`: an `Executor` whose device is a cost model and whose clock is virtual."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence

from jaxllm.executor.kv.copy_timer import CopyTimer
from jaxllm.predictors.base import CostModel
from jaxllm.predictors.own import checked
from jaxllm.research.simulator.drafting import Drafting
from jaxllm.research.simulator.files import SimulatedFiles
from jaxllm.research.simulator.truth import Residuals, key_of
from jaxllm.research.workloads.result import TimeSpent
from jaxllm.sched.ledger import Ledger
from jaxllm.types import (
    MAX_STAGED_BLOCKS,
    NO_COPIES,
    CopyProgress,
    HostPiece,
    Read,
    SampledTokens,
    SchedulerOutput,
    Swap,
    piece_sizes,
)


class SimulatedExecutor:
    """Charges every step to a virtual clock and makes up its tokens (all 0).

    Copies either stop the device (`overlap_swaps=False`, as in AdaptiveLLM and vLLM 0.2.5) or run beside
    it, one after another in each direction. A copy out delays the device only while more than
    `MAX_STAGED_BLOCKS` are under way. A copy in delays the step whose request waits for it by what the step
    before did not hide, and by a copy out of the same request still under way.

    Args:
        costs: seconds each piece of work takes; asked once for each.
        residuals: what they are multiplied by; None is a device without noise.
        num_gpu_blocks: blocks in the device's pool.
        block_size: tokens per block.
        overlap_swaps: whether copies run beside computation.
        ledger: told what each restore took.
        files: what of the prefix cache is copied to the host is written to them, too.

    Attributes:
        drafting: adds what a draft model takes; None adds nothing.
    """

    is_undisturbed = True

    def __init__(
        self,
        costs: CostModel,
        *,
        num_gpu_blocks: int,
        block_size: int,
        overlap_swaps: bool,
        residuals: Residuals | None = None,
        ledger: Ledger | None = None,
        files: SimulatedFiles | None = None,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.block_size = block_size
        self.now = 0.0
        self.spent = TimeSpent()
        self.drafting: Drafting | None = None
        self._costs = checked(costs)
        self._residuals = residuals
        self._overlap_swaps = overlap_swaps
        self._ledger = ledger
        self._files = files
        self._reads: dict[int, tuple[float, list[bool]]] = {}  # handle -> ready at, which were there
        self._copied_out: dict[int, _Copied] = {}
        self._staged: collections.deque[tuple[float, int]] = collections.deque()  # (ready at, blocks)
        self._out_free_at = self._in_free_at = 0.0
        self._loads: dict[int, float] = {}  # handle -> ready at
        self._out_timer = CopyTimer(is_out=True, begins_when_sent=False)
        self._in_timer = CopyTimer(is_out=False, begins_when_sent=True)
        self._hidden = 0.0  # seconds of the last step, behind which a copy in can hide

    @property
    def max_decode_steps(self) -> int:
        """Most decode iterations of one `execute`."""
        return self.block_size

    def wait_until(self, time: float) -> None:
        """Let the clock run to `time`, with nothing to do: who comes then has copied nothing before."""
        if time > self.now:
            self.spent.idle += time - self.now
            self._hidden = 0.0
            self.now = time

    def execute(self, scheduled: SchedulerOutput) -> SimulatedStep:
        """Charge one step; the clock then shows its end."""
        for handle in scheduled.discarded:
            del self._loads[handle]
            self._in_timer.forget(handle)
        self.drop(scheduled.dropped)
        if scheduled.joined:
            self._join(scheduled)
        if scheduled.swap_out:
            self._copy_out(scheduled)
        decode, added = self._work(scheduled)
        if scheduled.swap_in or scheduled.load:
            self._copy_in(scheduled)
        started = self.now
        if scheduled.decode or scheduled.prefill:
            self._compute(scheduled, decode, added)
            if self.drafting is not None:
                self._draft(self.drafting.seconds(scheduled))
        self._hidden = self.now - started
        num_sampled = sum([chunk.is_last for chunk in scheduled.prefill])
        return SimulatedStep(scheduled.num_decode_steps * len(scheduled.decode) + num_sampled)

    def _work(self, scheduled: SchedulerOutput) -> tuple[float, float]:
        """Seconds of a step's decodes, and what its prompt tokens add to them."""
        costs, prefill = self._costs, scheduled.prefill
        batch, context = len(scheduled.decode), scheduled.num_context_tokens
        seconds = costs.step_seconds(batch, context) if batch else 0.0
        added = 0.0
        if prefill:
            num_tokens = prompt_context = 0
            for chunk in prefill:
                num_tokens += chunk.length
                prompt_context += chunk.start
            whole = costs.step_seconds(batch, context, num_tokens, len(prefill), prompt_context)
            added = max(0.0, whole - seconds)
            if self._residuals is not None:
                added *= self._residuals.ratio("prefill", key_of(prefill[0].request))
        seconds *= scheduled.num_decode_steps
        if self._residuals is not None:
            seconds *= self._residuals.ratio("decode", scheduled.step_id)
        return seconds, added

    def _compute(self, scheduled: SchedulerOutput, decode: float, added: float) -> None:
        """Charge a step's `_work`."""
        spent, prefill = self.spent, scheduled.prefill
        if prefill:
            num_tokens = repeated = 0
            for chunk in prefill:
                num_tokens += chunk.length
                repeated += chunk.num_recomputed
            recompute = added * repeated / num_tokens
            verify = 0.0
            if scheduled.num_drafts:
                verify = added * sum([chunk.length for chunk in prefill if chunk.drafts]) / num_tokens
            spent.recompute += recompute
            spent.decode += verify
            spent.prefill += added - recompute - verify
            if self._ledger is not None and repeated:
                for chunk in prefill:
                    if chunk.num_recomputed:
                        share = added * chunk.num_recomputed / num_tokens
                        self._ledger.measured(chunk.request.request_id, share, scheduled.step_id)
        spent.decode += decode
        self.now += decode + added

    def _draft(self, seconds: float) -> None:
        """Charge drafting with decoding, of which it is a part."""
        self.spent.decode += seconds
        self.now += seconds

    def copies(self) -> CopyProgress:
        """Loads that have ended by now, what copies out still hold, and how long copies took."""
        if not self._loads and not self._staged and not self._reads and self._out_timer.is_idle:
            return NO_COPIES
        timed = self._out_timer.look(self.now, lambda handle: self._copied_out[handle].ready_at <= self.now)
        timed += self._in_timer.look(self.now, lambda handle: self._loads[handle] <= self.now)
        arrived = [handle for handle, ready in self._loads.items() if ready <= self.now]
        while self._staged and self._staged[0][0] <= self.now:
            self._staged.popleft()
        num_leaving = sum([num_blocks for _, num_blocks in self._staged])
        read = [
            (handle, were_there) for handle, (ready, were_there) in self._reads.items() if ready <= self.now
        ]
        for handle, _ in read:
            del self._reads[handle]
        return CopyProgress(arrived, num_leaving, timed, read)

    def transfer(self, scheduled: SchedulerOutput) -> None:
        """Do copies that no step waits for."""
        self.execute(scheduled)

    def read(self, reads: Sequence[Read]) -> None:
        """Read blocks from files into host memory."""
        for read in reads:
            assert self._files is not None  # whoever asks knows of files
            ready, were_there = self._files.read(read.names, self.now)
            self._reads[read.handle] = ready, were_there
            self._copied_out[read.handle] = _Copied(ready, 0.0, piece_sizes(len(read.names)))

    @property
    def write_room(self) -> None:
        """Whatever is copied out may be written."""

    def wait_for_files(self, seconds: float) -> None:
        """Let the clock run until a read has ended, at most so long."""
        self.wait_until(min([self.now + seconds, *(ready for ready, _ in self._reads.values())]))

    def drop(self, pieces: Collection[HostPiece]) -> None:
        """Forget copies out."""
        for piece in pieces:
            copied = self._copied_out[piece.handle]
            copied.num_dropped += 1
            if copied.num_dropped == len(copied.sizes):
                del self._copied_out[piece.handle]
                self._out_timer.forget(piece.handle)

    def release(self) -> None:
        """There is nothing to let go of."""

    def _join(self, scheduled: SchedulerOutput) -> None:
        for swap in scheduled.joined:
            stall = max(0.0, self._loads.pop(swap.handle) - self.now)
            self._in_timer.forget(swap.handle)
            self._stall(stall)
            if self._ledger is not None:
                self._charge(swap, stall, scheduled.step_id)

    def _stall(self, seconds: float) -> None:
        self.spent.swap_stall += seconds
        self.now += seconds

    def _copy_out(self, scheduled: SchedulerOutput) -> None:
        for swap in scheduled.swap_out:
            num_blocks = len(swap.block_ids)
            seconds = self._costs.swap_out_seconds(num_blocks)
            if self._residuals is not None and swap.request is not None:
                seconds *= self._residuals.ratio("swap_out", key_of(swap.request))
            if not self._overlap_swaps:
                self._stall(seconds)
            else:
                is_known = num_blocks <= MAX_STAGED_BLOCKS  # as in the real executor
                self._out_timer.send(swap.handle, num_blocks, self.now, is_known=is_known)
                self._stage(num_blocks, seconds)
            ready_at = self._out_free_at if self._overlap_swaps else self.now
            self._copied_out[swap.handle] = _Copied(ready_at, seconds, piece_sizes(num_blocks))
            if self._files is not None:
                self._files.write([name for name in swap.names if name is not None], ready_at)

    def _stage(self, num_blocks: int, seconds: float) -> None:
        """Queue a copy out, in pieces that leave one by one; wait until few enough are left."""
        start, staged = max(self.now, self._out_free_at), self._staged
        num_left = num_blocks
        for piece in reversed(piece_sizes(num_blocks)):  # as in the real executor
            num_left -= piece
            self._out_free_at = start + seconds * (num_blocks - num_left) / num_blocks
            staged.append((self._out_free_at, piece))
        while staged and (staged[0][0] <= self.now or sum([n for _, n in staged]) > MAX_STAGED_BLOCKS):
            self._stall(max(0.0, staged.popleft()[0] - self.now))

    def _copy_in(self, scheduled: SchedulerOutput) -> None:
        """Charge copies in to a step."""
        done = max(self.now - self._hidden, self._in_free_at) if self._overlap_swaps else self.now
        delays = []
        for swap in scheduled.swap_in:
            seconds, out_ready, out_seconds = self._copy_in_seconds(swap)
            before = max(done, self.now)
            if seconds:
                done = max(done, out_ready) + seconds
            delays.append(max(0.0, done - before) if self._overlap_swaps else out_seconds + seconds)
        if any(swap.block_ids for swap in scheduled.swap_in):
            self._stall(max(0.0, done - self.now))
        if self._ledger is not None:
            for swap, delay in zip(scheduled.swap_in, delays, strict=True):
                self._charge(swap, delay, scheduled.step_id)
        for swap in scheduled.load:
            seconds, out_ready, _ = self._copy_in_seconds(swap)
            if not swap.block_ids:
                self._loads[swap.handle] = self.now
                continue
            if not self._overlap_swaps:
                self._stall(seconds)
            else:
                num_blocks = len(swap.block_ids)
                is_known = out_ready <= self.now and num_blocks <= MAX_STAGED_BLOCKS
                self._in_timer.send(swap.handle, num_blocks, self.now, is_known=is_known)
            done = max(done, out_ready, self.now) + seconds if self._overlap_swaps else self.now
            self._loads[swap.handle] = done
        if self._overlap_swaps:
            self._in_free_at = done

    def _copy_in_seconds(self, swap: Swap) -> tuple[float, float, float]:
        """Of a copy back: its seconds, and when its copies out were ready and what these took, once."""
        out_ready = out_seconds = 0.0
        pieces = {place.piece for place in swap.host_blocks}  # they come as a whole
        for handle in {piece.handle for piece in pieces}:
            copied = self._copied_out[handle]
            out_ready = max(out_ready, copied.ready_at)
            out_seconds, copied.seconds = out_seconds + copied.seconds, 0.0
        num_blocks = sum([self._copied_out[one.handle].sizes[one.number] for one in pieces])
        seconds = self._costs.swap_in_seconds(num_blocks) if num_blocks else 0.0
        if self._residuals is not None and swap.request is not None:
            seconds *= self._residuals.ratio("swap_in", key_of(swap.request))
        return seconds, out_ready, out_seconds

    def _charge(self, swap: Swap, seconds: float, step_id: int) -> None:
        if self._ledger is not None and swap.request is not None:
            self._ledger.measured(swap.request.request_id, seconds, step_id)


@dataclasses.dataclass(slots=True)
class _Copied:
    """A copy out: when it is ready, its seconds until a copy back is charged with them, and its pieces."""

    ready_at: float
    seconds: float
    sizes: list[int]
    num_dropped: int = 0


class SimulatedStep:
    """A step that has ended."""

    __slots__ = ("_num_sampled",)

    def __init__(self, num_sampled: int) -> None:
        self._num_sampled = num_sampled

    def is_ready(self) -> bool:
        """Always."""
        return True

    def fetch(self) -> SampledTokens:
        """Token 0 for every sampled request."""
        return SampledTokens([0] * self._num_sampled)
