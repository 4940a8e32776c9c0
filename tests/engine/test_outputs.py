import dataclasses
import json
import math

import pytest
from scheduler_helpers import make_request
from tokenizer_helpers import write_tokenizer

from jaxllm.engine.output_builder import Delta, OutputBuilder, Samples
from jaxllm.engine.output_processor import RequestState
from jaxllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.sampling.param_checks import RequestOutputKind
from jaxllm.sampling.params import SamplingParams
from jaxllm.text.detokenizer import IncrementalDetokenizer
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.types import RequestMetrics, TokenLogprobs


def make_output():
    completion = CompletionOutput(
        index=0,
        text=" b",
        token_ids=(5,),
        cumulative_logprob=-0.5,
        logprobs=[{5: Logprob(-0.5, 1, " b"), 6: Logprob(-math.inf, 2, "c")}],
        finish_reason="stop",
        stop_reason=5,
    )
    prompt_logprobs = [None, {4: Logprob(-1.0, 3, "a")}]
    return RequestOutput("r", "xa", (3, 4), prompt_logprobs, (completion,), True, RequestMetrics(1.5))


def test_conveniences_are_those_of_the_first_completion():
    output = make_output()
    for name in ("text", "token_ids", "logprobs", "cumulative_logprob", "finish_reason", "stop_reason"):
        assert getattr(output, name) is getattr(output.outputs[0], name)
        with pytest.raises((AttributeError, TypeError)):
            setattr(output, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.finished = False


def test_to_dict_is_strict_json():
    content = make_output().to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert set(content) == {field.name for field in dataclasses.fields(RequestOutput)}
    assert set(content["outputs"][0]) == {field.name for field in dataclasses.fields(CompletionOutput)}
    assert content["prompt_logprobs"] == [None, {"4": {"logprob": -1.0, "rank": 3, "decoded_token": "a"}}]
    assert content["outputs"][0]["logprobs"][0]["6"]["logprob"] is None
    assert content["metrics"]["arrival_time"] == 1.5
    empty = RequestOutput("r", None, (1,), None, (CompletionOutput(0, "", ()),), False).to_dict()
    assert empty["prompt_logprobs"] is empty["metrics"] is empty["outputs"][0]["logprobs"] is None


def test_scores_of_a_prompt_are_complete_whatever_its_chunks_are_after_a_drop():
    request = make_request(0, 9)
    state = RequestState(request, None, primary_eos_token_id=None, stream=False)
    scores = [TokenLogprobs(position, 0.0, 1, (), ()) for position in range(1, 9)]
    for start, stop in ((0, 3), (0, 2), (0, 6), (6, 9)):  # dropped after the first and the second
        state.add_prompt_logprobs(scores[start:stop], start + 1)
    assert state.delta().prompt_logprobs == scores


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


def make_builder(tokenizer, *, is_delta=False, **options):
    prompt = [0, *tokenizer.encode("h", add_special_tokens=False)]
    params = SamplingParams(**options)
    request = make_request(0, len(prompt), prompt_token_ids=prompt, sampling_params=params)
    return OutputBuilder(request, "r", None, tokenizer, is_delta=is_delta)


def deltas(token_ids, scores=None):
    for place, token_id in enumerate(token_ids):
        reason = "length" if place == len(token_ids) - 1 else None
        scored = [] if scores is None else [scores[place]]
        yield Delta(place, [token_id], scored, [], reason, None)


@pytest.mark.parametrize("is_delta", [False, True])
def test_the_sampled_token_is_the_first_of_its_place_and_named_by_what_it_adds(tokenizer, is_delta):
    ids = tokenizer.encode("🙂a", add_special_tokens=False)
    assert len(ids) == 5
    others = (ids[4], ids[0], ids[3])
    scores = [
        TokenLogprobs(one, -3.0, 9, others, (-0.1, -0.2, -0.3))
        if one not in others
        else TokenLogprobs(one, -0.2, 2, others, (-0.1, -0.2, -0.3))
        for one in ids
    ]
    builder = make_builder(tokenizer, is_delta=is_delta, logprobs=3, max_tokens=5)
    found = [builder.add(delta).outputs[0] for delta in deltas(ids, scores)]
    positions = [one for output in found for one in output.logprobs] if is_delta else found[-1].logprobs
    assert [next(iter(position)) for position in positions] == ids
    assert [position[one].decoded_token for one, position in zip(ids, positions, strict=True)] == [
        *("", "", "", "🙂", "a")
    ]
    assert list(positions[1]) == [ids[1], *others]
    assert [one.rank for one in positions[1].values()] == [9, 1, 2, 3]
    assert {position[ids[4]].decoded_token for position in positions} == {"a"}
    assert positions[0][ids[0]].logprob == -0.2


def test_tokens_of_prompts_are_named_by_what_they_add(tokenizer):
    builder = make_builder(tokenizer, prompt_logprobs=0)
    ids = tokenizer.encode("é🙂", add_special_tokens=False)
    output = None
    for start in (0, 1, 4):  # in chunks
        stop = {0: 1, 1: 4, 4: 6}[start]
        scores = [TokenLogprobs(one, -1.0, 1, (), ()) for one in ids[start:stop]]
        output = builder.add(Delta(0, [], [], scores, None, None))
    names = [
        position[one].decoded_token for one, position in zip(ids, output.prompt_logprobs[1:], strict=True)
    ]
    assert names == ["", "é", "", "", "", "🙂"]


def test_what_is_new_is_told_without_making_all_of_the_text(tokenizer, monkeypatch):
    made = []
    whole = IncrementalDetokenizer.text.fget
    monkeypatch.setattr(
        IncrementalDetokenizer, "text", property(lambda self: made.append(len(whole(self))) or whole(self))
    )
    ids = tokenizer.encode("a🙂 b" * 50, add_special_tokens=False)
    for options in ({}, {"stop": ["zz"]}):
        builder = make_builder(tokenizer, is_delta=True, max_tokens=len(ids), **options)
        texts = [builder.add(delta).outputs[0].text for delta in deltas(ids)]
        assert "".join(texts) == "a🙂 b" * 50
        assert max(map(len, texts)) <= 2
    assert sum(made) <= 4 * len(ids)


def test_outputs_of_samples_do_not_cost_more_with_more_samples():
    def reads(num_samples, kind):
        count = 0

        class Counted(RequestOutput):
            def __getattribute__(self, name):
                nonlocal count
                count += 1
                return super().__getattribute__(name)

        params = SamplingParams(n=num_samples, output_kind=kind)
        samples = Samples(params, stream=kind is not RequestOutputKind.FINAL_ONLY)
        for step in range(3):
            for index in reversed(range(num_samples)):
                completion = CompletionOutput(index, "a", [5], finish_reason="length" if step == 2 else None)
                output = Counted("r", None, [1], None, [completion], step == 2, RequestMetrics(0.0))
                found = samples.add(index, output)
        assert found.finished
        assert [one.index for one in found.outputs] == (
            [0] if kind is RequestOutputKind.DELTA else list(range(num_samples))
        )
        return count / (3 * num_samples)

    for kind in RequestOutputKind:
        assert reads(100, kind) <= 1.5 * reads(10, kind)


def test_the_end_of_samples_is_that_of_the_last():
    samples = Samples(SamplingParams(n=3), stream=False)
    found = None
    for index, ends in ((2, 5.0), (0, 9.0), (1, 7.0)):
        metrics = RequestMetrics(1.0, finished_time=ends, last_token_time=ends)
        completion = CompletionOutput(index, "", [5], finish_reason="length")
        assert found is None
        found = samples.add(index, RequestOutput(f"{index}", None, [1], None, [completion], True, metrics))
    assert (found.request_id, found.metrics.finished_time) == ("0", 9.0)
    assert [one.index for one in found.outputs] == [0, 1, 2]
