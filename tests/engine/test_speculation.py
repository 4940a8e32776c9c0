"""Speculative decoding: proposers, and the same tokens as without, whatever is drafted."""

import dataclasses
import itertools

import numpy as np
import pytest
from engine_helpers import Knowing, make_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_request

from jaxllm import BeamSearchParams, SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.engine.ledgers import read_ledger
from jaxllm.engine.scheduling import UnknownCosts
from jaxllm.errors import ConfigError, RequestError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sched.gains import Gains
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import SchedulerPolicy, SeparateIterations
from jaxllm.sched.policies.speculation import AsProposed, ByCost
from jaxllm.sched.proposers.ngram import PromptLookup
from jaxllm.sched.scheduler import Scheduler
from jaxllm.sched.speculation import Speculation

EDIT = (
    "def add(a, b):\n    total = a + b\n    return total\n\n\n"
    "def sub(a, b):\n    total = a - b\n    return total\n\n\ndef mul(a, b):\n"
)
PROMPTS = [
    EDIT,
    "class Reader:\n    def __init__(self",
    "for i in range(10):\n    print(i)\nfor i in range(",
    EDIT[40:],
]
GREEDY = {"temperature": 0, "max_tokens": 24}
PARAMS = [
    SamplingParams(**GREEDY, ignore_eos=True, logprobs=2),
    SamplingParams(**GREEDY, repetition_penalty=1.2, presence_penalty=0.5, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, frequency_penalty=0.7, logprobs=1),
    SamplingParams(temperature=0.8, top_k=20, seed=8, max_tokens=24, min_tokens=6, stop=["\n", "):"]),
    SamplingParams(**GREEDY, stop=["self", "return"], logit_bias={3: 1.0}, min_p=0.1, prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=9, max_tokens=24, stop_token_ids=list(range(40, 60)), logprobs=0),
    SamplingParams(temperature=0.6, seed=10, max_tokens=24, ignore_eos=True, bad_words=["return total", "a"]),
    SamplingParams(**GREEDY, ignore_eos=True, allowed_token_ids=list(range(300, 420))),
]
MOST = 8


@pytest.fixture(scope="module")
def llm():
    return make_llm(
        demo_model_path(),
        skip_tokenizer_init=False,
        max_num_batched_tokens=64,
        prefill_buckets=[16, 64],
        max_model_len=176,
        num_host_blocks=32,
        num_gpu_blocks_override=176,
        speculative_config={"num_speculative_tokens": MOST, "policy": "fixed"},
    )


@pytest.fixture(scope="module")
def alone(llm):
    """Each request's answer when nobody else is there, and nothing is drafted."""
    return [run(engine_of(llm), [place])[place] for place in range(len(PARAMS))]


def engine_of(llm, speculation=None, policy=None, scheduler=None, **settings):
    config, policy = llm.engine.scheduler.config, policy or SchedulerPolicy()
    return Engine(
        llm.executor,
        scheduler or Scheduler(config, policy, speculation=speculation),
        vocab_size=llm.model_config.vocab_size,
        tokenizer=llm.tokenizer,
        eos_token_ids=frozenset([llm.tokenizer.eos_token_id]),
        **settings,
    )


def speculating(proposer, num_tokens=MOST, max_drafts=32, policy=None):
    return Speculation(proposer, policy or AsProposed(), num_tokens, max_drafts)


def run(engine, places):
    for place in places:
        engine.add_request(str(place), PROMPTS[place % len(PROMPTS)], PARAMS[place])
    outputs = {}
    while engine.has_unfinished_requests:
        outputs.update({int(output.request_id): output for output in engine.step()})
        engine.scheduler.check()
    assert engine.scheduler.num_free_blocks == engine.scheduler.config.num_gpu_blocks
    return outputs


def assert_same(output, expected):
    mine, theirs = output.outputs[0], expected.outputs[0]
    assert mine.token_ids == theirs.token_ids
    assert (mine.text, mine.finish_reason, mine.stop_reason) == (
        theirs.text,
        theirs.finish_reason,
        theirs.stop_reason,
    )
    for scores, reference in (
        *zip(mine.logprobs or [], theirs.logprobs or [], strict=True),
        *zip((output.prompt_logprobs or [])[1:], (expected.prompt_logprobs or [])[1:], strict=True),
    ):
        assert scores.keys() == reference.keys()
        assert all(scores[i].logprob == pytest.approx(reference[i].logprob, abs=1e-4) for i in scores)


def answers_of(alone):
    return {str(place): output.token_ids for place, output in enumerate(alone)}


# Exactness


