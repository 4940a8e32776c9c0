"""An engine's thread, seen from an event loop: bounded admission, requests in, outputs out."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxllm.engine.assembly import Assembly
from jaxllm.engine.output_builder import Delta, OutputBuilder
from jaxllm.engine.outputs import RequestOutput
from jaxllm.engine.replicas import thread_of
from jaxllm.engine.thread import Item
from jaxllm.errors import EngineError
from jaxllm.server.errors import busy, refused, shutting_down

_T = TypeVar("_T")
_SECONDS_TO_LOOK_UP = 1.0  # after which it is asked whether there is anything to wait for
_MAX_RETRY_SECONDS = 60
_MOST_AT_A_TIME = 8  # items from the engine, or outputs of them, in one turn of the loop
_POOL_SIZES = {"bodies": 1, "inputs": 2, "grammars": 64, "outputs": 1, "texts": 1}  # most of 64 wait
MANY_SCORES = 16
"""Places with scores, from which on naming them takes a thread."""


class Admission:
    """Counts what is admitted, in requests and in prompt tokens; both are bounded.

    Args:
        max_requests: most at once, those that run included. Each sample of a prompt is one.
        max_tokens: most prompt tokens of them together; one request alone may have more.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.num_requests = self.num_tokens = 0
        self.num_refused = 0
        self.retry_seconds = 1
        self.is_closing = False

    def check(self, num_requests: int = 1, num_tokens: int = 1) -> None:
        """Verify that there is room for so much more.

        Raises:
            ApiError: there is not, for now (503), or could never be (400).
        """
        if self.is_closing:
            self.num_refused += 1
            raise shutting_down()
        if num_requests > self.max_requests:
            raise refused(
                f"the request asks for {num_requests} samples at once; the server takes {self.max_requests}: "
                "send fewer prompts, or a smaller n or best_of"
            )
        has_room = self.num_tokens + num_tokens <= self.max_tokens or not self.num_requests
        if self.num_requests + num_requests <= self.max_requests and has_room:
            return
        self.num_refused += 1
        raise busy(
            f"the server is busy with {self.num_requests} requests of {self.num_tokens} prompt tokens; it "
            f"takes {self.max_requests} and {self.max_tokens}: try again later",
            min(_MAX_RETRY_SECONDS, max(1, self.retry_seconds)),
        )

    @contextlib.contextmanager
    def reserved(self, num_requests: int, num_tokens: int) -> Iterator[Reservation]:
        """Room for so much, until the block is left.

        Raises:
            ApiError: there is none; see `check`.
        """
        self.check(num_requests, num_tokens)
        reservation = Reservation(self, num_requests, num_tokens)
        try:
            yield reservation
        finally:
            reservation.release()


class Reservation:
    """Room for one call's requests."""

    def __init__(self, admission: Admission, num_requests: int, num_tokens: int) -> None:
        self._admission, self._num_requests, self._num_tokens = admission, num_requests, num_tokens
        admission.num_requests += num_requests
        admission.num_tokens += num_tokens

    def correct(self, num_tokens: int) -> None:
        """Set the number of tokens, once it is known."""
        self._admission.num_tokens += num_tokens - self._num_tokens
        self._num_tokens = num_tokens

    def release(self) -> None:
        """Give the room back."""
        self._admission.num_requests -= self._num_requests
        self._admission.num_tokens -= self._num_tokens
        self._num_requests = self._num_tokens = 0


class ClientGoneError(Exception):
    """Nobody reads the output any more."""


