"""How many engines a Ray cluster has room for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError

_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "data_parallel_size",
)


def num_devices(settings: Mapping[str, Any]) -> int:
    """Of an engine of these settings of `LLM`; what is no number of devices engines refuse by name."""
    sizes = [settings.get(name, 1) for name in _SIZES]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


@dataclasses.dataclass(frozen=True)
class Pool:
    """How many workers, and what each has of a node.

    Args:
        size: how many.
        gpus: of each.
        cpus: of each that has no GPU.
        in_flight: batches that each works on at once.
    """

    size: int
    gpus: float
    cpus: int
    in_flight: int

    @classmethod
    def of_cluster(
        cls,
        ray: Any,
        size: int | None,
        gpus: float | None,
        cpus: int | None,
        in_flight: int = 1,
        *,
        name: str = "worker",
        num_devices: int = 1,
    ) -> Pool:
        """What was asked for of engines called `name`, and of the rest as much as the cluster has.

        Each has `num_devices`, all of them on one node.

        Raises:
            ConfigError: it has less, or what was asked for is nothing, or less than engines need.
        """
        asked = {f"num_{name}s": (size, 1), f"gpus_per_{name}": (gpus, 0), f"cpus_per_{name}": (cpus, 1)}
        for field, (value, least) in asked.items():
            if value is not None and not value >= least:
                raise ConfigError(f"{field}={value} must be at least {least}; or leave it out")
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        all_gpus = sum(node.get("GPU", 0.0) for node in nodes)
        gpus = num_devices * float(bool(all_gpus)) if gpus is None else gpus
        if num_devices > 1 and 0 < gpus < num_devices:
            raise ConfigError(
                f"gpus_per_{name}={gpus:g}, and an engine of these settings is on {num_devices} devices: "
                "leave it out"
            )
        with_cpus = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
        if not with_cpus:
            raise ConfigError("the Ray cluster has no processors to run on: give its nodes some (--num-cpus)")
        if cpus is None:
            cpus = 1 if gpus else min(with_cpus)
        if gpus:
            fits = sum(math.floor(node.get("GPU", 0.0) / gpus) for node in nodes)
        else:
            fits = sum(count // cpus for count in with_cpus)
        if fits < (size or 1):
            raise ConfigError(
                f"{size or 1} {name}s of {gpus:g} GPUs and {cpus} processors do not fit the cluster, which "
                f"has room for {fits}: lower {', '.join(asked)}"
            )
        return cls(size or fits, gpus, cpus, in_flight)

    def options(self, ray: Any) -> dict[str, Any]:
        """For `map_batches`, which starts workers that die again and retries what they had, without end."""
        compute = ray.data.ActorPoolStrategy(
            size=self.size,
            max_tasks_in_flight_per_actor=self.in_flight,
            max_concurrent_calls_per_actor=self.in_flight,
            enable_true_multi_threading=True,
        )
        resources = {"num_gpus": self.gpus} if self.gpus else {"num_cpus": self.cpus}
        return {"compute": compute, **resources}
