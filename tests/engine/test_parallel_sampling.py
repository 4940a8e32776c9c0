"""Several samples of one prompt: each is that of a lone request, and they share what they have in common."""

import json

import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import RequestError, SamplingParamsError

PROMPT = [5 + index % 40 for index in range(50)]
SEEDED = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True, "seed": 11}


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint("llama_gqa"), enable_prefix_caching=True)


@pytest.fixture(scope="module")
def alone(llm):
    """Lone requests of the seeds that samples have."""
    params = [SamplingParams(**SEEDED | {"seed": 11 + index}, logprobs=1) for index in range(5)]
    return [llm.generate([PROMPT], one, use_tqdm=False)[0].outputs[0] for one in params]


def tokens(completions):
    return [one.token_ids for one in completions]


def test_a_sample_is_that_of_a_lone_request(llm, alone):
    other = SamplingParams(temperature=0, max_tokens=3)
    outputs = llm.generate(
        [PROMPT, [7, 8, 9]], [SamplingParams(**SEEDED, n=3, logprobs=1), other], use_tqdm=False
    )
    assert tokens(outputs[0].outputs) == tokens(alone[:3])
    assert [one.index for one in outputs[0].outputs] == [0, 1, 2]
    assert [one.text for one in outputs[0].outputs] == [one.text for one in alone[:3]]
    for one, expected in zip(outputs[0].outputs, alone[:3], strict=True):
        assert one.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
    assert outputs[0].finished
    assert len(outputs[1].outputs) == 1
    assert len({tuple(one) for one in tokens(alone)}) == 5


def test_samples_without_a_seed_differ(llm):
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, n=4)
    outputs = llm.generate([PROMPT], params, use_tqdm=False)
    assert len({tuple(one) for one in tokens(outputs[0].outputs)}) == 4


def test_the_prompt_is_computed_once(llm):
    params = SamplingParams(**SEEDED, n=4, prompt_logprobs=0)
    llm.generate([PROMPT], params, use_tqdm=False)  # else samples whose programs are there do not wait
    llm.reset_prefix_cache()
    engine = llm.engine
    engine.add_request("a", PROMPT, params)
    most = 0
    while engine.has_unfinished_requests:
        reports = engine.step()
        most = max(most, engine.scheduler.config.num_gpu_blocks - engine.scheduler.num_free_blocks)
        assert len(reports) == (not engine.has_unfinished_requests)
    block_size = engine.scheduler.config.block_size
    num_shared, num_all = len(PROMPT) // block_size, -(-(len(PROMPT) + 10) // block_size)
    assert most <= num_shared + 4 * (num_all - num_shared)
    assert len(reports[0].prompt_logprobs) == len(PROMPT)
    assert reports[0].request_id == "a"


def test_the_best_are_returned_the_best_first(llm, alone):
    output = llm.generate([PROMPT], SamplingParams(**SEEDED, n=2, best_of=5), use_tqdm=False)[0]
    ranked = sorted(alone, key=lambda one: -one.cumulative_logprob)
    assert tokens(output.outputs) == tokens(ranked[:2])
    assert [(one.index, one.logprobs) for one in output.outputs] == [(0, None), (1, None)]
    assert output.outputs[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob, abs=1e-4)
    with pytest.raises(SamplingParamsError, match="best_of=5 above n=2 cannot be streamed"):
        llm.stream([PROMPT], SamplingParams(**SEEDED, n=2, best_of=5))


def test_a_stream_has_all_samples_so_far(llm, alone):
    seen = {}
    for output in llm.stream([PROMPT], SamplingParams(**SEEDED, n=3)):
        for one in output.outputs:
            assert one.token_ids[: len(seen.get(one.index, []))] == seen.get(one.index, [])
            seen[one.index] = one.token_ids
        last = output
    assert last.finished
    assert [seen[index] for index in range(3)] == tokens(alone[:3])


def test_an_abort_ends_all_samples(llm):
    engine = llm.engine
    engine.add_request("a", PROMPT, SamplingParams(**SEEDED, n=3))
    for used in ("a", "1_a"):
        with pytest.raises(RequestError, match=f"request id '{used}' is in use"):
            engine.add_request(used, PROMPT, SamplingParams(**SEEDED))
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        engine.add_request("a", PROMPT, SamplingParams(**SEEDED, n=2))
    engine.step()
    engine.abort("a")
    assert not engine.is_live("a")
    reports = []
    while engine.has_unfinished_requests:
        reports += engine.step()
    assert [(one.request_id, one.finished, len(one.outputs)) for one in reports] == [("a", True, 3)]
    assert {one.finish_reason for one in reports[0].outputs} == {"abort"}
    assert engine.scheduler.num_free_blocks == engine.scheduler.config.num_gpu_blocks
    engine.add_request("a", PROMPT, SamplingParams(**SEEDED, n=2))
    engine.drop("a")
    assert not engine.has_unfinished_requests
    assert not engine.loop.outbox.builders


def test_samples_are_the_same_under_preemption(alone):
    small = make_llm(golden_checkpoint("llama_gqa"), num_gpu_blocks_override=28)
    output = small.generate([PROMPT], SamplingParams(**SEEDED, n=5), use_tqdm=False)[0]
    assert tokens(output.outputs) == tokens(alone)
    assert output.metrics.finished_time >= output.metrics.first_token_time


def test_the_command_writes_all_samples(tmp_path, capsys):
    row = {"prompt": "def add(a, b):", "sampling_params": {"n": 2, "seed": 3, "max_tokens": 4}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert main(["generate", "--input", str(path), "--quiet"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert [one["index"] for one in line["outputs"]] == [0, 1]
    assert line["text"] == line["outputs"][0]["text"] != line["outputs"][1]["text"]
    arguments = [
        "generate",
        "def add(a, b):",
        "--n",
        "2",
        "--best-of",
        "3",
        "--max-tokens",
        "4",
        "--text",
        "--quiet",
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("--- prompt 0: ") == 2
