"""Cost tables against the models they were distilled from, and against a naive interpolation."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import model_shape
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.table import BatchCostModel, TableAxes, TableCostModel

ROOFLINE = RooflineCostModel(model_shape("llama-13b"), device_spec("A800-80GB-PCIe"))
AXES = TableAxes.geometric(
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    max_context_tokens=65536,
    max_num_blocks=128,
    max_prefill_context_tokens=4096,
)
TABLE = TableCostModel.distil(ROOFLINE, AXES)
SMALL = TableAxes(
    prefill_tokens=(2, 10),
    prefill_seqs=(1, 3),
    prefill_context=(0, 8),
    decode_batch=(1, 5),
    decode_context=(4, 20, 100),
    swap_blocks=(1, 4),
)


def small_grids(**changes):
    grids = {
        "prefill_seconds": np.array([[[1.0, 2.0], [5.0, 8.0]], [[3.0, 4.0], [9.0, 12.0]]]),
        "decode_seconds": np.array([[1.0, 2.0, 6.0], [2.0, 4.0, 8.0]]),
        "swap_out_seconds": np.array([1.0, 2.5]),
        "swap_in_seconds": np.array([2.0, 2.0]),
    }
    return grids | changes


def naive(grid, axes, point):
    """Multilinear interpolation by summing over the corners of the cell, with the documented edges."""
    scale = max(1.0, *(x / axis[-1] for axis, x in zip(axes, point, strict=True) if axis[-1]))
    weights = []
    for axis, x in zip(axes, point, strict=True):
        x = min(max(x, axis[0]), axis[-1])
        weights.append([float(np.interp(x, axis, np.eye(len(axis))[i])) for i in range(len(axis))])
    corners = itertools.product(*(range(len(axis)) for axis in axes))
    return scale * sum(
        grid[corner] * math.prod(w[i] for w, i in zip(weights, corner, strict=True)) for corner in corners
    )


def test_values_between_the_nodes_by_hand():
    table = TableCostModel(SMALL, **small_grids())
    assert table.prefill_seconds(2, 1) == 1.0
    assert table.prefill_seconds(6, 2) == pytest.approx((1 + 2 + 5 + 8) / 4)
    assert table.prefill_seconds(10, 3, 8) == 12.0
    assert table.prefill_seconds(10, 3, 4) == 10.0
    assert table.decode_seconds(3, 12) == pytest.approx((1 + 2 + 2 + 4) / 4)
    assert table.swap_out_seconds(3) == 2.0


def test_values_beyond_the_nodes_grow_in_proportion():
    table = TableCostModel(SMALL, **small_grids())
    assert table.prefill_seconds(1, 1) == 1.0  # flat below the first node
    assert table.prefill_seconds(30, 3) == 24.0
    assert table.prefill_seconds(30, 6, 16) == 36.0  # tokens exceed their axis the most
    assert table.decode_seconds(10, 200) == 16.0
    assert table.swap_out_seconds(40) == 25.0
    assert table.swap_in_seconds(40) == 20.0


def test_no_work_costs_nothing():
    assert TABLE.prefill_seconds(0, 0) == TABLE.prefill_seconds(0, 1, 5) == TABLE.decode_seconds(0, 9) == 0.0
    assert TABLE.swap_out_seconds(0) == TABLE.swap_in_seconds(0) == TABLE.swap_in_seconds(-1) == 0.0


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 30))
def test_prefill_lookups_equal_naive_interpolation(tokens, seqs, context):
    table = TableCostModel(SMALL, **small_grids())
    grids = small_grids()
    expected = naive(
        grids["prefill_seconds"],
        (SMALL.prefill_context, SMALL.prefill_tokens, SMALL.prefill_seqs),
        (context, tokens, seqs),
    )
    assert table.prefill_seconds(tokens, seqs, context) == pytest.approx(expected)


@given(st.integers(1, 20), st.integers(0, 500))
def test_decode_lookups_equal_naive_interpolation(batch, context):
    table = TableCostModel(SMALL, **small_grids())
    expected = naive(
        small_grids()["decode_seconds"], (SMALL.decode_batch, SMALL.decode_context), (batch, context)
    )
    assert table.decode_seconds(batch, context) == pytest.approx(expected)


@given(st.integers(1, 2048), st.data())
def test_a_distilled_table_is_close_to_its_model(tokens, data):
    seqs = data.draw(st.integers(1, min(tokens, 64)))
    context = data.draw(st.one_of(st.just(0), st.integers(1, 4096)))
    batch = data.draw(st.integers(1, 64))
    decode_context = data.draw(st.integers(batch, 1024 * batch))
    blocks = data.draw(st.integers(1, 128))
    exact = ROOFLINE.prefill_seconds(tokens, seqs, context)
    assert TABLE.prefill_seconds(tokens, seqs, context) == pytest.approx(exact, rel=0.06)
    exact = ROOFLINE.decode_seconds(batch, decode_context)
    assert TABLE.decode_seconds(batch, decode_context) == pytest.approx(exact, rel=0.01)
    assert TABLE.swap_out_seconds(blocks) == pytest.approx(ROOFLINE.swap_out_seconds(blocks), rel=1e-9)
    assert TABLE.swap_in_seconds(blocks) == pytest.approx(ROOFLINE.swap_in_seconds(blocks), rel=1e-9)


class Noisy:
    """The roofline with half of each cost random: what a bad fit looks like."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def prefill_seconds(self, num_tokens, num_seqs, context_tokens=0):
        return ROOFLINE.prefill_seconds(num_tokens, num_seqs, context_tokens) * self.rng.uniform(0.5, 1.0)

    def decode_seconds(self, batch, context_tokens):
        return ROOFLINE.decode_seconds(batch, context_tokens) * self.rng.uniform(0.5, 1.0)

    def swap_out_seconds(self, num_blocks):
        return ROOFLINE.swap_out_seconds(num_blocks) * self.rng.uniform(0.5, 1.0)

    swap_in_seconds = swap_out_seconds


