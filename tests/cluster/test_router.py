import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_simulation import simulate_routing

from jaxllm.errors import ConfigError
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.research.workloads import Poisson, make_conversations
from jaxllm.routing.loads import Loads
from jaxllm.routing.prefix_index import PrefixIndex
from jaxllm.routing.prompt_keys import (
    keys_of_request,
    keys_of_text,
    keys_of_token_ids,
    segment_tokens,
)
from jaxllm.routing.router import PrefixAndLoad, PrefixOnly, RoundRobin, Router, TwoChoices
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import vllm_v1

EMPTY = keys_of_text("")


def text(num_tokens, seed=0):
    """Four letters a token."""
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefgh") for _ in range(4 * num_tokens))


def common(first, second):
    """How many tokens two prompts are known to have in common."""
    shared = [one == other for one, other in zip(first.keys, second.keys, strict=False)]
    assert shared == sorted(shared, reverse=True)  # once apart, apart
    return first.tokens_at(sum(shared) - 1) if any(shared) else 0


# Keys


def test_keys_end_after_each_block_then_after_each_eighth():
    prompt = keys_of_text(text(600))
    ends = [prompt.tokens_at(place) for place in range(len(prompt.keys))]
    assert ends[:10] == [16, 32, 48, 64, 80, 96, 112, 128, 144, 160]
    assert ends[-4:] == [432, 480, 528, 592]
    assert [segment_tokens(place) for place in (0, 1, len(ends) - 1)] == [16, 16, 64]
    assert prompt.num_tokens == 600


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000), st.booleans())
def test_what_begins_alike_is_known_to_a_ninth(shared, first, second, is_ids):
    of = (lambda s: keys_of_token_ids([ord(c) for c in s[::4]])) if is_ids else keys_of_text
    front = text(shared, 1)
    one, other = of(front + "x" * 4 * first), of(front + "y" * 4 * second)
    found = common(one, other)
    assert found <= shared
    if first and second:
        assert found + max(16, found // 8) > shared


def test_keys_depend_on_what_changes_the_first_tokens():
    messages = [{"role": "user", "content": text(40)}]
    bodies = [
        {"messages": messages},
        {"messages": messages, "cache_salt": "a"},
        {"messages": messages, "tools": [{"type": "function"}]},
        {"messages": [{"role": "system", "content": text(40)}]},
        {"prompt": text(40)},
        {"prompt": list(range(40))},
        {"prompt": text(40), "model": "other"},
    ]
    firsts = [keys_of_request(body).keys[0] for body in bodies]
    assert len(set(firsts)) == len(bodies)
    assert keys_of_request({"messages": messages, "temperature": 0.5, "max_tokens": 3}).keys[0] == firsts[0]


def test_a_next_turn_begins_with_the_one_before():
    turns = [{"role": "user", "content": text(100)}]
    first = keys_of_request({"messages": turns})
    turns = [*turns, {"role": "assistant", "content": text(50, 1)}, {"role": "user", "content": text(9, 2)}]
    assert common(first, keys_of_request({"messages": turns})) == 96


def test_of_several_prompts_the_first_decides_and_all_count():
    one = keys_of_request({"prompt": [text(20), text(30, 1)]})
    assert one.keys == keys_of_request({"prompt": text(20)}).keys
    assert one.num_tokens == 50
    assert keys_of_request({"prompt": [[1] * 20, [2] * 30]}).num_tokens == 50


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": []},
        {"prompt": {"a": 1}},
        {"prompt": [["x"]]},
        {"prompt": [2**40]},
        {"messages": 3},
        {"messages": [3, {"role": {}}]},
        {"prompt": "\ud800"},
        {"prompt": [1, "a"]},
    ],
)
def test_malformed_requests_have_no_keys(body):
    assert keys_of_request(body).keys == ()


# What the router knows


def test_the_longest_beginnings_come_first():
    index, rng = PrefixIndex(), random.Random(0)
    for name in "abc":
        index.add(name, 10_000)
    whole = keys_of_text(text(200))
    index.note("a", keys_of_text(text(200)[: 4 * 64] + "z" * 400))
    index.note("b", keys_of_text(text(200)[: 4 * 128]))
    assert index.holders(whole, 3, rng) == [("b", 128), ("a", 64)]
    assert index.holders(whole, 1, rng) == [("b", 128)]
    assert index.holders(keys_of_text(text(200, 5)), 3, rng) == []
    index.remove("b")
    assert index.holders(whole, 3, rng) == [("a", 64)]


def test_of_many_that_hold_the_same_some_are_taken_at_random():
    index, rng = PrefixIndex(), random.Random(0)
    prompt = keys_of_text(text(64))
    for place in range(50):
        index.add(f"{place}", 1000)
        index.note(f"{place}", prompt)
    seen = set()
    for _ in range(200):
        found = index.holders(prompt, 3, rng)
        assert len({replica for replica, _ in found}) == 3
        seen |= {replica for replica, _ in found}
    assert len(seen) == 50


