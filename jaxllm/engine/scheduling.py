"""The scheduling policy an engine was asked for, with the costs it predicts by and its host memory."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from jaxllm.engine.costs import find_costs
from jaxllm.errors import ConfigError, ProfileError
from jaxllm.predictors.base import CostModel, ModelShape
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.policies import SchedulingPolicy, is_policy
from jaxllm.sched.presets import DEFAULT_PRESET, NEEDS_COSTS, make_preset

_logger = logging.getLogger(__name__)
_HOST_BYTES = 4 * 2**30  # vLLM's default swap space


@dataclasses.dataclass(frozen=True)
class Scheduling:
    """What an engine schedules by.

    `costs` are predicted seconds, corrected as the engine runs, for the policy if it asks for them, and for
    the ledger. `source` says where they come from; None if nothing is known of this device. `weighs_costs`
    is whether the policy compares them, `is_ready_made` whether it was given as an object, which cannot ask,
    and `is_chosen` whether it is anything but the default.
    """

    policy: SchedulingPolicy
    costs: OnlineCalibration
    source: str | None
    weighs_costs: bool
    is_ready_made: bool
    is_chosen: bool = True

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
) -> Scheduling:
    """Find or import the policy, and the costs it needs.

    Args:
        choice: a preset's name, an import path, a policy, or None for the default preset.
        shape: the model's sizes.
        device_kind: what JAX calls the device.
        block_size: tokens per KV block.
        folder: of profiles; the user's cache folder if None.

    Raises:
        ConfigError: there is no such policy.
        ProfileError: a policy that weighs costs was asked for by name, and the stored profile is damaged or
            of another model or block size. The default falls back on the roofline, with a warning.
    """
    is_ready_made = is_policy(choice)
    if not (is_ready_made or isinstance(choice, str | None)):
        raise ConfigError(
            "scheduler_policy must be the name of a preset or a SchedulerPolicy, not "
            f"{type(choice).__name__}; pass SchedulerPolicy(victim=..., ...) with your classes"
        )
    name = choice if isinstance(choice, str) else DEFAULT_PRESET
    weighs_costs = not is_ready_made and (name in NEEDS_COSTS or ":" in name)
    try:
        found = find_costs(shape, device_kind, block_size, folder)
    except ProfileError as error:
        if choice is not None and weighs_costs:
            raise
        _logger.warning("the stored profile is not used: %s", error)
        found = find_costs(shape, device_kind, block_size, folder, use_profile=False)
    predicted: CostModel = UnknownCosts()
    source = None
    if found is not None:
        predicted, source = found
    costs = OnlineCalibration(predicted)
    policy = choice if is_policy(choice) else make_preset(name, costs)
    return Scheduling(policy, costs, source, weighs_costs, is_ready_made, choice is not None)


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
