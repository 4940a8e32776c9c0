"""How many replicas there should be, by what is queued at them."""

from __future__ import annotations

import math
from typing import Any


class QueuedTokens:
    """As many replicas as it takes for each to have so many tokens queued; a policy of Ray Serve's.

    Requests do not say how much work they are; tokens that are still to be computed do.

    Args:
        target: queued tokens of a replica. What a replica computes in a second or two is a good value: more
            of it waits, with less nothing does.
    """

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number wanted, before Ray Serve applies bounds and delays; and nothing to remember."""
        metrics = (context.aggregated_metrics or {}).get("queued_tokens", {})
        return self.wanted(metrics.values()), {}

    def wanted(self, queued: Any) -> int:
        """The number for what is queued at each replica; at least one."""
        return max(1, math.ceil(sum(queued) / self._target))
