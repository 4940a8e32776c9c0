"""Several engines as one: each runs in a thread of its own, and a router says which one answers a request."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxllm.engine.engine import Engine
from jaxllm.engine.output_builder import Delta, OutputBuilder
from jaxllm.engine.output_processor import RequestState, Sink
from jaxllm.engine.thread import EngineThread, Item, OutputStream
from jaxllm.errors import EngineError
from jaxllm.routing.prompt_keys import keys_of_token_ids
from jaxllm.routing.router import Router, TwoChoices


def thread_of(engines: Sequence[Engine]) -> EngineThread | Replicas:
    """What runs an engine for its clients, or several as one."""
    return EngineThread(engines[0]) if len(engines) == 1 else Replicas(engines)


class Replicas:
    """Runs engines of one model for their clients, as `EngineThread` runs one.

    Requests are checked by the first engine and answered by any: samples of a prompt may be apart. An engine
    that fails ends its requests with its cause. Those of the others go on, but no new ones are taken.

    Args:
        engines: alike, but for where they run.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """Nothing runs yet."""
        self._engines = engines
        self._threads = {str(place): EngineThread(engine) for place, engine in enumerate(engines)}
        limits = engines[0].scheduler.config
        self._router = Router(None if limits.enable_prefix_caching else TwoChoices())
        self._router.set_replicas(self._threads)
        room = (limits.num_gpu_blocks + limits.num_host_blocks) * limits.block_size
        for name in self._threads:
            self._router.report(name, now=time.monotonic(), queued_tokens=0, cache_tokens=room)
        self._live: set[str] = set()
        self._lock = threading.Lock()  # of these two

    @property
    def threads(self) -> Sequence[EngineThread]:
        """One of each engine."""
        return list(self._threads.values())

    @property
    def _checking(self) -> EngineThread:
        """Who checks requests: the first, or one that takes none any more and says why."""
        pairs = zip(self._engines, self.threads, strict=True)
        return next((one for engine, one in pairs if engine.is_closed or engine.is_asleep), self.threads[0])

    def submit(self, requests: Sequence[tuple[str, dict[str, Any]]], *, stream: bool) -> OutputStream:
        """Check and queue requests, all or none, as `EngineThread.submit`."""
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        states, builders = self.prepare(requests, stream=stream, put=items.put)
        outputs = OutputStream(self, items, builders)  # first, as there
        self.queue(states)
        return outputs

    def open(self) -> OutputStream:
        """Outputs of no requests yet, for `OutputStream.add`."""
        return OutputStream(self, queue.SimpleQueue(), {})

    def prepare(
        self, requests: Sequence[tuple[str, dict[str, Any]]], *, stream: bool, put: Callable[[Item], object]
    ) -> tuple[list[RequestState], dict[str, OutputBuilder]]:
        """Check requests, as `EngineThread.prepare`."""
        return self._checking.prepare(requests, stream=stream, put=put)

    def prepare_one(
        self,
        request_id: str,
        place: int,
        arguments: dict[str, Any],
        *,
        stream: bool,
        put: Callable[[Item], object],
    ) -> list[tuple[RequestState, OutputBuilder]]:
        """Check a request, as `EngineThread.prepare_one`."""
        return self._checking.prepare_one(request_id, place, arguments, stream=stream, put=put)

    def queue(self, states: Sequence[RequestState]) -> None:
        """Run requests that were prepared, each where it costs least.

        Raises:
            EngineError: an engine belongs to a thread that is not the caller.
        """
        parts: dict[str, list[RequestState]] = {}
        try:
            for state in states:
                state.sink = functools.partial(self._forward, state.sink)
                parts.setdefault(self._chosen(state), []).append(state)
            for name, part in parts.items():
                self._threads[name].queue(part)
        except BaseException:
            self._ended(states)
            raise

    def _chosen(self, state: RequestState) -> str:
        """The replica that a request is sent to."""
        request = state.request
        keys = keys_of_token_ids(request.prompt_token_ids, request.cache_salt or "")
        most = request.max_total_tokens - request.num_prompt_tokens
        with self._lock:
            self._live.add(request.request_id)
            choice = self._router.route(request.request_id, keys, now=time.monotonic(), max_tokens=most)
        return choice.replica

    def _forward(self, sink: Sink | None, state: RequestState, item: Delta | BaseException) -> None:
        """Pass on what is new of a request, in its engine's thread."""
        if isinstance(item, BaseException) or item.finish_reason is not None:
            self._ended([state])
        if sink is not None:
            sink(state, item)

    def _ended(self, states: Sequence[RequestState]) -> None:
        with self._lock:
            for state in states:
                self._live.discard(state.request.request_id)
                self._router.ended(state.request.request_id)

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        """Let no requests come meanwhile.

        Raises:
            EngineError: there are some.
        """
        with self._lock:
            if self._live:
                raise EngineError(
                    f"{len(self._live)} requests are under way: wait for them or abort them, and call again"
                )
            yield

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, and wait until they have; those that have ended are left alone."""
        for thread in self.threads:
            thread.abort(request_ids)

    def abort_soon(self, request_ids: Sequence[str]) -> None:
        """The same without waiting, nor a lock."""
        for thread in self.threads:
            thread.abort_soon(request_ids)

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a live request another priority, as `EngineThread.set_priority`."""
        for thread in self.threads:
            thread.set_priority(request_id, priority)

    def reset_prefix_cache(self) -> None:
        """Let later requests compute all of their prompts; those under way keep what they have found."""
        for thread in self.threads:
            thread.reset_prefix_cache()

    def close(self) -> None:
        """End all requests, and let the engines be used no more."""
        for thread in self.threads:
            thread.close()

    def has_ended(self, request_ids: Iterable[str]) -> bool:
        """Whether none of the requests is live, or about to be."""
        ids = tuple(request_ids)
        return all(thread.has_ended(ids) for thread in self.threads)
