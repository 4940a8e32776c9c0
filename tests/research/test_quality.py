"""`jaxllm eval-quantised`: what two checkpoints predict for a text."""

import json
import pathlib
import runpy
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from variants import golden_checkpoint

import jaxllm.functional as F
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, RequestError, WeightsError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.loading.load import load_params
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.research import compare_quality
from jaxllm.text.tokenizer import encode, load_tokenizer

TEXT = "def add(one, two):\n    return one + two\n" * 6
MODEL = demo_model_path()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The checkpoint with other numbers, as if it had been rounded."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    changed = {
        name: (array * (1 + 0.3 * rng.standard_normal(array.shape))).astype(array.dtype)
        for name, array in tensors.items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_figures_are_those_of_the_logits(other):
    """Computed anew in float64 from each model's logits of the pieces."""
    folders = MODEL, other
    ids = encode(load_tokenizer(folders[0]), TEXT)[:60]
    found = compare_quality(*folders, TEXT, num_tokens=60, context=25)
    logs = []
    for folder in folders:
        config = config_from_dict(read_hf_config(folder))
        params = load_params(folder, config, "float32")
        rows = [
            np.asarray(F.logits(params, config, jnp.array([ids[start : start + 25]]))[0], np.float64)
            for start in (0, 25, 50)
        ]
        logits = np.concatenate(rows)[:59]
        logs.append(logits - np.asarray(jax.scipy.special.logsumexp(logits, axis=-1))[:, None])
    divergences = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    assert found.num_predictions == 59
    assert found.divergence == pytest.approx(divergences.mean(), rel=1e-3)
    assert found.largest_divergence == pytest.approx(divergences.max(), rel=1e-3)
    same = logs[0].argmax(-1) == logs[1].argmax(-1)
    assert 0 < same.mean() < 1
    assert found.agreement == pytest.approx(same.mean())
    for perplexity, log in zip(found.perplexities, logs, strict=True):
        assert perplexity == pytest.approx(np.exp(-log[np.arange(59), ids[1:60]].mean()), rel=1e-4)
    worst = found.partings[0]
    place = max(np.flatnonzero(~same), key=lambda index: divergences[index])
    assert (worst.position, worst.divergence) == (place + 1, pytest.approx(divergences[place], rel=1e-3))
    tops = np.sort(logs[0][place])
    assert worst.lead == pytest.approx(tops[-1] - tops[-2], abs=1e-4)
    assert len(found.partings) == min(10, (~same).sum())


def test_a_checkpoint_agrees_with_itself_and_less_so_in_16_bits():
    folder = MODEL
    same, rounded = (compare_quality(folder, folder, TEXT, second_dtype=name) for name in (None, "bfloat16"))
    assert (same.agreement, same.divergence, same.partings) == (1.0, 0.0, ())
    assert same.perplexities[0] == same.perplexities[1]
    assert 0 < rounded.divergence < 1e-2


@pytest.mark.parametrize(("kv_dtype", "least", "most"), [("int8", 0.993, 1e-4), ("bfloat16", 0.997, 1e-5)])
def test_kv_of_fewer_bits_predicts_nearly_the_same(kv_dtype, least, most):
    """Of a text that does not change."""
    text = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text()
    found = compare_quality(MODEL, MODEL, text, kv_cache_dtype=kv_dtype)
    assert found.num_predictions == 3606
    assert found.agreement >= least
    assert 0 < found.divergence <= most


