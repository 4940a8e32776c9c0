"""Predictors for a simulated device, fitted as for a real one: to noisy measurements, not the truth."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS, CostKind, CostModel, ModelShape
from jaxllm.predictors.regression import RegressionCostModel, Sample, fit
from jaxllm.predictors.samples import load_samples
from jaxllm.predictors.table import TableAxes, TableCostModel
from jaxllm.research.simulator.truth import Residuals

Ratios = Mapping[CostKind, Sequence[float]]

_NAMES, _DEGREES = ("ridge", "random forest"), (1, 2, 3)  # what wins on real profiles, in seconds
_MIN_SAMPLES = 60


def held_out_ratios(samples: Mapping[CostKind, Sequence[Sample]], *, seed: int = 0) -> tuple[Ratios, Ratios]:
    """Ratios measured / predicted of a real profile, in two disjoint parts.

    A third of the samples is fitted; the other two thirds give the ratios: one to fit a simulated device's
    predictors with, one to be its truth.

    Args:
        samples: of a profile (`jaxllm profile --samples`).
        seed: of the split.

    Raises:
        ConfigError: there are fewer than 60 samples of a kind.
    """
    for_predictors: dict[CostKind, Sequence[float]] = {}
    for_truth: dict[CostKind, Sequence[float]] = {}
    for kind, of_kind in samples.items():
        if len(of_kind) < _MIN_SAMPLES:
            raise ConfigError(f"{len(of_kind)} {kind} samples are too few; profile for longer")
        shuffled = random.Random(seed).sample(list(of_kind), len(of_kind))
        third = len(shuffled) // 3
        regressor = fit(shuffled[:third], seed=seed, names=_NAMES, degrees=_DEGREES).regressor
        held_out = shuffled[third:]
        predicted = regressor.predict(np.array([one.features for one in held_out]))
        ratios = [one.seconds / seconds for one, seconds in zip(held_out, predicted.tolist(), strict=True)]
        for_predictors[kind], for_truth[kind] = ratios[:third], ratios[third:]
    return for_predictors, for_truth


def noise_and_predictor(
    costs: CostModel,
    model: ModelShape,
    samples: str | None,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_gpu_blocks: int,
    max_model_len: int,
    block_size: int,
    seed: int = 0,
) -> tuple[Residuals, CostModel]:
    """A simulated device's noise, and what policies predict by, which never saw it.

    Args:
        costs: of the device.
        model: whose steps they are.
        samples: file of a real profile's measurements, whose noise to take; None is a device without noise,
            whose costs are known exactly.
        max_num_batched_tokens, max_num_seqs, num_gpu_blocks, max_model_len, block_size: of the engine; the
            largest work there is.
        seed: of the noise, and of the predictor's samples.
    """
    if samples is None:
        return Residuals({}), costs
    for_predictors, for_truth = _ratios_of(samples)
    axes = TableAxes.geometric(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_context_tokens=num_gpu_blocks * block_size,
        max_num_blocks=num_gpu_blocks,
        max_prefill_context_tokens=max_model_len,
    )
    predictor = fit_predictor(costs, model, axes, for_predictors, block_size=block_size, seed=seed)
    return Residuals(for_truth, seed=seed), predictor


@functools.lru_cache(maxsize=1)
def _ratios_of(samples: str) -> tuple[Ratios, Ratios]:
    return held_out_ratios(load_samples(samples))


def fit_predictor(
    costs: CostModel,
    model: ModelShape,
    axes: TableAxes,
    ratios: Ratios,
    *,
    block_size: int,
    num_samples: int = 300,
    seed: int = 0,
) -> TableCostModel:
    """Measure a simulated device `num_samples` times per kind, with noise, and fit predictors to that.

    Args:
        costs: of the device.
        model: whose steps they are.
        axes: the largest work of each kind is what is measured up to.
        ratios: noise; drawn independently of what any simulation draws.
        block_size: tokens per KV block.
        num_samples: of each kind.
        seed: of work and noise.
    """
    rng = random.Random(seed)

    def size(limit: int) -> int:
        return max(1, round(limit ** rng.random()))

    def noise(kind: CostKind) -> float:
        of_kind = ratios.get(kind) or ratios.get("prefill" if kind == "mixed" else kind)
        return rng.choice(of_kind) if of_kind else 1.0

    samples: dict[CostKind, list[Sample]] = {kind: [] for kind in COST_KINDS}

    def measure(kind: CostKind, batch: int, context: int, *prompts: int) -> None:
        seconds = costs.step_seconds(batch, context, *prompts) * noise(kind)
        samples[kind].append(Sample.step(model, seconds, batch, context, *prompts))

    for _ in range(num_samples):
        tokens = size(axes.prefill_tokens[-1])
        seqs = min(tokens, size(axes.prefill_seqs[-1]))
        before = rng.choice((0, size(axes.prefill_context[-1]))) if axes.prefill_context[-1] else 0
        batch, context = size(axes.decode_batch[-1]), size(axes.decode_context[-1])
        measure("prefill", 0, 0, tokens, seqs, before)
        measure("decode", batch, context)
        measure("mixed", batch, context, tokens, seqs, before)
        blocks = size(axes.swap_blocks[-1])
        seconds = costs.swap_out_seconds(blocks) * noise("swap_out")
        samples["swap_out"].append(Sample.swap_out(model, block_size, blocks, seconds))
        seconds = costs.swap_in_seconds(blocks) * noise("swap_in")
        samples["swap_in"].append(Sample.swap_in(model, block_size, blocks, seconds))
    fitted = {
        kind: fit(of_kind, seed=seed, names=_NAMES, degrees=_DEGREES).regressor
        for kind, of_kind in samples.items()
    }
    return TableCostModel.distil(RegressionCostModel(fitted, model, block_size), axes)
