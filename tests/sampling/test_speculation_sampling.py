"""What is sampled with drafts: draws of the target's distribution, and the tokens that come without.

The target is a chain: its layers add nothing, so that the next token depends on the last one alone, in a way
that numpy knows. A draw is turned into a number that is uniform from 0 to 1, whatever came before it, if and
only if it is one of the target's distribution (Rosenblatt, "Remarks on a multivariate transformation", 1952).
"""

import ml_dtypes  # noqa: F401 - numpy needs it for bfloat16
import numpy as np
import pytest
from checkpoint_helpers import stored, write
from engine_helpers import Knowing, Recording, make_llm
from scipy import special, stats
from tokenizer_helpers import write_tokenizer

from jaxllm import SamplingParams
from jaxllm.engine import speculation as of_engines
from jaxllm.engine.engine import Engine
from jaxllm.sched.policies.speculation import AsProposed
from jaxllm.sched.proposers.ngram import PromptLookup
from jaxllm.sched.speculation import Speculation
from jaxllm.types import MAX_DECODE_STEPS

pytestmark = pytest.mark.usefixtures("optimised")

VOCAB, HIDDEN, SLOTS, MOST = 384, 64, 64, 3
PROMPT, LENGTH = [5, 9, 9, 40], 40
NUM_REQUESTS = {"temperature": 1280, "samples": 1280}
"""By option, 448 of the others: together they draw 209,920 tokens."""
LETTERS = {letter: 2 + ord(letter) - ord("!") for letter in "ABC"}  # as the tokenizer of bytes numbers them
LIKELY = [34, 35, 36, 43, 66, 67, 68, 300, 383]
"""Follow often, so that drafts are right at times, and penalties, bias and words matter."""
BIAS = {34: -2.0, 43: 1.5, 300: 1.0}
OPTIONS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1, "temperature": 1.3},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.9, "repetition_penalty": 1.5},
    "bias": {"logit_bias": BIAS},
    "bad words": {"bad_words": ["A", "BC"]},
    "samples": {"n": 8},
}


