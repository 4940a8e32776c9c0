"""EAGLE-3 heads: against a reference in numpy, their folders, and the same tokens as without them."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from checkpoint_helpers import stored
from checkpoint_helpers import write as write_model
from engine_helpers import Noting, Recording, Scripted, make_llm, noting_chains, run
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxllm import SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.errors import ConfigError
from jaxllm.models.eagle3 import TO_TARGET, Eagle3Config
from jaxllm.sched import speculation
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.policies.speculation import AsProposed
from jaxllm.sched.speculation import Speculation

NUM_LAYERS, KEPT, MOST, THETA = 4, [0, 1, 3], 4, 500000.0
CONFIG = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
    "draft_vocab_size": 100,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": KEPT,
    "transformer_layer_config": {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": THETA,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
    },
}
PROMPTS = [[5, 9, 33, 7, 8, 21, 90], [1], list(range(2, 45)), [100, 3] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def draw(config, seed=0):
    """Random weights of heads, by name."""
    random, made = np.random.default_rng(seed), {}
    for name, shape in config.shapes().items():
        scale = 0.1 if len(shape) > 1 else 1.0
        made[name] = (random.normal(size=shape) * scale + (len(shape) == 1)).astype(np.float32)
    if TO_TARGET in made:
        known = np.sort(random.choice(config.layer.vocab_size, config.num_tokens, replace=False))
        made[TO_TARGET] = known - np.arange(config.num_tokens)
    return made


def write(folder, weights, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(weights, folder / "model.safetensors")
    return folder


# The reference


def normed(x, weight, eps=1e-5):
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def rotated(x):
    """`x` [T, heads, 16] at places 0, 1, ..."""
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(8) / 8)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :8], x[..., 8:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def attended(x, weights, prefix):
    q, k, v = ((x @ weights[f"{prefix}{name}_proj.weight"].T).reshape(len(x), -1, 16) for name in "qkv")
    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(one, q.shape[1] // k.shape[1], axis=1) for one in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / 4
    scores += np.where(np.tri(len(x)) > 0, 0.0, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("hts,shd->thd", shares / shares.sum(axis=-1, keepdims=True), v)
    return out.reshape(len(x), -1) @ weights[f"{prefix}o_proj.weight"].T


def mlp(x, weights, prefix):
    gate, up = (x @ weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}down_proj.weight"].T


def layer_inputs(model, tokens):
    """What the kept layers of the model are given, side by side."""
    x, found = model["model.embed_tokens.weight"][tokens].astype(np.float64), []
    for layer in range(NUM_LAYERS):
        if layer in KEPT:
            found.append(x)
        name = f"model.layers.{layer}."
        x = x + attended(normed(x, model[f"{name}input_layernorm.weight"]), model, f"{name}self_attn.")
        x = x + mlp(normed(x, model[f"{name}post_attention_layernorm.weight"]), model, f"{name}mlp.")
    return np.concatenate(found, axis=1)


def reference(model, heads, tokens, count, norm_before_residual):
    """Section 3.1 of the paper, all of it computed anew for each draft."""
    hidden = layer_inputs(model, tokens[:-1]) @ heads["fc.weight"].T
    embedded, drafts, name = heads["embed_tokens.weight"][tokens[1:]], [], "layers.0."
    for _ in range(count):
        given = normed(hidden, heads[f"{name}hidden_norm.weight"])
        both = [normed(embedded, heads[f"{name}input_layernorm.weight"]), given]
        x = given if norm_before_residual else hidden
        x = x + attended(np.concatenate(both, axis=1), heads, f"{name}self_attn.")
        x = x + mlp(normed(x, heads[f"{name}post_attention_layernorm.weight"]), heads, f"{name}mlp.")
        found = int(np.argmax(normed(x[-1], heads["norm.weight"]) @ heads["lm_head.weight"].T))
        drafts.append(found + int(heads[TO_TARGET][found]) if TO_TARGET in heads else found)
        hidden = np.concatenate([hidden, x[-1:]])
        embedded = np.concatenate([embedded, heads["embed_tokens.weight"][drafts[-1:]]])
    return drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A model of four layers."""
    tensors = {name: one.astype(np.float32) for name, one in stored("llama_gqa").items()}
    random = np.random.default_rng(1)
    for name, one in list(tensors.items()):
        for layer in (0, 1):
            if f"layers.{layer}." in name:
                other = one + 0.05 * random.normal(size=one.shape).astype(np.float32)
                tensors[name.replace(f"layers.{layer}.", f"layers.{layer + 2}.")] = other
    folder = write_model(tmp_path_factory.mktemp("target"), tensors, num_hidden_layers=NUM_LAYERS)
    return folder, tensors


@pytest.fixture(scope="module")
def weights():
    return draw(Eagle3Config.from_dict(CONFIG, NUM_LAYERS))


@pytest.fixture(scope="module")
def llm(target, weights, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("heads"), weights)
    config = {"method": "eagle3", "model": folder, "num_speculative_tokens": MOST, "policy": "fixed"}
    settings = {"prefill_buckets": [16, 48], "num_host_blocks": 32, "num_scheduler_steps": 4}
    return make_llm(target[0], speculative_config=config, **settings)


def engine_of(llm, proposer, num_tokens=MOST, policy=None, num_steps=1, **changes):
    config = dataclasses.replace(llm.engine.scheduler.config, **changes)
    drafting = proposer and Speculation(
        proposer, AsProposed(), num_tokens, 16, chained=proposer if num_steps > 1 else None
    )
    scheduler = Recording(config, policy or SchedulerPolicy(), speculation=drafting)
    vocab_size = llm.model_config.vocab_size
    return Engine(llm.executor, scheduler, vocab_size=vocab_size, num_scheduler_steps=num_steps)


