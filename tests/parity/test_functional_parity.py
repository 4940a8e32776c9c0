"""Values and gradients of the pure functions against transformers and torch's autograd, in float32."""

import functools

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from variants import golden_checkpoint

from jaxllm import functional as F
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.architecture import ARCHITECTURES
from jaxllm.models.config import config_from_dict, read_hf_config

pytestmark = pytest.mark.parity

FOLDERS = {
    "embedded": demo_model_path(),
    **{
        name: golden_checkpoint(name)
        for name in ("opt_pre_norm", "opt_post_norm", "gemma3", "qwen3", "granite")
    },
}


@functools.cache
def both(name):
    folder = FOLDERS[name]
    config = config_from_dict(read_hf_config(folder))
    params = load_params(folder, config, np.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.random.default_rng(0).integers(5, config.vocab_size, (3, 21))
    return config, params, theirs, tokens


def relative(found, expected):
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_and_hidden_states(name):
    config, params, theirs, tokens = both(name)
    with torch.inference_mode():
        expected = theirs(torch.tensor(tokens), output_hidden_states=True)
    found = F.trace(params, config, tokens)
    assert relative(found.logits, expected.logits.numpy()) < 1e-5
    assert len(found.hidden) == len(expected.hidden_states)
    for ours, hidden in zip(found.hidden, expected.hidden_states, strict=True):
        assert relative(ours, hidden.numpy()) < 1e-5


@pytest.mark.parametrize("name", FOLDERS)
def test_gradients_of_every_weight(name):
    config, params, theirs, tokens = both(name)
    theirs.zero_grad()
    labels = torch.tensor(tokens)
    labels[1, :9] = -100  # not counted
    mask = np.ones(tokens.shape)
    mask[1, :9] = 0
    expected = theirs(torch.tensor(tokens), labels=labels).loss
    expected.backward()
    loss, found = jax.jit(jax.value_and_grad(lambda p: F.loss(p, config, tokens, mask)))(params)
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    names = ARCHITECTURES[config.architecture].names
    grads = {key: value.grad.numpy() for key, value in theirs.named_parameters() if value.grad is not None}
    assert len(found) > 5
    for target, ours in found.items():
        parts = names.parts(config, target, ours.shape)
        gradient = np.concatenate([grads[names.hf_name(part.name)] for part in parts])
        assert relative(np.asarray(ours), gradient) < 1e-4, target
