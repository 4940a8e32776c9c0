"""Connections between the processes of an engine: a leader, which decides, and followers."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jaxllm
from jaxllm.errors import ConfigError, EngineError
from jaxllm.executor.processes.wire import MAX_FIRST_BYTES, packed, receive
from jaxllm.executor.step_programs import Key

_logger = logging.getLogger(__name__)
SECONDS_TO_COME = 300.0
"""How long the processes of an engine wait for each other at their start."""
_BEAT_SECONDS = 1.0
_PATIENCE = 15.0
"""Seconds without a sign of life after which a process is given up; one that ends is noticed at once."""
_SECONDS_TO_KNOW = 2.0
_WAY_OUT = "make a new engine: start all of its processes again"
Settings = Mapping[str, str]


class Connection:
    """One connection, on which several threads may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._is_closed = False

    def send(self, name: str, *arguments: Any) -> None:
        """Send a message.

        Raises:
            OSError: the connection is broken.
        """
        self.send_bytes(packed(name, arguments))

    def send_bytes(self, message: bytes) -> None:
        """Send what `packed` has made."""
        with self._lock:
            self.sock.sendall(message)

    def beat(self) -> None:
        """Give signs of life, until it is closed."""

        def run() -> None:
            with contextlib.suppress(OSError):
                while not self._is_closed:
                    self.send("beat")
                    time.sleep(_BEAT_SECONDS)

        threading.Thread(target=run, name="jaxllm-beat", daemon=True).start()

    def close(self) -> None:
        """End it, also for a thread that waits for a message or to send one."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Leader:
    """The followers of an engine, for the process that decides.

    Args:
        address: host and port that followers connect to.
        num_processes: of the engine, itself included.
        settings: that followers must have, too, as text.
    """

    def __init__(self, address: tuple[str, int], num_processes: int, settings: Settings) -> None:
        self._changed = threading.Condition()
        self._lost: EngineError | None = None
        self._is_over = False
        self._compiled: dict[Key, set[int]] = {}
        self._answers: dict[str, dict[int, Any]] = {}
        self._news: list[tuple[int, Any]] = []
        self._followers: dict[int, Connection] = {}
        try:
            with socket.create_server(address) as server:
                self._gather(server, address, num_processes, settings)
        except OSError as error:
            raise ConfigError(
                f"master_addr={address[0]!r}, master_port={address[1]}: the leader (node_rank=0) cannot "
                f"listen there: {error.strerror or error}; name an address of this machine and a free port"
            ) from error
        self._coordinator = f"{address[0]}:{_free_port(address[0])}"
        for connection in self._followers.values():
            connection.send("begin", self._coordinator)
        begin_jax(self._coordinator, num_processes, 0)
        for rank, connection in self._followers.items():
            connection.beat()
            threading.Thread(
                target=self._listen, args=(rank, connection), name=f"jaxllm-rank-{rank}", daemon=True
            ).start()

    def _gather(
        self, server: socket.socket, address: tuple[str, int], num_processes: int, settings: Settings
    ) -> None:
        """Wait for all followers."""
        until = time.monotonic() + SECONDS_TO_COME
        while missing := set(range(1, num_processes)) - self._followers.keys():
            server.settimeout(max(0.01, until - time.monotonic()))
            try:
                sock, peer = server.accept()
            except TimeoutError:
                ranks = ", ".join(map(str, sorted(missing)))
                self.end()
                raise ConfigError(
                    f"nnodes={num_processes}: node_rank {ranks} did not come to {address[0]}:{address[1]} "
                    f"within {SECONDS_TO_COME:g} s: run `jaxllm serve` there with the same settings, "
                    f"--node-rank and --master-addr {address[0]} --master-port {address[1]}"
                ) from None
            sock.settimeout(10.0)
            connection = Connection(sock)
            try:
                name, arguments = receive(sock, MAX_FIRST_BYTES)
                if name != "hello" or list(map(type, arguments)) != [int, dict, dict]:
                    raise EngineError(f"its first message is {name!r} of {arguments!r:.100}")
            except (EOFError, OSError, EngineError) as error:
                _logger.warning("%s:%d is no process of this engine: %s", *peer[:2], error)
                connection.close()
                continue
            sock.settimeout(None)
            rank, versions, theirs = arguments
            if reason := self._why_not(rank, versions, theirs, num_processes, settings):
                with contextlib.suppress(OSError):
                    connection.send("refused", reason)
                connection.close()
                self.end(reason)
                raise ConfigError(reason)
            self._followers[rank] = connection

    def _why_not(
        self, rank: int, versions: Settings, theirs: Settings, num_processes: int, settings: Settings
    ) -> str | None:
        if rank not in range(1, num_processes) or rank in self._followers:
            return (
                f"node_rank={rank} came twice, or is not one of 1 to {num_processes - 1}: each process of "
                f"nnodes={num_processes} has a rank of its own"
            )
        for what, mine, its in (("", versions_here(), versions), ("setting ", settings, theirs)):
            for name in sorted({*mine, *its}):
                if mine.get(name) != its.get(name):
                    return (
                        f"{what}{name} is {its.get(name)} at node_rank={rank} and {mine.get(name)} at the "
                        "leader: all processes of an engine have the same"
                    )
        return None

    def _listen(self, rank: int, connection: Connection) -> None:
        """Hear what a follower says, until it is gone."""
        try:
            while True:
                name, arguments = receive(connection.sock)
                if name == "failed":
                    raise EngineError(str(arguments[0]))
                with self._changed:
                    if name == "compiled":
                        self._compiled.setdefault(arguments[0], set()).add(rank)
                    elif name == "ready":
                        connection.sock.settimeout(_PATIENCE)
                        self._answers.setdefault(name, {})[rank] = None
                    elif name == "news":
                        self._news.append((rank, arguments[0]))
                    elif name != "beat":
                        self._answers.setdefault(name, {})[rank] = arguments[0]
                    self._changed.notify_all()
        except TimeoutError:
            self._lose(rank, f"it has given no sign of life for {_PATIENCE:g} s")
        except (EOFError, OSError, EngineError, ValueError) as error:
            self._lose(rank, str(error))

    def _lose(self, rank: int, reason: str) -> None:
        with self._changed:
            if self._lost is None and not self._is_over:
                self._lost = EngineError(f"the process of node_rank={rank} is lost: {reason}; {_WAY_OUT}")
                _logger.error("%s", self._lost)
            self._changed.notify_all()
        for connection in self._followers.values():
            connection.close()

    @property
    def is_lost(self) -> bool:
        """Whether a process is lost, or all were told to end."""
        return self._lost is not None

    def check(self) -> None:
        """Verify that nobody is lost.

        Raises:
            EngineError: somebody is.
        """
        if self._lost is not None:
            raise EngineError(str(self._lost))

    def tell(self, name: str, arguments: Sequence[Any]) -> None:
        """See `worker.Others`."""
        self.check()
        message = packed(name, arguments)
        for rank, connection in self._followers.items():
            try:
                connection.send_bytes(message)
            except OSError as error:
                self._lose(rank, str(error))
                self.check()
                raise EngineError("the engine's other processes were told to end") from error

    def ask(self, name: str) -> dict[int, Any]:
        """What each of the followers says of something, waited for, by rank.

        Raises:
            EngineError: one is lost.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost is not None or len(self._answers.get(name, ())) == len(self._followers)
            )
            self.check()
            return self._answers[name]

    def news(self, seconds: float = 0.0) -> list[tuple[int, Any]]:
        """See `worker.Others`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self._news, seconds)
            self.check()
            news, self._news = self._news, []
            return news

    def compile(self, key: Key) -> Callable[[], None]:
        """Have a program compiled by all; what it returns waits until they have, or raises `EngineError`."""
        self.tell("compile", [key])

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._lost is not None
                        or self._is_over
                        or len(self._compiled.get(key, ())) == len(self._followers)
                    )
                )
                self.check()

        return wait

    def wait(self, arrays: Any) -> None:
        """See `worker.Others`: what a lost process leaves may never be computed, so a thread waits for it."""
        self.check()
        if all(one.is_ready() for one in jax.tree.leaves(arrays)):
            try:
                jax.block_until_ready(arrays)
            except Exception as error:
                self.blame(error)
                raise
            return
        ended: list[BaseException | None] = []

        def run() -> None:
            try:
                jax.block_until_ready(arrays)
                error = None
            except BaseException as raised:
                error = raised
            with self._changed:
                ended.append(error)
                self._changed.notify_all()

        threading.Thread(target=run, name="jaxllm-wait", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: ended or self._lost is not None)
        self.check()
        if (failure := ended[0]) is not None:
            self.blame(failure)
            raise failure

    def blame(self, error: BaseException) -> None:
        """See `worker.Others`."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, _SECONDS_TO_KNOW)
        if self._lost is not None:
            raise EngineError(str(self._lost)) from error

    def end(self, reason: str | None = None) -> None:
        """Let the followers end, well or for a reason; nothing is told any more."""
        self._is_over = True
        for connection in self._followers.values():
            with contextlib.suppress(OSError):
                connection.sock.settimeout(1.0)
                connection.send("end", reason)
        with self._changed:
            if self._lost is None:
                self._lost = EngineError("the engine was closed")
            self._changed.notify_all()


