import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import SamplingParamsError
from jaxllm.sampling.param_checks import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, RequestOutputKind
from jaxllm.sampling.params import PARAMETER_NAMES, SamplingParams
from jaxllm.server.parameters import completion_params
from jaxllm.server.protocol import CompletionRequest, GenerationRequest


def test_defaults_are_vllms():
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "n": 1,
        "best_of": None,
        "allowed_token_ids": (),
        "bad_words": (),
        "structured_outputs": None,
        "truncate_prompt_tokens": None,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }
    assert not params.is_greedy
    assert not params.needs_penalties
    assert not params.needs_logprobs


NUMBERS = {
    # name: (accepted, refused)
    "temperature": ([0, 0.0, 1e-9, 0.01, np.float32(0.01), 1, 100], [-1e-9, 100.1]),
    "top_p": ([1e-9, 0.5, 1], [0, -0.1, 1.0001]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.0001]),
    "presence_penalty": ([-2, 0, 2], [-2.001, 2.001]),
    "frequency_penalty": ([-2, 0, 2], [-2.001, 2.001]),
    "repetition_penalty": ([1e-3, 1, 100], [0, -1, 100.1]),
}
INTEGERS = {
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31]),
    "seed": ([None, -(2**63), 0, 2**64 - 1], [-(2**63) - 1, 2**64]),
    "max_tokens": ([None, 1, 2**31 - 1], [0, -1, 2**31]),
    "min_tokens": ([0, 16], [-1, 17, 2**31]),
    "logprobs": ([None, -1, 0, MAX_LOGPROBS], [-2, MAX_LOGPROBS + 1]),
    "prompt_logprobs": ([None, 0, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1]),
    "truncate_prompt_tokens": ([None, -1, 1, 2**31 - 1], [0, -2, 2**31]),
}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
def test_both_bounds_of_every_number(name):
    accepted, refused = (NUMBERS | INTEGERS)[name]
    for value in accepted:
        SamplingParams(**{name: value})
    for value in [*refused, 10**400, -(10**400)]:
        with pytest.raises(SamplingParamsError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
def test_wrong_types_of_numbers(name):
    for value in (True, "1", [1], math.nan, math.inf, -math.inf, 1j, np.float32("nan"), np.True_):
        with pytest.raises(SamplingParamsError, match=name):
            SamplingParams(**{name: value})
    if name in INTEGERS:
        with pytest.raises(SamplingParamsError, match=f"{name}.*must be an integer"):
            SamplingParams(**{name: 1.0})
    if None not in (NUMBERS | INTEGERS)[name][0]:
        with pytest.raises(SamplingParamsError, match=name):
            SamplingParams(**{name: None})


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name):
    assert getattr(SamplingParams(**{name: np.True_}), name) is True
    for value in (0, 1, None, "true"):
        with pytest.raises(SamplingParamsError, match=name):
            SamplingParams(**{name: value})


def test_numpy_scalars_become_python_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(5),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int32(7): np.float64(1.5)},
        max_tokens=np.array(3),
    )
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 5, 2**64 - 1, 3)
    assert [type(getattr(params, n)) for n in ("temperature", "top_k", "seed", "max_tokens")] == [
        float,
        int,
        int,
        int,
    ]
    assert params.stop_token_ids == (3, 4)
    assert type(params.stop_token_ids[0]) is type(params.logit_bias[0][0]) is int
    assert math.copysign(1, SamplingParams(min_p=-0.0).min_p) == 1


def test_stop_strings():
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert SamplingParams(stop=[]).stop == ()
    for name in ("stop", "bad_words"):
        with pytest.raises(SamplingParamsError, match="lone surrogate"):
            SamplingParams(**{name: ["a\ud800"]})
    assert len(SamplingParams(stop=[str(i) for i in range(64)]).stop) == 64
    refused = [1, [1], [""], "", b"a", [None], "x" * 1001, ["a"] * 65, {"a": 1}]
    for value in refused:
        with pytest.raises(SamplingParamsError, match="stop"):
            SamplingParams(stop=value)
    with pytest.raises(SamplingParamsError, match="needs detokenize=True"):
        SamplingParams(stop="a", detokenize=False)


def test_stop_token_ids():
    assert SamplingParams(stop_token_ids=[2, 1, 2]).stop_token_ids == (2, 1)
    for value in (1, "12", [1.0], [True], [-1], ["1"], list(range(MAX_STOP_TOKEN_IDS + 1))):
        with pytest.raises(SamplingParamsError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=value)


def test_logit_bias():
    assert SamplingParams(logit_bias={"10": 1, 2: -100}).logit_bias == ((2, -100.0), (10, 1.0))
    assert SamplingParams(logit_bias={}).logit_bias == ()
    full = dict.fromkeys(range(MAX_LOGIT_BIAS), 0.5)
    assert len(SamplingParams(logit_bias=full).logit_bias) == MAX_LOGIT_BIAS
    refused = [
        full | {MAX_LOGIT_BIAS: 1},
        {-1: 1},
        {1: 101},
        {1: math.nan},
        {1: "1"},
        {"x": 1},
        {"²": 1},
        {"9" * 5000: 1},
        {1.0: 1},
        {1: 1, "1": 2},
        5,
        "5",
        [1, 2],
        [[1, 2]],
    ]
    for value in refused:
        with pytest.raises(SamplingParamsError, match="logit_bias"):
            SamplingParams(logit_bias=value)


