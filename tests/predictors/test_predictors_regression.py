"""The choice among regressors, on measurements made up from a roofline, noise and padding."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.derived import derived_features
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.features import FEATURE_NAMES
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.regression import REGRESSORS, RegressionCostModel, Sample, fit
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.table import BatchCostModel, TableAxes, TableCostModel
from jaxllm.types import piece_sizes

NOISE = 0.01
BLOCK_SIZE = 16
MODELS = [model_shape("opt-13b"), model_shape("opt-30b")]
COSTS = {model: RooflineCostModel(model, device_spec("A800-80GB-PCIe")) for model in MODELS}


def log_uniform(rng, high):
    return int(math.exp(rng.uniform(0, math.log(high))))


def padded(count):
    """Up to the next power of two, at least 8: the shapes programs are compiled for."""
    return max(8, 1 << (count - 1).bit_length())


def draw_work(rng, kind):
    """Counts of a step, in the order of `CostModel.step_seconds`."""
    batch = tokens = seqs = before = 0
    if kind != "prefill":
        batch = log_uniform(rng, 128)
    if kind != "decode":
        tokens = log_uniform(rng, 2048)
        seqs, before = int(rng.integers(1, min(tokens, 64) + 1)), log_uniform(rng, 1024) - 1
    return batch, batch * log_uniform(rng, 1024), tokens, seqs, before


def synthetic(kind, count, models=MODELS, seed=0, padding=lambda count: count):
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        model = models[rng.integers(len(models))]
        cost, noise = COSTS[model], math.exp(rng.normal(0, NOISE))
        if kind.startswith("swap"):
            blocks = log_uniform(rng, 128)
            seconds = noise * cost.swap_in_seconds(blocks)
            samples.append(getattr(Sample, kind)(model, BLOCK_SIZE, blocks, seconds))
        else:
            batch, *rest = draw_work(rng, kind)
            seconds = noise * cost.step_seconds(padding(batch), *rest)
            samples.append(Sample.step(model, seconds, batch, *rest))
    return samples


@pytest.fixture(scope="module")
def quick_fits():
    """A fit of each kind over both models, by the candidates that fit fast."""
    names = ("linear", "ridge", "decision tree", "gradient boosting")
    return {kind: fit(synthetic(kind, 400), names=names, degrees=(1, 2, 3)) for kind in COST_KINDS}


@pytest.fixture(scope="module")
def all_candidates():
    """Every candidate, on one model's decode steps."""
    return fit(synthetic("decode", 120, MODELS[:1]), seed=3)


def test_every_candidate_is_reported(all_candidates):
    report = all_candidates.report
    assert [(c.regressor, c.degree) for c in report.candidates] == [
        (name, degree) for degree in range(1, 11) for name in REGRESSORS
    ]
    for candidate in report.candidates:
        assert candidate.num_features == math.comb(2 + candidate.degree, 2) - 1  # batch and context vary
        assert candidate.skipped is None
        assert 0 < candidate.held_out.mape < math.inf
        assert candidate.held_out.median <= candidate.held_out.largest
        assert candidate.fit_seconds > 0
    assert report.num_train + report.num_held_out + report.num_test == 120
    assert 0.15 * 120 <= report.num_test <= 0.3 * 120


def test_the_chosen_one_is_as_good_as_any_and_the_simplest_of_those(all_candidates):
    report = all_candidates.report
    best = min(candidate.held_out.mape for candidate in report.candidates)
    good = [c for c in report.candidates if c.held_out.mape <= 1.02 * best]
    assert report.chosen in good
    assert report.chosen.degree == min(candidate.degree for candidate in good)
    assert report.test.mape < 2 * NOISE


def test_the_report_as_json_and_markdown(all_candidates):
    report = all_candidates.report
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert len(document["candidates"]) == 80
    assert document["chosen"] in document["candidates"]
    assert document["test"]["mape"] == report.test.mape
    lines = report.to_markdown().splitlines()
    assert lines[0].startswith(f"decode: {report.chosen.regressor}, degree {report.chosen.degree}; MAPE ")
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 9
    assert all(row.count("|") == 12 for row in rows)
    assert sum(row.count("**") for row in rows) == 2


