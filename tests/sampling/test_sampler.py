"""Device sampling against plain numpy."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import SamplingParams
from jaxllm.executor.sampler import argmax_in_two_passes, argmax_of_pairs, gumbel, least_kept, sample
from jaxllm.executor.slot_params import Sampling, SlotParams

VOCAB, SLOTS, MAX_LEN = 50, 6, 24
sample_jit = jax.jit(sample, static_argnums=5, static_argnames="is_lazy")


def run_sampler(
    params,
    logits,
    history=None,
    prompt_length=4,
    lengths=None,
    seeds=None,
    eos=frozenset(),
    sampling=Sampling.GREEDY,
    is_lazy=False,
):
    """Sample one token per entry of `params`, row i in slot i, with a program that may do more `sampling`."""
    host = SlotParams.host_zeros(SLOTS)
    for slot, param in enumerate(params):
        seed = slot if seeds is None else seeds[slot]
        host.host_set(
            slot, param, seed=seed, prompt_length=prompt_length, eos_token_ids=eos, end_token_ids=eos
        )
    slots = np.full(SLOTS, SLOTS, np.int32)
    slots[: len(params)] = np.arange(len(params))
    padded = np.zeros((SLOTS, VOCAB), np.float32)
    padded[: len(params)] = logits
    tokens = np.zeros((SLOTS + 1, MAX_LEN), np.int32)
    if history is not None:
        tokens[: len(params)] = history
    ends = np.full(SLOTS, prompt_length if lengths is None else lengths, np.int32)
    sampling = functools.reduce(operator.or_, map(Sampling.of, params), sampling)
    slot_params = SlotParams(*map(jnp.asarray, host))
    rows = sample_jit(jnp.asarray(padded), slot_params, slots, tokens, ends, sampling, is_lazy=is_lazy)
    return [np.asarray(x)[: len(params)] for x in jax.tree.leaves(rows)]


@pytest.fixture(scope="module")
def logits():
    return np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32) * 3


def test_greedy_takes_the_most_likely_token(logits):
    tokens, *_ = run_sampler([SamplingParams(temperature=0)] * 4, logits)
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def test_logprobs_are_those_of_the_raw_logits(logits):
    params = [SamplingParams(temperature=0, logprobs=5, logit_bias={3: 50.0})] * 4
    tokens, logprob, rank, top_ids, top_logprobs = run_sampler(params, logits)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert tokens.tolist() == [3] * 4
    np.testing.assert_allclose(logprob, expected[:, 3], atol=1e-5)
    assert rank.tolist() == ((expected > expected[:, 3:4]).sum(axis=1) + 1).tolist()
    order = np.argsort(-expected, axis=1)[:, :20]
    assert top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(top_logprobs, np.take_along_axis(expected, order, 1), atol=1e-5)


def test_penalties_count_output_tokens_and_repetition_counts_the_prompt(logits):
    history = np.zeros((1, MAX_LEN), np.int32)
    prompt, output = [1, 2, 2, 3], [7, 7, 9]
    history[0, :7] = prompt + output
    history[0, 7:] = 11  # stale tokens of a former request
    params = SamplingParams(
        temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logprobs=0
    )
    for forced in range(VOCAB):
        bias = np.zeros(VOCAB, np.float32)
        bias[forced] = 4.0
        # Raising one token at a time makes its penalised score decide the winner.
        biased = logits[0] + bias
        want = biased.copy()
        for token in {*prompt, *output}:
            want[token] = want[token] / 1.5 if want[token] > 0 else want[token] * 1.5
        for token in set(output):
            want[token] -= 0.25 * output.count(token) + 0.5
        tokens, *_ = run_sampler([params], biased[None], history, lengths=7)
        assert tokens[0] == want.argmax()


def test_min_tokens_bans_every_end_until_then(logits):
    best = int(logits[0].argmax())
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=8, stop_token_ids=[best])
    second = int(np.argsort(-logits[0])[1])
    assert run_sampler([params], logits[:1], lengths=6)[0][0] == second
    assert run_sampler([params], logits[:1], lengths=7)[0][0] == best
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=8)
    assert run_sampler([params], logits[:1], lengths=6, eos=frozenset([best]))[0][0] == second


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 5, "top_p": 0.7},
        {"temperature": 0.5, "top_p": 0.8},
        {"temperature": 2.0},
    ],
)
def test_samples_follow_the_filtered_distribution(params, logits):
    row = logits[0]
    temperature = params.get("temperature", 1.0)
    probabilities = np.exp(row / temperature - (row / temperature).max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    keep = np.ones(VOCAB, bool)
    if "min_p" in params:
        keep &= probabilities >= params["min_p"] * probabilities.max()
    if "top_k" in params:
        keep[order[params["top_k"] :]] = False
    filtered = np.where(keep, probabilities, 0) / probabilities[keep].sum()
    if "top_p" in params:
        before = np.cumsum(filtered[order]) - filtered[order]
        keep[order[before >= params["top_p"]]] = False
    filtered = np.where(keep, probabilities, 0) / probabilities[keep].sum()
    draws = []
    for base in range(0, 1200, SLOTS):
        seeds = range(base, base + SLOTS)
        draws += run_sampler([SamplingParams(**params)] * SLOTS, np.tile(row, (SLOTS, 1)), seeds=seeds)[
            0
        ].tolist()
    counts = np.bincount(draws, minlength=VOCAB)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(keep))
    np.testing.assert_allclose(counts / len(draws), filtered, atol=0.06)


def test_a_sample_depends_on_seed_and_position_only(logits):
    hot = SamplingParams(temperature=1.5)
    seeds = [5, 2**63 + 1, 7, 5]
    same = np.tile(logits[0], (4, 1))
    together = run_sampler([hot] * 4, same, seeds=seeds)[0]
    assert together[0] == together[3]
    alone = [run_sampler([hot], logits[:1], seeds=[seed])[0][0] for seed in seeds]
    assert together.tolist() == alone
    by_position = [run_sampler([hot], logits[:1], seeds=[5], lengths=n)[0][0] for n in range(4, 24)]
    assert len(set(by_position)) > 3


def kept_tokens(logits, min_p=0.0, top_k=0, top_p=1.0):
    """What the filters keep of one row, by sorting: the oracle. Ties with the last token kept are kept."""
    logits = logits.astype(np.float64)
    kept = logits >= logits.max() + np.log(min_p) if min_p else np.ones(len(logits), bool)
    if 0 < top_k <= len(logits):
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        weights = np.where(kept, np.exp(logits - logits.max()), 0)
        order = np.argsort(-logits, kind="stable")
        reached = np.cumsum(weights[order]) >= top_p * weights.sum()
        kept &= logits >= logits[order[reached.argmax()]]
    return kept


def filtered(logits, min_p=0.0, top_k=0, top_p=1.0):
    """What the device keeps of rows that share their parameters."""
    num_rows = len(logits)
    least = jax.jit(lambda *args, **filters: least_kept(*args, **filters))(
        jnp.asarray(logits),
        min_p=jnp.full(num_rows, min_p, jnp.float32),
        top_k=jnp.full(num_rows, top_k, jnp.int32),
        top_p=jnp.full(num_rows, top_p, jnp.float32),
    )
    return logits >= np.asarray(least)[:, None]


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    """Whose code is run, on whatever device there is."""
    if request.param == "gpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("vocab_size", [7, 1000, 50272])
@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0])
def test_filters_are_exact(vocab_size, spread):
    """Up to the rounding of float32 sums: what is kept lies between what two close top_p keep."""
    rows = np.random.default_rng(1).normal(size=(4, vocab_size)).astype(np.float32) * spread
    rows[1] -= 1000
    rows[2, ::2] = -1e30  # as where tokens are banned
    rows[3] = np.round(rows[3])  # ties
    for filters in [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": vocab_size - 1},
        {"top_k": 2**31 - 1},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"min_p": 0.01, "top_k": 6, "top_p": 0.7},
    ]:
        for row, kept in zip(rows, filtered(rows, **filters), strict=True):
            least, most = (
                kept_tokens(row, **(filters | {"top_p": filters.get("top_p", 1.0) + error}))
                for error in (-4e-6, 4e-6)
            )
            if "top_p" not in filters:
                least = most
            assert (least <= kept).all(), filters
            assert (kept <= most).all(), filters


@pytest.mark.usefixtures("platform")
def test_what_ties_with_the_last_token_kept_is_kept():
    row = np.log(np.asarray([[0.25, 0.5, 0.125, 0.125, 1e-9]], np.float32))
    assert filtered(row, top_k=3)[0].tolist() == [True, True, True, True, False]
    assert filtered(row, top_p=0.5)[0].tolist() == [False, True, False, False, False]
    assert filtered(row, top_p=0.6)[0].tolist() == [True, True, False, False, False]
    assert filtered(row, top_p=0.8)[0].tolist() == [True, True, True, True, False]
    assert filtered(row, top_k=2, top_p=0.7)[0].tolist() == [True, True, False, False, False]  # of 0.75
    signed = np.asarray([[0.0, -0.0, -1.0]], np.float32)
    assert filtered(signed, top_k=1)[0].tolist() == [True, True, False]
    assert filtered(np.zeros((1, 4), np.float32), top_k=1, top_p=0.1)[0].all()
    lonely = np.asarray([[-np.inf, 2.0, -np.inf]], np.float32)
    assert filtered(lonely, top_k=2, top_p=0.5)[0].tolist() == [False, True, False]


@pytest.mark.usefixtures("platform")
def test_the_first_of_the_largest_wins():
    logits = np.asarray([[1, 3, 3, -np.inf], [-np.inf, -1e30, -np.inf, -1e30], [0, -0.0, -1, -1]], np.float32)
    slots, lengths = np.full(3, SLOTS, np.int32), np.ones(3, np.int32)
    params = SlotParams(*map(jnp.asarray, SlotParams.host_zeros(SLOTS)))
    history = np.zeros((SLOTS + 1, MAX_LEN), np.int32)
    greedy = jax.jit(lambda *args: sample(*args, Sampling.GREEDY))
    assert greedy(logits, params, slots, history, lengths).tokens.tolist() == [1, 1, 0]


def test_noise_is_that_of_jax():
    seeds = np.random.default_rng(0).integers(0, 2**32, (3, 2)).astype(np.uint32)
    positions = np.asarray([0, 7, 100_000], np.int32)

    def expected(seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (1001,), jnp.float32)

    found = np.asarray(jax.jit(gumbel, static_argnums=2)(seeds, positions, 1001))
    np.testing.assert_array_equal(found, jax.jit(jax.vmap(expected))(seeds, positions))


requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 7]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    min_tokens=st.sampled_from([0, 0, 5]),
    max_tokens=st.just(8),
    logit_bias=st.sampled_from([None, None, {3: 2.5, 7: -100.0}]),
    logprobs=st.sampled_from([None, 3]),
)


@settings(max_examples=60, deadline=None)
@given(params=st.lists(requests, min_size=SLOTS, max_size=SLOTS), number=st.integers(0, 2**16))
def test_a_token_is_the_same_whichever_program_computes_it(params, number):
    """Bit by bit: also the score of a token that two programs scale and perturb."""
    rng = np.random.default_rng(number)
    logits = rng.normal(size=(SLOTS, VOCAB)).astype(np.float32) * 2
    history = rng.integers(0, VOCAB, (SLOTS, MAX_LEN))
    lengths = rng.integers(4, MAX_LEN, SLOTS)
    eos = frozenset([int(logits[0].argmax())])
    together = run_sampler(params, logits, history, lengths=lengths, seeds=range(SLOTS), eos=eos)
    options = {"lengths": lengths, "seeds": range(SLOTS), "eos": eos, "sampling": Sampling.COMPLETE}
    for is_lazy in (False, True):
        most = run_sampler(params, logits, history, is_lazy=is_lazy, **options)
        assert together[0].tolist() == most[0].tolist()
        for found, expected in zip(together[1:], most[1:], strict=False):
            np.testing.assert_array_equal(found, expected)
    for row, one in enumerate(params):
        alone = [SamplingParams(temperature=0)] * SLOTS
        alone[row] = one
        found = run_sampler(alone, logits, history, lengths=lengths, seeds=range(SLOTS), eos=eos)
        assert found[0][row] == together[0][row]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0, "logit_bias": {1: 2.0}, "repetition_penalty": 1.5},
        {"temperature": 0, "logprobs": 3},
    ],
    ids=["greedy", "random", "filtered", "adjusted", "logprobs"],
)
def test_a_row_that_is_not_finite_has_no_token(params, logits):
    """Others have theirs; that some tokens are excluded is no fault."""
    bad = np.vstack([logits, logits[:1]])
    bad[0, 7], bad[1, 7], bad[2], bad[3, :40] = np.nan, np.inf, -np.inf, -np.inf
    tokens, *_ = run_sampler([SamplingParams(**params)] * 5, bad, seeds=[1] * 5)
    alone, *_ = run_sampler([SamplingParams(**params)] * 5, np.tile(logits[:1], (5, 1)), seeds=[1] * 5)
    assert tokens[:3].tolist() == [-1, -1, -1]
    assert tokens[3] >= 40
    assert tokens[4] == alone[4]


@pytest.mark.parametrize("find", [argmax_in_two_passes, argmax_of_pairs])
@pytest.mark.parametrize("size", [2, 50, 5000])
def test_the_first_of_the_largest_is_found(find, size):
    rng = np.random.default_rng(size)
    scores = rng.integers(-3, 3, size=(8, size)).astype(np.float32)
    scores[1, : size // 2] = -np.inf
    expected = scores.argmax(axis=1)
    scores[2], scores[3, size // 3], scores[4, size // 2], scores[5, 0] = -np.inf, np.nan, np.inf, np.nan
    scores[6, [0, -1]] = np.nan, np.inf
    expected[2:7] = -1
    assert find(jnp.asarray(scores)).tolist() == expected.tolist()
