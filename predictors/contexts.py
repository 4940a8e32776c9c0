"""Costs of steps whose prompts several groups of devices share (`executor.context_parallel`)."""

from __future__ import annotations

from jaxllm.predictors.base import CostModel, check_integer


class ContextParallelCosts:
    """A `CostModel` of several groups of devices, each with as many rows of a step with prompts.

    A step takes as long as that of the group that needs longest: of the first, which has the decodes, or of
    the last, whose rows attend to most. The prompts of a step are taken to be alike. What groups send one
    another is left out. They decode and copy alike, each for itself.

    Args:
        costs: of one group.
        num_contexts: groups, 1 to 1,024.

    Raises:
        ConfigError: the number is out of range.
    """

    def __init__(self, costs: CostModel, num_contexts: int) -> None:
        check_integer("num_contexts", num_contexts, 1, 1024)
        self._costs, self._num_contexts = costs, num_contexts
        self.swap_out_seconds, self.swap_in_seconds = costs.swap_out_seconds, costs.swap_in_seconds

    def step_seconds(
        self,
        batch: int,
        context_tokens: int,
        prompt_tokens: int = 0,
        num_prompts: int = 0,
        prompt_context: int = 0,
    ) -> float:
        """See `CostModel.step_seconds`."""
        batch = max(0, batch)
        if prompt_tokens <= 0 or num_prompts <= 0:
            return self._costs.step_seconds(batch, context_tokens)
        rows = -(-(batch + prompt_tokens) // self._num_contexts)
        of_last = min(rows, prompt_tokens)
        prompts = -(-num_prompts * of_last // prompt_tokens)
        context = prompt_context * prompts // num_prompts
        before = max(0, prompt_tokens // num_prompts - of_last)  # of the prompt that is in several groups
        seconds = self._costs.step_seconds(0, 0, of_last, prompts, context + before)
        if not batch:
            return seconds
        if batch >= rows:
            first = self._costs.step_seconds(rows, context_tokens * rows // batch)
        else:
            first = self._costs.step_seconds(batch, context_tokens, rows - batch, prompts, context)
        return max(first, seconds)
