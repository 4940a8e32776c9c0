"""The scheduling policy an engine was asked for, with the costs it predicts by and its host memory."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from pathlib import Path
from typing import Any

from jaxllm.engine.costs import find_costs
from jaxllm.errors import ConfigError, ProfileError
from jaxllm.predictors.base import CostModel, ModelShape
from jaxllm.predictors.online import OnlineCalibration, named
from jaxllm.predictors.own import own_costs
from jaxllm.sched.policies import SchedulingPolicy, is_policy
from jaxllm.sched.presets import DEFAULT_PRESET, as_policy, weighs_costs

_logger = logging.getLogger(__name__)
_HOST_BYTES = 4 * 2**30  # vLLM's default swap space


@dataclasses.dataclass(frozen=True)
class Scheduling:
    """What an engine schedules by.

    `costs` are predicted seconds, corrected as the engine runs, for the policy if it asks for them, and for
    the ledger. `source` says where they come from; None if nothing is known of this device. `weighs_costs`
    is whether the policy compares them, `is_ready_made` whether it was given as an object, which cannot ask,
    `is_chosen` whether it is anything but the default, and `has_own_costs` whether the user gave `costs`.
    """

    policy: SchedulingPolicy
    costs: OnlineCalibration
    source: str | None
    weighs_costs: bool
    is_ready_made: bool
    is_chosen: bool = True
    has_own_costs: bool = False

    @property
    def needs_measuring(self) -> bool:
        """Whether the policy compares costs that nobody has predicted."""
        return self.weighs_costs and self.source is None

    def num_host_blocks(
        self,
        asked: int | None,
        num_gpu_blocks: int,
        needed: int,
        block_bytes: int,
        *,
        is_needed: bool = False,
    ) -> int:
        """Blocks of host memory to set aside.

        Args:
            asked: the user's number; None chooses: none if the policy never swaps, or if the pool cannot run
                out and nobody's admission depends on it, else what 4 GiB hold, at most `num_gpu_blocks`.
            num_gpu_blocks: blocks in the device's pool.
            needed: blocks that as many of the longest sequences as may run at once would take.
            block_bytes: size of a block.
            is_needed: there must be some, whatever the policy does.

        Raises:
            ConfigError: the policy cannot do without host memory.
        """
        is_bound = self.policy.needs_host_pool
        if asked is None:
            is_needed = is_needed or (self.policy.may_swap and (is_bound or num_gpu_blocks < needed))
            return min(num_gpu_blocks, max(1, _HOST_BYTES // block_bytes)) if is_needed else 0
        if asked == 0 and is_bound:
            raise ConfigError(
                "num_host_blocks=0 contradicts a policy that starts only what fits host memory: set "
                "num_host_blocks, or choose another scheduler_policy"
            )
        return asked


def make_scheduling(
    choice: SchedulingPolicy | str | None,
    shape: ModelShape,
    device_kind: str,
    block_size: int,
    folder: Path | None = None,
    own: CostModel | str | os.PathLike[str] | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    prefill_context_parallel: int = 1,
) -> Scheduling:
    """Find or import the policy, and the costs it needs.

    Args:
        choice: what `as_policy` takes, or None for the default preset.
        shape: the model's sizes.
        device_kind: what JAX calls the device.
        block_size: tokens per KV block.
        folder: of profiles; the user's cache folder if None.
        own: what `own_costs` takes, instead of the engine's costs.
        tensor_parallel, pipeline_parallel, prefill_context_parallel: devices that share each layer, stages,
            and groups that share prompts.

    Raises:
        ConfigError: there is no such policy, or `own` is no predictor.
        ProfileError: a policy that weighs costs was asked for by name, and the stored profile is damaged or
            of another model or block size; or `own` is. The default falls back on the roofline, with a
            warning.
    """
    is_ready_made = is_policy(choice)
    chosen = DEFAULT_PRESET if choice is None else choice
    weighs = weighs_costs(chosen)
    where = shape, device_kind, block_size
    layout: Any = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    layout["prefill_context_parallel"] = prefill_context_parallel
    find = functools.partial(find_costs, *where, folder, **layout)
    try:
        found = find() if own is None else _own(own, *where)
    except ProfileError as error:
        if own is not None or (choice is not None and weighs):
            raise
        _logger.warning("the stored profile is not used: %s", error)
        found = find(use_profile=False)
    predicted, source = found or (UnknownCosts(), None)
    costs = predicted if isinstance(predicted, OnlineCalibration) else OnlineCalibration(predicted)
    policy = as_policy(chosen, named(costs))
    return Scheduling(policy, costs, source, weighs, is_ready_made, choice is not None, own is not None)


def _own(
    given: CostModel | str | os.PathLike[str], shape: ModelShape, device_kind: str, block_size: int
) -> tuple[CostModel, str]:
    """The user's costs, and what they are called."""
    own = own_costs(given)
    if own.profile is not None:
        own.profile.check_matches(device=device_kind, model=shape, block_size=block_size)
    return own.model, own.source


class UnknownCosts:
    """Stands in until costs are measured: everything takes 0 s, so that nothing seems worth swapping."""

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """Unknown."""
        return 0.0

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Unknown."""
        return 0.0

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Unknown."""
        return 0.0
