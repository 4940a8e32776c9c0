"""Conversations that are cut at their front keep the KV and the positions of what is left."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, make_llm, restless, run
from scheduler_helpers import LinearCosts, describe, lose, make_request, make_scheduler, take
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import RequestError, RequestTooLargeError, SamplingParamsError
from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.layers import Attend, whole
from jaxllm.models.llama import LlamaConfig
from jaxllm.models.registry import Params, bind
from jaxllm.pallas_kernels.heads import RopeTable, rotated_heads
from jaxllm.sched.policies import CostOverIdleTime, Decision, NoOffload, PreemptionAction, WriteBack
from jaxllm.sched.presets import make_preset
from jaxllm.types import CopyProgress

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
LENGTH = 192


# Schedulers


def cut_request(index, num_tokens, num_dropped, **changes):
    """A conversation of tokens 0, 1, ... of which the first are gone."""
    tokens = range(num_tokens)
    arguments = {"prompt_token_ids": tokens[num_dropped:], "dropped_token_ids": tokens[:num_dropped]}
    return make_request(index, num_tokens - num_dropped, 2, **(arguments | changes))


def play(scheduler, request):
    """Run a request alone; returns how many tokens it found."""
    scheduler.add(request)
    while not request.is_finished:
        take(scheduler, scheduler.schedule(0.0))
        scheduler.check()
    return request.num_cached_tokens


def caching(**changes):
    return make_scheduler(make_preset("vllm_v1"), enable_prefix_caching=True, **changes)


def test_only_cut_conversations_find_what_one_computed():
    scheduler = caching()
    found = [
        play(scheduler, cut_request(0, 23, 8)),
        play(scheduler, make_request(1, 23, 2)),  # computes all of it, and its blocks are anybody's
        play(scheduler, cut_request(2, 23, 8)),
        play(scheduler, cut_request(3, 26, 16)),
        play(scheduler, make_request(4, 23, 2)),
    ]
    assert found == [0, 0, 12, 4, 20]


@pytest.mark.parametrize(("num_dropped", "num_found"), [(4, 12), (8, 12), (12, 8), (20, 0)])
def test_other_cuts_find_what_one_computed(num_dropped, num_found):
    policy = dataclasses.replace(make_preset("vllm_v1"), retention=CostOverIdleTime(LinearCosts()))
    scheduler = make_scheduler(policy, enable_prefix_caching=True)  # looks past a missing block
    play(scheduler, cut_request(0, 22, 8))
    assert play(scheduler, cut_request(1, 22, num_dropped)) == num_found


def test_tokens_that_are_gone_and_salts_tell_conversations_apart():
    scheduler = caching()
    play(scheduler, cut_request(0, 22, 8, cache_salt="a"))
    others = [
        cut_request(1, 22, 8),
        cut_request(2, 22, 8, cache_salt="b"),
        cut_request(3, 22, 8, cache_salt="a", dropped_token_ids=[9] * 8),
        cut_request(4, 22, 8, cache_salt="a"),
    ]
    assert [play(scheduler, one) for one in others] == [0, 0, 0, 12]


def test_blocks_that_are_found_keep_their_names():
    """An uncut conversation finds on the device what a cut one has copied there from the host."""
    policy = dataclasses.replace(make_preset("vllm_v1"), offload=WriteBack())
    scheduler = make_scheduler(policy, num_gpu_blocks=8, num_host_blocks=40, enable_prefix_caching=True)
    play(scheduler, make_request(0, 23, 2))
    for index in (1, 2):
        play(scheduler, make_request(index, 29, 2, prompt_token_ids=range(50 * index, 50 * index + 29)))
    request = cut_request(3, 26, 8)
    assert play(scheduler, request) == 12
    assert request.num_host_cached_tokens == 12
    uncut = make_request(4, 26, 2)
    assert play(scheduler, uncut) == 20
    assert uncut.num_host_cached_tokens == 8  # what was cut there
    state = scheduler._state
    held = [name for name in state.pool._names if name is not None]
    assert len(held) == len(set(held))


def test_a_dropped_request_names_what_it_computes_anew():
    scheduler = caching()
    play(scheduler, make_request(0, 23, 2))
    request = cut_request(1, 26, 8)
    scheduler.add(request)
    take(scheduler, scheduler.schedule(0.0))
    assert [own == uncut for own, uncut in zip(request.block_names, request.uncut_names, strict=True)] == [
        *[True] * 3,
        False,
    ]
    state = scheduler._state
    state.leave(request)
    state.release(request)
    state.queue(request)
    assert not set(request.block_names) & set(request.uncut_names)
    scheduler.check()


def test_reads_ahead_look_for_either_name():
    uncut, cut = make_request(0, 26), cut_request(1, 26, 8)
    names = caching()._state.lookups.learn_names(uncut, 26)
    state = caching()._state
    own = state.lookups.learn_names(cut, 18)
    assert cut.uncut_names == names[2:]
    assert not set(own) & set(names)
    policy = dataclasses.replace(make_preset("vllm_v1"), offload=NoOffload())
    files = {*names[2:4], own[3]}
    scheduler = make_scheduler(
        policy, files=files, num_gpu_blocks=8, num_host_blocks=8, enable_prefix_caching=True
    )
    request = cut_request(2, 26, 8)
    scheduler.add(request)
    assert scheduler.schedule(0.0).is_empty
    (read,) = scheduler.take_reads()
    assert read.names == (names[2], names[3])  # the third is nowhere
    output = scheduler.schedule(0.0, CopyProgress(read=[(read.handle, [True, True])]))
    assert describe(output) == "| r2[8:18]! >r2"
    take(scheduler, output)


# Engines


SETTINGS = {"enable_prefix_caching": None, "num_host_blocks": 40, "num_scheduler_steps": 4}


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint("llama_gqa"), attention_implementation="xla", **SETTINGS)


@pytest.fixture(scope="module")
def native():
    path = golden_checkpoint("llama_gqa")
    return make_llm(path, attention_implementation="native", block_size=16, **SETTINGS)


@pytest.fixture(params=["llm", "native"])
def each(request):
    return request.getfixturevalue(request.param)


def tokens_of(seed, count, vocab_size=128):
    return np.random.default_rng(seed).integers(3, vocab_size, count).tolist()


class CutAttention(Attend):
    """Dense attention: each token sees those from a place of its own on up to itself."""

    def __init__(self, config: LlamaConfig, seen_from: jax.Array) -> None:
        """`seen_from` [T] int32 are the places."""
        self._config, self._seen_from = config, seen_from

    def __call__(
        self,
        layer: int,
        qkv: jax.Array,
        rope: RopeTable | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """See `jaxllm.models.layers.Attend`; of models without windows and soft caps."""
        assert window is None
        assert soft_cap is None
        del layer
        qkv = whole(qkv, dtype)
        length, kv_heads, size = len(qkv), self._config.num_kv_heads, self._config.head_dim
        q, k, v = rotated_heads(qkv, rope, kv_heads, size)
        scores = jnp.einsum("qhgd,khd->hgqk", q.reshape(length, kv_heads, -1, size) * scale, k)
        is_seen = jnp.tri(length, dtype=bool) & (jnp.arange(length) >= self._seen_from[:, None])
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -1e30), axis=-1)
        return jnp.einsum("hgqk,khd->qhgd", weights, v).reshape(length, -1, size)


@functools.partial(jax.jit, static_argnums=0)
def logprobs_of(config: LlamaConfig, params: Params, tokens: jax.Array, seen_from: jax.Array) -> jax.Array:
    """Log-probabilities [T, vocab_size] of what follows each of `tokens` [T]; see `CutAttention`."""
    model = bind(config, params)
    hidden = model(tokens, jnp.arange(len(tokens)), CutAttention(config, seen_from))
    return jax.nn.log_softmax(model.logits(hidden))


class Reference:
    """A dense model in float32 of which each token sees those from a place of its own on."""

    def __init__(self, name):
        folder = golden_checkpoint(name)
        self.config = config_from_dict(read_hf_config(folder)).with_max_model_len(112)
        self.params = load_params(folder, self.config, "float32")

    def follow(self, tokens, seen_from, count):
        """The most likely tokens and their log-probabilities; they see as much as the last of `tokens`."""
        tokens, logprobs = list(tokens), []
        seen_from = [*seen_from, *seen_from[-1:] * (LENGTH - len(seen_from))]
        for _ in range(count):
            padded = jnp.array(tokens + [0] * (LENGTH - len(tokens)), jnp.int32)
            row = logprobs_of(self.config, self.params, padded, jnp.array(seen_from, jnp.int32))
            tokens.append(int(row[len(tokens) - 1].argmax()))
            logprobs.append(float(row[len(tokens) - 2].max()))
        return tokens[-count:], logprobs


@pytest.fixture(scope="module")
def reference():
    return Reference("llama_gqa")


def cut(tokens, num_dropped):
    return {"prompt_token_ids": tokens, "num_dropped_tokens": num_dropped}


def ask(llm, prompt, params=GREEDY):
    return llm.generate([prompt], params, use_tqdm=False)[0]


def scores_of(output):
    return [scored[token].logprob for scored, token in zip(output.logprobs, output.token_ids, strict=True)]


def assert_follows(output, expected):
    token_ids, logprobs = expected
    assert output.token_ids == token_ids
    np.testing.assert_allclose(scores_of(output), logprobs, atol=2e-4)


def converse(llm, reference):
    """Four turns, the last three cut more and more, until there are more tokens than the model may see."""
    llm.reset_prefix_cache()
    history = tokens_of(0, 60)
    output = ask(llm, history)
    assert_follows(output, reference.follow(history, [0] * 60, 12))
    seen_from: list[int] = []
    num_computed, before = 71, 0
    for turn, (num_dropped, num_new) in enumerate([(32, 12), (48, 24), (64, 28)], 1):
        history = [*history, *output.token_ids, *tokens_of(turn, num_new)]
        num_found = num_computed // llm.executor.block_size * llm.executor.block_size
        seen_from += [before] * (num_found - len(seen_from))
        seen_from += [num_dropped] * (len(history) - num_found)
        output = ask(llm, cut(history, num_dropped))
        assert output.num_cached_tokens == num_found - num_dropped
        assert (output.num_dropped_tokens, output.prompt_token_ids) == (num_dropped, history)
        assert_follows(output, reference.follow(history, seen_from, 12))
        seen_from = seen_from[:num_found]
        num_computed, before = len(history) + 11, num_dropped
    assert len(history) > llm.max_model_len


def test_a_cut_conversation_keeps_its_kv(each, reference):
    converse(each, reference)


@pytest.mark.parametrize("name", ["llama_linear", "llama_llama3", "llama_dynamic"])
def test_it_does_with_every_type_of_rotary_positions(name):
    converse(make_llm(golden_checkpoint(name), enable_prefix_caching=None), Reference(name))


def test_uncut_conversations_are_as_if_there_were_no_others(each):
    llm, history = each, tokens_of(7, 90)
    llm.reset_prefix_cache()
    alone = ask(llm, history)
    llm.reset_prefix_cache()
    ask(llm, history[:49])
    ask(llm, cut(history, 32))
    found = ask(llm, history)
    assert found.num_cached_tokens == 48
    assert found.token_ids == alone.token_ids
    size = llm.executor.block_size
    assert ask(llm, cut(history, 48)).num_cached_tokens == 41 // size * size


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_nothing_cached_it_is_the_shortened_prompt(each, temperature):
    llm, history = each, tokens_of(3, 150)
    sampled = {"temperature": temperature, "seed": 5, "repetition_penalty": 1.2}
    params = dataclasses.replace(GREEDY, **sampled)
    llm.reset_prefix_cache()
    whole = ask(llm, cut(history, 64), params)
    llm.reset_prefix_cache()
    short = ask(llm, history[64:], params)
    assert whole.num_cached_tokens == short.num_cached_tokens == 0
    assert_follows(whole, (short.token_ids, scores_of(short)))


@pytest.mark.parametrize("lost", [(8,), (6, 10, 11)])
def test_blocks_that_are_missing_are_computed_over_what_is_left(llm, reference, lost):
    policy = dataclasses.replace(make_preset("vllm_v1"), retention=CostOverIdleTime(LinearCosts()))
    engine = make_engine(llm, policy=policy, enable_prefix_caching=True)
    history = tokens_of(4, 71)
    run(engine, [history], GREEDY)
    lose(engine.scheduler, make_request(0, 71, prompt_token_ids=history), *lost)
    output = run(engine, [cut(history, 24)], GREEDY)[0]
    assert output.num_cached_tokens == 68 - 24 - 4 * len(lost)
    seen_from = [0] * 68 + [24] * 3
    for number in lost:
        seen_from[4 * number : 4 * number + 4] = [24] * 4
    assert_follows(output, reference.follow(history, seen_from, 12))


class Always:
    """Swaps every victim that has computed anything, or drops it."""

    def __init__(self, action):
        self.action = action

    def choose(self, victim, state, now):
        return Decision(self.action if victim.num_computed_tokens else PreemptionAction.RECOMPUTE)


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("action", list(PreemptionAction))
def test_preempted_requests_go_on_where_they_were(each, action, caches):
    llm = each
    histories = [tokens_of(20 + index, 80 + 9 * index) for index in range(4)]
    prompts = [cut(history, 16 * (index + 1)) for index, history in enumerate(histories)]
    outputs = []
    for policy in (None, restless(action=Always(action))):
        llm.executor.settle_copies()
        engine = make_engine(llm, policy=policy, num_host_blocks=40, enable_prefix_caching=caches)
        if caches:
            for history in histories:
                run(engine, [history[:75]], GREEDY)
        outputs.append(run(engine, prompts, GREEDY))
        engine.reset_prefix_cache()
    calm, disturbed = outputs
    num_swaps = sum(output.metrics.num_swaps for output in disturbed)
    assert sum(output.metrics.num_preemptions for output in disturbed) > 2
    assert (num_swaps > 2) == (action is PreemptionAction.SWAP)
    assert [one.token_ids for one in calm] == [one.token_ids for one in disturbed]
    found = [one.num_cached_tokens for one in calm]
    assert found == [one.num_cached_tokens for one in disturbed]
    assert any(found) == caches


def test_no_program_is_added(llm):
    names = set(llm.executor.programs)
    llm.reset_prefix_cache()
    ask(llm, tokens_of(1, 30))
    before = set(llm.executor.programs)
    ask(llm, cut(tokens_of(1, 30), 8))
    assert set(llm.executor.programs) == before >= names


@pytest.mark.parametrize(
    ("num_dropped", "error", "message"),
    [
        (6, RequestError, "num_dropped_tokens=6 must be 0 or a multiple of .* 4: take 4 or 8"),
        (-4, RequestError, "num_dropped_tokens=-4 .*: take 0"),
        (40, RequestError, "num_dropped_tokens=40 leaves nothing of a prompt of 40 tokens"),
        (1.0, RequestError, "num_dropped_tokens=1.0 must be an integer"),
        (True, RequestError, "num_dropped_tokens=True must be an integer"),
    ],
)
def test_wrong_cuts_are_refused(llm, num_dropped, error, message):
    with pytest.raises(error, match=message):
        ask(llm, cut(tokens_of(0, 40), num_dropped))


def test_cuts_that_cannot_be_are_refused(llm):
    with pytest.raises(RequestError, match=r"num_dropped_tokens=262148 is more than 262144, .* float32"):
        ask(llm, cut([5] * (2**18 + 8), 2**18 + 4))
    with pytest.raises(RequestTooLargeError, match="has 112 prompt tokens"):
        ask(llm, cut([5] * 120, 8))
    with pytest.raises(SamplingParamsError, match=r"prompt_logprobs=1 .*num_dropped_tokens=8"):
        ask(llm, cut([5] * 20, 8), SamplingParams(prompt_logprobs=1))
    with pytest.raises(RequestError, match="'num_dropped_tokens'"):
        ask(llm, {"prompt_ids": [1], "num_dropped_tokens": 8})
    assert ask(llm, cut([5] * 20, 0)).num_dropped_tokens == 0
    assert ask(llm, cut([5] * 20, np.int64(8))).to_dict()["num_dropped_tokens"] == 8


def test_learned_positions_are_not_cut():
    llm = make_llm(golden_checkpoint("opt_pre_norm"), warm_up="background")
    with pytest.raises(RequestError, match=r"num_dropped_tokens=8 needs rotary .*OPT.*shortened prompt"):
        ask(llm, cut([5] * 20, 8))
    assert ask(llm, cut([5] * 20, 0)).finished