class Follower:
    """The leader of an engine, for a process that does as it is told.

    Args:
        address: the leader's host and port.
        rank: this process's.
        num_processes: of the engine.
        settings: of this process, to be the leader's.
    """

    _failure: str | None = None

    def __init__(self, address: tuple[str, int], rank: int, num_processes: int, settings: Settings) -> None:
        self._connection = Connection(_connected(address))
        sock = self._connection.sock
        self._connection.send("hello", rank, versions_here(), dict(settings))
        try:
            name, arguments = receive(sock)
        except (EOFError, OSError) as error:
            raise EngineError(f"the leader at {address[0]}:{address[1]} is gone: {error}") from error
        if name != "begin":
            raise ConfigError(f"the leader says: {arguments[0]}")
        begin_jax(arguments[0], num_processes, rank)
        self._connection.beat()
        self._where = f"{address[0]}:{address[1]}"

    def say(self, name: str, argument: Any = None) -> None:
        """Tell the leader something; if it is gone this process ends."""
        if name == "failed":  # whereupon the leader goes
            self._failure = argument
        try:
            self._connection.send(name, argument)
        except OSError as error:
            self.leave(f"the leader at {self._where} is gone: {error}")

    def listen(self, take: Callable[[str, list[Any]], None]) -> None:
        """Give what the leader says to `take`, in a thread; when the leader is gone the process ends."""

        def run() -> None:
            try:
                while True:
                    name, arguments = receive(self._connection.sock)
                    if name == "all ready":
                        self._connection.sock.settimeout(_PATIENCE)
                    elif name == "end" and arguments[0] is not None:
                        self.leave(f"the leader says: {arguments[0]}")
                    elif name != "beat":
                        take(name, arguments)
                    if name == "end":
                        return
            except TimeoutError:
                self.leave(f"the leader at {self._where} has given no sign of life for {_PATIENCE:g} s")
            except (EOFError, OSError, EngineError, ValueError) as error:
                self.leave(f"the leader at {self._where} is gone: {error}")

        threading.Thread(target=run, name="jaxllm-leader", daemon=True).start()

    def leave(self, reason: str | None = None) -> None:
        """End this process, whatever its other threads wait for: well, or for a reason, which is printed.

        If it has failed that is the reason.
        """
        reason = self._failure or reason
        if reason is not None:
            with contextlib.suppress(Exception):
                print(f"jaxllm: error: {reason}", file=sys.stderr, flush=True)
        self._connection.close()
        os._exit(0 if reason is None else 1)


def versions_here() -> dict[str, str]:
    """What has to be the same in all processes."""
    return {"jaxllm": jaxllm.__version__, "jax": jax.__version__}


def begin_jax(coordinator: str, num_processes: int, rank: int) -> None:
    """Let JAX see the devices of all processes.

    Raises:
        ConfigError: this process has used JAX already.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # else JAX kills this process when another one ends
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            rank,
            cluster_detection_method="deactivate",
            shutdown_timeout_seconds=5,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"nnodes={num_processes}: this process has used JAX, or led such an engine, before: {error}; "
            "make the engine first, in a new process"
        ) from error


def _connected(address: tuple[str, int]) -> socket.socket:
    """A connection to the leader, which may still be about to start.

    Raises:
        ConfigError: nobody listens there in time.
    """
    until = time.monotonic() + SECONDS_TO_COME
    while True:
        try:
            sock = socket.create_connection(address, timeout=10.0)
            sock.settimeout(None)
            return sock
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"no leader (node_rank=0) listens at {address[0]}:{address[1]}: {error.strerror or error}"
                    "; start it with --nnodes, or name its --master-addr and --master-port"
                ) from error
            time.sleep(0.2)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
