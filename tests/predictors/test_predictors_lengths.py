"""Predicted output lengths: what prompts tell is learned, and what they do not is not made up."""

import numpy as np
import pytest
from scheduler_helpers import LinearCosts, make_scheduler
from scipy.stats import spearmanr

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.predictors.lengths import (
    RangePredictor,
    RankPredictor,
    TrueLength,
    ValuePredictor,
    prompt_features,
)
from jaxllm.research.workloads import TopicOutputs, load_dataset_file, make_trace
from jaxllm.sched.presets import make_preset
from jaxllm.types import Request

LEARNED = (ValuePredictor, RangePredictor, RankPredictor)


def request_of(trace, index):
    return Request(
        str(index),
        trace.prompt_token_ids[index],
        SamplingParams(),
        arrival_time=0.0,
        arrival_index=index,
        max_total_tokens=int(trace.prompt_lens[index] + trace.output_lens[index]),
    )


def predictions(predictor, trace):
    """Predicted and true lengths; every request is predicted before its output is seen."""
    found = []
    for index in range(len(trace)):
        request, output = request_of(trace, index), int(trace.output_lens[index])
        found.append((predictor.predict(request), output))
        predictor.observe(request, output)
    assert found[0][0] is None or isinstance(predictor, TrueLength)
    return np.array([one for one in found if one[0] is not None])


@pytest.fixture(scope="module")
def trace():
    return make_trace("chatbot", 600, 256, outputs=TopicOutputs(noise=0.2), seed=1)


@pytest.mark.parametrize("kind", LEARNED)
def test_what_prompts_tell_is_learned(kind, trace):
    predicted, true = predictions(kind(), trace)[-200:].T
    assert predicted.min() >= 1
    assert spearmanr(predicted, true)[0] > 0.5
    errors = np.std(np.log(predicted / true))
    assert errors < 0.85 * np.std(np.log(true))


@pytest.mark.parametrize("kind", LEARNED)
def test_nothing_is_learned_of_noise(kind):
    trace = make_trace("chatbot", 400, 256, outputs=TopicOutputs(noise=4.0), seed=1)
    predicted, true = predictions(kind(), trace)[-150:].T
    assert abs(spearmanr(predicted, true)[0]) < 0.4
    assert predicted.max() <= 4 * true.max()


def test_ranks_survive_what_upsets_values(trace):
    """Outputs of a few requests are a thousand times as long: the order of the others is the same."""
    wild = np.where(np.arange(len(trace)) % 10, trace.output_lens, 1000 * trace.output_lens)
    predictor = RankPredictor()
    for index in range(len(trace)):
        predictor.observe(request_of(trace, index), int(wild[index]))
    asked = [index for index in range(len(trace)) if index % 10]
    predicted = [predictor.predict(request_of(trace, index)) for index in asked]
    assert spearmanr(predicted, trace.output_lens[asked])[0] > 0.5


@pytest.mark.parametrize("kind", LEARNED)
def test_equal_outputs_are_predicted_exactly(kind):
    predictor = kind()
    trace = make_trace("chatbot", 40, 64, outputs=TopicOutputs(noise=0.0), seed=0)
    for index in range(40):
        predictor.observe(request_of(trace, index), 17)
    assert predictor.predict(request_of(trace, 3)) == pytest.approx(17)


def test_the_true_length_is_known_from_the_start(trace):
    predicted, true = predictions(TrueLength(), trace).T
    np.testing.assert_array_equal(predicted, true)


def test_features_are_of_the_prompt_alone():
    features = prompt_features([5, 5, 900000, 7])
    assert features.shape == (514,)
    assert features[:2] == pytest.approx([np.log(4), 0.75])
    assert features[2:].sum() == pytest.approx(1)


def test_schedulers_learn_from_requests_that_end_by_themselves(trace):
    policy = make_preset("shortest", LinearCosts())
    scheduler = make_scheduler(policy, num_gpu_blocks=64, max_model_len=2048)
    for index in range(40):
        request = request_of(trace, index)
        scheduler.add(request)
        scheduler.finish(request, "abort" if index < 4 else "stop")
    assert policy.length._num_seen == 36
    request = request_of(trace, 41)
    scheduler.add(request)
    assert request.predicted_tokens >= 1


# The workload


def test_outputs_depend_on_topics_with_the_stated_noise():
    exact = make_trace("chatbot", 400, 320, outputs=TopicOutputs(noise=0.0, num_topics=5), seed=2)
    assert sorted(set(exact.output_lens.tolist())) == [10, 20, 40, 80, 160]
    noisy = make_trace("chatbot", 4000, 320, outputs=TopicOutputs(noise=0.25, num_topics=2), seed=2)
    logs = np.log(noisy.output_lens[noisy.output_lens < 40])
    assert np.std(logs) == pytest.approx(0.25, rel=0.1)
    assert np.median(noisy.output_lens[noisy.output_lens < 40]) == pytest.approx(10, abs=1)
    assert exact.prompt_lens.tolist() == make_trace("chatbot", 400, 8, seed=2).prompt_lens.tolist()
    assert all(max(ids) < 850 for ids in exact.prompt_token_ids)
    assert [len(ids) for ids in exact.prompt_token_ids] == exact.prompt_lens.tolist()
    assert (
        make_trace("chatbot", 4, 320, outputs=TopicOutputs(), seed=2).prompt_token_ids
        == (make_trace("chatbot", 9, 320, outputs=TopicOutputs(), seed=2).prompt_token_ids[:4])
    )


def test_wrong_workloads_are_refused(tmp_path):
    for wrong in ({"noise": -1.0}, {"noise": float("nan")}, {"num_topics": 1}):
        with pytest.raises(ConfigError):
            TopicOutputs(**wrong)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"length": 3}\n{"length": 4}\n')
    dataset = load_dataset_file(file, None, length_column="length")
    with pytest.raises(ConfigError, match="has its own"):
        make_trace(dataset, 2, 8, outputs=TopicOutputs())
