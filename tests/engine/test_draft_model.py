"""Draft models: what they draft, the blocks they hold, and the same tokens as without them."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import Recording, Scripted, make_llm, noting_chains, run
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_request
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.engine import sizing
from jaxllm.engine.engine import Engine
from jaxllm.engine.models import placements, read_model
from jaxllm.errors import CapacityError, ConfigError
from jaxllm.executor import drafted, memory
from jaxllm.executor.draft_model import DraftModel
from jaxllm.executor.draft_programs import ModelCore
from jaxllm.executor.drafted import DraftBatch, Drafted, DraftPlaces
from jaxllm.executor.drafter import CompiledAhead, DraftTimes
from jaxllm.executor.programs import PackedStep
from jaxllm.sched import speculation
from jaxllm.sched.acceptance import Chance
from jaxllm.sched.cache.lookups import learn_names
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.policies.speculation import _BY_COST, AsProposed, ByCost, IterationRows
from jaxllm.sched.scheduler import Scheduler
from jaxllm.sched.speculation import Speculation
from jaxllm.types import RequestStatus

MOST = 8
TARGET, OTHER = golden_checkpoint("llama_gqa"), golden_checkpoint("qwen3")
PROMPTS = [[5, 9, 33, 7, 8, 21, 90], [1], list(range(2, 45)), [100, 3] * 9, [64, 65, 66], [11] * 30]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def test_programs_that_draft_are_compiled_with_the_precision_of_whoever_makes_them():
    class Some(CompiledAhead):
        def lower(self, key):
            dots = jax.jit(lambda x: x @ x).lower(jnp.ones((2, 2)))
            found.append("precision = [HIGHEST" in dots.as_text())
            return dots

    for precision in ("default", "highest"):
        found = []
        with jax.default_matmul_precision(precision):
            made = Some([1])
        made.wait()
        assert found == [precision == "highest"]


def make_llm_that_drafts():
    config = {"method": "draft_model", "model": OTHER, "num_speculative_tokens": MOST, "policy": "fixed"}
    settings = {"prefill_buckets": [16, 48], "num_host_blocks": 32, "num_scheduler_steps": 4}
    return make_llm(TARGET, speculative_config=config, **settings)


@pytest.fixture(scope="module")
def llm():
    return make_llm_that_drafts()


@pytest.fixture(scope="module")
def other(llm):
    """A draft model that is not: the one that the engine has at first."""
    return llm.executor.drafter


@pytest.fixture(scope="module")
def alike(llm, other):
    """A draft model that is the model itself."""
    model = drafting(llm)
    model.warm_up()
    return model


def drafting(llm, **changes):
    executor = llm.executor
    config = dataclasses.replace(executor.config, **changes)
    core = ModelCore(executor.model_config, config)
    carried = None if changes else lambda: executor.carried
    return DraftModel(core, lambda: executor._params, config, MOST, executor._device, carried)


@pytest.fixture(scope="module")
def answers(llm):
    outputs = run(engine_of(llm, None), PROMPTS, GREEDY)
    return [output.token_ids for output in outputs]


def engine_of(llm, model, num_tokens=MOST, policy=None, num_steps=1, says=None, **changes):
    config = dataclasses.replace(llm.engine.scheduler.config, **changes)
    drafting = model and Speculation(model, says or AsProposed(), num_tokens, 4 * MOST, chained=model)
    scheduler = Recording(config, policy or SchedulerPolicy(), speculation=drafting)
    if num_steps > 1:
        llm.executor.drafter = model
    vocab_size = llm.model_config.vocab_size
    return Engine(llm.executor, scheduler, vocab_size=vocab_size, num_scheduler_steps=num_steps)


def running(index, tokens):
    request = make_request(index, 0, 200, prompt_token_ids=tokens)
    request.status = RequestStatus.RUNNING
    return request


# What is drafted


@settings(max_examples=30, deadline=None)
@given(
    rounds=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, MOST), st.integers(0, 9)), max_size=4),
        min_size=1,
        max_size=5,
    ),
    draw=st.integers(0, 2**20),
)
def test_drafts_are_those_of_one_who_has_just_come(alike, rounds, draw):
    """Whatever was drafted before, of whom, and how much of it was right."""
    random = np.random.default_rng(draw)
    requests = [running(i, random.integers(0, 128, (1, 2, 9, 60)[i]).tolist()) for i in range(4)]
    for asked in rounds:
        asked = list({number: one for number, *one in asked}.items())
        pairs = [
            (requests[number], count)
            for number, (count, _) in asked
            if requests[number].num_known_tokens < 90
        ]
        drafts = alike.propose(pairs)
        assert [len(tokens) for tokens in drafts] == [count for _, count in pairs]
        for (request, count), tokens in zip(pairs, drafts, strict=True):
            other = running(9, request.token_ids(0, request.num_known_tokens))
            assert alike.propose([(other, count)])[0] == tokens
            alike.forget(other)
        for (number, (_, num_right)), tokens in zip(asked, drafts, strict=False):
            right = tokens[: min(num_right, len(tokens))]
            requests[number].output_token_ids += [*right, *random.integers(0, 128, 1).tolist()]
    for request in requests:
        alike.forget(request)
    assert alike.num_free_blocks == alike.config.num_gpu_blocks


def beginning_with(model, index, tokens):
    """A request whose blocks have names, as those of an engine with prefix caching."""
    request = running(index, tokens)
    learn_names(request, len(tokens), model.config.block_size)
    return request


@settings(max_examples=30, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, MOST), st.integers(0, 9), st.booleans()),
        min_size=4,
        max_size=16,
    ),
    draw=st.integers(0, 2**20),
)
def test_drafts_after_what_others_began_with_are_the_same(alike, rounds, draw):
    """Two prompts, each with three endings, held, gone and back, after drafts of which some were wrong."""
    random, size = np.random.default_rng(draw), alike.config.block_size
    prompts = [random.integers(0, 128, count).tolist() for count in (40, 3 * size)]
    live, count = {}, itertools.count()
    for which, num_drafts, num_right, goes in rounds:
        request = live.get(which)
        if request is None:
            ending = [which] * (which % 3 and 7)
            request = live[which] = beginning_with(alike, next(count), prompts[which % 2] + ending)
        (tokens,) = alike.propose([(request, num_drafts)])
        other = running(999, request.token_ids(0, request.num_known_tokens))
        assert alike.propose([(other, num_drafts)])[0] == tokens
        alike.forget(other)
        request.output_token_ids += [*tokens[:num_right], *random.integers(0, 128, 1).tolist()]
        learn_names(request, request.num_known_tokens, size)
        if goes or request.num_known_tokens > 90:
            alike.forget(live.pop(which))
        alike._blocks.check()
    for request in live.values():
        alike.forget(request)
    assert alike.num_free_blocks == alike.config.num_gpu_blocks
    alike.forget_prefixes()


def test_what_others_began_with_is_not_computed_again(alike, monkeypatch):
    size, computed, compute = alike.config.block_size, [], alike._compute

    def counting(key, chunks):
        computed.extend(stop - start for _, start, stop, _ in chunks)
        return compute(key, chunks)

    def needs(request):
        computed.clear()
        alike.propose([(request, 2)])
        return sum(computed)

    monkeypatch.setattr(alike, "_compute", counting)
    tokens = [*range(3, 3 + 4 * size), 7, 7]
    first, second = (beginning_with(alike, i, tokens) for i in range(2))
    assert needs(first) == 4 * size + 2
    assert needs(second) == 2
    assert alike._blocks.num_shared(alike._held["r1"].blocks) == 4
    other = beginning_with(alike, 2, [*tokens[: 2 * size], 9, *tokens[2 * size + 1 :]])
    assert needs(other) == 2 * size + 2
    assert needs(beginning_with(alike, 3, tokens[: 4 * size])) == size, "one is to be computed"
    assert needs(running(4, tokens)) == 4 * size + 2, "without names, without prefix caching"
    salted = make_request(5, 0, 200, prompt_token_ids=tokens, cache_salt="mine")
    learn_names(salted, len(tokens), size)
    salted.status = RequestStatus.RUNNING
    assert needs(salted) == 4 * size + 2
    first.status = second.status = RequestStatus.WAITING  # and what they leave is found again
    assert needs(beginning_with(alike, 6, tokens)) == 2
    alike.forget_prefixes()
    assert needs(beginning_with(alike, 7, tokens)) == 4 * size + 2
    alike.warm_up()
    assert needs(beginning_with(alike, 8, tokens)) == 4 * size + 2, "its programs ran in the first block"
    for request in [held.request for held in alike._held.values()]:
        alike.forget(request)
    alike.forget_prefixes()


def test_nobody_reads_drafts_before_they_are_verified(llm, alike, other, answers, monkeypatch):
    """They go from one program to the next on the device, though others get tokens that the host knows."""
    seen, read, execute = [], DraftBatch.read, llm.executor.execute

    def reading(batch):
        seen.append("read")
        return read(batch)

    def executing(scheduled):
        result = execute(scheduled)
        if scheduled.num_drafts:
            seen.append("sent")
        return result

    monkeypatch.setattr(DraftBatch, "read", reading)
    monkeypatch.setattr(llm.executor, "execute", executing)
    engine = engine_of(llm, alike)
    outputs = run(engine, PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == answers
    counts = engine.scheduler.speculation.counts
    assert counts.num_kept > 0.9 * counts.num_drafted
    steps = "".join({"sent": "s", "read": "r"}[one] for one in seen).split("s")
    assert steps[0] == ""
    assert all(steps[1:])  # after each step, never before its own


def test_some_drafts_are_on_the_device_and_some_on_the_host():
    batches = [DraftBatch(jnp.array([[5, 6, 7], [8, -1, 9]])) for _ in range(2)]
    places = DraftPlaces()
    assert places.take((3, 4), 1) == (3, 4)
    assert places.take(Drafted(batches[0], 2, 2), 4) == [0, 0]
    assert places.take(Drafted(batches[0], 1, 2)[:1], 7) == [0]
    assert places.take(Drafted(batches[1], 1, 2), 9) == [6, 0]  # of another program: it is read
    assert places.fill(np.arange(10, dtype=np.int32)).tolist() == [0, 1, 2, 3, 7, 9, 6, 6, 8, 9]
    untouched = np.arange(3)
    assert DraftPlaces().fill(untouched) is untouched


def test_the_model_itself_is_always_right(llm, alike, answers):
    drafts = alike.propose([(running(i, tokens), MOST) for i, tokens in enumerate(PROMPTS[:4])])
    # All but the first draft come from the tokens drafted before them.
    assert drafts == [tokens[:MOST] for tokens in answers[:4]]
    for i, tokens in enumerate(PROMPTS[:4]):
        alike.forget(running(i, tokens))
    engine = engine_of(llm, alike)
    outputs = run(engine, PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == answers
    counts = engine.scheduler.speculation.counts
    assert counts.num_kept == counts.num_drafted > 90
    assert counts.num_verifications < 3 * len(PROMPTS) + 3


@pytest.fixture(scope="module")
def small(llm):
    """Ten blocks of 4 tokens, for sequences of 24, of programs that are compiled beside all else."""
    return drafting(llm, num_gpu_blocks=10, max_model_len=24)


def test_nothing_is_drafted_until_its_programs_are_there(llm):
    model = drafting(llm, num_gpu_blocks=3, max_model_len=24)
    first = running(0, [1, 2, 3])
    found = [model.propose([(first, 2)])[0]]
    model._programs.wait()
    found.append(model.propose([(first, 2)])[0])
    assert [len(tokens) for tokens in found] == [0, 2]
    assert model.seconds(1, 2) > 0
    model.release()
    assert model.propose([(first, 2)]) == [()]


def test_what_puts_drafts_into_inputs_is_compiled_beside_the_steps(llm):
    drafted._filled.clear_cache()
    model = drafting(llm, num_gpu_blocks=3, max_model_len=24)
    model._programs.wait()
    count = drafted._filled._cache_size()
    (drafts,) = model.propose([(running(0, [1, 2, 3]), 2)])
    for size in model.config.buckets.sizes:
        places = DraftPlaces()
        assert places.take(drafts, 0) == [0, 0]
        places.fill(PackedStep(model.config.draft_key(size), 4, model.config.block_size).array)
    assert drafted._filled._cache_size() == count == len(model.config.buckets.sizes)
    model.release()


def test_who_drafts_nothing_now_gives_blocks(small):
    small._programs.wait()
    first, second, third = (running(i, list(range(20))) for i in range(3))
    assert len(small.propose([(first, 1)])[0]) == 1
    assert len(small.propose([(second, 1)])[0]) == 1
    assert small.num_free_blocks == 0
    assert [len(tokens) for tokens in small.propose([(second, 1), (third, 1)])] == [1, 1]
    assert sorted(small._held) == ["r1", "r2"]
    drafts = small.propose([(first, 1), (second, 1), (third, 1)])
    assert sorted(len(tokens) for tokens in drafts) == [0, 1, 1], "three have no room together"
    third.status = RequestStatus.WAITING  # preempted
    drafts = small.propose([(first, 2)])
    assert "r2" not in small._held
    assert len(drafts[0]) == 2
    for request in (first, second, third):
        small.forget(request)
    assert small.num_free_blocks == 10


def test_beyond_its_positions_nothing_is_drafted(small):
    small._programs.wait()
    for length, most in ((21, 4), (22, 3), (24, 1), (25, 0)):
        request = running(length, list(range(length)))
        assert len(small.propose([(request, 4)])[0]) == most
        small.forget(request)


# The same tokens


def test_another_model_drafts_and_nothing_changes(llm, answers):
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == answers
    counts = llm.engine.scheduler.speculation.counts
    assert counts.num_drafted > counts.num_kept
    model = llm.executor.drafter
    assert model.core.model.architecture == "Qwen3ForCausalLM"
    assert model.num_free_blocks == model.config.num_gpu_blocks == llm.executor.num_gpu_blocks


@pytest.mark.parametrize("num_steps", [2, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, MOST])
@pytest.mark.parametrize("is_alike", [True, False])
def test_iterations_that_follow_one_another_draft_the_same(
    llm, alike, other, answers, is_alike, num_tokens, num_steps, monkeypatch
):
    """Each by what the one before it kept, which the host does not know yet."""
    monkeypatch.setattr(speculation, "_SURELY", 0.0)
    model = alike if is_alike else other
    engine = engine_of(llm, model, num_tokens, num_steps=num_steps)
    with noting_chains(llm.executor) as noted:
        outputs = run(engine, PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == answers
    assert max(one.num_decode_steps for one in engine.scheduler.lookups) == num_steps
    assert len(noted) > 3
    for request, length, drafts in noted:
        other = running(9, request.token_ids(0, length))
        assert model.propose([(other, len(drafts))])[0] == drafts
        model.forget(other)
    counts = engine.scheduler.speculation.counts
    assert counts.num_drafted == counts.num_kept if is_alike else counts.num_drafted > counts.num_kept


@pytest.mark.parametrize("end", [3, 9, 14])
def test_nobody_goes_on_after_an_end(llm, alike, answers, end):
    """Wherever it is, and others do."""
    tokens = answers[2]
    params = [dataclasses.replace(GREEDY, stop_token_ids=[tokens[end]]), GREEDY]
    engine = engine_of(llm, alike, 3, num_steps=4)
    outputs = run(engine, [PROMPTS[2], PROMPTS[3]], params)
    first = tokens.index(tokens[end])
    assert [output.token_ids for output in outputs] == [tokens[: first + 1], answers[3]]
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert engine.scheduler.lookups


def test_what_is_hardly_right_is_drafted_where_that_costs_little(llm, alike, answers):
    """Else nobody would ever learn that it has become right."""
    engine = engine_of(llm, alike, 1, num_steps=4, says=predicting())
    of_all = engine.scheduler.speculation._all
    for one in (of_all.after_right, of_all.after_wrong):
        one.add(40, 5)
    (output,) = run(engine, PROMPTS[:1], GREEDY)
    assert output.token_ids == answers[0]
    assert engine.scheduler.lookups
    assert engine.scheduler.speculation.counts.num_kept > 5


def test_blocks_that_are_too_few_for_all_are_left_to_step_by_step(llm):
    model = drafting(llm, num_gpu_blocks=10)
    model._carried = lambda: llm.executor.carried
    model._programs.wait()
    model._programs.chains = {4: None}
    requests = [running(i, list(range(16))) for i in range(2)]
    asked = [(request, 22) for request in requests]
    model._is_warm = True
    assert not model.prepare(asked)
    assert model.num_free_blocks == 10
    assert not model.prepare([(requests[0], 113)])
    assert model.prepare([(requests[0], 22)])
    assert model.num_free_blocks == 4
    model.release()


@pytest.mark.parametrize("is_alike", [True, False])
def test_who_asks_for_more_gets_it_of_drafts_on_the_device(llm, alike, other, is_alike):
    """What is sampled apart depends on the drafts before it, beside others that nobody has looked at."""
    common = {"max_tokens": 20, "ignore_eos": True}
    params = [
        GREEDY,
        SamplingParams(temperature=0, repetition_penalty=1.4, logprobs=2, **common),
        SamplingParams(temperature=0.8, seed=3, presence_penalty=0.7, top_p=0.9, **common),
        SamplingParams(temperature=0, logit_bias={5: 2.0, 9: -3.0}, prompt_logprobs=1, **common),
        SamplingParams(temperature=0.9, seed=8, min_p=0.05, frequency_penalty=0.4, **common),
        SamplingParams(temperature=0.7, seed=4, **common),
    ]
    expected = run(engine_of(llm, None), PROMPTS, params)
    engine = engine_of(llm, alike if is_alike else other)
    found = run(engine, PROMPTS, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert engine.scheduler.speculation.counts.num_drafted > 0


@settings(max_examples=10, deadline=None)
@given(
    script=st.lists(st.integers(0, 59), min_size=5, max_size=20),
    num_tokens=st.integers(0, MOST),
    budget=st.sampled_from([6, 17, 48]),
    is_shared=st.booleans(),
    is_alike=st.booleans(),
    abort=st.integers(0, 12),
    num_steps=st.sampled_from([1, 4]),
)
def test_any_number_of_drafts_chunks_preemptions_and_aborts(
    llm, alike, other, answers, script, num_tokens, budget, is_shared, is_alike, abort, num_steps
):
    policy = Scripted(script=itertools.cycle([*script, 1]))
    model = alike if is_alike else other
    changes = {"max_num_batched_tokens": budget, "enable_prefix_caching": is_shared}
    engine = engine_of(llm, model, num_tokens, policy, num_steps, **changes)
    for place, tokens in enumerate([*PROMPTS, PROMPTS[2]]):
        engine.add_request(str(place), tokens, GREEDY)
    num_steps, outputs = 0, {}
    while engine.has_unfinished_requests:
        if num_steps == abort and engine.is_live("3"):
            engine.abort("3")
        outputs.update({int(output.request_id): output for output in engine.step()})
        engine.scheduler.check()
        num_steps += 1
    for place, output in outputs.items():
        expected = answers[place % len(PROMPTS) if place < len(PROMPTS) else 2]
        is_cut = output.outputs[0].finish_reason == "abort"
        assert output.token_ids == (expected[: len(output.token_ids)] if is_cut else expected)
    assert model.num_free_blocks == model.config.num_gpu_blocks


# What it costs


def test_seconds_lie_between_those_that_were_measured():
    times = DraftTimes(5)
    assert times.seconds(1, 1) == 0
    times.measured(4, 0.1, 0.5)
    times.measured(16, 0.2, 0.6)
    assert times.seconds(3, 3) == pytest.approx(0.3)
    assert times.seconds(40, 5) == pytest.approx(0.6)


class Linear:
    def step_seconds(self, num_decodes, num_context=0, num_prompt=0, *_):
        return 1.0 + 0.01 * (num_decodes + num_prompt)


def test_drafts_that_take_too_long_are_not_drafted():
    rows = IterationRows(1, 100, 0, 64)
    for seconds, pays in ((0.05, True), (0.5, False)):
        policy = predicting(drafting=lambda _, count, each=seconds: each * count)
        assert (policy.num_drafts([4], [Chance(0.5, 0.5)], rows)[0] > 0) == pays
    free = predicting().num_drafts([8], [Chance(0.7, 0.7)], rows)[0]
    slow = predicting(drafting=lambda _, count: 0.1 * count)
    assert slow.num_drafts([8], [Chance(0.7, 0.7)], rows)[0] < free
    # Of iterations that follow one another each drafts as many, of everybody: all that pay.
    (together,) = slow.num_drafts([8], [Chance(0.7, 0.7)], IterationRows(1, 100, 0, 64, looks_up=True))
    assert 0 < together < free
    slow._regime(3).way = _BY_COST
    counts = slow.num_drafts(
        [8, 1, 8], [Chance(one, one) for one in (0.5, 0.5, 0.95)], IterationRows(3, 300, 0, 64, looks_up=True)
    )
    assert counts[0] == counts[2] > 1
    assert counts[1] == 1


def predicting(**settings):
    """A policy that goes by what it predicts, not by what it tries."""
    policy = ByCost(Linear(), **settings)
    policy._regime(1).way = _BY_COST
    return policy


class Computing:
    """Proposes as many as it is asked for, and counts."""

    def __init__(self):
        self.asked = []

    def propose(self, asked):
        self.asked += [count for _, count in asked]
        return [[1] * count for _, count in asked]

    def seconds(self, num_requests, num_tokens):
        return 0.1

    def forget(self, request):
        pass


class Few(AsProposed):
    """Lets two drafts of each be verified."""

    def num_drafts(self, proposed, acceptance, iteration):
        return [min(2, count) for count in proposed]


def test_only_what_is_verified_is_computed(llm, answers):
    proposer = Computing()
    speculation = Speculation(proposer, Few(), MOST, 4 * MOST)
    scheduler = Scheduler(llm.engine.scheduler.config, speculation=speculation)
    engine = Engine(llm.executor, scheduler, vocab_size=llm.model_config.vocab_size)
    outputs = run(engine, PROMPTS[:3], GREEDY)
    assert [output.token_ids for output in outputs] == answers[:3]
    assert max(proposer.asked) == 2
    assert sum(proposer.asked) == speculation.counts.num_drafted


class Refusing(AsProposed):
    """Lets none be verified."""

    def num_drafts(self, proposed, acceptance, iteration):
        self.acceptance = list(acceptance)
        return [0] * len(proposed)


def test_what_was_learned_of_refused_drafts_counts_less_and_less(llm):
    policy, proposer = Refusing(), Computing()
    speculation = Speculation(proposer, policy, MOST, 4 * MOST)
    scheduler = Scheduler(llm.engine.scheduler.config, speculation=speculation)
    engine = Engine(llm.executor, scheduler, vocab_size=llm.model_config.vocab_size)
    rates = []
    for _ in range(9):
        speculation._all.after_wrong.add(9, 0)
    for _ in range(40):
        run(engine, PROMPTS[:1], GREEDY)
        rates.append(policy.acceptance[0].first)
    assert rates[0] < 0.1
    assert rates[-1] > 3 * rates[0]
    assert not proposer.asked


# Settings and memory


@pytest.mark.parametrize(
    ("given_config", "message"),
    [
        ({"method": "draft_model"}, "give its folder as 'model'"),
        ({"method": "ngram", "model": "x"}, "method='ngram' takes none"),
        ({"method": "draft_model", "model": ""}, "must be a path"),
        ({"method": "draft_model", "model": "/nowhere at all"}, "'/nowhere at all'.*does not exist"),
        ({"method": "draft_model", "models": "x"}, "did you mean model"),
    ],
)
def test_wrong_settings_are_named(given_config, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(TARGET, speculative_config=given_config)


def test_another_vocabulary_is_refused(tmp_path):
    config = json.loads((TARGET / "config.json").read_text()) | {"vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"vocabulary of 256 tokens.*has 128: .*same tokenizer"):
        make_llm(TARGET, speculative_config={"method": "draft_model", "model": tmp_path})


def test_weights_and_pool_are_in_the_memory_that_is_planned(llm):
    """Of bytes for KV both models get as many blocks; its weights are subtracted like the model's."""
    config = dataclasses.replace(llm.config, num_gpu_blocks_override=None, kv_cache_memory=2**20 - 5)
    model = read_model(config, placements(config)[0])
    chosen = sizing.choose(config, model)
    alone = sizing.size(config, model, chosen).scheduler.num_gpu_blocks
    shared = sizing.size(config, model, chosen, beside=memory.Beside(bytes_per_block=14336))
    own = llm.executor.pool_bytes // llm.executor.num_gpu_blocks
    assert alone == 112
    assert shared.scheduler.num_gpu_blocks == (2**20 - 5) // (own + 14336)
    with pytest.raises(CapacityError):
        sizing.size(config, model, chosen, beside=memory.Beside(weight_bytes=2**50))


def test_it_sleeps_and_wakes_with_the_model(answers):
    llm = make_llm_that_drafts()
    model = llm.executor.drafter
    for level in (1, 2):
        llm.sleep(level)
        assert model._pool is None
        assert bool(model._params) == (level == 1)
        llm.wake_up()
        counts = llm.engine.scheduler.speculation.counts
        num_drafted = counts.num_drafted
        outputs = llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == answers[0]
        assert counts.num_drafted > num_drafted
    llm.close()
    assert not model._params