@pytest.mark.parametrize("place", range(len(PARAMS)))
@pytest.mark.parametrize("num_right", [0, 1, 3, MOST])
def test_whatever_is_drafted_the_tokens_are_the_same(llm, alone, place, num_right):
    speculation = speculating(Knowing(answers_of(alone), [num_right, 9]))
    output = run(engine_of(llm, speculation), [place])[place]
    assert_same(output, alone[place])
    counts, num_tokens = speculation.counts, len(output.token_ids)
    assert (counts.num_kept > 0) == (num_right > 0 and num_tokens > 2)
    if num_right == MOST and num_tokens == 24:
        assert counts.num_verifications <= 3, "nine tokens each"
    assert counts.num_drafted >= counts.num_kept


@settings(max_examples=25, deadline=None)
@given(
    script=st.lists(st.integers(0, 4095), min_size=2, max_size=30),
    num_tokens=st.integers(0, MOST),
    max_drafts=st.integers(0, 32),
    async_scheduling=st.booleans(),
    num_scheduler_steps=st.sampled_from([1, 4]),
)
def test_many_together_get_what_each_gets_alone(
    llm, alone, script, num_tokens, max_drafts, async_scheduling, num_scheduler_steps
):
    speculation = speculating(Knowing(answers_of(alone), script), num_tokens, max_drafts)
    steps = min(num_scheduler_steps, llm.executor.max_decode_steps)
    engine = engine_of(llm, speculation, async_scheduling=async_scheduling, num_scheduler_steps=steps)
    for place, output in run(engine, range(len(PARAMS))).items():
        assert_same(output, alone[place])


def test_prompt_lookup_through_generate(llm, alone):
    llm.engine.scheduler.speculation.counts.num_verifications = 0
    outputs = llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(PARAMS))], PARAMS, use_tqdm=False)
    for output, expected in zip(outputs, alone, strict=True):
        assert_same(output, expected)
    counts = llm.engine.scheduler.speculation.counts
    assert counts.num_verifications > 0
    assert counts.num_kept > 0


def test_samples_of_a_prompt_and_streams(llm):
    params = SamplingParams(temperature=0.7, seed=3, n=2, max_tokens=16, ignore_eos=True)
    sampled = [one.token_ids for one in llm.generate([EDIT], params, use_tqdm=False)[0].outputs]
    engine = engine_of(llm)
    engine.add_request("0", EDIT, params)
    reports = []
    while engine.has_unfinished_requests:
        reports += engine.step()
    assert [one.token_ids for one in reports[-1].outputs] == sampled
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    *_, last = llm.stream([EDIT], greedy)
    engine.add_request("0", EDIT, greedy)
    while engine.has_unfinished_requests:
        reports += engine.step()
    assert reports[-1].token_ids == last.token_ids


def test_wrong_drafts_leave_no_trace_beside_requests_that_are_sampled_apart(llm):
    """The step samples one request; what the other asks for is sampled after it, of the same histories."""
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    both = [plain, dataclasses.replace(plain, repetition_penalty=1.2)]
    answers = {}

    class Sparing:
        """Each fourth place two right drafts and a wrong one, else none."""

        def propose(self, asked):
            return [self.follow(*one) for one in asked]

        def follow(self, request, num_tokens):
            done = len(request.output_token_ids)
            right = answers[request.request_id][done : done + 2]
            return [] if done % 4 else [*right, 7][:num_tokens]

        def seconds(self, num_requests, num_tokens):
            return None

        def forget(self, request):
            pass

    for speculation in (None, speculating(Sparing())):
        engine = engine_of(llm, speculation, async_scheduling=False)
        for place, params in enumerate(both):
            engine.add_request(str(place), EDIT, params)
        outputs = {}
        while engine.has_unfinished_requests:
            outputs.update({output.request_id: output.token_ids for output in engine.step()})
        answers = answers or outputs
        assert outputs == answers
    assert speculation.counts.num_drafted > speculation.counts.num_kept > 0


GRAMMARS = [
    ({"regex": "[a-z]{2,6}(, [a-z]{2,6}){3}"}, 0.0),
    ({"regex": "[a-z]{2,6}(, [a-z]{2,6}){3}"}, 0.9),
    ({"json": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}}, 0.7),
    ({"choice": ["one two three", "one two four", "five"]}, 0.7),
]


def follow(llm, speculation=None):
    """Outputs of requests with grammars, which end at different places, and of one without."""
    engine = engine_of(llm, speculation)
    for place, (grammar, temperature) in enumerate(GRAMMARS):
        params = SamplingParams(
            temperature=temperature, seed=place, max_tokens=24, structured_outputs=grammar, logprobs=1
        )
        engine.add_request(str(place), EDIT, params)
    engine.add_request("free", EDIT, SamplingParams(temperature=0, max_tokens=24))
    outputs = {}
    while engine.has_unfinished_requests:
        outputs.update({output.request_id: output for output in engine.step()})
        engine.scheduler.check()
    return outputs


