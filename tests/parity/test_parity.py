"""Live comparisons with transformers on torch: `pytest tests/parity -m parity`, with the extra `parity`."""

import functools
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from variants import CONFIGS, VARIANTS, golden_checkpoint, golden_data

from jaxllm import functional as F
from jaxllm.errors import WeightsError
from jaxllm.executor.sampler import least_kept
from jaxllm.loading import load_params
from jaxllm.models.config import config_from_dict, read_hf_config

pytestmark = pytest.mark.parity

REPOSITORY = Path(__file__).parent.parent.parent


def run(*command, env=None):
    """Run a command in a shell-like way: `python` is this interpreter, `jaxllm` its command."""
    own = {"python": [sys.executable], "jaxllm": [sys.executable, "-m", "jaxllm"]}
    command = [*own.get(command[0], command[:1]), *command[1:]]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=env)


def read_config(folder):
    return config_from_dict(read_hf_config(folder))


def test_golden_files_agree_with_the_installed_transformers():
    done = run("python", "scripts/make_golden.py", "--check")
    assert done.returncode == 0, done.stderr
    assert f"{len(VARIANTS)} variants agree" in done.stdout


def test_golden_beams_agree_with_the_installed_transformers(tmp_path):
    committed = json.loads((REPOSITORY / "tests" / "data" / "golden_beams.json").read_text())
    done = run("python", "scripts/make_golden_beams.py", str(tmp_path / "beams.json"))
    assert done.returncode == 0, done.stderr
    for old, new in zip(committed, json.loads((tmp_path / "beams.json").read_text()), strict=True):
        assert old.pop("scores") == pytest.approx(new.pop("scores"), rel=1e-5, abs=1e-4)
        assert old == new


