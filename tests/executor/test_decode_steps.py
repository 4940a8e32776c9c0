"""Drafts that the device looks up in programs of several iterations: the same tokens as without them."""

import dataclasses

import jax
import numpy as np
import pytest
from engine_helpers import Recording, make_llm, restless
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.engine.scheduling import UnknownCosts
from jaxllm.executor import apart
from jaxllm.executor.decode_steps import Lookup, look_up
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sched.acceptance import Chance
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.policies.speculation import (
    _BY_COST,
    AsProposed,
    BelowBatch,
    ByCost,
    IterationRows,
)
from jaxllm.sched.proposers.ngram import PromptLookup
from jaxllm.sched.speculation import Speculation
from jaxllm.types import MAX_DECODE_STEPS

MOST = 8
EDIT = (
    "def add(a, b):\n    total = a + b\n    return total\n\n\n"
    "def sub(a, b):\n    total = a - b\n    return total\n\n\ndef mul(a, b):\n"
)
# What follows is right for a while, and then is not.
PROMPTS = [EDIT, "a b c d a b c e a b c d a b c e a b c", "x = 1\n" * 9, EDIT[40:]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=31, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=13, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=8, max_tokens=40, stop=["return"], stop_token_ids=[5, 6, 7]),
]


@pytest.fixture(scope="module")
def llm():
    return make_llm(
        demo_model_path(),
        skip_tokenizer_init=False,
        max_num_batched_tokens=64,
        prefill_buckets=[64],
        max_model_len=144,
        block_size=8,
        num_scheduler_steps=MAX_DECODE_STEPS,
        speculative_config={"num_speculative_tokens": MOST, "policy": "fixed"},
    )


def engine_of(llm, num_drafts=0, *, ledger=None, num_steps=8, policy=None, **limits):
    """A fresh engine on the executor; it drafts nothing if `num_drafts` is 0."""
    config = dataclasses.replace(llm.engine.scheduler.config, **limits)
    speculation = Speculation(PromptLookup(), AsProposed(), num_drafts, 32) if num_drafts else None
    return Engine(
        llm.executor,
        Recording(config, policy or SchedulerPolicy(), ledger=ledger, speculation=speculation),
        vocab_size=llm.model_config.vocab_size,
        tokenizer=llm.tokenizer,
        eos_token_ids=frozenset([llm.tokenizer.eos_token_id]),
        num_scheduler_steps=num_steps,
    )


def run(engine, prompts=PROMPTS, params=PARAMS, then=lambda outputs: None):
    """Tokens and why they end, by place; the scheduler's invariants are checked after every step."""
    for place, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(place), prompt, param)
    outputs = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            one = output.outputs[0]
            outputs[int(output.request_id)] = list(one.token_ids), one.finish_reason, one.stop_reason
        engine.scheduler.check()
        then(outputs)
    assert engine.scheduler.num_free_blocks == engine.scheduler.config.num_gpu_blocks
    return outputs


@pytest.fixture(scope="module")
def expected(llm):
    return run(engine_of(llm, num_steps=1))


# What is looked up

LOOKUPS = [Lookup(5, 2, 4), Lookup(3, 1, 2), Lookup(8, 3, 3)]
LOOK_UP = [jax.jit(lambda *rows, lookup=lookup: look_up(*rows, lookup)) for lookup in LOOKUPS]


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=3, max_size=3),
    stale=st.integers(0, 2),
    which=st.integers(0, 2),
)
def test_the_device_finds_what_the_host_does(texts, stale, which):
    lookup = LOOKUPS[which]
    history = np.full((3, 24), stale, np.int32)  # of whoever had the slot before
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    drafts, are_there = LOOK_UP[which](history, np.array([len(text) for text in texts], np.int32))
    proposer = PromptLookup(lookup.least, lookup.most)
    for text, found, is_there in zip(texts, drafts.tolist(), are_there.tolist(), strict=True):
        request = _Text(text)
        wanted = proposer.propose([(request, lookup.num_drafts)])[0]
        assert is_there == bool(wanted)
        assert not wanted or found == wanted


class _Text:
    def __init__(self, tokens):
        self.tokens, self.request_id, self.num_known_tokens = tokens, object(), len(tokens)

    def token_ids(self, start, stop):
        return self.tokens[start:stop]


# The same tokens


@pytest.mark.parametrize("num_drafts", [1, 3, MOST])
@pytest.mark.parametrize("num_steps", [2, 8])
def test_the_same_tokens_as_without(llm, expected, num_drafts, num_steps):
    engine = engine_of(llm, num_drafts, num_steps=num_steps)
    assert run(engine) == expected
    counts = engine.scheduler.speculation.counts
    assert counts.num_drafted > counts.num_kept > 0
    assert max(one.num_lookups for one in engine.scheduler.lookups) == num_drafts


