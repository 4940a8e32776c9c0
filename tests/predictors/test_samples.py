"""Measurements on disk, and the noisy device a simulation makes of them."""

import json
import random
import statistics

import pytest
from scheduler_helpers import LinearCosts

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.regression import Sample
from jaxllm.predictors.samples import load_samples, save_samples
from jaxllm.predictors.table import TableAxes
from jaxllm.research.simulator.fitted import fit_predictor, held_out_ratios

MODEL = model_shape("llama-13b")
AXES = TableAxes.geometric(
    max_num_batched_tokens=256, max_num_seqs=16, max_context_tokens=1024, max_num_blocks=32
)


def measured(count, noise):
    """Samples of a linear device whose every measurement is off by a factor up to `noise`."""
    rng = random.Random(0)

    def off(seconds):
        return seconds * rng.uniform(1 / noise, noise)

    samples = {kind: [] for kind in COST_KINDS}
    for _ in range(count):
        tokens, blocks = rng.randint(1, 256), rng.randint(1, 32)
        decodes = (1 + tokens % 16, 4 * tokens)
        samples["prefill"].append(Sample.step(MODEL, off(0.01 + tokens), 0, 0, tokens, 1))
        samples["decode"].append(Sample.step(MODEL, off(5.0 + tokens), *decodes))
        samples["mixed"].append(Sample.step(MODEL, off(5.0 + 2 * tokens), *decodes, tokens, 1))
        samples["swap_out"].append(Sample.swap_out(MODEL, 16, blocks, off(1.0 + blocks)))
        samples["swap_in"].append(Sample.swap_in(MODEL, 16, blocks, off(1.0 + blocks)))
    return samples


def test_samples_survive_a_file(tmp_path):
    samples = measured(5, 1.1)
    save_samples(tmp_path / "s.json", samples, {"command": "jaxllm profile"})
    assert load_samples(tmp_path / "s.json") == samples
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["command"] == "jaxllm profile"
    assert content["columns"].keys() == set(COST_KINDS)
    assert content["columns"]["swap_in"] == ["block_bytes", "num_blocks", "seconds"]
    counts = ["batch", "context_tokens", "num_tokens", "num_seqs", "prompt_context"]
    assert content["columns"]["mixed"] == ["num_layers", "hidden_size", *counts, "seconds"]
    for kind, of_kind in samples.items():
        assert len(content["samples"][kind]) == len(of_kind) == 5
    with pytest.raises(ConfigError, match=r"cannot write the samples .*: No such file"):
        save_samples(tmp_path / "absent" / "s.json", samples, {})


def test_a_file_may_lack_kinds(tmp_path):
    samples = {kind: of_kind for kind, of_kind in measured(90, 1.1).items() if kind != "mixed"}
    save_samples(tmp_path / "s.json", samples, {})
    loaded = load_samples(tmp_path / "s.json")
    assert loaded == samples
    assert all(ratios.keys() == samples.keys() for ratios in held_out_ratios(loaded))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": "other"}', "its format is 'other'"),
        ('{"format": "jaxllm-samples"}', "KeyError: 'samples'"),
        ('{"format": "jaxllm-samples", "samples": {"decode": [[1, 2]]}}', "sample has features"),
    ],
)
def test_damaged_files_are_refused(tmp_path, text, message):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_samples(tmp_path / "s.json")
    with pytest.raises(ConfigError, match="cannot read the samples"):
        load_samples(tmp_path / "absent.json")


def test_ratios_are_those_of_two_held_out_parts():
    samples = measured(240, 1.2)
    for_predictors, for_truth = held_out_ratios(samples, seed=1)
    for kind in COST_KINDS:
        assert (len(for_predictors[kind]), len(for_truth[kind])) == (80, 80)
        assert not set(for_predictors[kind]) & set(for_truth[kind])
        for ratios in (for_predictors[kind], for_truth[kind]):
            assert 0.9 < statistics.median(ratios) < 1.1
            assert 0.5 < min(ratios) < 0.95
            assert 1.05 < max(ratios) < 2.0
    with pytest.raises(ConfigError, match="40 prefill samples are too few"):
        held_out_ratios(measured(40, 1.2))


def test_a_predictor_fitted_to_noise_finds_the_costs_within_it():
    costs = LinearCosts(prefill=0.01, decode=0.1, swap=0.5)
    ratios = {kind: [0.8, 0.9, 1.0, 1.1, 1.2] for kind in COST_KINDS}
    predictor = fit_predictor(costs, MODEL, AXES, ratios, block_size=16, num_samples=150, seed=3)
    assert predictor.step_seconds(0, 0, 100, 4) == pytest.approx(1.0, rel=0.15)
    assert predictor.step_seconds(8, 500) == pytest.approx(0.8, rel=0.25)
    assert predictor.step_seconds(8, 500, 100, 4) == pytest.approx(1.8, rel=0.25)
    assert predictor.swap_in_seconds(10) == pytest.approx(5.0, rel=0.15)
    assert predictor.swap_out_seconds(10) != costs.swap_out_seconds(10)


def test_mixed_steps_without_ratios_of_their_own_take_those_of_prefills():
    costs = LinearCosts(prefill=0.01, decode=0.1, swap=0.5)
    predictor = fit_predictor(costs, MODEL, AXES, {"prefill": [2.0]}, block_size=16, num_samples=100)
    assert predictor.step_seconds(0, 0, 100, 4) == pytest.approx(2.0, rel=0.05)
    assert predictor.step_seconds(8, 500) == pytest.approx(0.8, rel=0.05)
    assert predictor.step_seconds(8, 500, 100, 4) == pytest.approx(2 * 1.8, rel=0.1)
