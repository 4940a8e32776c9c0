"""Costs of prompts that several groups of devices share."""

import pytest
from variants import golden_checkpoint

from jaxllm.engine.costs import find_costs, shape_of
from jaxllm.errors import ConfigError
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.predictors.contexts import ContextParallelCosts
from jaxllm.predictors.published_shapes import model_shape


class Counts:
    """Costs that remember what they were asked, and are what a row does: one, and what it attends to."""

    def __init__(self):
        self.asked = []

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        self.asked.append((batch, context_tokens, prompt_tokens, num_prompts, prompt_context))
        return batch + prompt_tokens + 0.001 * (context_tokens + prompt_tokens * prompt_context)

    def swap_out_seconds(self, num_blocks):
        return 1.0 * num_blocks

    def swap_in_seconds(self, num_blocks):
        return 2.0 * num_blocks


@pytest.mark.parametrize(
    ("work", "asked"),
    [
        ((8, 100), [(8, 100, 0, 0, 0)]),  # each group decodes for itself
        ((0, 0, 100, 1, 50), [(0, 0, 25, 1, 125)]),  # the last quarter of one prompt
        ((0, 0, 100, 8, 80), [(0, 0, 25, 2, 20)]),  # two of eight
        ((0, 0, 100, 2, 60), [(0, 0, 25, 1, 55)]),  # the second half of one of two
        ((8, 100, 92, 1, 0), [(0, 0, 25, 1, 67), (8, 100, 17, 1, 0)]),  # the last group, and the first one
        ((60, 600, 20, 1, 0), [(0, 0, 20, 1, 0), (20, 200, 0, 0, 0)]),  # decodes are on several groups
        ((-3, 0, 4, 1, 0), [(0, 0, 1, 1, 3)]),
    ],
)
def test_a_step_takes_as_long_as_its_longest_part(work, asked):
    costs = Counts()
    seconds = ContextParallelCosts(costs, 4).step_seconds(*work)
    assert costs.asked == asked
    assert seconds == max(Counts().step_seconds(*one) for one in asked)


def test_one_group_costs_what_it_costs_and_copies_are_each_groups():
    for work in ((8, 100), (0, 0, 100, 3, 50), (8, 100, 92, 2, 40)):
        assert ContextParallelCosts(Counts(), 1).step_seconds(*work) == Counts().step_seconds(*work)
    costs = ContextParallelCosts(Counts(), 4)
    assert (costs.swap_out_seconds(3), costs.swap_in_seconds(3)) == (3.0, 6.0)
    with pytest.raises(ConfigError, match="num_contexts"):
        ContextParallelCosts(Counts(), 0)


def test_an_engine_starts_from_them_and_finds_profiles_of_as_many_groups(tmp_path):
    config = config_from_dict(read_hf_config(golden_checkpoint("llama_gqa")))
    shapes = [shape_of(config, "m", "bfloat16", prefill_context_parallel=size) for size in (1, 4)]
    assert [shape.name for shape in shapes] == ["m", "m-pcp4"]
    where, large = ("NVIDIA H100 80GB HBM3", 16, tmp_path), model_shape("llama-3-8b")
    of_one, of_four = (find_costs(large, *where, prefill_context_parallel=size)[0] for size in (1, 4))
    assert of_four.step_seconds(0, 0, 4096, 1, 0) < 0.5 * of_one.step_seconds(0, 0, 4096, 1, 0)
    assert of_four.step_seconds(8, 800) == of_one.step_seconds(8, 800)
    on_cpus = [find_costs(shapes[0], "cpu", 16, tmp_path, prefill_context_parallel=size) for size in (1, 4)]
    seconds = [None if one is None else one[0].step_seconds(0, 0, 64, 1, 0) for one in on_cpus]
    assert seconds[0] == seconds[1], "whose devices share its cores"