class Generation(AsyncIterator[RequestOutput]):
    """Outputs of one call's requests, in the order they come; each holds what is new since its last one.

    What is not read yet is put together by request, so that a slow reader costs no more than its tokens.
    """

    def __init__(self, core: EngineCore, builders: dict[str, OutputBuilder]) -> None:
        self._core, self._builders = core, builders
        self._pending: dict[str, Delta] = {}
        self._has_news = asyncio.Event()
        self._is_closed = self._is_suspect = self._is_naming = False
        self._failure: BaseException | None = None
        self._num_read = 0

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Those that have not ended, as far as it was read."""
        return tuple(self._builders)

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            ClientGoneError: it was closed.
            Exception: what ended the requests.
        """
        while self._builders:
            while not self._pending:
                if self._is_closed:
                    raise ClientGoneError
                if self._failure is not None:
                    self._builders.clear()
                    raise self._failure
                self._has_news.clear()
                await self._has_news.wait()
            self._num_read += 1
            if self._num_read % _MOST_AT_A_TIME == 0:
                await asyncio.sleep(0)
            if self._is_closed:
                raise ClientGoneError
            request_id = next(iter(self._pending))
            item = self._pending.pop(request_id)
            builder = self._builders[request_id]
            if item.num_scored > MANY_SCORES:
                self._is_naming = True
                output = await self._core.call(builder.add, item, pool="outputs")
                self._is_naming = False
            else:
                output = builder.add(item)
            if item.finish_reason is not None:
                del self._builders[request_id]
            if output is not None:
                return output
        raise StopAsyncIteration

    @property
    def has_pending(self) -> bool:
        """Whether the next output is there already."""
        return bool(self._pending)

    def receive(self, request_id: str, item: Delta | BaseException) -> None:
        """Take what is new of a request."""
        if request_id not in self._builders or self._failure is not None:
            return
        if isinstance(item, BaseException):
            self.fail(item)
            return
        earlier = self._pending.get(request_id)
        self._pending[request_id] = item if earlier is None else _merged(earlier, item)
        self._is_suspect = False
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come but this error, after what is there."""
        if self._failure is None:
            self._failure = error
        self._has_news.set()

    def close(self) -> None:
        """End the requests that are left; whoever waits for outputs is told. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._core.forget(self)
        self._has_news.set()

    def look_up(self, has_ended: Callable[[Sequence[str]], bool]) -> None:
        """End it if the engine's thread knows nothing of it, twice in a row: news may be on their way."""
        is_read = self._pending or self._is_naming or not self._builders
        if is_read or not has_ended(self.request_ids):
            self._is_suspect = False
        elif self._is_suspect:
            self.fail(EngineError("the engine's thread ended without a word"))
        else:
            self._is_suspect = True


def _merged(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.start,
        [*first.token_ids, *second.token_ids],
        [*first.logprobs, *second.logprobs],
        [*first.prompt_logprobs, *second.prompt_logprobs],
        second.finish_reason,
        second.stop_reason,
    )


