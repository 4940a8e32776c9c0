"""The router as Ray Serve calls it, in each ingress. Imports Ray: Ray Serve does so by the module's name."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jaxllm.cluster.forwarding import ForwardedRequest
from jaxllm.routing.router import POLICIES, Router


class ServeRouter(RequestRouter):
    """Sends forwarded requests where `jaxllm.routing.router` says, and what else there is anywhere."""

    def initialize_state(self, policy: str = "prefix", **others: Any) -> None:
        """Begin without replicas.

        Args:
            policy: of `POLICIES`.
            **others: nothing that this version of Ray Serve knows of.
        """
        self._router = Router(POLICIES[policy]())
        self._reported: dict[str, Any] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of who is there, and of what they report."""
        super().update_replicas(replicas)
        self._note_replicas()
        now = time.monotonic()
        for replica in replicas:
            name, stats = replica.replica_id.unique_id, replica.routing_stats
            if stats and stats is not self._reported.get(name):
                self._reported[name] = stats
                self._router.report(name, now=now, **stats)
        self._reported = {
            name: self._reported[name] for name in self._router.replicas if name in self._reported
        }

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Send nothing there any more."""
        super().on_replica_actor_died(replica_id)
        self._note_replicas()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one that the router chooses, and should it be full any that is not."""
        if pending_request is None:
            return [candidate_replicas]
        request_id = pending_request.metadata.internal_request_id
        given = pending_request.args[0] if pending_request.args else None
        request = given if isinstance(given, ForwardedRequest) else ForwardedRequest({}, b"")
        request.replicas = tuple(self._router.replicas)
        if request.target is not None:
            found = [one for one in candidate_replicas if one.replica_id.unique_id == request.target]
            if found:
                return [found]
            request.target = None  # it has gone; who asked sees that
        self._router.ended(request_id)  # it has been refused where it was sent before
        choice = self._router.route(
            request_id,
            request.prompt,
            now=time.monotonic(),
            max_tokens=request.max_tokens,
            avoid=request.tried,
        )
        request.tried.append(choice.replica)
        return [[one for one in candidate_replicas if one.replica_id.unique_id == choice.replica]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has ended, one way or another."""
        super().on_request_completed(replica_id, internal_request_id)
        self._router.ended(internal_request_id)

    def _note_replicas(self) -> None:
        self._router.set_replicas(one.unique_id for one in self.curr_replicas)