def test_errors_reach_the_noise_of_the_measurements(quick_fits):
    # The mean of |noise| is 0.8 % at a deviation of 1 %; the rest is for kinks that few samples show.
    limits = {"prefill": 0.03, "decode": 0.015, "mixed": 0.06, "swap_out": 0.012, "swap_in": 0.012}
    assert quick_fits.keys() == limits.keys()
    for kind, fitted in quick_fits.items():
        assert fitted.report.test.mape < limits[kind], fitted.report.to_markdown()


def test_steps_of_padded_shapes_are_learned_by_trees():
    fitted = fit(synthetic("decode", 400, MODELS[:1], padding=padded), degrees=(1, 2))
    assert fitted.report.test.mape < 0.02, fitted.report.to_markdown()


def test_equal_seeds_give_equal_fits_and_the_split_depends_on_the_seed():
    samples = synthetic("swap_out", 60)
    first, again, other = (fit(samples, seed=seed, degrees=(1, 2)) for seed in (0, 0, 1))

    def errors(fitted):
        return [candidate.held_out for candidate in fitted.report.candidates]

    assert errors(first) == errors(again)
    assert errors(first) != errors(other)
    features = np.array([sample.features for sample in samples])
    assert np.array_equal(first.regressor.predict(features), again.regressor.predict(features))


def test_measurements_of_the_same_work_stay_together():
    # Ten distinct amounts, each measured 30 times, all with the same cost but for one that nothing explains:
    # a tree that saw some of its repetitions would know it.
    odd = 5
    samples = [
        Sample.swap_in(MODELS[0], BLOCK_SIZE, blocks, 100.0 if blocks == odd else 1.0)
        for blocks in range(1, 11)
        for _ in range(30)
    ]
    tests_with_odd = 0
    for seed in range(8):
        report = fit(samples, seed=seed, names=("decision tree",), degrees=(1,)).report
        assert report.num_test == 60
        assert report.num_held_out == 60
        tests_with_odd += report.test.largest > 0.5 or report.candidates[0].held_out.largest > 0.5
    assert tests_with_odd > 0


def test_nothing_was_fitted_to_the_test_samples():
    samples = synthetic("mixed", 60)
    options = {"names": ("linear", "decision tree"), "degrees": (1,)}
    first = fit(samples, **options)
    tested = [samples.index(sample) for sample in first.test]
    assert len(set(tested)) == len(first.test) == first.report.num_test == 12
    # Whatever those took, the same is chosen and predicted.
    changed = [
        dataclasses.replace(sample, seconds=sample.seconds * (1000.0 if index in tested else 1.0))
        for index, sample in enumerate(samples)
    ]
    second = fit(changed, **options)
    assert second.test == [changed[index] for index in tested]
    features = np.array([sample.features for sample in samples])
    assert np.array_equal(first.regressor.predict(features), second.regressor.predict(features))
    assert [c.held_out for c in first.report.candidates] == [c.held_out for c in second.report.candidates]
    # And the reported error is that on them.
    for fitted in (first, second):
        predicted = fitted.regressor.predict(np.array([sample.features for sample in fitted.test]))
        seconds = np.array([sample.seconds for sample in fitted.test])
        assert fitted.report.test.mape == pytest.approx(np.mean(abs(predicted - seconds) / seconds))


def test_too_many_features_are_skipped_and_said_so():
    fitted = fit(synthetic("swap_in", 60), names=("linear",), degrees=(1, 2, 3), max_features=5)
    assert [candidate.skipped for candidate in fitted.report.candidates] == [
        None,
        None,
        "degree 3 makes 9 features, more than 5",
    ]
    assert fitted.report.candidates[2].held_out is None
    assert "Skipped (-): degree 3 makes 9 features, more than 5." in fitted.report.to_markdown()
    with pytest.raises(ConfigError, match="degree 3 makes 9 features, more than 5; raise max_features"):
        fit(synthetic("swap_in", 60), degrees=(3,), max_features=5)


def test_a_cost_model_for_one_model_of_the_samples(quick_fits):
    fitted = {kind: quick_fits[kind].regressor for kind in COST_KINDS}
    model = RegressionCostModel(fitted, MODELS[1], BLOCK_SIZE)
    exact = COSTS[MODELS[1]]
    assert isinstance(model, BatchCostModel)
    for work, limit in (
        ((0, 0, 300, 4, 50), 0.1),
        ((16, 4000), 0.05),
        ((16, 4000, 20, 1, 50), 0.1),
        ((16, 4000, 300, 4, 50), 0.1),
    ):
        assert model.step_seconds(*work) == pytest.approx(exact.step_seconds(*work), rel=limit)
    assert model.swap_out_seconds(20) == pytest.approx(exact.swap_out_seconds(20), rel=0.03)
    assert model.swap_in_seconds(20) == pytest.approx(exact.swap_in_seconds(20), rel=0.03)


