"""What work costs in a simulation: a cost model times residuals seen in a real profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostKind, CostModel

_DRAWN_AT_ONCE = 4096


class ResampledCosts:
    """A cost model whose every cost is multiplied by a ratio measured / predicted, drawn at random.

    The ratios come from a part of a profile that no predictor was fitted on, so that predictors meet the
    errors they would meet on the device and never see the truth.

    Args:
        costs: predicted seconds.
        ratios: by kind of cost, ratios measured / predicted; a kind without any has no noise.
        seed: the same one draws the same ratios.

    Raises:
        ConfigError: a ratio is not a positive number.
    """

    def __init__(
        self, costs: CostModel, ratios: Mapping[CostKind, Sequence[float]], *, seed: int = 0
    ) -> None:
        self._costs = costs
        self._ratios = {kind: np.asarray(values, np.float64) for kind, values in ratios.items()}
        for kind, values in self._ratios.items():
            if values.ndim != 1 or not values.size or not np.all((values > 0) & np.isfinite(values)):
                raise ConfigError(f"ratios of {kind!r} must be positive numbers, at least one: {values}")
        self._rng = np.random.default_rng(seed)
        self._drawn: dict[CostKind, list[float]] = {kind: [] for kind in self._ratios}

    def prefill_seconds(self, num_tokens: int, num_seqs: int, context_tokens: int = 0) -> float:
        """One realisation."""
        return self._costs.prefill_seconds(num_tokens, num_seqs, context_tokens) * self._ratio("prefill")

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """One realisation."""
        return self._costs.decode_seconds(batch, context_tokens) * self._ratio("decode")

    def swap_out_seconds(self, num_blocks: int) -> float:
        """One realisation."""
        return self._costs.swap_out_seconds(num_blocks) * self._ratio("swap_out")

    def swap_in_seconds(self, num_blocks: int) -> float:
        """One realisation."""
        return self._costs.swap_in_seconds(num_blocks) * self._ratio("swap_in")

    def _ratio(self, kind: CostKind) -> float:
        if kind not in self._ratios:
            return 1.0
        drawn = self._drawn[kind]
        if not drawn:
            drawn.extend(self._rng.choice(self._ratios[kind], _DRAWN_AT_ONCE).tolist())
        return drawn.pop()
