"""What `jaxllm convert --quantization` writes, as compressed-tensors reads it within transformers."""

import compressed_tensors  # noqa: F401, which transformers would look for itself, and skip what it is for
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from variants import golden_checkpoint

from jaxllm import functional as F
from jaxllm.loading import convert_checkpoint
from jaxllm.loading.load import checkpoint_formats, iter_params
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import QUANTIZATIONS
from jaxllm.models.registry import PLAIN

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # of the library and what it imports
]

TOKENS = [5, 17, 9, 33, 20, 7, 8, 9, 64, 3]
OF_FAMILIES = [
    "gemma3",
    "granite",
    "llama_tied",
    "mistral_head_dim",
    "opt_post_norm",
    "phi3",
    "qwen2",
    "qwen3",
]
PAIRS = [("llama_gqa", name) for name in QUANTIZATIONS] + [(name, "int4_weight") for name in OF_FAMILIES]


@pytest.mark.parametrize(("name", "quantization"), PAIRS)
def test_logits_are_those_of_the_library(name, quantization, tmp_path):
    """Of int8 with no inputs rounded, which the library does by 1 / 127.5, and this, as vLLM, by 1 / 127."""
    folder = convert_checkpoint(golden_checkpoint(name), tmp_path / "model", quantization=quantization)
    hf_config = read_hf_config(folder)
    config = config_from_dict(hf_config)
    formats = PLAIN if quantization == "int8" else checkpoint_formats(folder, config, hf_config)
    params = dict(iter_params(folder, config, "float32", formats=formats))
    found = np.asarray(F.logits(params, config, jnp.array([TOKENS]))[0])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if quantization == "int8":
        for module in theirs.modules():
            module.quantization_enabled = False
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)
