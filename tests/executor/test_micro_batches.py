"""Steps in parts that go through stages one behind the other."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.executor.stages import Rows, micro_batches
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs, places_of
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.silicon import HOP_SECONDS, SiliconCostModel
from jaxllm.types import STAGED_ROWS, num_micro_batches

NUM_SLOTS, BLOCK_SIZE, NUM_BLOCKS = 6, 4, 30
LLAMA_70B = model_shape("llama-3-70b", "bfloat16")


@given(st.integers(1, 8), st.integers(0, 2**14))
def test_parts_are_equal_and_large(stages, rows):
    count = num_micro_batches(rows, stages)
    assert count == 1 or (rows % count == 0 and rows // count >= STAGED_ROWS)
    assert count <= (2 * stages if stages > 1 else 1)


@given(
    st.integers(0, NUM_SLOTS),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=3),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 99),
)
def test_each_row_belongs_where_it_did(num_decodes, chunks, count, seed):
    """The places of all parts' rows, found again of each part's inputs, are those of the step."""
    rng, size = np.random.default_rng(seed), 48
    starts = np.cumsum([num_decodes, *(length for _, length in chunks)])
    prompts = np.zeros((4, 2), int)
    prompts[: len(chunks)] = np.reshape(chunks, (-1, 2))
    tables = rng.integers(0, NUM_BLOCKS, (NUM_SLOTS, 20)).astype(np.int32)
    lengths = np.where(np.arange(NUM_SLOTS) < num_decodes, rng.integers(1, 60, NUM_SLOTS), 0)
    decode = DecodeInputs(*(jnp.asarray(x, jnp.int32) for x in (np.arange(NUM_SLOTS), lengths, tables)))
    prefill = PrefillInputs(
        tokens=jnp.arange(size),
        targets=jnp.arange(size) + 1,
        query_starts=jnp.asarray(np.r_[starts, [starts[-1]] * (5 - len(starts))], jnp.int32),
        lengths=jnp.asarray(prompts.sum(1), jnp.int32),
        slots=jnp.arange(4),
        num_seqs=jnp.asarray([len(chunks)], jnp.int32),
        sampled=jnp.zeros((3, 6), jnp.int32),
        block_tables=jnp.asarray(rng.integers(0, NUM_BLOCKS, (4, 20)), jnp.int32),
    )
    places = places_of(decode, prefill, NUM_SLOTS, BLOCK_SIZE)
    rows = Rows(decode, prefill, places, jnp.arange(size), jnp.maximum(places.positions, 0))
    parts = micro_batches(rows, count)
    assert len(parts) == count
    for name in ("slots", "positions", "slot_mapping"):
        found = [getattr(places_of(part.decode, part.prefill, NUM_SLOTS, BLOCK_SIZE), name) for part in parts]
        np.testing.assert_array_equal(np.concatenate(found), np.asarray(getattr(places, name)))
        given_ = [getattr(part.places, name) for part in parts]
        np.testing.assert_array_equal(np.concatenate(given_), np.asarray(getattr(places, name)))
    for name in ("tokens", "positions"):
        whole = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(whole, np.asarray(getattr(rows, name)))


@pytest.mark.parametrize(
    ("stages", "prompt", "count"), [(2, 2048, 4), (4, 2048, 4), (2, 4096, 4), (8, 8192, 16)]
)
def test_costs_are_those_of_parts(stages, prompt, count):
    """A part's time, as often as the last one comes out of the stages; decodes are not parted."""
    options = {"pipeline_parallel": stages}
    plain = SiliconCostModel(LLAMA_70B, "h100-sxm", **options)
    parted = SiliconCostModel(LLAMA_70B, "h100-sxm", **options, micro_batches=True)
    assert parted.step_seconds(64, 64_000) == plain.step_seconds(64, 64_000)
    whole, found = plain.step_seconds(0, 0, prompt, 1), parted.step_seconds(0, 0, prompt, 1)
    beside = plain.host_seconds + (stages - 1) * HOP_SECONDS
    ideal = beside + (whole - beside) * (stages + count - 1) / (stages * count)
    assert 0.9 * ideal < found < 1.1 * ideal


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_more_rows_take_no_less_time(stages):
    """But where measured products do."""
    plain, parted = (
        SiliconCostModel(LLAMA_70B, "h100-sxm", pipeline_parallel=stages, micro_batches=on)
        for on in (False, True)
    )
    for rows in (
        3,
        300,
        511,
        512,
        513,
        640,
        1023,
        1024,
        1100,
        1535,
        1536,
        2047,
        2048,
        2049,
        3000,
        6144,
        8000,
    ):
        few, more = (parted.step_seconds(0, 0, n, 1) for n in (rows, rows + 1))
        dips = min(1.0, plain.step_seconds(0, 0, rows + 1, 1) / plain.step_seconds(0, 0, rows, 1))
        assert more >= 0.99 * dips * few, rows
        parts = parted.parts(0, 0, rows, 1)
        assert sum(part.seconds for part in parts) == pytest.approx(few, rel=1e-2)
    assert parted.step_seconds(*map(np.int64, (64, 64_000, 2048, 1))) > 0