@pytest.mark.parametrize("place", range(len(PROMPTS)))
def test_the_same_tokens_alone(llm, expected, place):
    engine = engine_of(llm, MOST)
    assert run(engine, [PROMPTS[place]], [PARAMS[place]])[0] == expected[place]
    assert engine.scheduler.lookups or place == 1  # which says nothing twice


def test_a_stop_token_ends_a_request_wherever_it_is(llm):
    """Each token of an output once, in the middle of right drafts or not."""
    (tokens, _, _) = run(engine_of(llm, num_steps=1), [EDIT], [PARAMS[0]])[0]
    ends = sorted({tokens.index(token) for token in tokens})
    assert len(ends) > 4
    for some in (ends[:4], ends[-4:]):
        params = [dataclasses.replace(PARAMS[0], stop_token_ids=[tokens[end]]) for end in some]
        engine = engine_of(llm, MOST)
        found = run(engine, [EDIT] * len(params), params)
        assert [found[place][0] for place in range(len(params))] == [tokens[: end + 1] for end in some]
        assert {reason for _, reason, _ in found.values()} == {"stop"}
        assert engine.scheduler.lookups


@pytest.mark.parametrize("end", [2, 3, 5])
def test_what_follows_a_stop_token_is_not_counted(llm, expected, end):
    """However right it is."""
    stop = expected[2][0][end]
    engine = engine_of(llm, MOST)
    params = dataclasses.replace(PARAMS[0], stop_token_ids=[stop])
    assert run(engine, [PROMPTS[2]], [params])[0] == (expected[2][0][: end + 1], "stop", stop)
    assert engine.scheduler.progress.num_generated == end  # and the first, of the prompt


@pytest.mark.parametrize("max_tokens", [3, 9, 10, 11])
def test_an_output_is_no_longer_than_it_may_be(llm, expected, max_tokens):
    """Whatever is right after it, in the same iteration."""
    engine = engine_of(llm, MOST)
    params = dataclasses.replace(PARAMS[0], max_tokens=max_tokens)
    tokens, reason, _ = run(engine, [PROMPTS[2]], [params])[0]
    plain = run(engine_of(llm, num_steps=1), [PROMPTS[2]], [params])[0]
    assert (tokens, reason) == plain[:2]
    assert len(tokens) == max_tokens
    assert engine.scheduler.lookups


def test_the_longest_sequence_there_may_be(llm):
    config = llm.engine.scheduler.config
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=config.max_model_len)
    outputs = [run(engine_of(llm, num), [PROMPTS[2]], [params])[0] for num in (0, MOST)]
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == "length"


# Beside other things