class EngineCore:
    """An engine, or replicas, for an event loop. Checks and tokenising run in threads of their own.

    Args:
        replicas: the engines, with their tokenizers; they are this object's own from now on.
        max_queued_requests, max_queued_tokens: see `ServerConfig`.

    Attributes:
        is_drained: whether nothing is to be begun any more.
        on_abort: told how many requests end because their client has gone.
        waits: for what clients have yet to send; they end when the core is drained.
    """

    def __init__(
        self,
        replicas: Sequence[Assembly],
        *,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
    ) -> None:
        self.replicas, self.limits = replicas, replicas[0].engine.scheduler.config
        limits, num_running = self.limits, len(replicas) * self.limits.max_num_seqs
        num_queued = 4 * num_running if max_queued_requests is None else max_queued_requests
        max_requests = num_running + num_queued
        if max_queued_tokens is None:
            max_queued_tokens = max(limits.max_model_len, max_requests * min(limits.max_model_len, 2048))
        self.admission = Admission(max_requests, max_queued_tokens)
        self._thread = thread_of([one.engine for one in replicas])
        self._ids = itertools.count()
        self._pools = {
            name: ThreadPoolExecutor(size, thread_name_prefix=f"jaxllm-{name}")
            for name, size in _POOL_SIZES.items()
        }
        self._live: set[Generation] = set()
        self._inbox: collections.deque[tuple[Generation, Item]] = collections.deque()
        self._is_told = self.is_drained = False
        self.waits: set[asyncio.Timeout] = set()
        self.on_abort: Callable[[int], object] = lambda num_requests: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether the engine takes requests, or every replica does."""
        return not any(one.engine.is_closed or one.executor.is_lost for one in self.replicas)

    @property
    def num_live(self) -> int:
        """Calls under way."""
        return len(self._live)

    def start(self) -> None:
        """Serve the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._watch = self._loop.create_task(self._look_up())

    async def call(self, function: Callable[..., _T], *args: Any, pool: str = "inputs") -> _T:
        """A function's result, from a thread for work that would hold the loop up.

        Args:
            function: what to call.
            *args: its arguments.
            pool: whose work it is, of large "bodies", of requests' "inputs" (with new "grammars" apart) and
                "outputs", and other "texts"; each has threads of its own, so that none waits for another's.
        """
        assert self._loop is not None
        return await self._loop.run_in_executor(self._pools[pool], functools.partial(function, *args))

    async def call_last(self, function: Callable[[], None]) -> None:
        """Run a function in a thread that is not the pool's, which the function may shut down."""
        await asyncio.to_thread(function)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        requests: Sequence[dict[str, Any]],
        *,
        stream: bool,
        reservation: Reservation,
        name: str = "request",
    ) -> AsyncIterator[Generation]:
        """Queue requests, all or none; leaving the block ends those that are left.

        Args:
            name: what to call them, for people.
            requests: arguments of `Engine.prepare` for each prompt; outputs are called by their places.
            stream: whether outputs are wanted as they come.
            reservation: told how many tokens there are.

        Raises:
            RequestError, SamplingParamsError: a request is refused.
            EngineError: the engine has failed.
        """
        call = next(self._ids)
        named = [(f"{name}/{call}.{place}", one) for place, one in enumerate(requests)]
        holder: list[Generation] = []

        def put(item: Item) -> None:  # in the engine's thread
            self._inbox.append((holder[0], item))
            if not self._is_told and self._loop is not None:
                self._is_told = True
                with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all readers
                    self._loop.call_soon_threadsafe(self._distribute)

        prepare = functools.partial(self._thread.prepare, named, stream=stream, put=put)
        params = [one.get("sampling_params") for one in requests]
        takes_long = any(one is not None and self.replicas[0].engine.inputs.takes_long(one) for one in params)
        states, builders = await self.call(prepare, pool="grammars" if takes_long else "inputs")
        if self.is_drained:
            raise shutting_down()
        reservation.correct(sum(state.request.num_prompt_tokens for state in states))
        generation = Generation(self, builders)
        holder.append(generation)
        self._live.add(generation)
        try:
            self._thread.queue(states)
            yield generation
        finally:
            generation.close()

    def forget(self, generation: Generation) -> None:
        """End what is left of a generation."""
        self._live.discard(generation)
        if generation.request_ids and not all(one.engine.is_closed for one in self.replicas):
            self.on_abort(len(generation.request_ids))
            self._thread.abort_soon(generation.request_ids)

    async def drain(self, seconds: float, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Admit nobody any more, and wait for those under way to end; the rest are told that they do not.

        Args:
            seconds: to wait, at most.
            is_hurried: whether not to wait any longer.
        """
        self.admission.is_closing = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.admission.num_requests and not is_hurried():
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.02)
        self.is_drained = True
        left = list(self._live)
        error = shutting_down()
        for generation in left:
            generation.fail(error)
        for wait in self.waits:
            wait.reschedule(0.0)
        if left:
            self._thread.abort_soon([name for generation in left for name in generation.request_ids])

    def close(self) -> None:
        """End everything, and let go of the device."""
        if self._watch is not None:
            self._watch.cancel()
        self._thread.close()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for one in self.replicas:
            one.executor.flush_files()
            one.executor.release()

    def _distribute(self) -> None:
        """Pass on what came, a few at a time: others, such as who is to be refused, have turns between."""
        self._is_told = False
        for _ in range(min(len(self._inbox), _MOST_AT_A_TIME)):
            generation, (request_id, item) = self._inbox.popleft()
            generation.receive(request_id, item)
        if self._inbox and self._loop is not None:
            self._is_told = True
            self._loop.call_soon(self._distribute)

    async def _look_up(self) -> None:
        while True:
            await asyncio.sleep(_SECONDS_TO_LOOK_UP)
            for generation in list(self._live):
                generation.look_up(self._thread.has_ended)