@pytest.fixture(scope="module")
def answers(llm):
    return [output.token_ids for output in run(engine_of(llm, None), PROMPTS, GREEDY)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_heads_draft_what_a_reference_drafts(llm, target, weights, answers, is_shared):
    noting = Noting(llm.executor.drafter)
    engine = engine_of(llm, noting, max_num_batched_tokens=17, enable_prefix_caching=is_shared)
    for _ in range(1 + is_shared):
        outputs = run(engine, PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == answers
    assert any(output.num_cached_tokens for output in outputs) == is_shared
    assert len(noting.noted) > 20
    for tokens, count, drafts in noting.noted:
        assert len(drafts) == count
        assert drafts == reference(target[1], weights, np.array(tokens), count, norm_before_residual=True)


def test_blocks_before_other_tokens_are_shared_but_for_the_last(llm, target, weights, monkeypatch):
    """A row is of the token after its own, too."""
    drafter, shared = llm.executor.drafter, []
    found, size = drafter._found, drafter.config.block_size

    def finding(request):
        held = found(request)
        shared.append(len(held.blocks))
        return held

    monkeypatch.setattr(drafter, "_found", finding)
    noting = Noting(drafter)
    engine = engine_of(llm, noting, enable_prefix_caching=True)
    for ending in ([7] * size, [9] * size, [9] * size + [6]):
        run(engine, [[*range(60, 60 + 3 * size), *ending]], GREEDY)
    assert shared == [0, 2, 3]
    for tokens, count, drafts in noting.noted:
        assert drafts == reference(target[1], weights, np.array(tokens), count, norm_before_residual=True)


def test_heads_of_other_settings_draft_what_a_reference_drafts(target, answers, tmp_path):
    changes = {"norm_before_residual": False, "draft_vocab_size": 128}
    weights = draw(Eagle3Config.from_dict(CONFIG | changes, NUM_LAYERS), seed=5)
    folder = write(
        tmp_path, {name.replace("layers.0", "midlayer"): one for name, one in weights.items()}, **changes
    )
    config = {"method": "eagle3", "model": folder, "num_speculative_tokens": 3, "policy": "fixed"}
    with make_llm(target[0], speculative_config=config, max_num_seqs=1, decode_buckets=[1]) as llm:
        noting = Noting(llm.executor.drafter)
        outputs = run(engine_of(llm, noting, num_tokens=3), PROMPTS[:1], GREEDY)
        assert [output.token_ids for output in outputs] == answers[:1]
    for tokens, count, drafts in noting.noted:
        assert drafts == reference(target[1], weights, np.array(tokens), count, norm_before_residual=False)


@pytest.mark.parametrize("num_tokens", [1, 3, MOST])
def test_iterations_that_follow_one_another_draft_the_same(
    llm, target, weights, answers, num_tokens, monkeypatch
):
    """Each by what the one before it kept, which the host does not know yet."""
    monkeypatch.setattr(speculation, "_SURELY", 0.0)
    engine = engine_of(llm, llm.executor.drafter, num_tokens, num_steps=4)
    with noting_chains(llm.executor) as noted:
        outputs = run(engine, PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == answers
    assert max(one.num_decode_steps for one in engine.scheduler.lookups) == 4
    assert len(noted) > 20
    for request, length, drafts in noted:
        tokens = np.array(request.token_ids(0, length))
        assert drafts == reference(target[1], weights, tokens, len(drafts), norm_before_residual=True)


@settings(max_examples=10, deadline=None)
@given(
    script=st.lists(st.integers(0, 59), min_size=5, max_size=20),
    num_tokens=st.integers(0, MOST),
    budget=st.sampled_from([6, 17, 48]),
    is_shared=st.booleans(),
    abort=st.integers(0, 12),
    num_steps=st.sampled_from([1, 4]),
)
def test_any_number_of_drafts_chunks_preemptions_and_aborts(
    llm, answers, script, num_tokens, budget, is_shared, abort, num_steps
):
    policy = Scripted(script=itertools.cycle([*script, 1]))
    changes = {"max_num_batched_tokens": budget, "enable_prefix_caching": is_shared}
    drafter = llm.executor.drafter
    engine = engine_of(llm, drafter, num_tokens, policy, num_steps, **changes)
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
        expected = [*answers, answers[2]][place]
        is_cut = output.outputs[0].finish_reason == "abort"
        assert output.token_ids == (expected[: len(output.token_ids)] if is_cut else expected)
    assert drafter.num_free_blocks == drafter.config.num_gpu_blocks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_config": {"algorithm": "eagle"}}, "the algorithm 'eagle'"),
        ({"speculators_config": None}, "no 'speculators_config'"),
        ({"target_hidden_size": 32}, "for 128 tokens and layers of 32 features, and .* has 128 and 64"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, r"\[0, 1, 4\] must be 3 layers .* from 0 to 3"),
        ({"norm_before_fc": True}, "norm_before_fc=True is not supported"),
        ({"draft_depth": 3}, "draft_depth"),
    ],
)
def test_what_is_not_of_this_model_is_refused(target, tmp_path, changes, message):
    write(tmp_path, {"fc.weight": np.zeros(1, np.float32)}, **changes)
    with pytest.raises(ConfigError, match=message):
        make_llm(target[0], speculative_config={"method": "eagle3", "model": tmp_path})
