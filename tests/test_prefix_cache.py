"""Requests that find the KV of others: names, what schedulers plan with them, and equal tokens."""

import pytest
from engine_helpers import make_engine, make_llm, restless, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_helpers import LinearCosts, describe, make_request, make_scheduler, step, take
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, RequestError
from jaxllm.sched.cache.names import names_of, root
from jaxllm.sched.presets import adaptive, make_preset

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


# Names


def test_equal_prefixes_have_equal_names():
    long = names_of(range(40), 8, root())
    assert len(long) == 5
    assert names_of(range(17), 8, root()) == long[:2]
    assert names_of(range(16, 40), 8, long[1].digest) == long[2:]
    assert len(set(long)) == 5


def test_a_name_is_of_all_before_it_and_of_the_salt():
    one, other = names_of([1, 2, 3, 4], 2, root()), names_of([9, 2, 3, 4], 2, root())
    assert one[1].tokens == other[1].tokens
    assert one[1] != other[1]
    assert names_of([1, 2], 2, root("a")) != names_of([1, 2], 2, root())
    assert names_of([1, 2], 2, root("a")) == names_of([1, 2], 2, root("a"))


# Schedulers: blocks of 4 tokens


def shared(policy=None, **changes):
    policy = make_preset("vllm_v1") if policy is None else policy
    return make_scheduler(policy, enable_prefix_caching=True, **changes)


def test_a_prefix_is_computed_once():
    scheduler = shared()
    first, second, third = (make_request(i, tokens) for i, tokens in enumerate((10, 12, 8)))
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)  # 12 tokens, of which two blocks are there
    scheduler.add(third)  # 8 tokens, of which the last is computed anyway
    output = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length) for chunk in output.prefill] == [(8, 4), (4, 4)]
    assert first.block_ids[:2] == second.block_ids[:2]
    assert third.block_ids[0] == first.block_ids[0]
    assert third.block_ids[1] != first.block_ids[1]
    assert scheduler.num_free_blocks == 64 - (3 + 1 + 1)
    assert [one.num_cached_tokens for one in (first, second, third)] == [0, 8, 4]
    scheduler.check()


def test_requests_of_one_iteration_share():
    scheduler = shared()
    for index in range(3):
        scheduler.add(make_request(index, 10))
    output = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.length) for chunk in output.prefill] == [(0, 10), (8, 2), (8, 2)]
    assert scheduler.num_free_blocks == 64 - (3 + 1 + 1)
    scheduler.check()


def test_what_ended_is_found_until_its_blocks_are_needed():
    scheduler = shared(num_gpu_blocks=5)
    scheduler.add(make_request(0, 8, 4))
    while scheduler.has_unfinished:
        step(scheduler)
    assert scheduler.num_free_blocks == 5
    again = make_request(1, 8, 4)
    scheduler.add(again)
    while scheduler.has_unfinished:
        step(scheduler)
    assert again.num_cached_tokens == 4
    scheduler.add(make_request(2, 16, 4, prompt_token_ids=range(100, 116)))  # takes all five
    while scheduler.has_unfinished:
        step(scheduler)
    last = make_request(3, 8, 4)
    scheduler.add(last)
    step(scheduler)
    assert last.num_cached_tokens == 0


def test_outputs_are_found_by_the_next_turn():
    scheduler = shared()
    first = make_request(0, 6, 7)
    scheduler.add(first)
    while scheduler.has_unfinished:
        step(scheduler)
    turn = [*first.prompt_token_ids, *first.output_token_ids, 7, 7]
    second = make_request(1, len(turn), prompt_token_ids=turn)
    scheduler.add(second)
    step(scheduler)
    assert second.num_cached_tokens == 12  # of 13, the last of which was never computed


def test_requests_keep_apart_if_they_ask_to():
    scheduler = shared()
    salted = {"cache_salt": "mine"}
    for index, changes in enumerate([{}, salted, salted]):
        scheduler.add(make_request(index, 9, **changes))
    starts = [chunk.start for chunk in scheduler.schedule(0.0).prefill]
    assert starts == [0, 0, 8]
    scored = make_request(3, 9, sampling_params=SamplingParams(prompt_logprobs=1))
    scheduler.add(scored)
    assert [chunk.start for chunk in scheduler.schedule(1.0).prefill] == [0]  # of which all is computed
    scheduler.reset_prefix_cache()
    scheduler.add(make_request(4, 9))
    assert [chunk.start for chunk in scheduler.schedule(2.0).prefill] == [0]


