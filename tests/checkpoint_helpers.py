"""Checkpoint folders made of golden ones, and weights compared."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file
from variants import golden_checkpoint

from jaxllm.models.config import config_from_dict, read_hf_config

GQA = "llama_gqa"


def read_config(folder):
    return config_from_dict(read_hf_config(folder))


def stored(name):
    return load_file(golden_checkpoint(name) / "model.safetensors")


def write(folder, tensors, *, like=GQA, num_shards=1, **config_changes):
    """A checkpoint folder of `tensors` with the config of a golden one; big and small shards alternate."""
    folder.mkdir(exist_ok=True)
    config = read_hf_config(golden_checkpoint(like)) | config_changes
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        names = sorted(tensors)[i::num_shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(value), err_msg=name)
