"""Device sampling against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import SamplingParams
from jaxllm.executor.sampler import SlotParams, sample

VOCAB, SLOTS, MAX_LEN = 50, 6, 24
sample_jit = jax.jit(sample)


def run_sampler(params, logits, history=None, prompt_length=4, lengths=None, seeds=None, eos=frozenset()):
    """Sample one token per entry of `params`, row i in slot i."""
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
    rows = sample_jit(jnp.asarray(padded), SlotParams(*map(jnp.asarray, host)), slots, tokens, ends)
    return [np.asarray(x)[: len(params)] for x in rows]


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
