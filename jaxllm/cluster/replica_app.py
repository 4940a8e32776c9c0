"""The server of one engine, as a replica runs it: an ASGI application, and what is asked of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.cluster.cpu_slices import CpuSlice
from jaxllm.engine.config import EngineConfig
from jaxllm.errors import EngineError
from jaxllm.routing.router import OUTPUT_WEIGHT, TYPICAL_OUTPUT_TOKENS

if TYPE_CHECKING:
    from jaxllm.server.config import ServerConfig


class ReplicaApp(Protocol):
    """What a replica runs."""

    @property
    def app(self) -> Any:
        """The ASGI application, lifespan included."""
        ...

    def check_health(self) -> None:
        """Verify that it answers requests.

        Raises:
            EngineError: it does not, and another one should take its place.
        """
        ...

    def queued_tokens(self) -> int:
        """Tokens it has yet to compute, as routers count them. Any thread may ask."""
        ...

    def cache_tokens(self) -> int:
        """How many tokens its prefix cache has room for."""
        ...

    def bytes_per_token(self) -> float | None:
        """Of the prompts that it is sent, if it knows."""
        ...

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and end those that are left after so many seconds."""
        ...


class EngineApp:
    """jaxllm's own server.

    Args:
        settings: of the engine, as `LLM` takes them.
        server: how it serves.
        num_cpus: processors to bind it to; 0 leaves it unbound.
    """

    def __init__(self, settings: Mapping[str, Any], server: ServerConfig, num_cpus: int) -> None:
        self._slice = (
            CpuSlice(num_cpus) if num_cpus else None
        )  # taken before JAX starts, and held from then on
        if self._slice is not None:
            self._slice.bind()
        from jaxllm.server.app import make_app
        from jaxllm.server.run import log_to_stderr, tune_interpreter
        from jaxllm.server.service import Service

        log_to_stderr()
        self._service = Service.load(EngineConfig(**settings), server)
        tune_interpreter()
        self.app = make_app(self._service)

    def check_health(self) -> None:
        """See `ReplicaApp`."""
        if not self._service.core.is_healthy:
            raise EngineError("the engine has failed; another replica takes its place")

    def queued_tokens(self) -> int:
        """See `ReplicaApp`."""
        prompts = answers = 0
        for request in (one for scheduler in self._service.schedulers for one in scheduler.live_requests()):
            with contextlib.suppress(IndexError, ValueError):  # it changes beside this, and may have ended
                prompts += max(0, request.num_prompt_tokens - request.num_computed_tokens)
                answers += min(TYPICAL_OUTPUT_TOKENS, max(0, request.max_total_tokens - request.num_tokens))
        return prompts + round(OUTPUT_WEIGHT * answers)

    def cache_tokens(self) -> int:
        """See `ReplicaApp`."""
        limits = self._service.core.limits
        num_blocks = limits.num_gpu_blocks + limits.num_host_blocks
        return len(self._service.replicas) * num_blocks * limits.block_size

    def bytes_per_token(self) -> float | None:
        """See `ReplicaApp`."""
        return self._service.stats.bytes_per_token

    async def drain(self, seconds: float) -> None:
        """See `ReplicaApp`."""
        await self._service.core.drain(seconds)