def test_kv_is_what_a_checkpoint_has_scales_for(tmp_path):
    """As an engine stores it, with no option; scales of 1 are those of fp8 without any."""
    shutil.copytree(MODEL, tmp_path / "scaled")
    tensors = load_file(MODEL / "model.safetensors")
    for layer in range(read_hf_config(MODEL)["num_hidden_layers"]):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = np.ones(1, np.float32)
    save_file(tensors, tmp_path / "scaled" / "model.safetensors", {"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    groups = {"a": {"targets": ["none"], "weights": {"num_bits": 8}, "format": "int-quantized"}}
    said = {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": scheme}
    config = read_hf_config(MODEL) | {"quantization_config": said}
    (tmp_path / "scaled" / "config.json").write_text(json.dumps(config))
    found = compare_quality(MODEL, tmp_path / "scaled", TEXT, num_tokens=60)
    expected = compare_quality(MODEL, MODEL, TEXT, num_tokens=60, kv_cache_dtype="fp8")
    assert found.divergence == pytest.approx(expected.divergence, rel=1e-3)
    turned = compare_quality(tmp_path / "scaled", MODEL, TEXT, num_tokens=60)
    assert turned.perplexities == pytest.approx(found.perplexities[::-1], rel=1e-6)


def test_kv_goes_by_the_names_that_engines_take(tmp_path, capsys):
    (tmp_path / "text.py").write_text(TEXT)
    options = ["--text", str(tmp_path / "text.py"), "--num-tokens", "20", "--kv-cache-dtype"]
    printed = []
    for name in ("fp8", "fp8_e4m3"):
        assert main(["eval-quantised", str(MODEL), str(MODEL), *options, name]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_the_command_prints_and_writes_them(other, tmp_path, capsys):
    (tmp_path / "text.py").write_text(TEXT)
    options = [
        "--text",
        str(tmp_path / "text.py"),
        "--num-tokens",
        "40",
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert main(["eval-quantised", str(MODEL), str(other), *options]) == 0
    printed, written = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert printed.startswith("| 39 predictions | ")
    assert f"| {written['agreement']:.2%} |" in printed
    assert written["command"].startswith("jaxllm eval-quantised ")
    assert printed.count("\n| ") >= len(written["partings"]) > 0


def changed(folder, factor):
    """The checkpoint, whose last norm has a number times a factor."""
    shutil.copytree(MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][:2] *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_broken_weights_are_told(tmp_path):
    """Also where both are: none of their tokens is the likeliest. And perplexities are floats."""
    broken, vast = changed(tmp_path / "broken", np.nan), changed(tmp_path / "vast", 1e5)
    for pair in ((MODEL, broken), (broken, MODEL), (broken, broken)):
        with pytest.raises(WeightsError, match=r"the logits of '.*broken' in float32 are not finite: take"):
            compare_quality(*pair, TEXT, num_tokens=20)
    found = compare_quality(MODEL, vast, TEXT, num_tokens=20)
    assert 1e300 < found.perplexities[1] < np.inf


def test_what_cannot_be_compared_is_said(other, tmp_path, capsys):
    folder = MODEL
    with pytest.raises(RequestError, match=r"the text has \d tokens"):
        compare_quality(folder, other, "", num_tokens=10)
    for name in ("context", "num_tokens"):
        with pytest.raises(ConfigError, match=f"{name} must lie in"):
            compare_quality(folder, other, TEXT, **{name: 1})
    for name in ("dtype", "second_dtype", "kv_cache_dtype"):
        with pytest.raises(ConfigError, match=f"^{name}='int4' is not supported"):
            compare_quality(folder, other, TEXT, **{name: "int4"})
    with pytest.raises(ConfigError, match=r"vocabularies of \d+ and \d+ tokens"):
        compare_quality(folder, golden_checkpoint("llama_gqa"), TEXT)
    small = tmp_path / "small"
    shutil.copytree(golden_checkpoint("llama_gqa"), small)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, small / name)
    with pytest.raises(RequestError, match=r"gives token \d+, and the models have \d+"):
        compare_quality(small, small, TEXT)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for text, message in (("none.txt", "cannot read --text"), ("latin.txt", "is no UTF-8")):
        assert main(["eval-quantised", str(folder), str(other), "--text", str(tmp_path / text)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "bound"), [("float", 0.03), ("mxfp8", 0.03), ("nvfp4-pack", 0.1), ("mxfp4-pack", 0.14)]
)
def test_folders_of_float_blocks_are_near_what_they_are_of(form, bound, tmp_path, monkeypatch):
    """Each layer by the root of its mean square; and layers whose inputs are no whole groups stay."""
    script = pathlib.Path(__file__).parents[2] / "scripts" / "write_float_blocks.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(MODEL), str(tmp_path), form])
    runpy.run_path(str(script), run_name="__main__")
    config = config_from_dict(read_hf_config(tmp_path))
    found, expected = (load_params(folder, config, "float32") for folder in (tmp_path, MODEL))
    for name, weight in expected.items():
        off = float(jnp.linalg.norm(found[name] - weight) / jnp.linalg.norm(weight))
        is_kept = "_proj" not in name or (form == "float" and "down_proj" in name)
        assert (off == 0) if is_kept else (0.01 < off < bound), (name, off)