def test_the_least_recently_used_is_forgotten_first_and_of_it_the_end():
    index, rng = PrefixIndex(), random.Random(0)
    index.add("a", 160)
    old, new = keys_of_text(text(96)), keys_of_text(text(96, 1))
    index.note("a", old)
    index.note("a", new)
    assert index.share_filled("a") == 1
    assert index.holders(old, 1, rng) == [("a", 64)]
    assert index.holders(new, 1, rng) == [("a", 96)]
    index.note("a", old)
    assert index.holders(old, 1, rng) == [("a", 96)]
    assert index.holders(new, 1, rng) == [("a", 64)]
    index.add("a", 16)  # it says that its cache is smaller
    assert index.holders(old, 1, rng) == [("a", 16)]
    assert index.holders(new, 1, rng) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 300)), max_size=60))
def test_the_index_stays_within_its_bounds(steps):
    index, rng = PrefixIndex(), random.Random(0)
    there = set()
    for replica, seed, length in steps:
        name, prompt = f"{replica}", keys_of_text(text(length, seed))
        if length == 0 and name in there:
            index.remove(name)
            there.remove(name)
            continue
        if name not in there:
            index.add(name, 400)
            there.add(name)
        index.note(name, prompt)
        assert index.share_filled(name) <= 1
        found = dict(index.holders(prompt, 9, rng))
        assert found.keys() <= there
        if prompt.keys and prompt.num_tokens <= 400:
            assert found[name] == prompt.tokens_at(len(prompt.keys) - 1)
    for name in there:
        index.remove(name)
    assert not index._holders


def test_loads_count_what_was_sent_until_a_report_speaks_for_it():
    loads = Loads()
    loads.add("a")
    loads.sent("a", "1", 100, now=0.0)
    loads.sent("a", "2", 10, now=1.5)
    assert loads.load("a") == 110
    loads.report("a", 70, now=2.0)  # made when the first was there for sure, and the second perhaps not
    assert loads.load("a") == 80
    loads.ended("1")
    assert loads.load("a") == 80
    loads.ended("2")
    assert loads.load("a") == 70
    loads.report("a", 0, now=3.0)
    assert loads.load("a") == 0
    loads.sent("a", "3", 5, now=4.0)
    loads.remove("a")
    loads.ended("3")
    assert "a" not in loads


# Choices


def make_router(policy=None, replicas="abcd"):
    router = Router(policy, output_weight=0.0)
    router.set_replicas(replicas)
    return router


def test_a_conversation_stays_where_its_blocks_are():
    router = make_router()
    spoken = text(100)
    first = router.route("0", keys_of_text(spoken), now=0.0)
    for turn in range(1, 8):
        router.ended(f"{turn - 1}")
        spoken += text(40, turn)
        choice = router.route(f"{turn}", keys_of_text(spoken), now=float(turn))
        assert choice.replica == first.replica
        assert choice.num_cached_tokens >= (60 + 40 * turn) * 8 // 9 - 16


def test_it_leaves_when_waiting_costs_more_than_computing():
    router = make_router()
    spoken = text(1000)
    home = router.route("first", keys_of_text(spoken), now=0.0).replica
    router.ended("first")
    router.report(home, now=1.0, queued_tokens=900)
    assert router.route("second", keys_of_text(spoken), now=1.0).replica == home
    router.ended("second")
    router.report(home, now=3.0, queued_tokens=1100)
    assert router.route("third", keys_of_text(spoken), now=3.0).replica != home


def test_texts_of_few_bytes_a_token_fill_caches_sooner():
    prompts = [keys_of_text(text(100, place)) for place in range(12)]

    def num_known(bytes_per_token):
        router = make_router(replicas="a")
        router.report("a", now=0.0, queued_tokens=0, cache_tokens=1600, bytes_per_token=bytes_per_token)
        for place, prompt in enumerate(prompts):
            router.route(f"{place}", prompt, now=0.0)
        return sum(
            router.route(f"again {place}", prompts[place], now=0.0).num_cached_tokens > 90
            for place in range(11, -1, -1)
        )

    assert num_known(4.0) == 12
    assert num_known(2.0) == 8  # 800 tokens of four bytes


def test_queues_are_as_long_as_their_prompts_are_in_bytes():
    router = make_router()
    spoken = text(1000)
    home = router.route("first", keys_of_text(spoken), now=0.0).replica
    router.ended("first")
    router.report(home, now=3.0, queued_tokens=1100, bytes_per_token=2.0)  # 550 of four bytes
    assert router.route("second", keys_of_text(spoken), now=3.0).replica == home


