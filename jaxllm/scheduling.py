"""The scheduling policy an engine was asked for, with the costs it predicts by and its host memory."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from jaxllm.costs import find_costs
from jaxllm.errors import ConfigError
from jaxllm.predictors.base import ModelShape
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.sched.policies import AlwaysRecompute, HostBoundAdmission, SchedulerPolicy
from jaxllm.sched.presets import DEFAULT_PRESET, NEEDS_COSTS, make_preset

_logger = logging.getLogger(__name__)
_HOST_BYTES = 4 * 2**30  # vLLM's default swap space
_ROOFLINE = "predicted costs are a roofline estimate, not measured; `jaxllm profile` measures them"


@dataclasses.dataclass(frozen=True)
class Scheduling:
    """What an engine schedules by.

    `costs` are the predicted seconds its policy asks for, corrected as the engine runs; None if it was given
    ready-made. `source` says where they come from; None if nothing is known of this device, so that they have
    to be measured before the first request.
    """

    policy: SchedulerPolicy
    costs: OnlineCalibration | None
    source: str | None

    @property
    def may_swap(self) -> bool:
        """Whether the policy can ask for host memory."""
        return not isinstance(self.policy.action, AlwaysRecompute)

    @property
    def needs_measuring(self) -> bool:
        """Whether the policy compares costs that nobody has predicted."""
        return self.costs is not None and self.source is None and self.may_swap

    def num_host_blocks(self, asked: int | None, num_gpu_blocks: int, needed: int, block_bytes: int) -> int:
        """Blocks of host memory to set aside.

        Args:
            asked: the user's number; None chooses: none if the policy never swaps or the pool cannot run
                out, else what 4 GiB hold, at most `num_gpu_blocks`.
            num_gpu_blocks: blocks in the device's pool.
            needed: blocks that as many of the longest sequences as may run at once would take.
            block_bytes: size of a block.

        Raises:
            ConfigError: the policy cannot do without host memory.
        """
        if asked is None:
            can_run_out = num_gpu_blocks < needed
            return min(num_gpu_blocks, max(1, _HOST_BYTES // block_bytes)) * (self.may_swap and can_run_out)
        admission = self.policy.admission
        if asked == 0 and isinstance(admission, HostBoundAdmission) and not admission.count_device_pool:
            raise ConfigError(
                "num_host_blocks=0 contradicts a policy that starts only what fits host memory: set "
                "num_host_blocks, or choose another scheduler_policy"
            )
        return asked

    def say_source(self, num_host_blocks: int) -> None:
        """Log a warning if swaps will be weighed by a mere estimate."""
        if num_host_blocks and self.source is not None and self.source.startswith("roofline"):
            _logger.warning(_ROOFLINE)


def make_scheduling(
    choice: SchedulerPolicy | str | None,
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
        ProfileError: the stored profile is damaged.
    """
    if isinstance(choice, SchedulerPolicy):
        return Scheduling(choice, None, None)
    if not isinstance(choice, str | None):
        raise ConfigError(
            "scheduler_policy must be the name of a preset or a SchedulerPolicy, not "
            f"{type(choice).__name__}; pass SchedulerPolicy(victim=..., ...) with your classes"
        )
    name = DEFAULT_PRESET if choice is None else choice
    found = find_costs(shape, device_kind, block_size, folder)
    if found is None:
        costs, source = OnlineCalibration(UnknownCosts()), None
        if ":" not in name and name not in NEEDS_COSTS:
            source = "none"
    else:
        predicted, source = found
        costs = OnlineCalibration(predicted)
    return Scheduling(make_preset(name, costs), costs, source)


class UnknownCosts:
    """Stands in until costs are measured: everything takes 0 s, so that nothing seems worth swapping."""

    def prefill_seconds(self, num_tokens: int, num_seqs: int, context_tokens: int = 0) -> float:
        """Unknown."""
        return 0.0

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """Unknown."""
        return 0.0

    def swap_out_seconds(self, num_blocks: int) -> float:
        """Unknown."""
        return 0.0

    def swap_in_seconds(self, num_blocks: int) -> float:
        """Unknown."""
        return 0.0
