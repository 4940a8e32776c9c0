"""guidellm's own command against the server: no request fails, and each has the tokens asked for."""

import json

import pytest

from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.workloads import load_trace
from jaxllm.sampling.params import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 16
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture
def benchmark(url, run_client, tmp_path):
    def run(path, profile, constraint, *, turns=1, **backend):
        """What the report has of each part of a profile."""
        options = {
            "backend": {"kind": "openai_http", "target": url, "request_format": path, **backend},
            "profile": profile,
            "constraint": constraint,
            "tokenizer": {"kind": "huggingface_auto", "model": str(demo_model_path())},
            "data": {
                "kind": "synthetic_text",
                "prompt_tokens": PROMPT_TOKENS,
                "output_tokens": OUTPUT_TOKENS,
                "turns": turns,
            },
            "output": {"kind": "json", "path": str(tmp_path / "report.json")},
        }
        values = [part for name, value in options.items() for part in (f"--{name}", json.dumps(value))]
        run_client("guidellm", "run", *values, "--disable-console")
        parts = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
        for one in parts:
            assert one["requests"]["errored"] == []
            for request in one["requests"]["successful"]:
                assert request["output_tokens"] == OUTPUT_TOKENS
                assert request["input_metrics"]["text_tokens"] == request["prompt_tokens"]
        trace = load_trace(tmp_path / "report.json", benchmark=0)
        rows = sorted(parts[0]["requests"]["successful"], key=lambda row: row["request_start_time"])
        assert trace.prompt_lens.tolist() == [row["prompt_tokens"] for row in rows]
        return parts

    return run


def requests(count):
    return {"kind": "max_requests", "count": count}


def greedily():
    return {"extras": {"body": {"temperature": 0}}}


def sent(request):
    return json.loads(request["request_args"])["body"]


def test_a_sweep_of_completions_has_the_texts_of_the_offline_engine(benchmark, llm):
    """One after the other, all at once, and at a rate between."""
    parts = benchmark("/v1/completions", {"kind": "sweep", "sweep_size": 3}, requests(12), **greedily())
    strategies = [one["config"]["strategy"]["type_"] for one in parts]
    assert strategies == ["synchronous", "throughput", "constant"]
    for one in parts:
        assert one["metrics"]["request_totals"] == {
            "successful": 12,
            "errored": 0,
            "incomplete": 0,
            "total": 12,
        }
        done = one["requests"]["successful"]
        assert {request["prompt_tokens"] for request in done} == {PROMPT_TOKENS}
        expected = llm.generate([sent(request)["prompt"] for request in done], GREEDY, use_tqdm=False)
        assert [request["output"] for request in done] == [answer.outputs[0].text for answer in expected]
        assert {len(answer.prompt_token_ids) for answer in expected} == {PROMPT_TOKENS}


def test_conversations_of_several_turns_side_by_side(benchmark, llm):
    [part] = benchmark(
        "/v1/chat/completions",
        {"kind": "concurrent", "streams": [4]},
        requests(16),
        turns=2,
        **greedily(),
    )
    done = part["requests"]["successful"]
    assert len(done) == 16
    messages = [sent(request)["messages"] for request in done]
    assert {len(one) for one in messages} == {1, 3}
    expected = llm.chat(messages, GREEDY, use_tqdm=False)
    assert [request["output"] for request in done] == [answer.outputs[0].text for answer in expected]
    assert [one["prompt_tokens"] for one in done] == [len(answer.prompt_token_ids) for answer in expected]


def test_whole_responses_at_random_times(benchmark):
    [part] = benchmark("/v1/completions", {"kind": "poisson", "rate": [20]}, requests(20), stream=False)
    assert len(part["requests"]["successful"]) == 20
    assert {request["prompt_tokens"] for request in part["requests"]["successful"]} == {PROMPT_TOKENS}


def test_more_at_once_than_the_batch_holds_until_time_is_up(benchmark):
    profile = {"kind": "throughput", "max_concurrency": 24}
    [part] = benchmark("/v1/chat/completions", profile, {"kind": "max_duration", "seconds": 4})
    assert part["requests"]["successful"]
    assert part["requests"]["incomplete"]  # those that the client gave up at the end
