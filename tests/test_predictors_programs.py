"""What programs compute for a step, padding included."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import LinearCosts

from jaxllm.errors import ConfigError
from jaxllm.executor.buckets import Buckets
from jaxllm.predictors.programs import ProgramCosts, ProgramSizes

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