@pytest.fixture(scope="module")
def tensors():
    rng, found = np.random.default_rng(11), stored("llama_gqa")
    for name, tensor in found.items():
        if "o_proj" in name or "down_proj" in name:
            found[name] = np.zeros_like(tensor)
    embeddings, head = rng.normal(0, 1, (VOCAB, HIDDEN)), rng.normal(0, 0.35, (VOCAB, HIDDEN))
    embeddings[:, 0] = 1.0
    head[LIKELY, 0] = 3.0
    head[LETTERS["B"], 0] = 6.0
    head[LETTERS["C"]] += 0.15 * embeddings[LETTERS["B"]]
    found["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    found["model.embed_tokens.weight"] = embeddings.astype(np.float32)
    found["lm_head.weight"] = head.astype(np.float32)
    return found


@pytest.fixture(scope="module")
def table(tensors):
    """Logits after each token: [VOCAB, VOCAB]."""
    hidden = tensors["model.embed_tokens.weight"].astype(np.float64)
    hidden /= np.sqrt(np.mean(hidden**2, axis=1, keepdims=True) + 1e-6)
    return hidden @ tensors["lm_head.weight"].T.astype(np.float64)


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    return write_tokenizer(write(tmp_path_factory.mktemp("chain"), tensors, vocab_size=VOCAB))


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(
        folder,
        dtype="float32",
        skip_tokenizer_init=False,
        max_model_len=64,
        block_size=16,
        max_num_seqs=SLOTS,
        num_gpu_blocks_override=4 * SLOTS,
        max_num_batched_tokens=(MOST + 1) * SLOTS,
        decode_buckets=[SLOTS],
        prefill_buckets=[(MOST + 1) * SLOTS],
        speculative_config={"num_speculative_tokens": MOST, "policy": "fixed"},
    )


class Guessing:
    """Drafts what is likely to follow, by the table, at random."""

    def __init__(self, table):
        self.best = np.argsort(-table, axis=1)[:, [0, 0, 1]].tolist()
        self.picks = np.random.default_rng(3).integers(0, 3, 4096).tolist()
        self.num_asked = 0

    def propose(self, asked):
        return [self.follow(*one) for one in asked]

    def seconds(self, num_requests, num_tokens):
        return None

    def follow(self, request, num_tokens):
        (token,), tokens = request.token_ids(request.num_known_tokens - 1, request.num_known_tokens), []
        for _ in range(num_tokens):
            self.num_asked += 1
            token = self.best[token][self.picks[self.num_asked % 4096]]
            tokens.append(token)
        return tokens

    def forget(self, request):
        pass


def draw(llm, options, num_requests, proposer=None, *, num_steps=1):
    """Tokens [requests, LENGTH] of requests with a seed each, and the counts of drafts.

    Samples of a request have the seeds after its own. With `num_steps` nobody waits for others, so that
    programs may compute so many iterations.
    """
    speculation = None if proposer is None else Speculation(proposer, AsProposed(), MOST, MOST * SLOTS)
    config, tokenizer = llm.engine.scheduler.config, llm.get_tokenizer()
    scheduler = Recording(config, speculation=speculation)
    options = {**options, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
    engine = Engine(
        llm.executor, scheduler, vocab_size=VOCAB, tokenizer=tokenizer, num_scheduler_steps=num_steps
    )
    each = options.get("n", 1)
    numbers, found = range(num_requests // each), {}
    at_once = len(numbers) if num_steps == 1 else config.max_num_seqs // each
    for first in range(0, len(numbers), at_once):
        for number in numbers[first : first + at_once]:
            params = SamplingParams(**options, seed=8 * number)
            engine.add_request(str(number), {"prompt_token_ids": PROMPT}, params)
        while engine.has_unfinished_requests:
            for output in engine.step():
                found[int(output.request_id)] = [list(one.token_ids) for one in output.outputs]
    tokens = np.array([one for number in sorted(found) for one in found[number]])
    assert tokens.shape == (num_requests, LENGTH)
    assert bool(scheduler.lookups) == (num_steps > 1)
    return tokens, None if speculation is None else speculation.counts


def probabilities(table, options, before, last):
    """Of each token next, [requests, VOCAB], by vLLM's definitions; `before` [requests, place] are outputs.

    What is just not kept by float64 may be kept by float32, and counts here.
    """
    logits, rows = table[last].copy(), np.arange(len(last))
    words = options.get("bad_words")
    if words:
        logits[:, LETTERS["A"]] = -np.inf
        logits[before[:, -1:].ravel() == LETTERS["B"], LETTERS["C"]] = -np.inf
    for token, bias in options.get("logit_bias", {}).items():
        logits[:, token] += bias
    if "repetition_penalty" in options:
        counts = np.zeros(logits.shape)
        np.add.at(counts, (rows[:, None], before), 1)
        is_known = counts > 0
        is_known[:, PROMPT] = True
        repetition = options["repetition_penalty"]
        logits = np.where(is_known, np.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits -= options["frequency_penalty"] * counts + options["presence_penalty"] * (counts > 0)
    logits /= options.get("temperature", 1.0)
    shares = special.softmax(logits, axis=1)
    if "min_p" in options:
        shares[shares < 0.9999 * options["min_p"] * shares.max(axis=1, keepdims=True)] = 0.0
    if "top_k" in options:
        shares[shares < 0.9999 * np.sort(shares, axis=1)[:, -options["top_k"], None]] = 0.0
    if "top_p" in options:
        ranked = -np.sort(-shares, axis=1)
        enough = np.argmax(np.cumsum(ranked, axis=1) >= options["top_p"] + 1e-5, axis=1)
        shares[shares < ranked[rows, enough][:, None]] = 0.0
    return shares / shares.sum(axis=1, keepdims=True)


def uniform(table, options, tokens):
    """Of each draw the probability of smaller tokens, and a random part of its own: [requests, LENGTH]."""
    rng, found, rows = np.random.default_rng(7), np.empty(tokens.shape), np.arange(len(tokens))
    for place in range(LENGTH):
        last = tokens[:, place - 1] if place else np.full(len(tokens), PROMPT[-1])
        shares = probabilities(table, options, tokens[:, :place], last)
        own = shares[rows, tokens[:, place]]
        assert np.all(own > 0), "a token that may not be sampled"
        found[:, place] = np.cumsum(shares, axis=1)[rows, tokens[:, place]] - rng.random(len(rows)) * own
    return np.clip(found, 0.0, 1.0 - 1e-9)


def p_values(numbers):
    """Of chi-squared: that the numbers are uniform, and that those of neighbours are independent."""
    alone = np.bincount((numbers * 100).astype(int).ravel(), minlength=100)
    places = (numbers * 12).astype(int)
    pairs = np.bincount((places[:, :-1] * 12 + places[:, 1:]).ravel(), minlength=144)
    return stats.chisquare(alone).pvalue, stats.chisquare(pairs).pvalue


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_with_drafts_are_draws_of_the_target(llm, table, name):
    """And seed by seed they are those without drafts."""
    options = OPTIONS[name]
    tokens, counts = draw(llm, options, NUM_REQUESTS.get(name, 448), Guessing(table))
    assert counts.num_kept > 1000
    assert counts.num_drafted - counts.num_kept > 1000
    assert min(p_values(uniform(table, options, tokens))) > 1e-3
    few = tokens[: 2 * SLOTS]
    assert np.array_equal(draw(llm, options, len(few))[0], few)
    each = options.get("n", 1)
    names = [str(i) if each == 1 else f"{i % each}_{i // each}" for i in range(len(few))]
    knowing = Knowing(dict(zip(names, few.tolist(), strict=True)), [2, 9, 1, 9, 3, 0], VOCAB)
    again, counts = draw(llm, options, len(few), knowing)
    assert np.array_equal(again, few)
    assert counts.num_kept > counts.num_drafted / 3


@pytest.mark.parametrize("name", ["temperature", "samples"])
def test_so_are_those_of_programs_that_draft(folder, llm, table, name):
    """Several iterations without the host, of which each drafts what followed the newest token before."""
    steps, options = MAX_DECODE_STEPS, OPTIONS[name]
    drafting = make_llm(
        folder,
        dtype="float32",
        skip_tokenizer_init=False,
        max_model_len=64,
        block_size=16,
        max_num_seqs=16,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=64,
        decode_buckets=[16],
        prefill_buckets=[64],
        num_scheduler_steps=steps,
        speculative_config={"num_speculative_tokens": MOST, "policy": "fixed", "prompt_lookup_min": 1},
    )
    tokens, counts = draw(drafting, options, NUM_REQUESTS[name], PromptLookup(1, 2), num_steps=steps)
    assert counts.num_kept > 1000
    assert counts.num_drafted - counts.num_kept > 1000
    assert min(p_values(uniform(table, options, tokens))) > 1e-3
    few = tokens[: 2 * SLOTS]
    assert np.array_equal(draw(llm, options, len(few))[0], few)


def test_tokens_that_follow_wrong_drafts_are_found_out(llm, table, monkeypatch):
    monkeypatch.setattr(of_engines, "accepted", lambda scheduled, rows: rows)
    tokens, _ = draw(llm, {}, 2 * SLOTS, Guessing(table))
    assert max(p_values(uniform(table, {}, tokens))) < 1e-9