@pytest.fixture(scope="module")
def followed(llm):
    return follow(llm)


@pytest.mark.parametrize("script", [[MOST, 0], [2, 9, 0, 4, MOST, 3], [1, 7]])
def test_masks_follow_drafts(llm, followed, script):
    """Right ones, and wrong ones after them, whether grammars allow these or not."""
    answers = {name: output.token_ids for name, output in followed.items()}
    speculation = speculating(Knowing(answers, script))
    for name, output in follow(llm, speculation).items():
        assert_same(output, followed[name])
    counts = speculation.counts
    assert counts.num_kept > 8
    assert counts.num_drafted > counts.num_kept or script[0] == MOST


def test_drafts_that_a_grammar_refuses_are_left_out_and_counted(llm):
    speculation = speculating(Knowing({"0": [5] * 99}, [MOST, 9]))
    engine = engine_of(llm, speculation)
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"regex": "[a-z]{4}"})
    engine.add_request("0", EDIT, params)
    text = ""
    while engine.has_unfinished_requests:
        for output in engine.step():
            text = output.text
    assert len(text) == 4
    assert speculation.counts.num_drafted == 0
    assert speculation.counts.num_excluded > 0


def test_prefix_hits_and_the_suffix_method(alone):
    config = {"method": "suffix", "num_speculative_tokens": 4, "policy": "fixed"}
    settings = {"skip_tokenizer_init": False, "enable_prefix_caching": True, "speculative_config": config}
    with make_llm(demo_model_path(), max_num_batched_tokens=64, max_model_len=176, **settings) as llm:
        for _ in range(2):
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(PARAMS))]
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            for output, expected in zip(outputs, alone, strict=True):
                assert_same(output, expected)
        assert outputs[0].num_cached_tokens > 0
        assert llm.engine.scheduler.speculation.counts.num_kept > 10
        llm.engine.scheduler.check()


def test_beam_search_is_refused_by_name(llm):
    with pytest.raises(ConfigError, match=r"speculative_config.*beam_search"):
        llm.beam_search([EDIT], BeamSearchParams(beam_width=2, max_tokens=4))


def test_drafts_preempt_nobody_and_take_only_what_is_free(llm, alone):
    """In a pool that just holds two requests with their growth, as many are preempted as without drafts."""
    counts = {}
    for drafts in (0, MOST):
        speculation = speculating(Knowing(answers_of(alone), [MOST, 0]), drafts)
        engine = engine_of(llm, speculation)
        blocks = engine.scheduler._state.pool
        taken = blocks.allocate(blocks.num_free - 2 * blocks.blocks_for(len(alone[0].prompt_token_ids) + 3))
        for place in (0, 1):
            engine.add_request(str(place), EDIT, SamplingParams(**GREEDY, ignore_eos=True))
        engine.step()
        most_free = blocks.num_free
        while engine.has_unfinished_requests and not engine.scheduler.progress.num_preempted:
            engine.step()
            most_free = min(most_free, blocks.num_free)
        counts[drafts] = engine.scheduler.progress.num_preempted
        engine.close()
        blocks.release(taken)
    assert counts[0] == counts[MOST] == 1


def test_the_ledger_tells_what_became_of_drafts(llm, alone, tmp_path):
    path = tmp_path / "ledger.jsonl"
    with path.open("w") as file:
        ledger = Ledger(file)
        speculation = speculating(Knowing(answers_of(alone), [MOST, 0, 2, 1]), policy=ByCost(UnknownCosts()))
        config = llm.engine.scheduler.config
        scheduler = Scheduler(config, ledger=ledger, speculation=speculation)
        engine = engine_of(llm, scheduler=scheduler, clock=itertools.count(0.0, 1.0).__next__)
        run(engine, [0, 1])
        ledger.close()
    counts, read = speculation.counts, read_ledger(path)
    columns = read.columns("verifications")
    assert (
        columns["num_drafted"].sum() == counts.num_drafted >= columns["num_kept"].sum() == counts.num_kept > 0
    )
    assert columns["num_verified"].sum() == counts.num_verifications
    assert np.all(columns["expected_kept"] < columns["num_drafted"])
    assert speculation.gains == Gains.of(read.verifications)
    assert speculation.gains.measured_gain > 0
    known = columns["measured_seconds"] > 0
    assert known.any()
    assert np.all(columns["measured_gain"][known & (columns["plain_seconds"] > 0)] > 0)
    steps = read.columns("steps")
    assert steps["num_prefill_tokens"].sum() == sum(len(alone[place].prompt_token_ids) for place in (0, 1))