@functools.cache
def noisy_table(seed):
    axes = TableAxes.geometric(
        max_num_batched_tokens=512,
        max_num_seqs=16,
        max_context_tokens=2048,
        max_num_blocks=32,
        max_prefill_context_tokens=256,
        nodes_per_octave=1,
    )
    return TableCostModel.distil(Noisy(seed), axes)


@given(
    st.integers(0, 3), st.integers(1, 9999), st.integers(1, 200), st.integers(0, 9999), st.integers(1, 9999)
)
def test_a_table_of_noise_is_monotone_all_the_same(seed, tokens, seqs, context, more):
    table = noisy_table(seed)
    slack = 1 + 1e-12
    prefill = table.prefill_seconds(tokens, seqs, context)
    assert 0 < prefill <= table.prefill_seconds(tokens + more, seqs, context) * slack
    assert prefill <= table.prefill_seconds(tokens, seqs, context + more) * slack
    decode = table.decode_seconds(seqs, context)
    assert 0 < decode <= table.decode_seconds(seqs + more, context) * slack
    assert decode <= table.decode_seconds(seqs, context + more) * slack
    assert 0 < table.swap_out_seconds(tokens) <= table.swap_out_seconds(tokens + more) * slack


def test_the_cleanup_only_ever_raises_values():
    raw = TableCostModel.distil(Noisy(1), AXES, monotone=False).to_arrays()
    clean = TableCostModel.distil(Noisy(1), AXES).to_arrays()
    assert (clean["decode_seconds"] >= raw["decode_seconds"]).all()
    assert (clean["decode_seconds"] > raw["decode_seconds"]).any()
    assert (np.diff(raw["swap_in_seconds"]) < 0).any()