@pytest.mark.parametrize(
    ("bytes_per_token", "num_tokens"), [(None, 1600), (0.001, 200), (2.0, 800), (1e9, 6400)]
)
def test_caches_have_room_for_what_replicas_measure_within_reason(bytes_per_token, num_tokens):
    router = make_router(replicas="ab")
    router.report("a", now=0.0, queued_tokens=0, cache_tokens=1600, bytes_per_token=bytes_per_token)
    router.report("b", now=0.0, queued_tokens=0, cache_tokens=1600)  # which knows no better than the other
    assert router._prefixes._room == {"a": num_tokens, "b": num_tokens}
    router.report("a", now=0.0, queued_tokens=0, cache_tokens=1600)
    assert router._prefixes._room["a"] == num_tokens
    router.set_replicas("c")
    router.report("c", now=0.0, queued_tokens=0, cache_tokens=1600)
    assert router._prefixes._room == {"c": 1600}


def test_what_nobody_knows_goes_to_the_less_loaded_of_two():
    router = make_router()
    for place, name in enumerate("abcd"):
        router.report(name, now=0.0, queued_tokens=10_000 * place)
    chosen = [router.route(f"{n}", keys_of_text(text(2, n)), now=0.0).replica for n in range(200)]
    assert "d" not in chosen  # every pair has a better one
    assert set(chosen) == {"a", "b", "c"}


def test_new_conversations_spread_over_idle_replicas():
    router = make_router()
    for name in "abcd":
        router.report(name, now=0.0, queued_tokens=0, cache_tokens=10_000)
    system = text(64)
    chosen = []
    for place in range(400):
        chosen.append(router.route(f"{place}", keys_of_text(system + text(300, place)), now=0.0).replica)
        router.ended(f"{place}")
    assert max(map(chosen.count, "abcd")) < 1.3 * 100


def test_replicas_that_failed_a_request_are_avoided_while_there_are_others():
    router = make_router()
    prompt = keys_of_text(text(100))
    home = router.route("1", prompt, now=0.0).replica
    router.ended("1")
    assert router.route("2", prompt, now=0.0, avoid=[home]).replica != home
    assert router.route("3", prompt, now=0.0, avoid="abcd").replica in "abcd"


def test_replicas_come_and_go():
    router = make_router(replicas="ab")
    prompt = keys_of_text(text(100))
    home = router.route("1", prompt, now=0.0).replica
    router.set_replicas("abc".replace(home, ""))
    router.ended("1")
    router.report(home, now=1.0, queued_tokens=5)
    assert router.route("2", prompt, now=0.0) != home
    router.set_replicas([])
    with pytest.raises(ConfigError, match="no replica"):
        router.route("3", prompt, now=0.0)


@pytest.mark.parametrize("policy", [PrefixAndLoad(), TwoChoices(), PrefixOnly(), RoundRobin()])
def test_every_policy_takes_one_replica_and_prompts_without_keys(policy):
    router = make_router(policy, replicas="a")
    assert router.route("1", EMPTY, now=0.0).replica == "a"
    router.set_replicas("ab")
    assert router.route("2", EMPTY, now=0.0).replica in "ab"


def test_round_robin_takes_turns_and_prefix_only_does_not_look_at_loads():
    turns = make_router(RoundRobin())
    assert "".join(turns.route(f"{n}", EMPTY, now=0.0).replica for n in range(6)) == "abcdab"
    sticky, prompt = make_router(PrefixOnly()), keys_of_text(text(32))
    assert len({sticky.route(f"{n}", prompt, now=0.0).replica for n in range(20)}) == 1


# Replicas simulated with the engine's scheduler


def simulate(policy, seed=0):
    costs = RooflineCostModel(model_shape("opt-13b"), device_spec("A100-80GB"), block_size=16)
    config = SchedulerConfig(
        num_gpu_blocks=2000,
        block_size=16,
        max_model_len=2049,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_host_blocks=0,
        enable_prefix_caching=True,
    )
    trace = make_conversations(200, common_len=32, max_len=2048, arrivals=Poisson(2.0), seed=seed)
    return trace, simulate_routing(trace, Router(policy, seed=seed), 4, config, vllm_v1(), costs)


def test_conversations_over_four_replicas_find_more_than_with_round_robin():
    trace, ours = simulate(PrefixAndLoad())
    _, others = simulate(RoundRobin())
    assert sum(ours.num_requests) == sum(others.num_requests) == len(trace)
    assert ours.num_prompt_tokens == int(trace.prompt_lens.sum())
    first, second = ours.summary(), others.summary()
    assert first["cached_tokens"] >= 1.5 * second["cached_tokens"]
    assert first["balance_of_work"] < 1.1
    assert first["first_token_seconds"] < second["first_token_seconds"]
    for result in (ours, others):
        computed = result.num_prompt_tokens - result.num_cached_tokens + int(trace.output_lens.sum())
        assert sum(result.work) == computed - len(trace)  # the first token of an answer comes with its prompt
        assert (result.first_token_seconds > 0).all()
        assert (result.latency_seconds >= result.first_token_seconds).all()