def test_golden_check_fails_on_a_difference(tmp_path):
    """In a copy of the repository's files, with one recorded token changed."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    shutil.copytree(golden_checkpoint("llama_gqa"), tmp_path / "tests" / "data" / "golden" / "llama_gqa")
    shutil.copy(REPOSITORY / "tests" / "variants.py", tmp_path / "tests")
    file = tmp_path / "tests" / "data" / "golden" / "llama_gqa" / "golden.npz"
    with np.load(file) as arrays:
        changed = dict(arrays)
    changed["greedy"][2, 5] ^= 1
    changed["logits_1"][0, 0] += 1e-3
    np.savez(file, **changed)
    done = run("python", str(tmp_path / "scripts" / "make_golden.py"), "--check", "llama_gqa")
    assert done.returncode == 1
    assert "llama_gqa: logits of prompt 1 differ by 1.00e-03" in done.stderr
    assert "llama_gqa: greedy tokens of prompt 2 differ" in done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "llama_llama3",
        "llama_attention_bias",
        "qwen3",
        "granite",
        "phi3_longrope",
        "gemma2",
        "gemma3",
        "opt_pre_norm",
        "opt_post_norm",
    ],
)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(name):
    folder, golden = golden_checkpoint(name), golden_data(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    config = read_config(folder)
    params = load_params(folder, config, "bfloat16")
    prompt, exact = golden["prompts"][3], golden["logits"][3]
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0].float().numpy()
    ours = np.asarray(F.logits(params, config.with_max_model_len(128), np.array([prompt]))[0])
    assert np.isfinite(ours).all()
    # The root mean square, for the largest error of 5000 logits is a matter of luck.
    our_error, their_error = (np.sqrt(np.mean(np.square(x - exact))) for x in (ours, theirs))
    assert our_error < 1.5 * their_error
    assert np.sqrt(np.mean(np.square(ours - theirs))) < 2 * their_error


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("llama_head_dim", 128),
        ("llama_llama3", 128),
        ("llama_linear", 256),
        ("qwen2_yarn", 256),
        *(("llama_dynamic", length) for length in (1, 128, 129, 256)),
        *(("phi3_longrope", length) for length in (1, 128, 129, 512)),
    ],
)
def test_rope_frequencies_equal_those_of_transformers(name, length):
    hf_config = AutoConfig.from_pretrained(golden_checkpoint(name))
    config = read_config(golden_checkpoint(name))
    rope_type = hf_config.rope_parameters["rope_type"]
    if rope_type == "default":
        expected, scaling = AutoModelForCausalLM.from_config(hf_config).model.rotary_emb.inv_freq, 1.0
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[rope_type](hf_config, "cpu", seq_len=length)
    ours = config.with_max_model_len(length).rope
    assert ours.attention_factor == pytest.approx(scaling)
    np.testing.assert_allclose(ours.inverse_frequencies(), expected.numpy(), rtol=2e-6)


@functools.cache
def hf_model(name):
    return AutoModelForCausalLM.from_pretrained(golden_checkpoint(name), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", ["llama_tied", "opt_post_norm"])
@pytest.mark.parametrize("max_shard_size", ["60KB", "1GB"])
def test_checkpoints_saved_by_transformers_load(tmp_path, name, max_shard_size):
    hf_model(name).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "1GB")
    config = read_config(tmp_path)
    expected = load_params(golden_checkpoint(name), config, "float32")
    ours = load_params(tmp_path, config)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), ours, expected))


def save_bin(folder, name, *, num_shards=1):
    """A pickled checkpoint, as torch.save of a state dictionary whose tied tensors share memory."""
    folder.mkdir(parents=True)
    state = dict(hf_model(name).state_dict())
    shutil.copy(golden_checkpoint(name) / "config.json", folder)
    (folder / "tokenizer.json").write_text("{}")
    if num_shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    # The head goes with the embedding, as transformers wrote it.
    names = sorted(state, key=lambda n: ("embed_tokens" not in n and n != "lm_head.weight", n))
    weight_map = {}
    for i in range(num_shards):
        file = f"pytorch_model-{i + 1:05d}-of-{num_shards:05d}.bin"
        per_shard = -(-len(names) // num_shards)
        part = names[i * per_shard : (i + 1) * per_shard]
        torch.save({n: state[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", ["opt_post_norm", "llama_tied", "llama_mha"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_command_in_the_error_converts_pickles(tmp_path, name, num_shards):
    folder = save_bin(tmp_path / "it's a model", name, num_shards=num_shards)
    config = read_config(folder)
    with pytest.raises(WeightsError, match="pickled weights only") as error:
        load_params(folder, config, "float32")
    command = next(line for line in str(error.value).splitlines() if line.startswith("  jaxllm "))
    # Run as a user would: through a shell, with the command on the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run("bash", "-c", command.strip(), env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    converted = Path(shlex.split(command)[-1])
    assert sorted(path.name for path in converted.iterdir()) == sorted(
        ["config.json", "tokenizer.json"]
        + (
            ["model.safetensors"]
            if num_shards == 1
            else ["model.safetensors.index.json"] + [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
        )
    )
    if num_shards > 1:
        index = json.loads((converted / "model.safetensors.index.json").read_text())
        assert ("lm_head.weight" in index["weight_map"]) == (not config.tie_word_embeddings)
        assert index["metadata"]["total_size"] > 0
    expected = load_params(golden_checkpoint(name), config, "float32")
    ours = load_params(converted, config, "float32")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), ours, expected))


def convert(folder, target):
    return run("jaxllm", "convert-bin", str(folder), str(target))


class _Malicious:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_malicious_pickles_are_refused_and_not_run(tmp_path, how):
    folder = save_bin(tmp_path / "source", "opt_pre_norm")
    with (folder / "pytorch_model.bin").open("wb") as file:
        save = torch.save if how == "torch" else pickle.dump
        save({"weight": _Malicious(tmp_path / "owned")}, file)
    done = convert(folder, tmp_path / "target")
    assert done.returncode == 2
    assert "pytorch_model.bin' is refused: it holds more than tensors and could run code" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_other_bad_sources_are_explained(tmp_path):
    folder = save_bin(tmp_path / "source", "opt_pre_norm")
    file = folder / "pytorch_model.bin"
    whole = file.read_bytes()

    def message():
        done = convert(folder, tmp_path / "target")
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
        return done.stderr

    file.write_bytes(whole[: len(whole) // 2])
    assert "pytorch_model.bin' cannot be read, it is truncated or corrupt" in message()
    torch.save({"weight": torch.ones(1), "step": 3}, file)
    assert "entries that are not tensors: step" in message()
    file.unlink()
    assert "has no pytorch_model.bin" in message()
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "gone.bin"}}')
    assert "names files that are not beside it: gone.bin" in message()
    done = convert(folder, folder)
    assert "exists and is not an empty folder" in done.stderr


def test_every_variant_is_a_config_transformers_reads_the_same_way():
    for name in VARIANTS:
        hf_config, config = (
            AutoConfig.from_pretrained(golden_checkpoint(name)),
            config_from_dict(CONFIGS[name]),
        )
        assert hf_config.tie_word_embeddings == config.tie_word_embeddings
        assert hf_config.num_hidden_layers == config.num_layers
        # What transformers saves for it means the same to us.
        assert config_from_dict(hf_config.to_dict() | {"architectures": [config.architecture]}) == config


@pytest.mark.parametrize("spread", [0.3, 2.0, 20.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
@pytest.mark.parametrize("top_k", [0, 1, 40, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_filters_keep_what_those_of_transformers_do(spread, min_p, top_k, top_p):
    """In the order of vLLM. Both keep ties with the k-th token; those with the last of top_p, ours alone."""
    rows = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32) * spread
    if top_p == 1:
        rows[:4] = np.round(rows[:4])
    scores = torch.from_numpy(rows.copy())
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    least = least_kept(
        jnp.asarray(rows),
        min_p=jnp.full(8, min_p, jnp.float32),
        top_k=jnp.full(8, top_k, jnp.int32),
        top_p=jnp.full(8, top_p, jnp.float32),
    )
    np.testing.assert_array_equal(rows >= np.asarray(least)[:, None], torch.isfinite(scores).numpy())