def test_each_kind_is_asked_of_its_own_regressor():
    class Fixed:
        """Answers with the sum of what it is asked, and its number."""

        def __init__(self, number):
            self.number = number

        def predict(self, features):
            return features.sum(axis=1) + self.number

    fitted = {kind: Fixed(number / 8) for number, kind in enumerate(COST_KINDS)}
    model = RegressionCostModel(fitted, MODELS[0], BLOCK_SIZE)
    shape, block = 40 + 5120, MODELS[0].block_bytes(BLOCK_SIZE)
    assert model.step_seconds(0, 0, 100, 4, 7) == shape + 111
    assert model.step_seconds(8, 900) == shape + 908 + 1 / 8
    assert model.step_seconds(8, 900, 100, 4, 7) == shape + 1019 + 2 / 8
    assert model.swap_out_seconds(5) == block + 5 + 3 / 8
    assert model.swap_in_seconds(9) == block + 9 + 4 / 8
    # A part without work is left out; nothing is asked where there is none at all.
    for nothing in ((0, 4, 9), (-1, 1, 9), (5, 0, 9)):
        assert model.step_seconds(8, 900, *nothing) == shape + 908 + 1 / 8
    for nothing in ((0, 99), (-1, 99)):
        assert model.step_seconds(*nothing, 100, 4, 7) == shape + 111
    assert model.step_seconds(8, -5) == shape + 8 + 1 / 8
    for work in ((0, 0), (0, 9), (-1, 9), (0, 0, 0, 4), (0, 0, 5, 0), (0, 0, -1, 1, 9)):
        assert model.step_seconds(*work) == 0.0
    assert model.swap_out_seconds(0) == model.swap_in_seconds(0) == model.swap_in_seconds(-1) == 0.0


def test_a_distilled_fit_errs_little_more_than_the_fit(quick_fits):
    fitted = {kind: quick_fits[kind].regressor for kind in COST_KINDS}
    model = RegressionCostModel(fitted, MODELS[1], BLOCK_SIZE)
    axes = TableAxes.geometric(
        max_num_batched_tokens=2048,
        max_num_seqs=128,
        max_context_tokens=2**17,
        max_num_blocks=128,
        max_prefill_context_tokens=1024,
    )
    table = TableCostModel.distil(model, axes, monotone=False)
    for blocks in axes.swap_blocks:
        assert table.swap_in_seconds(blocks) == pytest.approx(model.swap_in_seconds(blocks))
    assert table.step_seconds(0, 0, 2048, 1) == pytest.approx(model.step_seconds(0, 0, 2048, 1))
    assert table.step_seconds(128, 2**17) == pytest.approx(model.step_seconds(128, 2**17))
    for kind in ("prefill", "decode", "mixed"):
        ours = [sample for sample in quick_fits[kind].test if sample.features[1] == MODELS[1].hidden_size]
        errors = [abs(table.seconds_of(kind, one.work) / one.seconds - 1) for one in ours]
        assert len(errors) > 20
        assert np.mean(errors) < quick_fits[kind].report.test.mape + 0.02


