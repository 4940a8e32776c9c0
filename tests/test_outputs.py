import dataclasses
import json
import math

import pytest
from scheduler_helpers import make_request

from jaxllm.engine.output_processor import RequestState
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
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
