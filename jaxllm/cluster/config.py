"""Settings of a server of several engines."""

from __future__ import annotations

import math

from jaxllm.errors import ConfigError
from jaxllm.routing.router import POLICIES
from jaxllm.system.options import check_options, option, with_options

_AT_LEAST_1 = (1, 2**40)


@with_options
class ClusterConfig:
    """How many replicas there are, and how requests find them.

    Args:
        num_replicas: Engines, each with its server, on a Ray cluster (extra: ray), or the fewest if
            `max_replicas` is given.
        max_replicas: Let their number follow what is queued, up to so many.
        target_queued_tokens: Tokens yet to compute of each, for that; see `QueuedTokens`.
        policy: How requests are routed, one of {policy}. "prefix" is `PrefixAndLoad`.
        num_ingresses: Processes that read requests and route them, each with a router of its own.
        gpus_per_replica: GPUs of an engine; by default as many as it has devices, if the cluster has GPUs.
        cpus_per_replica: Processors of a replica that has no GPU, to which it is bound; by default its share.
        health_check_seconds: How often replicas are asked whether they are well.
        upscale_seconds: How long more replicas must be wanted.
        downscale_seconds: How long fewer must be.

    Raises:
        ConfigError: a value is out of range.
    """

    num_replicas: int = option(1, within=_AT_LEAST_1, flag="replicas")
    max_replicas: int | None = option(None, within=_AT_LEAST_1)
    target_queued_tokens: int = option(16384, within=_AT_LEAST_1)
    policy: str = option("prefix", choices=tuple(POLICIES), names=tuple(POLICIES), flag="routing")
    num_ingresses: int = option(1, within=_AT_LEAST_1, flag="ingresses")
    gpus_per_replica: float | None = option(None, within=(0, math.inf))
    cpus_per_replica: int | None = option(None, within=_AT_LEAST_1)
    health_check_seconds: float = option(2.0, within=(0, math.inf), flag=None)
    upscale_seconds: float = option(10.0, within=(0, math.inf), flag=None)
    downscale_seconds: float = option(300.0, within=(0, math.inf), flag=None)

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(f"max_replicas={self.max_replicas} is below num_replicas={self.num_replicas}")