def test_work_beyond_the_samples_grows_on_as_it_did(quick_fits):
    model = RegressionCostModel({k: f.regressor for k, f in quick_fits.items()}, MODELS[0], BLOCK_SIZE)
    largest = int(max(s.features[1] for s in synthetic("swap_in", 400)))
    edge, half = model.swap_in_seconds(largest), model.swap_in_seconds(largest // 2)
    grown = edge + 9 * largest * (edge - half) / (largest - largest // 2)
    assert model.swap_in_seconds(10 * largest) == pytest.approx(min(grown, 10 * edge), rel=1e-3)
    assert 0 < model.step_seconds(10_000, 10**8) < math.inf
    measured = np.array([sample.features for sample in synthetic("mixed", 400)])
    most = [int(largest) for largest in measured.max(axis=0)[2:]]
    edge = model.step_seconds(*most)
    for place in range(len(most)):
        more = [count * (3 if place == number else 1) for number, count in enumerate(most)]
        assert edge <= model.step_seconds(*more) <= 3 * edge * (1 + 1e-9)


@pytest.mark.parametrize("name", ["linear", "decision tree"])
def test_what_hardly_matters_hardly_matters_beyond_the_samples(name):
    """A step of fixed seconds and a few for each token: twice the tokens are not twice the seconds."""
    steps = [
        Sample.step(MODELS[0], 1 + 0.1 * tokens / 1000 + 0.01 * seqs, 0, 0, tokens, seqs)
        for tokens in range(50, 1001, 50)
        for seqs in (1, 2, 4)
    ]
    found = fit(steps, names=(name,), degrees=(1,)).regressor
    for tokens, seqs in ((4000, 4), (1000, 16), (4000, 16)):
        (seconds,) = found.predict(np.array([[40, 5120, tokens, seqs, 0]]))
        assert seconds == pytest.approx(1 + 0.1 * tokens / 1000 + 0.01 * seqs, rel=0.06)


def test_where_only_no_row_was_measured_more_are_predicted_alike():
    steps = [Sample("decode", (40.0, 5120.0, 0.0, float(context)), 1.0 + context) for context in range(1, 30)]
    found = fit(steps, names=("linear",), degrees=(1,)).regressor
    assert found.predict(np.array([[40, 5120, 3, 10]])) == pytest.approx([11.0])


def test_other_models_and_unmeasured_work_are_refused(quick_fits, all_candidates):
    fitted = {kind: quick_fits[kind].regressor for kind in COST_KINDS}
    large = dataclasses.replace(MODELS[1], num_layers=96)
    with pytest.raises(
        ConfigError, match="num_layers 40 to 48 only, and is asked for 96; measure it there too"
    ):
        RegressionCostModel(fitted, large, BLOCK_SIZE).step_seconds(1, 1)
    with pytest.raises(ConfigError, match="swap_in was measured with block_bytes"):
        RegressionCostModel(fitted, MODELS[1], 2 * BLOCK_SIZE).swap_in_seconds(1)
    for missing in set(COST_KINDS) - {"mixed"}:
        with pytest.raises(ConfigError, match=f"no regressor was fitted for {missing}$"):
            RegressionCostModel({k: f for k, f in fitted.items() if k != missing}, MODELS[1], BLOCK_SIZE)
    pure = RegressionCostModel({k: f for k, f in fitted.items() if k != "mixed"}, MODELS[1], BLOCK_SIZE)
    both = pure.step_seconds(8, 900) + pure.step_seconds(0, 0, 100, 4)
    assert pure.step_seconds(8, 900, 100, 4) == pytest.approx(both)
    one_seq = [Sample.step(MODELS[0], float(tokens), 0, 0, tokens, 1) for tokens in range(1, 21)]
    only = fit(one_seq, names=("linear",), degrees=(1,)).regressor
    assert only.predict(np.array([[40, 5120, 7, 1, 0]])) == pytest.approx([7.0])
    with pytest.raises(ConfigError, match="prefill was measured with num_seqs 1 only, and is asked for 2"):
        only.predict(np.array([[40, 5120, 7, 2, 0]]))


@pytest.mark.parametrize(
    ("counts", "kind", "work"),
    [
        ((8, 900), "decode", (8, 900)),
        ((8, 900, 0, 3, 7), "decode", (8, 900)),
        ((0, 0, 100, 4), "prefill", (100, 4, 0)),
        ((0, 900, 100, 4, 7), "prefill", (100, 4, 7)),
        ((8, 900, 100, 4), "mixed", (8, 900, 100, 4, 0)),
        ((8, 900, 100, 4, 7), "mixed", (8, 900, 100, 4, 7)),
    ],
)
def test_a_step_is_a_sample_of_the_kind_that_it_computes(counts, kind, work):
    sample = Sample.step(MODELS[0], 0.5, *counts)
    assert sample == Sample(kind, (40, 5120, *work), 0.5)
    assert sample.work == work
    assert len(FEATURE_NAMES[kind]) == len(sample.features)


def test_the_work_of_a_sample_is_without_the_models_counts():
    assert Sample.swap_out(MODELS[0], BLOCK_SIZE, 5, 0.5).work == (5,)
    assert Sample.swap_in(MODELS[1], BLOCK_SIZE, 9, 0.5).work == (9,)
    work = Sample("mixed", (40.0, 5120.0, 8.0, 900.0, 100.0, 4.0, 7.0), 0.5).work  # as from a file
    assert work == (8, 900, 100, 4, 7)
    assert {type(count) for count in work} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", (40.0, 5120.0, 1.0), 1.0), "a decode sample has features"),
        (("mixed", (40.0, 5120.0, 8.0, 900.0, 100.0, 4.0), 1.0), "a mixed sample has features"),
        (("swap_in", (4.0, -1.0), 1.0), "features must lie in"),
        (("swap_in", (4.0, math.nan), 1.0), "features must lie in"),
        (("swap_in", (4.0, 1.0), 0.0), r"took 0.0 seconds; it must be from 1e-09"),
        (("swap_in", (4.0, 1.0), math.inf), "took inf seconds"),
    ],
)
def test_bad_samples_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Sample(*arguments)


