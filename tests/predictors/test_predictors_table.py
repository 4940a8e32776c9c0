"""Cost tables against the models they were distilled from, and against a naive interpolation."""

import functools
import itertools
import math
import random
import statistics
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import model_shape
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
        # By context, batch and rows.
        "mixed_seconds": np.array(
            [[[2.0, 5.2], [2.8, 5.6]], [[2.9, 6.0], [4.6, 7.4]], [[8.0, 9.0], [9.2, 13.0]]]
        ),
        "swap_out_seconds": np.array([1.0, 2.5]),
        "swap_in_seconds": np.array([2.0, 2.0]),
    }
    return grids | changes


def naive(grid, axes, point, *, grows=True):
    """Multilinear interpolation by summing over the corners of the cell, with the documented edges."""
    scale = (
        max(1.0, *(x / axis[-1] for axis, x in zip(axes, point, strict=True) if axis[-1])) if grows else 1.0
    )
    weights = []
    for axis, x in zip(axes, point, strict=True):
        x = min(max(x, axis[0]), axis[-1])
        weights.append([float(np.interp(x, axis, np.eye(len(axis))[i])) for i in range(len(axis))])
    corners = itertools.product(*(range(len(axis)) for axis in axes))
    return scale * sum(
        grid[corner] * math.prod(w[i] for w, i in zip(weights, corner, strict=True)) for corner in corners
    )


def naive_mixed(batch, context, tokens, seqs, before):
    """A mixed step of the small table: its grid's, and what its prompts take more than usual ones."""
    grids = small_grids()
    axes = (SMALL.prefill_context, SMALL.prefill_tokens, SMALL.prefill_seqs)
    prefill = naive(grids["prefill_seconds"], axes, (before, tokens, seqs))
    usual = naive(grids["prefill_seconds"], axes, (0, tokens, 1))
    axes = (SMALL.decode_context, SMALL.decode_batch, SMALL.prefill_tokens)
    mixed = naive(grids["mixed_seconds"], axes, (context, batch, batch + tokens))
    decode = naive(grids["decode_seconds"], (SMALL.decode_batch, SMALL.decode_context), (batch, context))
    return min(max(mixed + prefill - usual, decode, prefill), decode + prefill + min(decode, prefill))


def test_values_between_the_nodes_by_hand():
    table = TableCostModel(SMALL, **small_grids())
    assert table.step_seconds(0, 0, 2, 1) == 1.0
    assert table.step_seconds(0, 0, 6, 2) == pytest.approx((1 + 2 + 5 + 8) / 4)
    assert table.step_seconds(0, 0, 10, 3, 8) == 12.0
    assert table.step_seconds(0, 0, 10, 3, 4) == 10.0
    assert table.step_seconds(3, 12) == pytest.approx((1 + 2 + 2 + 4) / 4)
    assert table.swap_out_seconds(3) == 2.0


def test_values_beyond_the_nodes_grow_in_proportion():
    table = TableCostModel(SMALL, **small_grids())
    assert table.step_seconds(0, 0, 1, 1) == 1.0  # flat below the first node
    assert table.step_seconds(0, 0, 30, 3) == 24.0
    assert table.step_seconds(0, 0, 30, 6, 16) == 36.0  # tokens exceed their axis the most
    assert table.step_seconds(10, 200) == 16.0
    assert table.swap_out_seconds(40) == 25.0
    assert table.swap_in_seconds(40) == 20.0


def test_a_mixed_step_is_looked_up_by_its_rows():
    table = TableCostModel(SMALL, **small_grids())
    assert table.step_seconds(1, 4, 1, 1) == 2.0
    assert table.step_seconds(1, 4, 9, 1) == pytest.approx(5.2)
    assert table.step_seconds(5, 4, 5, 1) == pytest.approx(5.6)
    # Between the nodes of batch, rows and context.
    assert table.step_seconds(3, 4, 3, 1) == pytest.approx((2.0 + 5.2 + 2.8 + 5.6) / 4)
    assert table.step_seconds(1, 12, 1, 1) == pytest.approx((2.0 + 2.9) / 2)
    # More sequences, and context, take as much more as without decodes: 11 rather than 4.5.
    assert table.step_seconds(1, 4, 9, 3, 8) == pytest.approx(5.2 + 11.0 - 4.5)


