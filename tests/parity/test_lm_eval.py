"""The harness's tasks through jaxllm and through transformers: the same scores to 1e-3, the same texts."""

import json

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from jaxllm.errors import ConfigError, RequestError, SamplingParamsError
from jaxllm.jobs.lm_eval import JaxLLM
from jaxllm.loading.checkpoints import demo_model_path

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # of the harness and what it imports
]

DOCUMENTS = [
    {"text": "def add(a, b):", "choices": [" return a + b", "\n    return a + b", "xyz"], "answer": 1},
    {"text": "import ", "choices": ["os", "sys\n", "12"], "answer": 0},
    {"text": "for i in range(", "choices": ["10):", "):", "len(x)):\n"], "answer": 2},
    {"text": "class A:\n" * 200, "choices": ["    pass", "def"], "answer": 0},  # longer than max_length
    {"text": "", "choices": ["import os", "#"], "answer": 0},
]
LENGTH = 200


@pytest.fixture(scope="module")
def ours():
    return JaxLLM(max_length=LENGTH, num_gpu_blocks_override=256, max_num_seqs=4)


@pytest.fixture(scope="module")
def theirs():
    path = str(demo_model_path())
    return get_model("hf")(pretrained=path, max_length=LENGTH, device="cpu", dtype="float32", batch_size=1)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    file = tmp_path_factory.mktemp("task") / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    rolling = {
        "task": "rolling",
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}{{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    generated = {
        "task": "generated",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n", ":"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [common | task for task in (choice, rolling, generated)]


def evaluated(model, tasks):
    """Metrics by task, and each request's answers."""
    found = simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0, log_samples=True)
    metrics = {
        (task, name): value
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, float)
    }
    answers = {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}
    return metrics, answers


def test_tasks_have_the_scores_of_transformers(ours, theirs, tasks):
    our_metrics, our_answers = evaluated(ours, tasks)
    their_metrics, their_answers = evaluated(theirs, tasks)
    assert {task for task, _ in our_metrics} == {"choice", "rolling", "generated"}
    assert our_metrics == pytest.approx(their_metrics, rel=1e-3, abs=1e-3)
    assert our_answers["generated"] == their_answers["generated"]
    assert len({text for [[text]] in our_answers["generated"]}) > 2
    for mine, other in zip(our_answers["choice"], their_answers["choice"], strict=True):
        for [[score, is_greedy]], [[expected, is_theirs_greedy]] in zip(mine, other, strict=True):
            assert float(score) == pytest.approx(float(expected), abs=1e-3)
            assert is_greedy == is_theirs_greedy


def requests_of(kind, *arguments):
    return [Instance(kind, {}, one, place) for place, one in enumerate(arguments)]


def test_long_texts_are_scored_in_windows(ours, theirs):
    requests = requests_of("loglikelihood_rolling", ("x = [1, 2, 3]\n" * 120,), ("",), ("import os",))
    assert len(ours.tok_encode(requests[0].args[0])) > 2 * LENGTH
    found = ours.loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(theirs.loglikelihood_rolling(requests, disable_tqdm=True), abs=1e-3)


def test_a_continuation_of_no_tokens_is_certain(ours):
    """It does not end the run of the others."""
    requests = [(None, [5, 6], [7]), (("a", ""), [5, 6], []), (None, [5, 6], [8])]
    first, empty, last = ours._loglikelihood_tokens(requests, disable_tqdm=True)
    assert empty == (0.0, True)
    assert [first, last] == ours._loglikelihood_tokens([requests[0], requests[2]], disable_tqdm=True)


def test_what_cannot_be_run_is_an_error(ours):
    with pytest.raises(RequestError, match=r"requests\[1\] scores .* tokens, more than max_length=200"):
        ours.loglikelihood(
            requests_of("loglikelihood", ("a =", " b"), ("a =", " b\n" * 400)), disable_tqdm=True
        )
    options = {"until": "\n", "max_gen_toks": 10**6}
    with pytest.raises(RequestError, match="max_gen_toks=1000000 leaves no room"):
        ours.generate_until(requests_of("generate_until", ("a", options)), disable_tqdm=True)
    with pytest.raises(SamplingParamsError, match="num_beams"):
        ours.generate_until(requests_of("generate_until", ("a", {"num_beams": 4})), disable_tqdm=True)
    with pytest.raises(ConfigError, match="max_length=100000 must be from 1 to"):
        JaxLLM(max_length=10**5, num_gpu_blocks_override=64, max_num_seqs=1)
    assert ours.generate_until(requests_of("generate_until", ("import ", {"max_gen_toks": 4})), True)[0]
