"""Engines whose requests find the KV of others: the tokens of engines without that, and what is found."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, make_llm, restless, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_helpers import LinearCosts, lose, make_request
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, RequestError
from jaxllm.sched.policies import (
    AheadOfTime,
    CostOverIdleTime,
    NoOffload,
    WriteBack,
    WriteThrough,
)
from jaxllm.sched.presets import adaptive, make_preset

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


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
    assert second.cached_tokens_by_tier == {"device": 28, "host": 0, "disk": 0}
    turn = [*prompt, *second.token_ids, 9, 8, 7]
    found = llm.generate(turn, GREEDY, use_tqdm=False)[0]
    assert found.num_cached_tokens == 40  # of 42 tokens, the last of which was never computed
    assert found.token_ids == run(make_engine(llm), [turn], GREEDY)[0].token_ids
    llm.reset_prefix_cache()


def test_the_last_block_is_found_at_any_length(llm):
    """A request that ends by length is released before its last tokens are read."""
    for length in range(20, 28):
        prompt = [length, *(3 + i % 50 for i in range(length - 1))]
        engine = make_engine(llm, enable_prefix_caching=True)
        (first,) = run(engine, [prompt], GREEDY)
        turn = [*prompt, *first.token_ids]
        (second,) = run(engine, [[*turn, 9, 8]], GREEDY)
        assert second.num_cached_tokens == (len(turn) - 1) // 4 * 4
        engine.scheduler.check()


def test_salts_and_resets(llm):
    prompt = {"prompt_token_ids": [5] * 20, "cache_salt": "a"}
    counts = [llm.generate(one, GREEDY, use_tqdm=False)[0].num_cached_tokens for one in (prompt, prompt)]
    other = llm.generate(prompt | {"cache_salt": "b"}, GREEDY, use_tqdm=False)[0]
    assert [*counts, other.num_cached_tokens] == [0, 16, 0]
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    for salt in ("", 3, "\ud800"):
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate(prompt | {"cache_salt": salt}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("lost", [(0,), (3,), (0, 1, 4, 6)])
def test_tokens_are_those_of_a_whole_prompt_where_blocks_are_missing(llm, lost):
    policy = dataclasses.replace(make_preset("vllm_v1"), retention=CostOverIdleTime(LinearCosts()))
    engine = make_engine(llm, policy=policy, enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3)
    prompt = [3 + i % 50 for i in range(39)]
    alone = run(make_engine(llm), [prompt], params)[0]
    run(engine, [prompt], GREEDY)
    lose(engine.scheduler, make_request(0, 39, prompt_token_ids=prompt), *lost)
    output = run(engine, [prompt], params)[0]
    assert output.num_cached_tokens == 36 - 4 * len(lost)
    assert output.token_ids == alone.token_ids


def test_a_later_turn_finds_its_blocks_on_the_host(llm):
    policy = dataclasses.replace(make_preset("vllm_v1"), offload=WriteBack())
    engine = make_engine(
        llm, num_gpu_blocks=20, num_host_blocks=40, policy=policy, enable_prefix_caching=True
    )
    prompt, others = [3 + i % 50 for i in range(30)], [[60 + i] * 40 for i in range(3)]
    first = run(engine, [prompt], GREEDY)[0]
    run(engine, others, GREEDY)
    turn = [*prompt, *first.token_ids, 9, 8, 7]
    found = run(engine, [turn], GREEDY)[0]
    assert found.num_cached_tokens == 40
    assert found.cached_tokens_by_tier["host"] > 0
    assert found.token_ids == run(make_engine(llm), [turn], GREEDY)[0].token_ids
    engine.reset_prefix_cache()
    assert not llm.executor.swapper.pieces


def test_it_can_be_turned_off():
    llm = make_llm(golden_checkpoint("llama_gqa"))
    counts = [llm.generate([[5] * 20], GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 0]
    with pytest.raises(ConfigError, match="enable_prefix_caching='yes' must be True or False"):
        make_llm(golden_checkpoint("llama_gqa"), enable_prefix_caching="yes")


class Poisoning:
    """An executor that fills blocks which nobody holds or could find with NaN after each step."""

    def __init__(self, part, scheduler):
        self.part, self.scheduler = part, scheduler
        self.num_poisoned = 0

    def __getattr__(self, name):
        return getattr(self.part, name)

    def execute(self, scheduled):
        result = self.part.execute(scheduled)
        blocks = self.scheduler._state.pool
        lost = [one for one in blocks.free_blocks() if blocks.name_of(one) is None]
        ids = np.full(blocks.num_blocks, len(self.part._state.pool), np.int32)
        ids[: len(lost)] = lost
        self.part._state = self.part._state._replace(pool=poison(self.part._state.pool, ids))
        self.num_poisoned += len(lost)
        return result


@functools.partial(jax.jit, donate_argnums=0)
def poison(pool, ids):
    return pool.at[ids].set(jnp.nan, mode="drop")


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
    policy = dataclasses.replace(
        policies[data.draw(st.sampled_from(sorted(policies)))],
        offload=data.draw(st.sampled_from([NoOffload(), WriteBack(), WriteThrough(), AheadOfTime(0.5)])),
    )
    num_host_blocks = data.draw(st.sampled_from([0, 10, 40]))
    llm.executor.settle_copies()
    engine = make_engine(
        llm,
        num_gpu_blocks=data.draw(st.integers(20, 40)),
        policy=policy,
        num_host_blocks=num_host_blocks,
        async_scheduling=data.draw(st.booleans()),
        enable_prefix_caching=True,
    )
    engine.loop._executor = poisoning = Poisoning(engine.loop._executor, engine.scheduler)
    outputs = run(engine, prompts, params)
    assert poisoning.num_poisoned
    for output, prompt, param in zip(outputs, prompts, params, strict=True):
        lone = run(make_engine(llm), [prompt], param)[0]
        assert output.token_ids == lone.token_ids
    engine.reset_prefix_cache()
    assert not llm.executor.swapper.pieces
