"""`run`: the server of several engines, as an application of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cluster.autoscaling import QueuedTokens
from jaxllm.cluster.config import ClusterConfig
from jaxllm.cluster.forwarding import ForwardedRequest, Message
from jaxllm.cluster.paths import for_workers
from jaxllm.cluster.pool import Pool, num_devices
from jaxllm.cluster.ray_extra import own_error, require_ray
from jaxllm.cluster.replica import Replica
from jaxllm.cluster.replica_app import EngineApp, ReplicaApp
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import demo_model_path

if TYPE_CHECKING:
    from jaxllm.server.config import ServerConfig

_logger = logging.getLogger(__name__)
APPLICATION = "jaxllm"
_ROUTER = "jaxllm.cluster.serve_router.ServeRouter"
_SCALER = f"{QueuedTokens.__module__}:{QueuedTokens.__name__}"
_MOST_ONGOING = 2**16  # the replicas' own servers say when they have no room
_REPORT_SECONDS = 0.5
_SECONDS_TO_LOOK_UP, _SECONDS_TO_ANSWER, _SECONDS_TO_PASS_ON = 0.1, 5.0, 8.0
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}  # replicas have lines for requests themselves


class ReplicaDeployment(Replica):
    """A replica in a process of Ray Serve's."""

    async def __del__(self) -> None:  # Ray Serve awaits it before it ends the process
        if hasattr(self, "_lifespan"):  # it was made
            await self.close()