def test_min_tokens_follows_max_tokens():
    assert SamplingParams(min_tokens=1000, max_tokens=None).min_tokens == 1000
    with pytest.raises(SamplingParamsError, match="min_tokens=5 is over max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_immutable_hashable_copyable():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4
    for twin in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), dataclasses.replace(params)):
        assert twin == params
        assert hash(twin) == hash(params)
    assert dataclasses.replace(params, top_k=3).logit_bias == ((1, 2.0),)
    with pytest.raises(SamplingParamsError, match="top_k"):
        dataclasses.replace(params, top_k=-5)


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("max_new_tokens", 5, "use max_tokens"),
        ("do_sample", False, "temperature=0"),
        ("num_beams", 4, "LLM.beam_search"),
        ("num_return_sequences", 2, "use n"),
        ("guided_decoding", {"regex": "a"}, "structured_outputs"),
        ("guided_regex", "a", "structured_outputs"),
        ("temprature", 1, "did you mean temperature?"),
        ("topk", 1, "did you mean top_k?"),
        ("zzz", 1, "choose from temperature, top_k"),
        ("self", 1, "choose from"),
    ],
)
def test_names_of_other_libraries(name, value, way_out):
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "eos_token_id",
        "pad_token_id",
        "min_new_tokens",
        "num_return_sequences",
        "length_penalty",
        "early_stopping",
        "no_repeat_ngram_size",
        "penalty_alpha",
        "typical_p",
        "bad_words_ids",
        "use_beam_search",
        "max_length",
        "logits_processors",
    ],
)
def test_known_foreign_names_are_explained_and_not_guessed_at(name):
    with pytest.raises(SamplingParamsError, match=f"{name} is not a sampling parameter") as caught:
        SamplingParams(**{name: 1})
    assert "did you mean" not in str(caught.value)
    assert "choose from" not in str(caught.value)


def test_several_samples():
    params = SamplingParams(n=2, best_of=3, seed=2**64 - 1, prompt_logprobs=1)
    assert params.num_samples == 3
    samples = [params.sample(index) for index in range(3)]
    assert [one.seed for one in samples] == [2**64 - 1, 0, 1]
    assert [one.prompt_logprobs for one in samples] == [1, None, None]
    assert {(one.n, one.best_of, one.logprobs) for one in samples} == {(1, None, 0)}
    assert SamplingParams(n=2).sample(1) == SamplingParams()
    for value in (0, True, "1", 16385):
        with pytest.raises(SamplingParamsError, match="n="):
            SamplingParams(n=value)
    with pytest.raises(SamplingParamsError, match="best_of=1 is below n=2"):
        SamplingParams(n=2, best_of=1)
    for values in ({"n": 2}, {"best_of": 2}):
        with pytest.raises(SamplingParamsError, match="=2 with temperature=0 would give the same output"):
            SamplingParams(temperature=0, **values)


def test_from_dict():
    assert SamplingParams.from_dict({"stop": ["a"], "top_k": 2}) == SamplingParams(stop="a", top_k=2)
    for values in ([("top_k", 2)], None, "top_k=2"):
        with pytest.raises(SamplingParamsError, match="object of names and values"):
            SamplingParams.from_dict(values)
    with pytest.raises(SamplingParamsError, match="names must be strings"):
        SamplingParams.from_dict({1: 2})
    with pytest.raises(SamplingParamsError, match="max_new_tokens"):
        SamplingParams.from_dict({"max_new_tokens": 2})


def test_token_ids_against_the_vocabulary():
    params = SamplingParams(logit_bias={9: 1}, stop_token_ids=[4])
    params.validate_for_vocab(10)
    with pytest.raises(SamplingParamsError, match=r"logit_bias: token id 9 .* 0\.\.8"):
        params.validate_for_vocab(9)
    with pytest.raises(SamplingParamsError, match="stop_token_ids: token id 4"):
        SamplingParams(stop_token_ids=[4]).validate_for_vocab(4)


def test_requests_take_every_parameter():
    apart = {"max_tokens", "logprobs", "best_of", "detokenize", "output_kind"}
    assert set(GenerationRequest.model_fields) >= set(PARAMETER_NAMES) - apart
    values = {"prompt": "a", "min_p": 0.25, "top_k": 3, "ignore_eos": True, "seed": 5}
    params = completion_params(CompletionRequest(**values), SamplingParams(top_p=0.5))
    assert (params.min_p, params.top_k, params.ignore_eos, params.seed, params.top_p) == (
        0.25,
        3,
        True,
        5,
        0.5,
    )


def test_properties():
    assert SamplingParams(temperature=0).is_greedy
    for name, value in (("presence_penalty", 1), ("frequency_penalty", -1), ("repetition_penalty", 1.1)):
        assert SamplingParams(**{name: value}).needs_penalties
    assert SamplingParams(logprobs=0).needs_logprobs
    assert not SamplingParams(prompt_logprobs=1).needs_logprobs


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab1é", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a1", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*PARAMETER_NAMES, "n", "top_kk"]), json_values, max_size=4))
def test_any_json_gives_parameters_or_the_projects_error(values):
    try:
        params = SamplingParams.from_dict(values)
    except SamplingParamsError:
        return
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)
    hash(params)
