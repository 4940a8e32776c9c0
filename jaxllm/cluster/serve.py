"""`run`: the server of several engines, as an application of Ray Serve."""

from __future__ import annotations

import dataclasses
import functools
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.checkpoints import demo_model_path
from jaxllm.cluster.autoscaling import QueuedTokens
from jaxllm.cluster.forwarding import ForwardedRequest, Message
from jaxllm.cluster.paths import with_absolute_paths
from jaxllm.cluster.pool import Pool
from jaxllm.cluster.ray_extra import require_ray
from jaxllm.cluster.replica import Replica
from jaxllm.cluster.replica_app import EngineApp, ReplicaApp
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.server.config import ServerConfig

_logger = logging.getLogger(__name__)
APPLICATION = "jaxllm"
_ROUTER = "jaxllm.cluster.serve_router.ServeRouter"
_SCALER = f"{QueuedTokens.__module__}:{QueuedTokens.__name__}"
_MOST_ONGOING = 2**16  # the replicas' own servers say when they have no room
_REPORT_SECONDS = 0.5
_SECONDS_TO_LOOK_UP, _SECONDS_TO_PASS_ON, _SECONDS_TO_WRITE = 0.1, 5.0, 0.5
_LOGGING = {"log_level": "WARNING", "enable_access_log": False}  # replicas have lines for requests themselves


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """How many replicas there are, and how requests find them.

    Args:
        num_replicas: engines, or the fewest if `max_replicas` is given.
        max_replicas: most engines; with it their number follows what is queued.
        target_queued_tokens: of a replica, for their number; see `QueuedTokens`.
        policy: how requests are routed: "prefix" (`PrefixAndLoad`), "two_choices", "prefix_only" or
            "round_robin".
        num_ingresses: processes that read requests and route them, each with a router of its own.
        gpus_per_replica: by default 1 if the cluster has GPUs.
        cpus_per_replica: processors of a replica that has no GPU, to which it is bound; by default its share.
        health_check_seconds: how often replicas are asked whether they are well.
        upscale_seconds: how long more replicas must be wanted.
        downscale_seconds: how long fewer must be.

    Raises:
        ConfigError: a value is out of range.
    """

    num_replicas: int = 1
    max_replicas: int | None = None
    target_queued_tokens: int = 16384
    policy: str = "prefix"
    num_ingresses: int = 1
    gpus_per_replica: float | None = None
    cpus_per_replica: int | None = None
    health_check_seconds: float = 2.0
    upscale_seconds: float = 10.0
    downscale_seconds: float = 300.0

    def __post_init__(self) -> None:
        from jaxllm.cluster.router import POLICIES

        for name in ("num_replicas", "target_queued_tokens", "num_ingresses"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(f"max_replicas={self.max_replicas} is below num_replicas={self.num_replicas}")
        if self.policy not in POLICIES:
            raise ConfigError(f"policy={self.policy!r} must be one of {', '.join(POLICIES)}")


class ReplicaDeployment(Replica):
    """A replica in a process of Ray Serve's."""

    async def __del__(self) -> None:  # Ray Serve awaits it before it ends the process
        if hasattr(self, "_lifespan"):  # it was made
            await self.close()


class IngressDeployment:
    """An ingress in a process of Ray Serve's."""

    def __init__(self, replicas: Any, config: ServerConfig) -> None:
        from ray.exceptions import RayActorError

        from jaxllm.cluster.ingress import Ingress

        self._handle = replicas.options(stream=True).handle
        self._ingress = Ingress(self._send, config, (RayActorError,))

    async def __call__(self, request: Any) -> Any:
        """The response to an HTTP request."""
        return await self._ingress.answer(request)

    async def refuse_new(self) -> None:
        """See `Ingress`."""
        self._ingress.refuse_new()

    async def wait_until_idle(self, seconds: float) -> None:
        """See `Ingress`."""
        await self._ingress.wait_until_idle(seconds)

    async def _send(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        response = self._handle.remote(request)
        try:
            async for batch in response:
                yield batch
        finally:
            response.cancel()  # if it has not ended


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
        url = start(engine_apps(ray, settings, server, cluster), server, cluster)
        name = (*server.served_model_names, Path(settings.get("model") or demo_model_path()).name)[0]
        is_up.set()
        tell(f"serving {name} on {url}")
        stop.wait()
        draining = threading.Thread(target=_drain, args=(ray.serve, server.shutdown_timeout), daemon=True)
        draining.start()
        while draining.is_alive() and not hurry.is_set():
            draining.join(_SECONDS_TO_LOOK_UP)
        if hurry.is_set():
            _drain(ray.serve, 0.0)
    finally:
        ray.serve.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _drain(serve: Any, seconds: float) -> None:
    """Have replicas end what they have, and ingresses pass it on: shutting down cuts all connections."""
    steps: Sequence[tuple[str, str, tuple[float, ...]]] = (
        ("Ingress", "refuse_new", ()),
        ("Replica", "drain", (seconds,)),
        ("Ingress", "wait_until_idle", (_SECONDS_TO_PASS_ON,)),
    )
    for name, method, given in steps:
        try:
            handle = serve.get_deployment_handle(name, APPLICATION)
            handle.broadcast(method, *given).results(timeout_s=sum(given) + _SECONDS_TO_PASS_ON)
        except Exception as error:  # one that has died; the others have been told
            _logger.warning("%s of %s: %s", method, name, error)
    time.sleep(_SECONDS_TO_WRITE)


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
    """jaxllm's own server, on a GPU or a slice of a node's processors.

    Raises:
        ConfigError: the cluster has no room.
    """
    cpus = cluster.cpus_per_replica
    if cpus is None:
        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        cpus = max(1, sum(nodes) // (cluster.max_replicas or cluster.num_replicas))
        cpus = min([cpus, *(count for count in nodes if count)])
    pool = Pool.of_cluster(ray, cluster.num_replicas, cluster.gpus_per_replica, cpus, name="replica")
    make = functools.partial(EngineApp, with_absolute_paths(settings), server, 0 if pool.gpus else cpus)
    return Apps(make, pool.gpus, 1 if pool.gpus else cpus)


def start(apps: Apps, server: ServerConfig, cluster: ClusterConfig) -> str:
    """Start replicas and ingresses on a cluster, and return the URL once they answer.

    Raises:
        ConfigError: they do not start.
    """
    serve = require_ray("ray.serve").serve
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    port = server.port or _free_port(server.host)
    serve.start(
        http_options={
            "host": server.host,
            "port": port,
            "keep_alive_timeout_s": max(1, int(server.keep_alive_timeout)),
        },
        logging_config=_LOGGING,
    )
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
    ingress = serve.deployment(
        IngressDeployment,
        name="Ingress",
        num_replicas=cluster.num_ingresses,
        max_ongoing_requests=_MOST_ONGOING,
        logging_config=_LOGGING,
        ray_actor_options={"num_cpus": 0},
    ).bind(replicas, server)
    try:
        serve.run(ingress, name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise ConfigError(f"the replicas do not start: {_why(serve) or error}") from error
    return f"http://[{server.host}]:{port}" if ":" in server.host else f"http://{server.host}:{port}"


def _why(serve: Any) -> str:
    """What the first deployment that is not well says, in its last line."""
    application = serve.status().applications.get(APPLICATION)
    messages = [one.message for one in application.deployments.values()] if application else []
    found = next((message.strip() for message in messages if message), "")
    return str(found.splitlines()[-1]) if found else ""


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
