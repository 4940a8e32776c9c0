"""Medusa heads: against a reference in numpy, their folders, and the same tokens as without them."""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from engine_helpers import Noting, Recording, Scripted, make_llm, noting_chains, run
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.errors import ConfigError, WeightsError
from jaxllm.executor.medusa import MedusaHeads, run_heads
from jaxllm.models.medusa import TOKEN_MAP, MedusaConfig
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.policies.speculation import AsProposed
from jaxllm.sched.speculation import Speculation

TARGET = golden_checkpoint("llama_gqa")
CONFIG = {"hidden_size": 64, "vocab_size": 128, "num_heads": 4, "num_hidden_layers": 1}
PROMPTS = [[5, 9, 33, 7, 8, 21, 90], [1], list(range(2, 45)), [100, 3] * 9, [64, 65, 66], [11] * 30]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def draw(config, seed=0):
    """Random weights of heads, by name."""
    random, made = np.random.default_rng(seed), {}
    for name, shape in config.shapes().items():
        made[name] = random.normal(size=shape).astype(np.float32) / 8
    if TOKEN_MAP in made:
        made[TOKEN_MAP] = np.sort(random.choice(config.vocab_size, config.num_tokens, replace=False))
    return made


def write(folder, weights, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file({f"medusa_heads.{name}": one for name, one in weights.items()}, folder / "model.safetensors")
    return folder


def reference(config, weights, hidden):
    """Section 2.1 of the paper, a head after another; [heads, C]."""
    drafts = []
    for head, output in enumerate(config.output_names):
        x = hidden.astype(np.float64)
        for layer in range(config.num_layers):
            name = f"blocks.{head}.layers.{layer}"
            y = x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
            x = x + y / (1 + np.exp(-y))
        found = np.argmax(x @ weights[output].T, axis=1)
        drafts.append(weights[TOKEN_MAP][found] if TOKEN_MAP in weights else found)
    return np.array(drafts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("heads"), draw(MedusaConfig.from_dict(CONFIG)))


@pytest.fixture(scope="module")
def llm(folder):
    config = {"method": "medusa", "model": folder, "num_speculative_tokens": 4, "policy": "fixed"}
    settings = {"prefill_buckets": [16, 48], "num_host_blocks": 32, "num_scheduler_steps": 4}
    return make_llm(TARGET, speculative_config=config, **settings)


def engine_of(llm, proposer, num_tokens=4, policy=None, num_steps=1, **changes):
    config = dataclasses.replace(llm.engine.scheduler.config, **changes)
    speculation = proposer and Speculation(
        proposer, AsProposed(), num_tokens, 16, chained=proposer if num_steps > 1 else None
    )
    scheduler = Recording(config, policy or SchedulerPolicy(), speculation=speculation)
    if num_steps > 1:
        llm.executor.drafter = proposer
    vocab_size = llm.model_config.vocab_size
    return Engine(llm.executor, scheduler, vocab_size=vocab_size, num_scheduler_steps=num_steps)


class Watching:
    """Proposes nothing, and notes what the newest tokens were sampled from."""

    def __init__(self, executor):
        self.executor, self.seen = executor, {}

    def propose(self, asked):
        hidden = np.asarray(self.executor.carried.hidden)
        for request, _ in asked:
            position = request.num_known_tokens - 2
            self.seen[request.request_id, len(request.output_token_ids) - 1] = hidden[
                request.slot, position % hidden.shape[1]
            ]
        return [()] * len(asked)

    def seconds(self, num_requests, num_tokens):
        return 0.0

    def forget(self, request):
        pass


@pytest.fixture(scope="module")
def seen(llm):
    """The answers without drafts, and what each of their tokens but the last was sampled from."""
    watching = Watching(llm.executor)
    outputs = run(engine_of(llm, watching), PROMPTS, GREEDY)
    return [output.token_ids for output in outputs], watching.seen


@pytest.fixture(scope="module")
def trained(llm, seen):
    """Heads that are fitted to the answers, by least squares, without what their layers add."""
    answers, hidden = seen
    weights = draw(llm.executor.drafter.heads)
    for head in range(4):
        known = [(one, answers[int(name)], at + 1 + head) for (name, at), one in hidden.items()]
        known = [(one, tokens[at]) for one, tokens, at in known if at < len(tokens)]
        wanted = np.eye(128, dtype=np.float32)[[token for _, token in known]]
        fitted = np.linalg.lstsq(np.array([one for one, _ in known]), wanted, rcond=None)[0]
        weights[f"lm_heads.{head}.weight"] = fitted.T.astype(np.float32)
        weights[f"blocks.{head}.layers.0.weight"] *= 0
    executor = llm.executor
    load = functools.partial(jax.tree.map, lambda x: jax.device_put(x, executor._device), weights)
    heads = MedusaHeads(
        executor.drafter.heads, load, executor.config, 4, lambda: executor.carried, executor._device
    )
    heads.warm_up()
    return heads


# What is drafted


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 3, "medusa_fc_bias": True},
        {"original_lm_head": True},
        {"truncated_vocab_size": 40, "medusa_num_heads": 2, "num_heads": None},
    ],
)
def test_heads_draft_what_a_reference_drafts(changes):
    config = MedusaConfig.from_dict(CONFIG | changes)
    weights, random = draw(config, 3), np.random.default_rng(4)
    kept = random.normal(size=(6, 5, 64)).astype(np.float32)
    places = np.array([[0, 4, 2, 2], [3, 14, 7, 0]], np.int32)
    params = {name: np.int32(one) if name == TOKEN_MAP else one for name, one in weights.items()}
    drafts = jax.jit(functools.partial(run_heads, config, config.num_heads, 4))(params, kept, places)
    expected = reference(config, weights, kept[places[0], places[1] % 5])
    np.testing.assert_array_equal(drafts, expected)
    params["lm_head.weight" if config.shares_output else "lm_heads.0.weight"] *= np.nan
    assert np.all(np.asarray(run_heads(config, 1, 4, params, kept, places)) == -1)


