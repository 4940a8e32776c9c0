"""What the scheduler's side needs of whoever computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from jaxllm.sampling.params import SamplingParams
from jaxllm.types.kv import HostPiece
from jaxllm.types.request import Request
from jaxllm.types.steps import CopyProgress, Read, SampledTokens, SchedulerOutput


class StepResult(Protocol):
    """A step that has been dispatched; `fetch` blocks until the device has finished it."""

    def is_ready(self) -> bool:
        """Whether the device has finished it."""
        ...

    def fetch(self) -> SampledTokens:
        """Wait for the device and return the tokens."""
        ...


class Executor(Protocol):
    """The one boundary between scheduling and computing."""

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks in the KV pool."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def max_decode_steps(self) -> int:
        """Most decode iterations of one `execute`."""
        ...

    @property
    def is_undisturbed(self) -> bool:
        """Whether the last step runs as it always will: no program was being compiled when it was sent."""
        ...

    def beyond_steps(self, params: SamplingParams) -> int:
        """Flags of what a request asks of sampling that not every step does; 0 for nothing."""
        ...

    def steps_together(self, flags: Collection[int], num_rows: int) -> bool:
        """Whether several iterations of so many requests, which ask for such flags, may be one `execute`."""
        ...

    def looks_up(self, flags: Collection[int], num_rows: int) -> bool:
        """Whether several iterations of so many requests with such flags may draft by themselves."""
        ...

    def is_ready_for(self, request: Request) -> bool:
        """Whether no step waits for a program because of what a request asks of sampling.

        If one would, it is compiled from now on, beside the steps; raises what came of it if it cannot be.
        """
        ...

    def wait_for_programs(self, seconds: float) -> None:
        """Wait until a program is compiled that a request may need, at most so long."""
        ...

    def execute(self, scheduled: SchedulerOutput) -> StepResult:
        """Dispatch one step; reads the requests' block tables before it returns."""
        ...

    def copies(self) -> CopyProgress:
        """How far the copies between device and host are."""
        ...

    def transfer(self, scheduled: SchedulerOutput) -> None:
        """Do what an iteration that computes nothing has to copy and to let go of, and give up all reads."""
        ...

    def read(self, reads: Sequence[Read]) -> None:
        """Start to read blocks from files; `copies` tells when they are in host memory."""
        ...

    @property
    def write_room(self) -> int | None:
        """Blocks that may be copied out to be written to files, as `copies` says; None without files."""
        ...

    def wait_for_files(self, seconds: float) -> None:
        """Wait until a read has ended, or if there is none something is written; at most so long."""
        ...

    def drop(self, pieces: Collection[HostPiece]) -> None:
        """Let go of host memory that nobody will read, and that no step is told of."""
        ...

    def release(self) -> None:
        """Let go of the device: nothing will be executed any more."""
        ...
