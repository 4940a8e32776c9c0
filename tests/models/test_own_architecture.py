"""An architecture is one entry: a file outside the package adds one, and whatever runs models runs it."""

import json
import re

import numpy as np
import own_architecture  # noqa: F401  registers FactorForCausalLM
import pytest
from checkpoint_helpers import GQA, read_config, stored, write
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, RequestError, UnsupportedModelError, WeightsError
from jaxllm.loading import convert_checkpoint
from jaxllm.models.architecture import ARCHITECTURES, register
from jaxllm.models.config import config_from_dict, read_hf_config

PROMPT = [5, 17, 3, 9, 40]
OURS = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}


def own_checkpoint(folder):
    """The golden model's weights under other names, its MLPs halved, and a factor that makes up for it."""
    tensors = {}
    for name, tensor in stored(GQA).items():
        for theirs, ours in OURS.items():
            name = name.replace(theirs, ours)
        if "gate_proj" in name:
            name, tensor = (
                name.replace("gate_proj", "gate_up_proj"),
                np.concatenate([tensor, stored(GQA)[name.replace("gate_proj", "up_proj")]]),
            )
        elif "up_proj" in name:
            continue
        tensors[re.sub("^model\\.", "decoder.", name)] = tensor / 2 if "down_proj" in name else tensor
    changes = {"architectures": ["FactorForCausalLM"], "model_type": "factor", "mlp_factor": 2.0}
    return write(folder, tensors, **changes)


def generate(folder, **settings):
    with make_llm(folder, **settings) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    return list(output.outputs[0].token_ids)


def test_it_generates_what_its_layer_computes(tmp_path):
    folder = own_checkpoint(tmp_path / "own")
    expected = generate(golden_checkpoint(GQA))
    assert generate(folder) == expected
    assert generate(folder, attention_implementation="xla") == expected
    assert generate(folder, hf_overrides={"mlp_factor": 1.0}) != expected
    assert generate(convert_checkpoint(folder, tmp_path / "orbax")) == expected


def test_its_entry_says_what_it_is_called_and_what_it_cannot_do(tmp_path):
    folder = own_checkpoint(tmp_path / "own")
    config = read_hf_config(folder)
    assert config_from_dict(config, {"architectures": None}).architecture == "FactorForCausalLM"
    with pytest.raises(UnsupportedModelError, match=r"mlp_factors=2.*did you mean mlp_factor\?"):
        config_from_dict({**config, "mlp_factors": 2})
    with make_llm(folder) as llm, pytest.raises(RequestError, match="num_dropped_tokens"):
        llm.generate([{"prompt_token_ids": PROMPT, "num_dropped_tokens": 16}])
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match="mlp_factor"):
        read_config(folder)


def test_weights_are_missed_by_their_own_names(tmp_path):
    folder = own_checkpoint(tmp_path / "own")
    write(folder, {"decoder.norm.weight": np.ones(64, np.float32)}, **read_hf_config(folder))
    with pytest.raises(WeightsError, match=r"decoder\.layers\.0\.self_attn\.query\.weight"):
        make_llm(folder)


def test_a_name_is_registered_once():
    known = dict(ARCHITECTURES)
    with pytest.raises(ConfigError, match="'LlamaForCausalLM' is registered already"):
        register(name="LlamaForCausalLM", model=None, names=None)(lambda fields: None)
    assert known == ARCHITECTURES