def test_steps_keep_what_tokens_were_sampled_from(llm, seen):
    answers, hidden = seen
    head = load_file(TARGET / "model.safetensors")["lm_head.weight"]
    assert len(hidden) == sum(
        len(tokens) - 2 for tokens in answers
    )  # after the others there is none to draft
    for (name, place), one in hidden.items():
        assert np.argmax(head @ one) == answers[int(name)][place]


def test_trained_heads_are_right_now_and_then(llm, seen, trained):
    engine = engine_of(llm, trained)
    outputs = run(engine, PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == seen[0]
    counts = engine.scheduler.speculation.counts
    assert counts.num_kept > 0.3 * sum(len(tokens) for tokens in seen[0])


# The same tokens


def test_heads_of_a_folder_draft_and_nothing_changes(llm, seen):
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in PROMPTS], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == seen[0]
    assert llm.engine.scheduler.speculation.counts.num_drafted > 100


def test_iterations_that_follow_one_another_draft_the_same(llm, seen, trained):
    """Each by what the one before it kept, which the host does not know yet."""
    noting = Noting(trained)
    run(engine_of(llm, noting), PROMPTS, GREEDY)
    engine = engine_of(llm, trained, num_steps=4)
    with noting_chains(llm.executor) as noted:
        outputs = run(engine, PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == seen[0]
    assert max(one.num_decode_steps for one in engine.scheduler.lookups) == 4
    before = {tuple(tokens): drafts for tokens, _, drafts in noting.noted}
    again = [(before.get(tuple(one.token_ids(0, length))), drafts) for one, length, drafts in noted]
    found = [pair for pair in again if pair[0]]
    assert len(found) > 10
    for alone, drafts in found:
        assert alone[: len(drafts)] == drafts[: len(alone)]
    assert engine.scheduler.speculation.counts.num_kept > 10


@settings(max_examples=10, deadline=None)
@given(
    script=st.lists(st.integers(0, 59), min_size=5, max_size=20),
    num_tokens=st.integers(0, 4),
    budget=st.sampled_from([6, 17, 48]),
    is_shared=st.booleans(),
    abort=st.integers(0, 12),
    num_steps=st.sampled_from([1, 4]),
)
def test_any_number_of_drafts_chunks_preemptions_and_aborts(
    llm, seen, trained, script, num_tokens, budget, is_shared, abort, num_steps
):
    policy = Scripted(script=itertools.cycle([*script, 1]))
    changes = {"max_num_batched_tokens": budget, "enable_prefix_caching": is_shared}
    engine = engine_of(llm, trained, num_tokens, policy, num_steps, **changes)
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
        expected = [*seen[0], seen[0][2]][place]
        is_cut = output.outputs[0].finish_reason == "abort"
        assert output.token_ids == (expected[: len(output.token_ids)] if is_cut else expected)
    assert not trained._resumed


# Folders


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"vocab_size": 256}, {}, "for 256 tokens and hidden states of 64, and .* has 128 and 64"),
        ({}, {"num_speculative_tokens": 5}, "num_speculative_tokens=5 is more than the 4 heads"),
        ({"speculators_config": {"algorithm": "eagle3"}}, {}, "the algorithm 'eagle3'"),
        ({"truncated_vocab_size": 129}, {}, "truncated_vocab_size=129 is more than vocab_size=128"),
        ({"num_heads": None}, {}, "no 'num_heads'"),
        ({"medusa_choices": 3}, {}, "medusa_choices"),
    ],
)
def test_what_is_not_of_this_model_is_refused(tmp_path, changes, config, message):
    write(tmp_path, {}, **changes)
    with pytest.raises(ConfigError, match=message):
        make_llm(TARGET, speculative_config={"method": "medusa", "model": tmp_path, **config})


def test_weights_that_do_not_match_are_named(tmp_path):
    weights = draw(MedusaConfig.from_dict(CONFIG))
    del weights["lm_heads.2.weight"]
    weights["blocks.0.layers.0.weight"] = weights["blocks.0.layers.0.weight"][:9]
    write(tmp_path, weights)
    with pytest.raises(
        WeightsError, match=r"lm_heads.2.weight is missing.*weight \(9, 64\), to be \(64, 64\)"
    ):
        make_llm(
            TARGET, speculative_config={"method": "medusa", "model": tmp_path, "num_speculative_tokens": 4}
        )


def test_without_such_heads_steps_keep_nothing():
    config = {"num_gpu_blocks_override": 64, "speculative_config": {"method": "ngram"}}
    with make_llm(TARGET, **config, warm_up="background") as llm:
        assert llm.executor.carried.hidden is llm.executor.carried.layers is None