class IngressProcess:
    """An ingress that listens, in a process of its own; one of Ray's actors.

    Args:
        replicas: the handle of their deployment.
        config: where to listen, and bounds of connections and bodies.
        port: to listen on, beside other ingresses.
    """

    def __init__(self, replicas: Any, config: ServerConfig, port: int) -> None:
        import uvicorn
        from ray.exceptions import RayActorError

        from jaxllm.cluster.ingress import Ingress
        from jaxllm.server.run import http_settings, log_to_stderr, tune_interpreter

        log_to_stderr()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        tune_interpreter()
        self._handle = replicas.options(stream=True, method_name="handle")
        self._to_acknowledge = replicas.options(method_name="acknowledge")
        self._config, self._port = config, port
        self._ingress = Ingress(self._send, config, (RayActorError,), self._acknowledge)
        self._server = uvicorn.Server(http_settings(self._ingress, config, lifespan="off"))

    async def serve(self) -> None:
        """Listen until told to stop.

        Raises:
            ConfigError: the address cannot be had.
        """
        from jaxllm.server.run import listen

        with listen(self._config.host, self._port, is_shared=True) as listener:
            await self._server.serve(sockets=[listener])

    async def wait_until_ready(self) -> None:
        """Returns once it listens."""
        while not self._server.started:
            await asyncio.sleep(_SECONDS_TO_LOOK_UP)

    async def refuse_new(self) -> None:
        """Answer 503 to new requests for outputs from now on."""
        self._ingress.refuse_new()

    async def stop(self) -> None:
        """Let `serve` end, once what replicas have answered has been passed on."""
        self._ingress.close()
        self._server.should_exit = True

    async def _send(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        response = self._handle.remote(request)
        try:
            async for batch in response:
                yield batch
        finally:
            response.cancel()  # if it has not ended

    def _acknowledge(self, replica: str, flow_id: str, num_bytes: int) -> None:
        self._to_acknowledge.remote(ForwardedRequest({}, b"", target=replica), flow_id, num_bytes)


def run(
    settings: Mapping[str, Any],
    server: ServerConfig,
    cluster: ClusterConfig,
    *,
    ray_address: str | None = None,
    tell: Callable[[str], None],
) -> None:
    """Serve a model with several engines until SIGINT or SIGTERM, and let requests under way end.

    They have `server.shutdown_timeout` seconds for that, or until a second signal; the rest ends with errors.

    Args:
        settings: of the engines, as `LLM` takes them.
        server: how to serve; each replica keeps to its bounds.
        cluster: how many replicas, and how requests find them.
        ray_address: of a cluster; by default RAY_ADDRESS's, one that runs on this machine, or a new one.
        tell: given a line when the server is ready.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room.
    """
    ray = require_ray("ray.serve")
    if not ray.is_initialized():
        ray.init(address=ray_address, logging_level=logging.WARNING)
    is_up, stop, hurry = threading.Event(), threading.Event(), threading.Event()

    def end(*_: object) -> None:
        if not is_up.is_set():
            raise KeyboardInterrupt  # there is nobody to wait for
        (hurry if stop.is_set() else stop).set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with started(engine_apps(ray, settings, server, cluster), server, cluster) as running:
            name = (*server.served_model_names, Path(settings.get("model") or demo_model_path()).name)[0]
            is_up.set()
            tell(f"serving {name} on {running.url}")
            while not stop.is_set():
                time.sleep(_SECONDS_TO_LOOK_UP)
                running.check()
            draining = threading.Thread(target=running.drain, args=(server.shutdown_timeout,), daemon=True)
            draining.start()
            while draining.is_alive() and not hurry.is_set():
                draining.join(_SECONDS_TO_LOOK_UP)
            if hurry.is_set():
                running.drain(0.0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class Apps:
    """What replicas run, and what each of them needs of a node.

    Args:
        make: makes one.
        gpus: of each.
        cpus: of each.
    """

    make: Callable[[], ReplicaApp]
    gpus: float = 0.0
    cpus: float = 1


def engine_apps(ray: Any, settings: Mapping[str, Any], server: ServerConfig, cluster: ClusterConfig) -> Apps:
    """jaxllm's own server, on GPUs or a slice of a node's processors.

    Raises:
        ConfigError: the cluster has no room.
    """
    cpus = cluster.cpus_per_replica
    if cpus is None:
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        cpus = max(1, sum(nodes) // (cluster.max_replicas or cluster.num_replicas))
        cpus = min([cpus, *(count for count in nodes if count)])
    asked = cluster.num_replicas, cluster.gpus_per_replica, cpus
    pool = Pool.of_cluster(ray, *asked, name="replica", num_devices=num_devices(settings))
    make = functools.partial(EngineApp, for_workers(settings), server, 0 if pool.gpus else cpus)
    return Apps(make, pool.gpus, 1 if pool.gpus else cpus)


class Running:
    """Replicas, and the ingresses before them.

    Args:
        ray: the package.
        replicas: the handle of their deployment.
        ingresses: actors.
        url: where clients find them.
    """

    def __init__(self, ray: Any, replicas: Any, ingresses: Sequence[Any], url: str) -> None:
        self._ray, self._replicas, self._ingresses, self.url = ray, replicas, ingresses, url
        self._serving = [one.serve.remote() for one in ingresses]

    def wait_until_ready(self) -> None:
        """Returns once all ingresses listen.

        Raises:
            ConfigError: one cannot.
        """
        waiting = [one.wait_until_ready.remote() for one in self._ingresses]
        while waiting:
            _, waiting = self._ray.wait(waiting, timeout=_SECONDS_TO_LOOK_UP)
            self.check()

    def check(self) -> None:
        """Verify that all ingresses serve; one that has died is started again, and does.

        Raises:
            ConfigError: one has ended.
        """
        if ended := self._ray.wait(self._serving, timeout=0)[0]:
            try:
                self._ray.get(ended)
            except self._ray.exceptions.RayError as error:
                raise own_error(error) from error
            raise ConfigError("an ingress ended, though nobody told it to: start the server again")

    def drain(self, seconds: float) -> None:
        """Have replicas end what they have, and ingresses pass it on; the rest ends with errors.

        Args:
            seconds: that requests have to end.
        """
        self._tell_ingresses("refuse_new")
        try:
            drained = self._replicas.broadcast("drain", seconds)
            drained.results(timeout_s=seconds + _SECONDS_TO_ANSWER)
        except Exception as error:  # of one that has died; the others have been told
            _logger.warning("replicas end: %s", error)
        self._tell_ingresses("stop")
        self._ray.wait(self._serving, num_returns=len(self._serving), timeout=_SECONDS_TO_PASS_ON)

    def close(self) -> None:
        """End everything."""
        for one in self._ingresses:
            self._ray.kill(one)

    def _tell_ingresses(self, method: str) -> None:
        told = [getattr(one, method).remote() for one in self._ingresses]
        self._ray.wait(told, num_returns=len(told), timeout=_SECONDS_TO_ANSWER)


@contextlib.contextmanager
def started(apps: Apps, server: ServerConfig, cluster: ClusterConfig) -> Iterator[Running]:
    """Replicas on a cluster, and ingresses on this machine, which answer; all of it ends with the block.

    Raises:
        ConfigError: they do not start, or the address is taken.
    """
    from jaxllm.server.run import listen, url_of

    ray = require_ray("ray.serve", "ray.util.scheduling_strategies")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    listen(server.host, server.port).close()  # who listens there, listens alone
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((server.host, server.port))  # keeps the port for the ingresses; it does not listen
        port = holder.getsockname()[1]
        stack.callback(ray.serve.shutdown)
        replicas = _deploy(ray.serve, apps, server, cluster)
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
        make = actor(IngressProcess).remote
        ingresses = [make(replicas, server, port) for _ in range(cluster.num_ingresses)]
        running = Running(ray, replicas, ingresses, url_of(server.host, port))
        stack.callback(running.close)
        running.wait_until_ready()
        yield running


def _deploy(serve: Any, apps: Apps, server: ServerConfig, cluster: ClusterConfig) -> Any:
    """The handle of replicas that are up.

    Raises:
        ConfigError: they do not start.
    """
    serve.start(proxy_location="Disabled", logging_config=_LOGGING)
    number: dict[str, Any] = {"num_replicas": cluster.num_replicas}
    if cluster.max_replicas is not None:
        number = {
            "autoscaling_config": {
                "min_replicas": cluster.num_replicas,
                "max_replicas": cluster.max_replicas,
                "upscale_delay_s": cluster.upscale_seconds,
                "downscale_delay_s": cluster.downscale_seconds,
                "look_back_period_s": 2 * _REPORT_SECONDS,
                "policy": {
                    "policy_function": _SCALER,
                    "policy_kwargs": {"target": cluster.target_queued_tokens},
                },
            }
        }
    replicas = serve.deployment(
        ReplicaDeployment,
        name="Replica",
        max_ongoing_requests=_MOST_ONGOING,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": apps.cpus, "num_gpus": apps.gpus},
        request_router_config={
            "request_router_class": _ROUTER,
            "request_router_kwargs": {"policy": cluster.policy},
            "request_routing_stats_period_s": _REPORT_SECONDS,
        },
        health_check_period_s=cluster.health_check_seconds,
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        **number,
    ).bind(apps.make)
    try:
        return serve.run(replicas, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise ConfigError(f"the replicas do not start: {_why(serve) or error}") from error


def _why(serve: Any) -> str:
    """What the first deployment that is not well says, in its last line."""
    application = serve.status().applications.get(APPLICATION)
    messages = [one.message for one in application.deployments.values()] if application else []
    found = next((message.strip() for message in messages if message), "")
    return str(found.splitlines()[-1]) if found else ""