@pytest.mark.parametrize("num_missing", [3, 5, 7])
def test_drafts_take_only_blocks_that_are_there(llm, expected, num_missing):
    """There are fewer iterations where blocks are few, or none that draft."""
    lengths = [
        len(llm.tokenizer.encode(prompt)) + params.max_tokens
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    num_gpu_blocks = sum(-(-length // 8) for length in lengths) - num_missing
    engine = engine_of(llm, MOST, num_gpu_blocks=num_gpu_blocks)
    assert run(engine) == expected
    assert not any(one.preempted for one in engine.scheduler.scheduled)
    assert min(one.num_decode_steps for one in engine.scheduler.lookups) < 8


def test_forced_preemption_and_swaps_change_nothing(llm, expected):
    engine = engine_of(llm, MOST, policy=restless())
    assert run(engine) == expected
    assert any(one.preempted for one in engine.scheduler.scheduled)
    assert engine.scheduler.lookups


def test_prefix_hits_change_nothing(llm, expected):
    engine = engine_of(llm, MOST, enable_prefix_caching=True)
    for _ in range(2):
        assert run(engine) == expected
    assert engine.scheduler.lookups
    llm.engine.scheduler.reset_prefix_cache()


def test_an_abort_leaves_the_others_as_they_are(llm, expected):
    engine = engine_of(llm, 3)

    def abort(outputs):
        if engine.scheduler.lookups and engine.is_live("1"):
            engine.abort("1")

    found = run(engine, then=abort)
    assert found.pop(1)[1] == "abort"
    assert found == {place: output for place, output in expected.items() if place != 1}


@pytest.mark.parametrize(
    "other", [{"repetition_penalty": 1.2}, {"logprobs": 1}, {"structured_outputs": {"regex": "[a-z ]{30}"}}]
)
def test_who_asks_for_more_lets_nobody_look_up(llm, expected, other):
    """Until it has ended: what is sampled of it apart, or follows its tokens, is the host's."""
    params = SamplingParams(temperature=0, max_tokens=12, **other)
    engine, seen = engine_of(llm, MOST), []

    def note(outputs):
        seen.append((4 in outputs, len(engine.scheduler.lookups)))

    found = run(engine, [*PROMPTS, EDIT], [*PARAMS, params], note)
    del found[4]
    assert found == expected
    assert max(count for has_ended, count in seen if not has_ended) == 0


FILTERS = [
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.7, "seed": 4, "top_k": 5},
    {"temperature": 0.6, "seed": 5, "min_p": 0.2},
    {"temperature": 0},
]


def test_who_filters_looks_up_once_a_program_does_both(llm, monkeypatch):
    monkeypatch.setattr(apart, "_MANY_ITERATIONS", 3)
    params = [SamplingParams(max_tokens=32, ignore_eos=True, **one) for one in FILTERS]
    expected = run(engine_of(llm, num_steps=1), PROMPTS, params)
    assert run(engine_of(llm, MOST), PROMPTS, params) == expected
    while not llm.executor._programs.is_settled:
        llm.executor.wait_for_programs(1.0)
    engine = engine_of(llm, MOST)
    assert run(engine, PROMPTS, params) == expected
    assert engine.scheduler.lookups
    assert engine.scheduler.speculation.counts.num_kept > 0


# What is counted


def test_counts_and_the_ledger_tell_the_truth(llm, expected):
    """Every token is of a prompt, an iteration without drafts, a verification, or a draft that was kept."""
    ledger = Ledger()
    engine = engine_of(llm, MOST, ledger=ledger)
    outputs = run(engine)
    counts, records = engine.scheduler.speculation.counts, ledger.verifications
    assert sum(record.num_drafted for record in records) == counts.num_drafted
    assert sum(record.num_kept for record in records) == counts.num_kept
    assert sum(record.num_verified for record in records) == counts.num_verifications
    step_ids = {record.step_id for record in records}
    plain = [one for one in engine.scheduler.scheduled if one.step_id not in step_ids]
    most = sum(len(one.sampled) * one.num_decode_steps for one in plain)
    with_drafts = sum(record.num_decodes + record.num_kept for record in records)
    num_tokens = sum(len(tokens) for tokens, _, _ in outputs.values())
    assert with_drafts <= num_tokens <= len(PROMPTS) + most + with_drafts
    assert all(record.expected_kept > 0 for record in records)


@pytest.mark.parametrize("rate", [0.6, 0.1])
def test_the_device_looks_up_as_much_as_it_can_or_nothing(rate):
    """Its rows are computed whether they are used or not."""
    policy = ByCost(Linear())
    policy._regime(1).way = _BY_COST
    on_host, on_device = (IterationRows(1, 9, 0, 64, looks_up) for looks_up in (False, True))
    assert 0 < policy.num_drafts([MOST], [Chance(0.6, 0.6)], on_host)[0] < MOST
    assert policy.num_drafts([MOST], [Chance(rate, rate)], on_device) == [MOST if rate > 0.5 else 0]


class Linear(UnknownCosts):
    def step_seconds(self, num_decodes, context, *chunks):
        return 1.0 + 0.1 * (num_decodes + (chunks[0] if chunks else 0))


def test_what_is_seldom_right_is_not_worth_its_programs():
    fixed, by_cost = AsProposed(), ByCost(UnknownCosts())
    assert not by_cost.is_worth_looking_up(0.2, are_there=True)
    assert by_cost.is_worth_looking_up(0.3, are_there=False)
    assert fixed.is_worth_looking_up(0.0, are_there=True)
    assert not fixed.is_worth_looking_up(0.2, are_there=False)
    assert BelowBatch(3, fixed).is_worth_looking_up(0.0, are_there=True)


@pytest.mark.parametrize(("num_wrong", "num_steps"), [(0, 8), (40, 2)])
def test_what_is_hardly_right_is_tried_in_few_iterations(llm, num_wrong, num_steps):
    engine = engine_of(llm, MOST)
    engine.add_request("0", EDIT, PARAMS[0])
    (request,) = engine.scheduler.live_requests()
    speculation = engine.scheduler.speculation
    speculation.verified(request, [(1, 1)])
    for one in (speculation._all, speculation._histories["0"]):
        one.after_right.add(num_wrong, 0)
        one.after_wrong.add(num_wrong, 0)
    while not engine.scheduler.lookups:
        engine.step()
    assert engine.scheduler.lookups[0].num_decode_steps == num_steps
    while engine.has_unfinished_requests:
        engine.step()
