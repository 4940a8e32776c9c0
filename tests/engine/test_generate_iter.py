"""`LLM.generate_iter`: any number of rows, taken as they are needed."""

import itertools

import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, RequestError

LONG, SHORT = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (24, 2))


@pytest.fixture(scope="module")
def llm():
    llm = make_llm(golden_checkpoint("llama_gqa"), warm_up="background")
    yield llm
    llm.close()


def rows_of(count):
    """Prompts of their own; every third output is long."""
    for number in range(count):
        params = LONG if number % 3 == 0 else SHORT
        yield {"prompt_token_ids": [3 + number % 40, 5, 7], "sampling_params": params}


def test_outputs_are_those_of_generate_in_the_order_of_the_rows(llm):
    rows = list(rows_of(30))
    prompts = [{"prompt_token_ids": row["prompt_token_ids"]} for row in rows]
    expected = llm.generate(prompts, [row["sampling_params"] for row in rows], use_tqdm=False)
    outputs = list(llm.generate_iter(iter(rows)))
    assert [output.request_id for output in outputs] == [str(place) for place in range(30)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    unordered = list(llm.generate_iter(iter(rows), in_order=False))
    assert [one.request_id for one in unordered] != [one.request_id for one in outputs]
    assert sorted(int(one.request_id) for one in unordered) == list(range(30))


@pytest.mark.parametrize("in_order", [True, False])
def test_rows_are_taken_as_they_are_needed(llm, in_order):
    taken = []

    def endless():
        for number, row in enumerate(rows_of(10**9)):
            taken.append(number)
            yield row

    outputs = llm.generate_iter(endless(), in_order=in_order, max_in_flight=3)
    assert taken == []
    num_read = 20
    for count, _ in enumerate(itertools.islice(outputs, num_read), 1):
        assert len(taken) <= count + 3 * (1 + 8)
    outputs.close()
    assert llm.engine.num_live == 0
    assert llm.generate([[3, 5]], SHORT, use_tqdm=False)[0].finish_reason == "length"


def test_a_row_that_is_refused_is_an_error_in_its_place(llm):
    good, bad = [3, 5, 7], [{"prompt_token_ids": [10**6]}, None, {"prompt": "no tokenizer"}, []]
    outputs = list(llm.generate_iter([good, *bad, good], SHORT))
    assert [output.finish_reason for output in outputs] == ["length", *["error"] * len(bad), "length"]
    assert "1000000" in outputs[1].stop_reason
    assert outputs[1].token_ids == []
    assert outputs[1].to_dict()["finished"] is True


def test_a_job_goes_on_where_it_ended(llm):
    params = SamplingParams(temperature=1, seed=3, max_tokens=4, ignore_eos=True)
    rows = [[3 + number, 5] for number in range(10)]
    whole = [(one.request_id, one.token_ids) for one in llm.generate_iter(rows, params)]
    first = list(itertools.islice(llm.generate_iter(rows, params), 4))
    rest = llm.generate_iter(rows[4:], params, first_place=4)
    assert [(one.request_id, one.token_ids) for one in (*first, *rest)] == whole


def test_what_rows_raise_ends_the_call_and_nothing_else(llm):
    def failing():
        yield [3, 5]
        raise OSError("the disk has gone")

    with pytest.raises(OSError, match="the disk has gone"):
        list(llm.generate_iter(failing(), LONG))
    assert llm.engine.num_live == 0


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_wrong_bounds(llm, wrong):
    with pytest.raises(ConfigError, match="max_in_flight="):
        llm.generate_iter([[3]], max_in_flight=wrong)


def test_a_table_is_refused(llm):
    with pytest.raises(RequestError, match="prompts is a table"):
        llm.generate_iter({"prompt": ["a", "b"]})


def test_no_rows(llm):
    assert list(llm.generate_iter([])) == []


def test_one_prompt_is_one_row(llm):
    (output,) = llm.generate_iter({"prompt_token_ids": [3, 5, 7]}, SHORT)
    (alone,) = llm.generate({"prompt_token_ids": [3, 5, 7]}, SHORT, use_tqdm=False)
    assert output.token_ids == alone.token_ids
    (output,) = llm.generate_iter("a text", SHORT)
    assert output.finish_reason == "error"  # there is no tokenizer


@pytest.mark.parametrize("wrong", [{"first_place": -3}, {"first_place": "x"}, {"rows": None}, {"rows": 5}])
def test_what_are_no_rows_is_refused_by_name(llm, wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        llm.generate_iter(**({"rows": [[5]]} | wrong))