def test_a_mixed_step_takes_as_long_as_its_longer_part_and_not_much_longer_than_both():
    fast = TableCostModel(SMALL, **small_grids(mixed_seconds=np.zeros((3, 2, 2))))
    slow = TableCostModel(SMALL, **small_grids(mixed_seconds=np.full((3, 2, 2), 99.0)))
    for work, decode, prefill in (((1, 4, 10, 1), 1.0, 5.0), ((5, 20, 2, 1), 4.0, 1.0)):
        assert fast.step_seconds(*work) == max(decode, prefill)
        assert slow.step_seconds(*work) == decode + prefill + min(decode, prefill)


def test_mixed_steps_beyond_the_axes_grow_in_proportion():
    table = TableCostModel(SMALL, **small_grids())
    assert table.step_seconds(10, 4, 10, 1) == pytest.approx(2 * 5.6)
    assert table.step_seconds(1, 200, 1, 1) == pytest.approx(14.0)  # 2 * 8, but for the bound


def test_no_work_costs_nothing():
    for work in ((0, 0), (0, 9), (-1, 9), (0, 0, 0, 1, 5), (0, 0, -1, 1), (0, 0, 5, 0), (0, 0, 5, -1)):
        assert TABLE.step_seconds(*work) == 0.0
    assert TABLE.swap_out_seconds(0) == TABLE.swap_in_seconds(0) == TABLE.swap_in_seconds(-1) == 0.0


def test_a_part_without_work_is_left_out():
    for nothing in ((0, 4, 9), (-1, 1, 9), (5, 0, 9)):
        assert TABLE.step_seconds(3, 300, *nothing) == TABLE.step_seconds(3, 300)
    for nothing in ((0, 99), (-1, 99)):
        assert TABLE.step_seconds(*nothing, 100, 2, 20) == TABLE.step_seconds(0, 0, 100, 2, 20)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 30))
def test_prefill_lookups_equal_naive_interpolation(tokens, seqs, context):
    table = TableCostModel(SMALL, **small_grids())
    grids = small_grids()
    expected = naive(
        grids["prefill_seconds"],
        (SMALL.prefill_context, SMALL.prefill_tokens, SMALL.prefill_seqs),
        (context, tokens, seqs),
    )
    assert table.step_seconds(0, 0, tokens, seqs, context) == pytest.approx(expected)


@given(st.integers(1, 20), st.integers(0, 500))
def test_decode_lookups_equal_naive_interpolation(batch, context):
    table = TableCostModel(SMALL, **small_grids())
    expected = naive(
        small_grids()["decode_seconds"], (SMALL.decode_batch, SMALL.decode_context), (batch, context)
    )
    assert table.step_seconds(batch, context) == pytest.approx(expected)


@given(st.integers(1, 20), st.integers(0, 500), st.integers(1, 40), st.integers(1, 9), st.integers(0, 30))
def test_mixed_lookups_equal_naive_interpolation(batch, context, tokens, seqs, before):
    table = TableCostModel(SMALL, **small_grids())
    expected = naive_mixed(batch, context, tokens, seqs, before)
    assert table.step_seconds(batch, context, tokens, seqs, before) == pytest.approx(expected)


@given(st.integers(1, 2048), st.data())
def test_a_distilled_table_is_close_to_its_model(tokens, data):
    seqs = data.draw(st.integers(1, min(tokens, 64)))
    before = data.draw(st.one_of(st.just(0), st.integers(1, 4096)))
    batch = data.draw(st.integers(1, 64))
    context = data.draw(st.integers(batch, 1024 * batch))
    blocks = data.draw(st.integers(1, 128))
    for work, limit in (
        ((0, 0, tokens, seqs, before), 0.065),
        ((batch, context), 0.01),
        ((batch, context, tokens, seqs, before), 0.13),
    ):
        assert TABLE.step_seconds(*work) == pytest.approx(ROOFLINE.step_seconds(*work), rel=limit), work
    assert TABLE.swap_out_seconds(blocks) == pytest.approx(ROOFLINE.swap_out_seconds(blocks), rel=1e-9)
    assert TABLE.swap_in_seconds(blocks) == pytest.approx(ROOFLINE.swap_in_seconds(blocks), rel=1e-9)


