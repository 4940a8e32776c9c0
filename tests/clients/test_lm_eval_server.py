"""lm-evaluation-harness through the server: scores and texts of the model in process, and the engine's."""

import json
import re

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from server_helpers import SMALL

from jaxllm.jobs.lm_eval import JaxLLM
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sampling.params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

LENGTH = 1024  # as long as the demo model's requests may be, in tokens
LONG = "class A:\n" * 400  # which is longer, so that its beginning is cut off
DOCUMENTS = [
    {"text": "def add(a, b):", "choices": [" return a + b", "\n    return a + b", "xyz"], "answer": 1},
    {"text": "for i in range(", "choices": ["10):", "):", "len(x)):\n"], "answer": 2},
    {"text": LONG, "choices": ["    pass", "def"], "answer": 0},
    {"text": "", "choices": ["import os", "#"], "answer": 0},
    # Tokens of which several have the same text, as they are parts of characters.
    {"text": "# éé", "choices": ["é", "é → ✓", "日本"], "answer": 0},
]
CONTEXTS = ("def add(a, b):", "import ", "for i in range(", "class A:\n")
STOPS, MAX_TOKENS = ["\n\n", "("], 24


@pytest.fixture(scope="module")
def in_process():
    """The harness's in-process models, without and with special tokens added to texts."""
    return {adds: JaxLLM(add_bos_token=adds, **SMALL) for adds in (False, True)}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, llm):
    """Tasks of each type that the harness has, as its files and as what these say."""
    folder = tmp_path_factory.mktemp("tasks")
    greedy = llm.generate([CONTEXTS[0]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    foreseen = {"text": CONTEXTS[0], "choices": [greedy[0].outputs[0].text, "?"], "answer": 0}
    contexts = [{"text": text, "choices": [""], "answer": 0} for text in CONTEXTS]
    for name, documents in (("scored", [*DOCUMENTS, foreseen]), ("generated", contexts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))

    def task(name, file, **options):
        return {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{file}.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{text}}",
            "target_delimiter": "",
            **options,
        }

    found = [
        task(
            "choice",
            "scored",
            output_type="multiple_choice",
            doc_to_choice="{{choices}}",
            doc_to_target="{{answer}}",
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        task(
            "rolling",
            "scored",
            output_type="loglikelihood_rolling",
            doc_to_target="{{text}}{{choices[0]}}",
            metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        ),
        task(
            "generated",
            "generated",
            output_type="generate_until",
            doc_to_target="{{choices[0]}}",
            generation_kwargs={"until": STOPS, "max_gen_toks": MAX_TOKENS, "do_sample": False},
            metric_list=[{"metric": "exact_match"}],
        ),
    ]
    for one in found:
        (folder / f"{one['task']}.yaml").write_text(yaml.safe_dump(one))
    return folder, found


def evaluated(model, tasks, **options):
    """What the harness finds; without its own tasks, which take long to list."""
    manager = TaskManager(include_defaults=False)
    return simple_evaluate(model=model, tasks=tasks, task_manager=manager, log_samples=True, **options)


def through_server(url, path, **arguments):
    return {
        "base_url": f"{url}{path}",
        "model": "demo_model",
        "tokenizer": str(demo_model_path()),
        "num_concurrent": 4,
        "max_length": LENGTH,
        **arguments,
    }


def metrics(results):
    return {
        (task, name): value
        for task, values in results.items()
        for name, value in values.items()
        if isinstance(value, float) and "stderr" not in name
    }


def answers(samples):
    """Each request's answers, in the order of documents."""
    return [sample["resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]


def scores(samples):
    found = [score for resps in answers(samples) for [score] in resps]
    return [(float(score), str(is_greedy) == "True") for score, is_greedy in found]


def sums(samples):
    return [float(score) for [[score]] in answers(samples)]


def assert_same(found, expected):
    assert metrics(found["results"]) == pytest.approx(metrics(expected["results"]), rel=1e-3, abs=1e-3)
    for name, samples in expected["samples"].items():
        if name == "choice":
            assert_same_scores(scores(found["samples"][name]), scores(samples))
        elif name == "generated":
            assert answers(found["samples"][name]) == answers(samples)
        else:
            assert sums(found["samples"][name]) == pytest.approx(sums(samples), abs=1e-3)


def assert_same_scores(found, expected):
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]


@pytest.fixture
def by_command(url, run_client, tmp_path):
    def run(folder, arguments):
        """What `lm_eval` writes of all tasks in a folder."""
        run_client(
            "lm_eval",
            "--model=local-completions",
            "--model_args=" + ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--tasks=choice,rolling,generated",
            f"--include_path={folder}",
            f"--output_path={tmp_path}/out",
            "--log_samples",
        )
        [results] = tmp_path.glob("out/*/results_*.json")
        samples = {}
        for name in ("choice", "rolling", "generated"):
            [file] = tmp_path.glob(f"out/*/samples_{name}_*.jsonl")
            samples[name] = [json.loads(line) for line in file.read_text().splitlines()]
        return {"results": json.loads(results.read_text())["results"], "samples": samples}

    return run


def test_the_command_has_what_the_model_in_process_has(url, by_command, in_process, tasks, llm):
    folder, described = tasks
    arguments = through_server(url, "/v1/completions", tokenized_requests=True, add_bos_token=True)
    found = by_command(folder, arguments)
    assert_same(found, evaluated(in_process[True], described))
    assert {is_greedy for _, is_greedy in scores(found["samples"]["choice"])} == {True, False}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = llm.generate(list(CONTEXTS), params, use_tqdm=False)
    whole = [output.outputs[0].text for output in outputs]
    texts = [text for [[text]] in answers(found["samples"]["generated"])]
    assert texts == [re.split("|".join(map(re.escape, STOPS)), text)[0] for text in whole]
    assert texts != whole


@pytest.mark.parametrize("arguments", [{}, {"num_concurrent": 1, "batch_size": 5}], ids=["single", "batches"])
def test_texts_without_special_tokens(url, in_process, tasks, llm, arguments):
    """The harness adds none by default."""
    arguments = through_server(url, "/v1/completions", **arguments)
    found = evaluated("local-completions", tasks[1], model_args=arguments)
    assert_same(found, evaluated(in_process[False], tasks[1]))
    scored = [(document, choice) for document in DOCUMENTS for choice in document["choices"]]
    expected = [directly_scored(llm, document, choice) for document, choice in scored]
    assert_same_scores(scores(found["samples"]["choice"])[: len(expected)], expected)


def directly_scored(llm, document, choice):
    """The sum of log-probabilities and whether each token is the likeliest, by the engine itself."""
    tokenizer = llm.get_tokenizer()

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    context = document["text"].rstrip()  # the harness scores the spaces between with what follows
    before = encode(context) if context else [tokenizer.bos_token_id]
    scored = encode(document["text"] + choice)[len(before) if context else 0 :]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([(before + scored)[-(LENGTH - 1) :]], params, use_tqdm=False)
    positions = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[-len(scored) :]
    entries = [position[token_id] for token_id, position in positions]
    return sum(one.logprob for one in entries), all(one.rank == 1 for one in entries)


def test_texts_that_the_server_tokenises(url, in_process, tasks):
    """Which adds the tokenizer's special tokens, as it does for every client."""
    generated = [one for one in tasks[1] if one["task"] == "generated"]
    arguments = through_server(url, "/v1/completions", tokenized_requests=False)
    found = evaluated("local-completions", generated, model_args=arguments)
    assert_same(found, evaluated(in_process[True], generated))


def test_chats(url, in_process, tasks):
    generated = [one for one in tasks[1] if one["task"] == "generated"]
    arguments = through_server(url, "/v1/chat/completions")
    found = evaluated("local-chat-completions", generated, model_args=arguments, apply_chat_template=True)
    assert_same(found, evaluated(in_process[True], generated, apply_chat_template=True))
    assert len({text for [[text]] in answers(found["samples"]["generated"])}) > 1