def test_bad_arguments_are_refused():
    samples = synthetic("swap_in", 60)
    with pytest.raises(ConfigError, match="samples of one kind of cost, got none"):
        fit([])
    with pytest.raises(ConfigError, match=r"one kind of cost, got \['decode', 'swap_in'\]"):
        fit(samples + synthetic("decode", 1))
    with pytest.raises(ConfigError, match="measured at 3 distinct amounts of work; measure at least 10"):
        fit([Sample.swap_in(MODELS[0], 16, blocks, 1.0) for blocks in (1, 2, 3) * 9])
    with pytest.raises(ConfigError, match=r"degree must lie in \[1, 10\], got 11"):
        fit(samples, degrees=(11,))
    with pytest.raises(ConfigError, match=r"one of the regressors linear, .* names=\['svm'\]"):
        fit(samples, names=("svm",))
    prompts = ("num_tokens", "num_seqs")
    assert FEATURE_NAMES["prefill"] == ("num_layers", "hidden_size", *prompts, "context_tokens")
    decodes = ("num_layers", "hidden_size", "batch", "context_tokens")
    assert FEATURE_NAMES["mixed"] == (*decodes, *prompts, "prompt_context")


def test_every_candidate_is_tested_on_demand():
    samples = synthetic("decode", 200)
    brief = {"names": ["ridge", "decision tree"], "degrees": [1, 2]}
    plain, tested = fit(samples, **brief).report, fit(samples, test_all=True, **brief).report
    assert {candidate.test for candidate in plain.candidates} == {None}
    assert tested.chosen.held_out == plain.chosen.held_out
    assert tested.chosen.test == tested.test == plain.test
    assert all(candidate.test.mape > 0 for candidate in tested.candidates)


def test_features_are_derived_from_what_describes_the_work():
    blocks = {"block_bytes": np.array([10.0, 10.0]), "num_blocks": np.array([16.0, 23.0])}
    assert derived_features(blocks).tolist() == [[1, 160], [4, 230]]  # 16 + 4 + 2 + 1
    shape = {"num_layers": np.array([2.0]), "hidden_size": np.array([3.0])}
    decode = {"batch": np.array([5.0]), "context_tokens": np.array([7.0])}
    prompts = {"num_tokens": np.array([10.0]), "num_seqs": np.array([4.0])}
    assert derived_features({**shape, **decode}).tolist() == [[90, 42]]
    assert derived_features({**shape, **prompts, "context_tokens": np.array([1.0])}).tolist() == [[180, 6]]
    mixed = {**shape, **decode, **prompts, "prompt_context": np.array([1.0])}
    assert derived_features(mixed).tolist() == [[270, 48]]


def test_derived_features_explain_the_pieces_of_copies():
    """Of a device that takes 1 ms for each piece, and nothing else."""
    samples = [
        Sample.swap_out(model, BLOCK_SIZE, blocks, 1e-3 * len(piece_sizes(blocks)))
        for model in MODELS
        for blocks in range(1, 64)
    ]
    brief = {"names": ["linear"], "degrees": [1]}
    assert fit(samples, **brief).report.test.mape > 0.1
    found = fit(samples, derived=True, **brief)
    assert found.report.test.mape < 1e-9
    # Beyond what was measured it is scaled, as without.
    block_bytes = MODELS[0].block_bytes(BLOCK_SIZE)
    assert found.regressor.predict(np.array([[block_bytes, 126.0]])) == pytest.approx([2 * 7e-3])