@pytest.mark.parametrize("name", ["opt-13b", "llama-13b"])
def test_a_distilled_table_errs_little_on_mixed_steps_of_whole_prompts(name):
    roofline = RooflineCostModel(model_shape(name), device_spec("A800-80GB-PCIe"))
    table = TableCostModel.distil(roofline, AXES)
    rng, errors = random.Random(0), []
    for _ in range(3000):
        batch, tokens = rng.randint(1, 64), rng.randint(1, 2048)
        work = (batch, rng.randint(batch, 1024 * batch), tokens, rng.randint(1, min(tokens, 64)))
        errors.append(abs(table.step_seconds(*work) / roofline.step_seconds(*work) - 1))
    assert statistics.fmean(errors) < 0.004
    assert max(errors) < 0.09
    # Adding up what both parts take alone would be wrong by far: weights are read once.
    apart = table.step_seconds(32, 8000) + table.step_seconds(0, 0, 64, 1)
    assert apart > 1.7 * table.step_seconds(32, 8000, 64, 1)


def test_what_mixing_hides_is_found_by_asking_the_model():
    """Of a device that takes the longer part and half of the shorter one, whatever they are."""

    class HalfHidden:
        def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
            decode, prefill = 1.0 * batch, 0.25 * prompt_tokens
            return decode + prefill - 0.5 * min(decode, prefill)

        def swap_out_seconds(self, num_blocks):
            return 1.0

        swap_in_seconds = swap_out_seconds

    table = TableCostModel.distil(HalfHidden(), AXES)
    grid = table.to_arrays()["mixed_seconds"]
    assert grid.shape == (len(AXES.decode_context), len(AXES.decode_batch), len(AXES.prefill_tokens))
    assert table.step_seconds(8, 100, 16, 1) == pytest.approx(8 + 4 - 2)


def test_work_of_a_kind_is_looked_up_by_its_counts():
    assert TABLE.seconds_of("decode", (7, 300)) == TABLE.step_seconds(7, 300)
    assert TABLE.seconds_of("prefill", (100, 2, 50)) == TABLE.step_seconds(0, 0, 100, 2, 50)
    assert TABLE.seconds_of("mixed", (7, 300, 100, 2, 50)) == TABLE.step_seconds(7, 300, 100, 2, 50)
    assert TABLE.seconds_of("swap_out", (9,)) == TABLE.swap_out_seconds(9)
    table = TableCostModel(SMALL, **small_grids())
    assert table.seconds_of("swap_out", [1]) == 1.0
    assert table.seconds_of("swap_in", [1]) == 2.0