def test_who_lacks_blocks_for_drafts_decodes(llm, alone):
    """It computes no prompt, and nothing more was expected of drafts than there were."""
    ledger, places, num_extra = Ledger(), [0, 1], []
    speculation = speculating(Knowing(answers_of(alone), [MOST]))
    scheduler = Scheduler(llm.engine.scheduler.config, ledger=ledger, speculation=speculation)
    engine = engine_of(llm, scheduler=scheduler, async_scheduling=False)
    pool = scheduler._state.pool
    for place in places:
        engine.add_request(str(place), EDIT, SamplingParams(**GREEDY, ignore_eos=True))
    while engine.has_unfinished_requests:
        live = scheduler.live_requests()
        missing = sum(len(one.block_ids) * pool.block_size < one.num_tokens for one in live)
        are_decoding = len(scheduler._state.running) == len(live)
        taken = pool.allocate(max(0, pool.num_free - missing)) if are_decoding else []
        engine.step()
        num_extra.append(len(taken))
        pool.release(taken)
    assert max(num_extra) > 0
    counts = speculation.counts
    assert 0 < counts.num_kept <= counts.num_drafted < MOST * counts.num_verifications
    assert all(record.expected_kept <= record.num_drafted for record in ledger.verifications)
    num_prompt = sum(len(alone[0].prompt_token_ids) for _ in places)
    assert sum(record.num_prefill_tokens for record in ledger.steps) == num_prompt
    num_tokens = len(places) * GREEDY["max_tokens"]
    assert scheduler.progress.num_generated == num_tokens - len(places)
    decoded = sum(record.num_decoded for record in ledger.steps)
    assert decoded + counts.num_kept == num_tokens - len(places)


def test_what_ends_a_request_is_counted(llm, alone):
    ledger = Ledger()
    speculation = speculating(Knowing(answers_of(alone), [MOST]))
    scheduler = Scheduler(llm.engine.scheduler.config, ledger=ledger, speculation=speculation)
    run(engine_of(llm, scheduler=scheduler), range(len(PARAMS)))
    counts, records = speculation.counts, ledger.verifications
    assert sum(record.num_drafted for record in records) == counts.num_drafted
    assert sum(record.num_kept for record in records) == counts.num_kept
    assert sum(record.num_verified for record in records) == counts.num_verifications


def test_a_preempted_request_keeps_its_history():
    speculation = speculating(PromptLookup(1, 2))
    request = make_request(4, 20)
    before = speculation._chance(request).first
    for _ in range(5):
        speculation.verified(request, [(4, 4)])
    assert speculation._chance(request).first > 0.8 > before
    speculation.ended(request, is_whole=True)
    assert request.request_id not in speculation._histories


# Refusals


def test_policies_that_do_not_mix_are_refused(llm):
    policy = SchedulerPolicy(iterations=SeparateIterations())
    with pytest.raises(ConfigError, match="leave speculative_config out"):
        engine_of(llm, speculating(PromptLookup()), policy)


def test_accepting_what_was_not_drafted_is_refused(llm):
    engine = engine_of(llm, speculating(PromptLookup()))
    with pytest.raises(RequestError, match="verified no drafts"):
        engine.scheduler.accept(make_request(4, 20), [(1, 0)])


class Never(AsProposed):
    """Does not let anybody be asked."""

    def is_worth_asking(self, num_running):
        return False


@pytest.mark.parametrize(("policy", "is_asked"), [(Never(), False), (AsProposed(), True)])
def test_who_asks_for_no_drafts_pays_nothing_for_them(llm, monkeypatch, policy, is_asked):
    """Neither programs nor what is in flight are looked at, in no step."""
    seen, looks_up = [], llm.executor.looks_up
    monkeypatch.setattr(llm.executor, "looks_up", lambda *asked: seen.append(asked) or looks_up(*asked))
    proposer = PromptLookup(2, 4)
    engine = engine_of(llm, speculating(proposer, policy=policy))
    engine.add_request("0", EDIT, SamplingParams(**GREEDY))
    while engine.has_unfinished_requests:
        engine.step()
    assert bool(seen) == is_asked
    assert bool(engine.scheduler.speculation.counts.num_drafted) == is_asked


class Noting(AsProposed):
    """Notes beside how many it was asked."""

    def __init__(self):
        self.seen = set()

    def is_worth_asking(self, num_running):
        self.seen.add(num_running)
        return True


def test_prompts_under_way_are_not_taken_for_decodes(llm):
    """A limit of the batch is one of requests that decode: the other one never does."""
    policy = Noting()
    engine = engine_of(llm, speculating(PromptLookup(2, 4), policy=policy))
    engine.add_request("0", EDIT, SamplingParams(**GREEDY, ignore_eos=True))
    engine.step()
    engine.add_request("1", [*range(3, 153)], SamplingParams(temperature=0, max_tokens=1))  # three steps long
    while engine.has_unfinished_requests:
        engine.step()
    assert policy.seen == {1}
