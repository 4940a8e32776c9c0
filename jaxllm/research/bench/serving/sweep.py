"""Several runs one after another: on one server, or each on a server of its own that is started for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import MODEL_SHAPES
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research.bench.serving.measure import Load, Measured, measure
from jaxllm.research.bench.serving.server_process import running_server
from jaxllm.research.bench.serving.workload import with_new_prompts
from jaxllm.sched.presets import make_preset
from jaxllm.system import hardware

_SERVER_DEFAULTS = ("--warm-up=all", "--no-log-requests", "--shutdown-timeout=5")
_DESCRIBE_SECONDS = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is run.

    Args:
        loads: by the name of their arrivals.
        repetitions: of each run; policies take turns.
        base_url: of a server that is there; None if servers are started.
        policies: presets, or `module:attribute`: each of their runs is on a server that was just started.
        server_args: further arguments of these servers.
        start_timeout: seconds in which such a server must be ready.

    Raises:
        ConfigError: a policy is unknown or there twice, a number is out of range, or runs on one server would
            share prompts.
    """

    loads: Mapping[str, Load]
    repetitions: int = 1
    base_url: str | None = None
    policies: Sequence[str] = ()
    server_args: Sequence[str] = ()
    start_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError(f"repetitions={self.repetitions} must be at least 1")
        if not 0 < self.start_timeout < float("inf"):
            raise ConfigError(f"start_timeout={self.start_timeout:g} must be seconds above 0")
        any_costs = RooflineCostModel(MODEL_SHAPES["llama-3-8b"], device_spec("a100"))
        for name in self.policies:
            make_preset(name, any_costs)  # which a server would refuse only once it has its model
        if len(set(self.policies)) < len(self.policies):
            raise ConfigError(f"a policy is named twice in {','.join(self.policies)}; use repetitions")
        if not self.policies and self.num_runs > 1:
            for load in self.loads.values():
                with_new_prompts(load.trace, 1)

    @property
    def num_runs(self) -> int:
        """How many there will be."""
        return self.repetitions * len(self.loads) * max(1, len(self.policies))

    def runs(self) -> Iterator[Measured]:
        """Run after run, with `policy` (null on a server that was there), `arrivals` and `repetition`.

        On one server each run has prompts of its own, of the same lengths; servers started here get the same.

        Raises:
            ConfigError: a server cannot be started or reached.
        """
        number = 0
        for repetition in range(self.repetitions):
            for arrivals, load in self.loads.items():
                for policy in self.policies or (None,):
                    with self._server(policy) as url:
                        trace = with_new_prompts(load.trace, 0 if policy else number)
                        measured = asyncio.run(measure(url, dataclasses.replace(load, trace=trace)))
                    names = {"policy": policy, "arrivals": arrivals, "repetition": repetition}
                    facts = {"workload": trace.summary()}
                    yield Measured({**names, **measured.result, **facts}, measured.answers)
                    number += 1

    def hardware(self) -> dict[str, Any]:
        """What the load ran on: this host, and the device of servers that are started here.

        A process of its own asks for the device and ends, so that it is free for the servers.

        Raises:
            ConfigError: JAX finds no device.
        """
        if not self.policies:
            return {"role": "client", **hardware.describe_host()}
        done = subprocess.run(
            [sys.executable, "-m", hardware.__name__],
            capture_output=True,
            text=True,
            timeout=_DESCRIBE_SECONDS,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"JAX cannot tell its device: {done.stderr.strip().splitlines()[-1]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return {"role": "client and servers", **found}

    def _server(self, policy: str | None) -> contextlib.AbstractContextManager[str]:
        if policy is None:
            assert self.base_url is not None
            return contextlib.nullcontext(self.base_url)
        arguments = (*_SERVER_DEFAULTS, "--scheduler-policy", policy, *self.server_args)
        return running_server(arguments, start_timeout=self.start_timeout)