class Noisy:
    """The roofline with half of each cost random: what a bad fit looks like."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def step_seconds(self, *work):
        return ROOFLINE.step_seconds(*work) * self.rng.uniform(0.5, 1.0)

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
    prefill = table.step_seconds(0, 0, tokens, seqs, context)
    assert 0 < prefill <= table.step_seconds(0, 0, tokens + more, seqs, context) * slack
    assert prefill <= table.step_seconds(0, 0, tokens, seqs, context + more) * slack
    decode = table.step_seconds(seqs, context)
    assert 0 < decode <= table.step_seconds(seqs + more, context) * slack
    assert decode <= table.step_seconds(seqs, context + more) * slack
    mixed = table.step_seconds(seqs, context, tokens, seqs, more)
    prefill = table.step_seconds(0, 0, tokens, seqs, more)
    assert max(decode, prefill) <= mixed * slack
    assert mixed <= (decode + prefill + min(decode, prefill)) * slack
    assert 0 < table.swap_out_seconds(tokens) <= table.swap_out_seconds(tokens + more) * slack


def test_the_cleanup_only_ever_raises_values():
    raw = TableCostModel.distil(Noisy(2), AXES, monotone=False).to_arrays()
    clean = TableCostModel.distil(Noisy(2), AXES).to_arrays()
    assert (clean["decode_seconds"] >= raw["decode_seconds"]).all()
    assert (clean["decode_seconds"] > raw["decode_seconds"]).any()
    assert (np.diff(raw["swap_in_seconds"]) < 0).any()


def test_a_model_that_answers_in_batches_is_asked_once_per_kind():
    class Batched(Noisy):
        def __init__(self):
            self.calls = []

        def seconds_many(self, kind, work):
            self.calls.append(kind)
            work = work.astype(int).tolist()
            if kind.startswith("swap"):
                return np.array([ROOFLINE.swap_in_seconds(*row) for row in work])
            before = (0, 0) if kind == "prefill" else ()
            return np.array([ROOFLINE.step_seconds(*before, *row) for row in work])

    model = Batched()
    assert isinstance(model, BatchCostModel)
    assert not isinstance(ROOFLINE, BatchCostModel)
    table = TableCostModel.distil(model, AXES)
    assert sorted(set(model.calls)) == sorted(COST_KINDS)
    assert Counter(model.calls) == dict.fromkeys(COST_KINDS, 1)
    for name, array in table.to_arrays().items():
        assert array == pytest.approx(TABLE.to_arrays()[name]), name


def test_impossible_nodes_take_the_nearest_possible_work():
    asked = []

    class Recorder:
        def step_seconds(self, *work):
            asked.append(work)
            return 1.0

        def swap_out_seconds(self, num_blocks):
            return 1.0

        swap_in_seconds = swap_out_seconds

    TableCostModel.distil(Recorder(), AXES)
    steps = [(*work, 0, 0, 0)[:5] for work in asked]
    assert {(batch > 0, tokens > 0) for batch, _, tokens, *_ in steps} == {(0, 1), (1, 0), (1, 1)}
    for batch, context, tokens, seqs, before in steps:
        assert context >= batch
        assert tokens >= seqs >= (tokens > 0)
        assert not (batch and before)
        assert seqs <= AXES.prefill_seqs[-1]
        assert not (batch and tokens) or batch + tokens in {2, *AXES.prefill_tokens}


def test_arrays_round_trip():
    arrays = TABLE.to_arrays()
    copy = TableCostModel.from_arrays(arrays)
    assert copy.axes == AXES
    for name, array in copy.to_arrays().items():
        assert np.array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype
    for array in arrays.values():
        array[:] = 0  # a copy
    for work in ((3, 100), (0, 0, 100, 3, 50), (3, 100, 100, 3, 50)):
        assert TABLE.step_seconds(*work) == copy.step_seconds(*work) > 0
    assert TABLE.swap_in_seconds(3) == copy.swap_in_seconds(3) > 0


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
        ({"mixed_seconds": None}, r"missing \['mixed_seconds'\], unknown \[\]"),
        (
            {"mixed_seconds": np.zeros((2, 3, 2))},
            r"mixed_seconds has shape \(2, 3, 2\); its axes \(decode_context, decode_batch, prefill_tokens\) "
            r"make \(3, 2, 2\)",
        ),
        ({"mixed_seconds": np.full((3, 2, 2), -1.01)}, "mixed_seconds must hold finite seconds"),
        ({"mixed_seconds": np.full((3, 2, 2), np.nan)}, "mixed_seconds must hold finite seconds"),
        ({"mixed_seconds": np.zeros((3, 2, 2), np.int64)}, "mixed_seconds must be an array of float64"),
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
    assert table.step_seconds(0, 0, 2 * limit, 1, 77) > 0  # a context that no plane knows is left out
    assert table.step_seconds(2 * limit, 4 * limit, 2 * limit, 1) > 0


def test_geometric_axes_refuse_limits_below_one():
    with pytest.raises(ConfigError, match="max_num_seqs must lie in"):
        TableAxes.geometric(max_num_batched_tokens=1, max_num_seqs=0, max_context_tokens=1, max_num_blocks=1)
