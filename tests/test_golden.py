"""The models, run densely over one sequence, against logits recorded from transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import NUM_GREEDY_TOKENS, PROMPT_LENGTHS, VARIANTS, golden_checkpoint, golden_data

from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.registry import bind
from jaxllm.pallas_kernels.heads import rotated_heads


@dataclasses.dataclass
class CausalAttend:
    """Dense attention over one whole sequence, in float32."""

    num_kv_heads: int
    head_dim: int
    num_rows: None = None

    def __call__(self, layer, qkv, rope, scale, window=None, soft_cap=None):
        q, k, v = rotated_heads(qkv, rope, self.num_kv_heads, self.head_dim)
        group = q.shape[1] // k.shape[1]
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * scale
        scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
        length = q.shape[0]
        seen = jnp.tril(jnp.ones((length, length), bool))
        if window is not None:
            seen &= ~jnp.tril(seen, -window)
        scores = jnp.where(seen, scores, -jnp.inf)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v, precision="highest")


def dense_logits(config, params, token_ids):
    """`token_ids` [N, T] -> [N, T, vocab_size]. Not jitted: compiling every variant takes longer."""
    model = bind(config, params)
    attend = CausalAttend(config.num_kv_heads, config.head_dim)
    positions = jnp.arange(token_ids.shape[1], dtype=jnp.int32)
    return jax.vmap(lambda ids: model.logits(model(ids, positions, attend)))(token_ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name):
    golden = golden_data(name)
    config = config_from_dict(read_hf_config(golden_checkpoint(name)))
    params = load_params(golden_checkpoint(name), config, "float32")
    # What follows a token does not change its logits, so shorter sequences are padded.
    answers = list(zip(golden["prompts"], golden["greedy"], strict=True))
    padded = np.zeros((len(answers), max(PROMPT_LENGTHS) + NUM_GREEDY_TOKENS), np.int32)
    for row, (prompt, greedy) in zip(padded, answers, strict=True):
        row[: len(prompt) + len(greedy)] = prompt + greedy
    ours = np.asarray(dense_logits(config, params, padded))
    for i, (prompt, greedy) in enumerate(answers):
        np.testing.assert_allclose(ours[i, : len(prompt)], golden["logits"][i], rtol=0, atol=1e-4)
        end = len(prompt) + len(greedy) - 1
        assert ours[i, len(prompt) - 1 : end].argmax(-1).tolist() == greedy


@pytest.mark.parametrize("name", VARIANTS)
def test_recorded_answers_are_varied_and_decided(name):
    golden = golden_data(name)
    assert [len(prompt) for prompt in golden["prompts"]] == list(PROMPT_LENGTHS)
    assert all(len(tokens) == NUM_GREEDY_TOKENS and len(set(tokens)) >= 8 for tokens in golden["greedy"])
    assert golden["margin"] >= 2e-3


def test_variants_differ_in_more_than_name():
    logits = [golden_data(name)["logits"][3] for name in VARIANTS]
    for i, a in enumerate(logits):
        assert all(np.abs(a - b).max() > 0.1 for b in logits[:i])
