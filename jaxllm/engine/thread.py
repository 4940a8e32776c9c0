"""A thread that owns an engine, for any number of threads that want something of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm.engine.engine import Engine
from jaxllm.engine.output_builder import Delta, OutputBuilder
from jaxllm.engine.output_processor import RequestState, Sink
from jaxllm.engine.outputs import RequestOutput
from jaxllm.errors import EngineError, RequestError, SamplingParamsError
from jaxllm.system.threads import WorkingThread, is_interpreter_exiting

if TYPE_CHECKING:
    from jaxllm.engine.replicas import Replicas

_R = TypeVar("_R")
_SECONDS_TO_LOOK_UP = 1.0  # after which a reader asks whether there is anything to wait for
Item = tuple[str, Delta | BaseException]
"""The id of a request, and what is new of it, or what ended it."""
_Queue = queue.SimpleQueue[Item]  # its put may interrupt anything, itself included: the collector calls it


_INTERRUPTED = "a signal handler cannot wait for the call that it interrupts: call it from another thread"


class EngineThread:
    """Runs an engine for its clients: commands go in, deltas come out by a queue for each call.

    The thread is there while its requests are, so that nothing has to be closed; it ends them when the
    interpreter exits. While it runs the engine is its own, and requests that a thread had added itself go on
    with the others.
    """

    def __init__(self, engine: Engine) -> None:
        """Nothing runs yet."""
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, RequestState] = {}
        self._waiting: list[threading.Event] = []  # for what was commanded to have taken place
        self._lock = threading.RLock()  # of the thread's beginning and end
        self._thread: threading.Thread | None = None

    def submit(self, requests: Sequence[tuple[str, dict[str, Any]]], *, stream: bool) -> OutputStream:
        """Check and queue requests, all or none.

        Args:
            requests: an id that is never used twice and the arguments of `Engine.prepare`, in order; outputs
                are called by their places.
            stream: whether outputs are wanted in every step, not only the last.

        Raises:
            RequestError, SamplingParamsError: a request is refused; the message names its place.
            EngineError: the engine has failed, or belongs to a thread that is not the caller.
        """
        items: _Queue = queue.SimpleQueue()
        states, builders = self.prepare(requests, stream=stream, put=items.put)
        # Made first: should the caller be interrupted below, its requests end when this is collected.
        outputs = OutputStream(self, items, builders)
        self.queue(states)
        return outputs

    def open(self) -> OutputStream:
        """Outputs of no requests yet, for `OutputStream.add`."""
        return OutputStream(self, queue.SimpleQueue(), {})

    def prepare(
        self, requests: Sequence[tuple[str, dict[str, Any]]], *, stream: bool, put: Callable[[Item], object]
    ) -> tuple[list[RequestState], dict[str, OutputBuilder]]:
        """Check requests, all or none, for `queue` to take; arguments and errors as `submit`.

        Args beside those:
            put: given the id of a request and what is new of it, or what ended it; in the engine's thread.

        Returns:
            What `queue` takes, and what puts the deltas together, by id.
        """
        self._engine.owner.check_process()
        prepared: list[tuple[RequestState, OutputBuilder]] = []
        for place, (request_id, arguments) in enumerate(requests):
            try:
                prepared += self.prepare_one(request_id, place, arguments, stream=stream, put=put)
            except (RequestError, SamplingParamsError) as error:
                given = [one.get("sampling_params") for _, one in requests]
                name = f"prompts[{place}]"
                if isinstance(error, SamplingParamsError):
                    name = f"sampling_params[{place}]" if any(one is not given[0] for one in given) else name
                raise type(error)(f"{name}: {error}") from error
        builders = {state.request.request_id: builder for state, builder in prepared}
        return [state for state, _ in prepared], builders

    def prepare_one(
        self,
        request_id: str,
        place: int,
        arguments: dict[str, Any],
        *,
        stream: bool,
        put: Callable[[Item], object],
    ) -> list[tuple[RequestState, OutputBuilder]]:
        """Check a request, whose outputs are called by its place; as `prepare`."""
        return self._engine.prepare(
            request_id,
            stream=stream,
            sink=lambda state, item: put((state.request.request_id, item)),
            output_id=str(place),
            **arguments,
        )

    def queue(self, states: Sequence[RequestState]) -> None:
        """Run requests that were prepared, by this or by the thread of an engine like this one's.

        Raises:
            EngineError: the engine belongs to a thread that is not the caller.
        """
        self._engine.owner.check_process()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise EngineError(_INTERRUPTED)
        with self._lock:
            if not self._is_running:
                self._start()
            self._commands.put(functools.partial(self._add, states))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, and wait until they have; those that have ended are left alone."""
        self._have_done(functools.partial(self._abort, request_ids), lambda: None)

    def abort_soon(self, request_ids: Sequence[str]) -> None:
        """The same without waiting, nor a lock: from wherever the garbage collector runs."""
        self._commands.put(functools.partial(self._abort, request_ids, None))

    def set_priority(self, request_id: str, priority: int) -> None:
        """Give a live request another priority; one that has ended is left alone.

        Raises:
            RequestError: the priority is no integer, or would be ignored.
        """
        self._engine.inputs.check_priority(priority)
        self._commands.put(functools.partial(self._set_priority, request_id, priority))

    def reset_prefix_cache(self) -> None:
        """Let later requests compute all of their prompts; those under way keep what they have found."""
        self._have_done(self._reset_prefix_cache, self._engine.reset_prefix_cache)

    def call(self, action: Callable[[], _R]) -> _R:
        """Do something with the engine in its thread, or in this one while there is none.

        Raises:
            Exception: what the action raised.
        """
        done: concurrent.futures.Future[_R] = concurrent.futures.Future()
        self._engine.owner.check_process()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise EngineError(_INTERRUPTED)
        with self._lock:
            if not self._is_running:
                return action()
            self._commands.put(functools.partial(_call, action, done))
        return done.result()

    def close(self) -> None:
        """End all requests, and let the engine be used no more."""
        self._have_done(self._close, self._engine.close)

    def _have_done(self, command: Callable[[threading.Event], None], alone: Callable[[], object]) -> None:
        """Have the thread do something, and wait until it has; without a thread do it here.

        In a signal handler that interrupts the start of the thread nobody can wait: it is done soon after.
        """
        done = threading.Event()
        self._engine.owner.check_process()
        is_interrupted = self._lock._is_owned()  # type: ignore[attr-defined]  # as threading.Condition asks
        with self._lock:
            if not self._is_running and not (is_interrupted and self._thread is not None):
                alone()
                return
            self._commands.put(functools.partial(command, done))
        if not is_interrupted:
            done.wait()

    def has_ended(self, request_ids: Iterable[str]) -> bool:
        """Whether none of the requests is live, or about to be."""
        self._engine.owner.check_process()
        if not self._is_running:
            return True
        return self._commands.empty() and not any(request_id in self._live for request_id in request_ids)

    @property
    def _is_running(self) -> bool:
        """Whether there is a thread; one that was killed is none."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _start(self) -> None:
        """Begin. The thread waits for the lock, and ends at once if by then it is not the one.

        So a start that Ctrl-C interrupts, wherever it does, leaves nothing behind.
        """
        owner = self._engine.owner
        if self._thread is not None:  # it was killed, or never began
            owner.give_back(self._thread)
        thread = WorkingThread(target=self._run, name="jaxllm-engine")
        try:
            self._thread = thread
            owner.lend(thread)
            thread.start()
        except BaseException:
            self._thread = None
            owner.give_back(thread)
            raise

    # In the thread

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return
        while True:
            while not self._commands.empty():
                command = self._commands.get()
                try:
                    command()
                except BaseException as error:
                    self._end(error)
            if is_interpreter_exiting():
                self._end(EngineError("the interpreter exits"))
            if not (self._live or self._waiting or self._engine.loop.is_draining):
                with self._lock:
                    if self._commands.empty():
                        self._thread = None
                        self._engine.owner.give_back(threading.current_thread())
                        return
            try:
                self._engine.advance()
                time.sleep(0)  # whoever reads has a turn: else it waits for the next step to be dispatched
            except BaseException as error:
                self._end(error)
            finally:
                waiting, self._waiting = self._waiting, []
                for event in waiting:
                    event.set()

    def _forward(self, sink: Sink | None, state: RequestState, item: Delta | BaseException) -> None:
        """Pass on what is new of a request to whoever prepared it."""
        if isinstance(item, BaseException) or item.finish_reason is not None:
            self._live.pop(state.request.request_id, None)
        if sink is not None:
            sink(state, item)

    def _end(self, error: BaseException) -> None:
        """End all requests with what went wrong. If the engine has failed it has done so already."""
        for state in list(self._live.values()):
            self._end_one(state, error)

    def _end_one(self, state: RequestState, error: BaseException) -> None:
        request_id = state.request.request_id
        if self._engine.is_live(request_id):
            with contextlib.suppress(EngineError):  # it has failed of that, and told all
                self._engine.drop(request_id)
        if request_id in self._live and state.sink is not None:
            state.sink(state, error)

    def _add(self, states: Sequence[RequestState]) -> None:
        for state in states:
            self._live[state.request.request_id] = state
            state.sink = functools.partial(self._forward, state.sink)
        try:
            self._engine.add(states)
        except Exception as error:
            for state in states:
                self._end_one(state, error)

    def _abort(self, request_ids: Sequence[str], done: threading.Event | None) -> None:
        for request_id in request_ids:
            if self._engine.is_live(request_id):
                self._engine.abort(request_id)
        if done is not None:
            self._waiting.append(done)

    def _reset_prefix_cache(self, done: threading.Event) -> None:
        self._waiting.append(done)
        self._engine.reset_prefix_cache()

    def _close(self, done: threading.Event) -> None:
        self._waiting.append(done)
        self._engine.close()

    def _set_priority(self, request_id: str, priority: int) -> None:
        if self._engine.is_live(request_id):
            self._engine.set_priority(request_id, priority)


class OutputStream(Iterator[RequestOutput]):
    """Outputs of one call's requests, each time with everything so far; in the order they come.

    Closing it ends the requests that are left; so does dropping it, used or not.
    """

    def __init__(
        self, thread: EngineThread | Replicas, items: _Queue, builders: dict[str, OutputBuilder]
    ) -> None:
        self._thread, self._items, self._builders = thread, items, builders
        self._dropped = weakref.finalize(self, _abort_left, thread, builders)
        self._dropped.atexit = False

    def add(self, request_id: str, place: int, arguments: dict[str, Any]) -> None:
        """Check and queue one request more, of which only the last output is wanted.

        Args:
            request_id: an id that is never used twice.
            place: what its output is called.
            arguments: of `Engine.prepare`.

        Raises:
            RequestError, SamplingParamsError: it is refused.
            EngineError: the engine has failed, or belongs to a thread that is not the caller.
        """
        prepared = self._thread.prepare_one(request_id, place, arguments, stream=False, put=self._items.put)
        self._builders.update({state.request.request_id: builder for state, builder in prepared})
        self._thread.queue([state for state, _ in prepared])

    @property
    def num_unfinished(self) -> int:
        """Requests whose last output is still to come."""
        return len({builder.request_id for builder in list(self._builders.values())})

    def __next__(self) -> RequestOutput:
        """The next output; waits for it.

        Raises:
            EngineError: the engine has failed.
            Exception: what ended all requests, such as an error of a scheduling policy.
        """
        while self._builders:
            request_id, item = self._next_item()
            if isinstance(item, BaseException):
                self._builders.clear()
                raise item
            builder = self._builders.get(request_id)
            if builder is None:  # another thread has closed this
                continue
            output = builder.add(item)
            if item.finish_reason is not None:
                self._builders.pop(request_id, None)
            if output is not None:
                return output
        raise StopIteration

    def _next_item(self) -> tuple[str, Delta | BaseException]:
        has_ended = False
        while True:
            try:
                return self._items.get(timeout=_SECONDS_TO_LOOK_UP)
            except queue.Empty:
                if has_ended:  # twice, since the last item is put after its request has ended
                    self._builders.clear()
                    raise EngineError(
                        "the last tokens were lost when reading them was interrupted; generate again"
                    ) from None
                has_ended = self._thread.has_ended(self._builders)

    def set_priority(self, place: int, priority: int) -> None:
        """Give the request at a place of the call another priority, for policies that look at it.

        Raises:
            RequestError: the priority is no integer, or would be ignored.
        """
        for request_id, builder in list(self._builders.items()):  # whoever reads takes some out meanwhile
            if builder.request_id == str(place):
                self._thread.set_priority(request_id, priority)

    def close(self) -> None:
        """End the requests that are left, and wait until they hold nothing."""
        request_ids = tuple(self._builders)
        self._builders.clear()
        if request_ids:
            self._thread.abort(request_ids)
        self._dropped.detach()


def _call(action: Callable[[], _R], done: concurrent.futures.Future[_R]) -> None:
    try:
        done.set_result(action())
    except BaseException as error:
        done.set_exception(error)


def _abort_left(thread: EngineThread | Replicas, builders: dict[str, OutputBuilder]) -> None:
    thread.abort_soon(tuple(builders))
