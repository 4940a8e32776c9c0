"""Beam search against what transformers finds, and its limits."""

import json
from pathlib import Path

import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import BeamSearchParams
from jaxllm.engine.beam_search import BeamSearch
from jaxllm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.errors import RequestError, SamplingParamsError

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_beams.json").read_text())
SETTINGS = ("beam_width", "length_penalty", "early_stopping", "max_tokens")


@pytest.fixture(scope="module")
def llms():
    names = {row["variant"] for row in GOLDEN}
    return {name: make_llm(golden_checkpoint(name), enable_prefix_caching=True) for name in names}


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("variant", ["llama_gqa", "opt_pre_norm"])
def test_hypotheses_and_scores_are_those_of_transformers(llms, variant, early_stopping):
    llm = llms[variant]
    rows = [row for row in GOLDEN if (row["variant"], row["early_stopping"]) == (variant, early_stopping)]
    assert len(rows) == 32
    for row in rows:
        llm.engine.eos_token_ids = frozenset(row["eos_token_ids"])
        params = BeamSearchParams(**{name: row[name] for name in SETTINGS})
        (output,) = llm.beam_search([row["prompt"]], params)
        num_prompt = len(row["prompt"])
        assert [one.tokens[num_prompt:] for one in output.sequences] == row["outputs"], row
        assert [one.score for one in output.sequences] == pytest.approx(row["scores"], rel=1e-5, abs=1e-4)
        for one in output.sequences:
            length = len(one.tokens) - num_prompt
            assert one.score == pytest.approx(one.cum_logprob / length ** row["length_penalty"])
            is_ended = one.tokens[-1] in row["eos_token_ids"]
            assert (one.finish_reason, one.stop_reason) == (
                ("stop", one.tokens[-1]) if is_ended else ("length", None)
            )


def test_several_prompts_are_searched_at_once_and_share_blocks(llms):
    llm = llms["llama_gqa"]
    llm.engine.eos_token_ids = frozenset({2})
    params = BeamSearchParams(beam_width=3, max_tokens=9)
    prompts = [[5 + index % 40 for index in range(30)], {"prompt_token_ids": [9, 8, 7], "cache_salt": "a"}]
    together = llm.beam_search(prompts, params)
    alone = [llm.beam_search(prompt, params)[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert [found.tokens for found in one.sequences] == [found.tokens for found in other.sequences]
        assert len(one.sequences) == 3
    # Of the eight to ten blocks of each of three beams seven are the prompt's.
    assert together[0].num_blocks < 0.6 * together[0].num_blocks_unshared
    assert together[0].num_blocks >= 8 * 8


def test_the_model_ends_what_is_too_long(llms):
    llm = llms["llama_gqa"]
    prompt = [3 + index % 50 for index in range(llm.max_model_len - 4)]
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    assert {(len(one.tokens), one.finish_reason) for one in output.sequences} == {
        (llm.max_model_len, "length")
    }
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=1, ignore_eos=True))
    assert {len(one.tokens) for one in output.sequences} == {len(prompt) + 1}
    with pytest.raises(RequestError):
        llm.beam_search([prompt * 2], BeamSearchParams(beam_width=2, max_tokens=5))


def step(*continuations):
    """Outputs of requests for one token."""
    return [
        RequestOutput(
            request_id="",
            prompt=None,
            prompt_token_ids=[1],
            prompt_logprobs=None,
            outputs=[CompletionOutput(0, "", [0], None, [{t: Logprob(p, 1) for t, p in tokens.items()}])],
            finished=True,
        )
        for tokens in continuations
    ]


def test_a_search_by_hand():
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=3), {0}, [1])
    search.advance(step({5: -0.5, 0: -1.0, 6: -2.0, 7: -3.0}))
    assert [beam.tokens for beam in search.running] == [(5,), (6,)]
    assert [(one.tokens, one.score) for one in search.finished] == [((0,), -1.0)]
    search.advance(step({0: -2.0, 8: -0.2, 9: -5.0, 4: -6.0}, {3: -0.1, 0: -1.0, 9: -4.0, 4: -6.0}))
    # -0.7 for 5 8, -2.1 for 6 3; both ends (-2.5 and -3.0) come after them, and are not among the best two.
    assert [beam.tokens for beam in search.running] == [(5, 8), (6, 3)]
    assert len(search.finished) == 1
    search.advance(step({0: -0.1, 8: -3.0, 9: -5.0, 4: -6.0}, {3: -0.1, 0: -1.0, 9: -4.0, 4: -6.0}))
    assert search.running == []
    assert [one.tokens for one in search.output(None).sequences] == [[1, 5, 8, 0], [1, 6, 3, 3]]
    assert [one.score for one in search.output(None).sequences] == pytest.approx([-0.8 / 3, -2.2 / 3])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"beam_width": 0}, "beam_width=0"),
        ({"beam_width": 11}, "beam_width=11"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": 0.5}, "temperature=0.5"),
        ({"early_stopping": "always"}, "early_stopping='always'"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
    ],
)
def test_parameters_are_checked(values, problem):
    with pytest.raises(SamplingParamsError, match=problem):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5} | values)


def test_too_many_ends_for_the_width(llms):
    params = BeamSearchParams(beam_width=6, max_tokens=5)
    with pytest.raises(
        SamplingParamsError, match=r"beam_width=6 with 4 end-of-sequence tokens needs 30 .* to 4,"
    ):
        BeamSearch(params, {1, 2, 3, 4})
    with pytest.raises(SamplingParamsError, match="must be BeamSearchParams, not dict"):
        llms["llama_gqa"].beam_search([[1]], {"beam_width": 2})