def test_shared_blocks_outlive_a_victim():
    scheduler = shared(num_gpu_blocks=6, max_num_seqs=2)
    first, second = make_request(0, 10, 8), make_request(1, 10, 8)
    for request in (first, second):
        scheduler.add(request)
    preempted = []
    while scheduler.has_unfinished:
        output = scheduler.schedule(0.0)
        scheduler.check()
        preempted += [request.request_id for request in output.preempted]
        take(scheduler, output)
    assert preempted == ["r1"]  # each needs five blocks, of which they share two: eight of six
    assert [len(one.output_token_ids) for one in (first, second)] == [8, 8]


def test_who_shares_starts_where_others_do_not_fit():
    scheduler = shared(adaptive(LinearCosts()), num_gpu_blocks=8)
    scheduler.add(make_request(0, 22, 6))
    step(scheduler)
    scheduler.add(make_request(1, 23, 4, prompt_token_ids=range(50, 73)))  # six blocks; two are free
    step(scheduler)
    assert scheduler.num_waiting == 1
    scheduler.add(make_request(2, 23, 4))  # six blocks, of which five are there
    assert "r2[20:23]!" in describe(scheduler.schedule(0.0))
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_system_without_a_prefix_cache_refuses_one():
    with pytest.raises(ConfigError, match="plans without a prefix cache"):
        make_scheduler(make_preset("vllm"), enable_prefix_caching=True)


# Engines


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint("llama_gqa"), enable_prefix_caching=None, num_host_blocks=40)


def test_tokens_are_those_of_an_engine_without_it(llm):
    prompt = [3 + i % 50 for i in range(30)]
    alone = run(make_engine(llm), [prompt], GREEDY)[0]
    llm.reset_prefix_cache()
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == alone.token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)
    assert second.cached_tokens_by_tier == {"device": 28}
    turn = [*prompt, *second.token_ids, 9, 8, 7]
    found = llm.generate(turn, GREEDY, use_tqdm=False)[0]
    assert found.num_cached_tokens == 40  # of 42 tokens, the last of which was never computed
    assert found.token_ids == run(make_engine(llm), [turn], GREEDY)[0].token_ids
    llm.reset_prefix_cache()


def test_salts_and_resets(llm):
    prompt = {"prompt_token_ids": [5] * 20, "cache_salt": "a"}
    counts = [llm.generate(one, GREEDY, use_tqdm=False)[0].num_cached_tokens for one in (prompt, prompt)]
    other = llm.generate(prompt | {"cache_salt": "b"}, GREEDY, use_tqdm=False)[0]
    assert [*counts, other.num_cached_tokens] == [0, 16, 0]
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    for salt in ("", 3):
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate(prompt | {"cache_salt": salt}, GREEDY, use_tqdm=False)


def test_it_can_be_turned_off():
    llm = make_llm(golden_checkpoint("llama_gqa"))
    counts = [llm.generate([[5] * 20], GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 0]
    with pytest.raises(ConfigError, match="enable_prefix_caching='yes' must be True or False"):
        make_llm(golden_checkpoint("llama_gqa"), enable_prefix_caching="yes")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_never_depend_on_what_is_shared(llm, data):
    """Random requests with common beginnings, in a small pool, with swaps and forced preemptions."""
    prompts = []
    for _ in range(data.draw(st.integers(2, 8))):
        length = data.draw(st.integers(1, 40))
        split = data.draw(st.integers(0, length))
        seed = data.draw(st.integers(1, 3))
        prompts.append([(seed * 7 + i) % 60 for i in range(split)] + [70 + seed] * (length - split))
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.8])),
            seed=index,
            max_tokens=data.draw(st.integers(1, 20)),
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    costs = LinearCosts(swap=data.draw(st.sampled_from([0.01, 100.0])))
    policies = {"adaptive": adaptive(costs), "vllm_v1": make_preset("vllm_v1"), "restless": restless()}
    policy = policies[data.draw(st.sampled_from(sorted(policies)))]
    num_host_blocks = data.draw(st.sampled_from([0, 40])) if policy is policies["adaptive"] else 0
    llm.executor.settle_copies()
    engine = make_engine(
        llm,
        num_gpu_blocks=data.draw(st.integers(20, 40)),
        policy=policy,
        num_host_blocks=num_host_blocks,
        async_scheduling=data.draw(st.booleans()),
        enable_prefix_caching=True,
    )
    outputs = run(engine, prompts, params)
    for output, prompt, param in zip(outputs, prompts, params, strict=True):
        lone = run(make_engine(llm), [prompt], param)[0]
        assert output.token_ids == lone.token_ids
