"""What programs compute for a step, padding included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import LinearCosts

from jaxllm.errors import ConfigError
from jaxllm.executor.buckets import Buckets
from jaxllm.predictors.programs import ProgramCosts, ProgramSizes
from jaxllm.predictors.table import TableAxes, TableCostModel

BUCKETS = Buckets.make(max_num_seqs=24, max_num_batched_tokens=96)


@given(st.integers(0, 24), st.integers(0, 96), st.integers(0, 24))
def test_padding_is_that_of_the_executors_programs(batch, tokens, prompts):
    padded = BUCKETS.program_sizes().padded(batch, tokens, prompts)
    if not (tokens and prompts):
        assert padded == (BUCKETS.decode_size(batch) if batch else 0, 0)
    elif batch + tokens <= 96 and prompts <= BUCKETS.max_prefill_seqs:
        assert padded == (batch, BUCKETS.size(batch, tokens, prompts) - batch)


def test_larger_steps_are_left_as_they_are():
    sizes = BUCKETS.program_sizes()
    assert sizes.padded(25, 0, 0) == (25, 0)
    assert sizes.padded(10, 90, 1) == (10, 90)


def test_costs_are_of_all_rows():
    costs = ProgramCosts(
        LinearCosts(prefill=1.0, decode=2.0, swap=3.0), ProgramSizes([4, 8], [16, 32], [2, 4])
    )
    assert costs.step_seconds(5, 100) == 16.0
    assert costs.step_seconds(5, 100, 3, 1) == 10.0 + 11.0
    assert costs.step_seconds(5, 100, 3, 3) == 10.0 + 27.0  # three prompts need the larger program
    assert costs.step_seconds(0, 0, 17, 1) == 32.0
    assert (costs.swap_out_seconds(2), costs.swap_in_seconds(3)) == (6.0, 9.0)


@pytest.mark.parametrize(("decode", "rows"), [([], [8]), ([4], []), ([8, 4], [8]), ([4], [8, 8]), ([0], [8])])
def test_malformed_sizes_are_refused(decode, rows):
    with pytest.raises(ConfigError, match=r"must increase from 1|at least one size"):
        ProgramSizes(decode, rows, [1] * len(rows))


class OnlyProgramsKnown(LinearCosts):
    """Steps of 4 or 32 sequences of up to 16 tokens, and of 16 or 64 rows; whatever else looks costly."""

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        if context_tokens > 16 * batch:
            return 1000.0
        rows, sizes = (batch + prompt_tokens, (16, 64)) if prompt_tokens else (batch, (4, 32))
        return float(rows) if rows in sizes else 1000.0


def test_a_fit_is_asked_only_about_what_can_happen():
    """A table that never falls would else carry what a fit says between two programs over to the larger."""
    axes = TableAxes.geometric(
        max_num_batched_tokens=64, max_num_seqs=32, max_context_tokens=512, max_num_blocks=4
    )
    fitted, sizes = OnlyProgramsKnown(), ProgramSizes([4, 32], [16, 64], [32, 32])
    assert TableCostModel.distil(fitted, axes).step_seconds(32, 100) == 1000.0
    assert TableCostModel.distil(ProgramCosts(fitted, sizes), axes).step_seconds(32, 400) == 1000.0
    table = TableCostModel.distil(ProgramCosts(fitted, sizes, 16), axes)
    assert table.step_seconds(32, 400) == 32.0
    assert [table.step_seconds(n, 100) for n in (1, 4, 32)] == [4.0, 4.0, 32.0]
    assert [table.step_seconds(0, 0, n, 1) for n in (3, 16, 64)] == [16.0, 16.0, 64.0]
    assert table.step_seconds(8, 100, 40, 1) == pytest.approx(64.0)


@given(st.integers(1, 24), st.integers(1, 80), st.sampled_from([0.0, 0.3, 1.0]))
def test_nearest_is_what_some_step_takes(batch, tokens, share):
    sizes = BUCKETS.program_sizes(share)
    possible = {sizes.padded(batch, used, 1)[1] for used in range(1, 97 - batch)}
    at_most = BUCKETS.sizes[-1] - batch
    if tokens <= at_most:
        assert sizes.nearest(batch, tokens) == min(one for one in possible if one >= tokens)


def test_padding_costs_its_share():
    """Products are of 32 rows, attention of the 10 in use, and each takes half of a token's time."""
    sizes = ProgramSizes([4], [32], [4], padding_share=0.5)
    costs = ProgramCosts(LinearCosts(prefill=1.0, decode=1.0), sizes)
    assert costs.step_seconds(0, 0, 10, 1) == 0.5 * 32 + 0.5 * 10
    assert costs.step_seconds(2, 9, 10, 1) == 2.0 + 10 + 0.5 * 20
    assert costs.step_seconds(2, 9) == 2.0 + 0.5 * 2
    with pytest.raises(ConfigError, match="0 to 1"):
        ProgramSizes([4], [32], [4], padding_share=1.5)