def test_a_model_that_answers_in_batches_is_asked_once_per_kind():
    class Batched(Noisy):
        calls = 0

        def seconds_many(self, kind, work):
            self.calls += 1
            return np.array([getattr(ROOFLINE, f"{kind}_seconds")(*row) for row in work])

    model = Batched(0)
    assert isinstance(model, BatchCostModel)
    assert not isinstance(ROOFLINE, BatchCostModel)
    table = TableCostModel.distil(model, AXES)
    assert model.calls == 4
    assert table.decode_seconds(7, 300) == pytest.approx(TABLE.decode_seconds(7, 300))


def test_impossible_nodes_take_the_nearest_possible_work():
    asked = []

    class Recorder:
        def prefill_seconds(self, num_tokens, num_seqs, context_tokens=0):
            asked.append(("prefill", num_tokens, num_seqs))
            return 1.0

        def decode_seconds(self, batch, context_tokens):
            asked.append(("decode", context_tokens, batch))
            return 1.0

        def swap_out_seconds(self, num_blocks):
            return 1.0

        swap_in_seconds = swap_out_seconds

    TableCostModel.distil(Recorder(), AXES)
    assert all(tokens >= seqs for _, tokens, seqs in asked)


def test_arrays_round_trip():
    arrays = TABLE.to_arrays()
    copy = TableCostModel.from_arrays(arrays)
    assert copy.axes == AXES
    for name, array in copy.to_arrays().items():
        assert np.array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype
    arrays["decode_seconds"][:] = 0.0  # a copy
    assert TABLE.decode_seconds(3, 100) == copy.decode_seconds(3, 100) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decode_seconds": None}, r"missing \['decode_seconds'\], unknown \[\]"),
        ({"surprise": np.zeros(2)}, r"missing \[\], unknown \['surprise'\]"),
        ({"decode_seconds": np.zeros((2, 2))}, r"decode_seconds has shape \(2, 2\); its axes \(decode_batch"),
        ({"decode_seconds": np.zeros((2, 3), np.float32)}, "decode_seconds must be an array of float64"),
        ({"swap_in_seconds": np.array([1.0, np.nan])}, "swap_in_seconds must hold finite seconds"),
        (
            {"swap_in_seconds": np.array([-1.0, 1.0])},
            "swap_in_seconds must hold finite seconds of at least 0",
        ),
        ({"swap_blocks": np.array([4, 1])}, "axis swap_blocks must strictly increase"),
        ({"swap_blocks": np.array([0, 1])}, "a node of axis swap_blocks must lie in"),
        ({"swap_blocks": np.array([[1, 4]])}, r"axis swap_blocks must be a vector, got shape \(1, 2\)"),
        ({"swap_blocks": np.array([], np.int64)}, "axis swap_blocks must have 1 to 4096 nodes, got 0"),
        ({"swap_blocks": np.array([1.0, 4.0])}, "swap_blocks must be an array of int64, got float64"),
    ],
)
def test_bad_arrays_are_refused(change, message):
    arrays = TableCostModel(SMALL, **small_grids()).to_arrays() | change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(ConfigError, match=message):
        TableCostModel.from_arrays(arrays)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100, 2048])
def test_geometric_axes_reach_from_one_to_their_limits(limit):
    axes = TableAxes.geometric(
        max_num_batched_tokens=limit, max_num_seqs=limit, max_context_tokens=limit, max_num_blocks=limit
    )
    assert axes.swap_blocks[0] == 1
    assert axes.swap_blocks[-1] == limit
    assert all(high <= 1.5 * low + 1 for low, high in itertools.pairwise(axes.swap_blocks))
    assert axes.prefill_context == (0,)
    table = TableCostModel.distil(ROOFLINE, axes)
    assert table.prefill_seconds(2 * limit, 1, 77) > 0  # a context that no plane knows is left out


def test_geometric_axes_refuse_limits_below_one():
    with pytest.raises(ConfigError, match="max_num_seqs must lie in"):
        TableAxes.geometric(max_num_batched_tokens=1, max_num_seqs=0, max_context_tokens=1, max_num_blocks=1)
