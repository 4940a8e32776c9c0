"""Reading and checking checkpoints."""

import dataclasses
import os
import re
import shlex
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_helpers import GQA, assert_same, read_config, stored, write
from engine_helpers import make_llm
from safetensors.numpy import load_file
from variants import VARIANTS, golden_checkpoint

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.models import settle_dtype
from jaxllm.errors import ConfigError, WeightsError
from jaxllm.loading import load_params, resolve_dtype, safetensors_format
from jaxllm.loading.shards import list_tensors
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.registry import abstract_params

QKV = "layers.0.self_attn.qkv_proj.weight"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_loads_with_the_expected_names_shapes_and_dtype(name):
    config = read_config(golden_checkpoint(name))
    params = load_params(golden_checkpoint(name), config, "bfloat16")
    expected = abstract_params(config, "bfloat16")
    assert {k: (v.shape, v.dtype) for k, v in params.items()} == {
        k: (v.shape, v.dtype) for k, v in expected.items()
    }


def test_fused_weights_stack_their_parts_in_order():
    tensors = stored(GQA)
    params = load_params(golden_checkpoint(GQA), read_config(golden_checkpoint(GQA)), "float32")
    layer = "model.layers.1."
    q, k, v = (tensors[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv")
    assert (q.shape, k.shape) == ((64, 64), (32, 64))
    fused = np.concatenate([q, k, v]).astype(np.float32)
    np.testing.assert_array_equal(params["layers.1.self_attn.qkv_proj.weight"], fused)
    gate_up = [tensors[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(
        params["layers.1.mlp.gate_up_proj.weight"], np.concatenate(gate_up).astype(np.float32)
    )


def test_fused_biases_stack_too():
    name = "opt_pre_norm"
    tensors = stored(name)
    params = load_params(golden_checkpoint(name), read_config(golden_checkpoint(name)), "float32")
    parts = [tensors[f"model.decoder.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"]
    np.testing.assert_array_equal(params["layers.0.self_attn.qkv_proj.bias"], np.concatenate(parts))


def test_projections_that_a_checkpoint_has_fused_are_taken_as_they_are():
    tensors = stored("phi3")
    params = load_params(golden_checkpoint("phi3"), read_config(golden_checkpoint("phi3")), "bfloat16")
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        fused = tensors[f"model.layers.1.{name}.weight"]
        np.testing.assert_array_equal(params[f"layers.1.{name}.weight"], fused)


@pytest.mark.parametrize("num_shards", [2, 5])
def test_shards_give_the_same_weights_even_where_they_split_a_fused_one(tmp_path, num_shards):
    folder = write(tmp_path / "sharded", stored(GQA), num_shards=num_shards)
    config = read_config(folder)
    assert_same(
        load_params(folder, config, "float32"), load_params(golden_checkpoint(GQA), config, "float32")
    )


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_source_dtypes_are_cast(tmp_path, source, dtype):
    tensors = {name: value.astype(source) for name, value in stored(GQA).items()}
    folder = write(tmp_path / "cast", tensors)
    params = load_params(folder, read_config(folder), dtype)
    assert {value.dtype for value in params.values()} == {jnp.dtype(dtype)}
    norm = tensors["model.norm.weight"]
    np.testing.assert_array_equal(np.asarray(params["norm.weight"]), norm.astype(dtype))


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [(GQA, {"model.": ""}), ("opt_post_norm", {"model.decoder.": "decoder."})],
)
def test_saves_of_the_base_model_load(tmp_path, name, prefixes):
    tensors = stored(name)
    for old, new in prefixes.items():
        tensors = {key.replace(old, new, 1): value for key, value in tensors.items()}
    folder = write(tmp_path / "base", tensors, like=name)
    config = read_config(folder)
    assert_same(
        load_params(folder, config, "float32"), load_params(golden_checkpoint(name), config, "float32")
    )


@pytest.mark.parametrize(("name", "prefix"), [("llama_tied", "model."), ("opt_pre_norm", "model.decoder.")])
def test_tied_heads_may_be_stored_twice_or_under_either_name(tmp_path, monkeypatch, name, prefix):
    monkeypatch.setattr(safetensors_format, "_COMPARED_ROWS", 50)
    config = read_config(golden_checkpoint(name))
    expected = load_params(golden_checkpoint(name), config, "float32")
    tensors = stored(name)
    both = tensors | {"lm_head.weight": tensors[prefix + "embed_tokens.weight"]}
    assert_same(load_params(write(tmp_path / "both", both, like=name), config, "float32"), expected)
    del both[prefix + "embed_tokens.weight"]
    assert_same(load_params(write(tmp_path / "head", both, like=name), config, "float32"), expected)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    tensors = stored("llama_tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    folder = write(tmp_path / "differs", tensors, like="llama_tied")
    with pytest.raises(WeightsError, match=r"lm_head\.weight differ .*hf_overrides=.'tie_word_embeddings'"):
        load_params(folder, read_config(folder), "float32")
    untied = config_from_dict(read_hf_config(folder), {"tie_word_embeddings": False})
    assert "lm_head.weight" in load_params(folder, untied, "float32")


def test_buffers_are_skipped(tmp_path):
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "model.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "model.layers.0.self_attn.masked_bias": np.zeros((), np.float32),
    }
    folder = write(tmp_path / "buffers", stored(GQA) | buffers)
    assert QKV in load_params(folder, read_config(folder), "float32")


def test_one_error_names_everything_missing_unexpected_and_misshapen(tmp_path):
    tensors = stored(GQA)
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((1, 2), np.float32)
    tensors["model.norm.bias"] = np.zeros(64, np.float32)
    tensors["model.layers.1.self_attn.v_proj.weight"] = np.zeros((16, 64), np.float32)
    tensors["model.norm.weight"] = np.zeros(64, np.int8)
    folder = write(tmp_path / "wrong", tensors)
    with pytest.raises(WeightsError) as error:
        load_params(folder, read_config(folder), "float32")
    message = str(error.value)
    missing, unexpected, wrong = message.split("; ")
    assert "model.layers.0.self_attn.k_proj.weight" in missing
    assert "lm_head.weight" in missing
    assert "missing: " in missing
    assert "unexpected: " in unexpected
    assert "model.layers.7.mlp.up_proj.weight" in unexpected
    assert "model.norm.bias" in unexpected
    assert "model.layers.1.self_attn.v_proj.weight is [16, 64], expected [32, 64]" in wrong
    assert "model.norm.weight is I8, expected one of F32, BF16, F16" in wrong


def test_a_weight_stored_under_two_names_is_refused(tmp_path):
    tensors = stored(GQA)
    folder = write(tmp_path / "twice", tensors | {"norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(WeightsError, match=r"'norm\.weight' twice, as .*'model\.norm\.weight'"):
        load_params(folder, read_config(folder), "float32")


@pytest.mark.parametrize("keep", [0, 6, 300, -10])
def test_truncated_files_are_named(tmp_path, keep):
    folder = write(tmp_path / "cut", stored(GQA))
    config = read_config(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"cannot read .*model\.safetensors': .*truncated or corrupt"):
        load_params(folder, config, "float32")


def test_git_lfs_pointers_are_recognised(tmp_path):
    folder = write(tmp_path / "lfs", stored(GQA))
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 10\n")
    with pytest.raises(WeightsError, match=r"Git LFS pointer.*git lfs pull"):
        load_params(folder, read_config(folder), "float32")


def test_a_missing_shard_is_named(tmp_path):
    folder = write(tmp_path / "missing", stored(GQA), num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"the folder lacks: model-00002-of-00003\.safetensors"):
        load_params(folder, read_config(folder), "float32")


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ('{"metadata": {}}', "weight_map"),
        ('{"weight_map": {}}', "names no files"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"a": "shard.safetensors"}}', "a is not in shard.safetensors"),
    ],
)
def test_bad_indexes_are_named(tmp_path, index, problem):
    folder = write(tmp_path / "index", stored(GQA))
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=problem):
        load_params(folder, read_config(folder), "float32")


def test_folders_without_weights_say_what_was_expected(tmp_path):
    config = read_config(golden_checkpoint(GQA))
    with pytest.raises(WeightsError, match=r"it is empty; expected model\.safetensors"):
        load_params(tmp_path, config, "float32")
    (tmp_path / "weights.txt").touch()
    with pytest.raises(WeightsError, match=r"it has weights\.txt; expected"):
        load_params(tmp_path, config, "float32")
    with pytest.raises(WeightsError, match="does not exist"):
        load_params(tmp_path / "absent", config, "float32")
    with pytest.raises(WeightsError, match=r"no params/ folder; write one with `jaxllm convert`"):
        load_params(tmp_path, config, "float32", load_format="orbax")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_command_that_converts_them(tmp_path, file):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / file).write_bytes(b"never read")
    (folder / "training_args.bin").touch()
    with pytest.raises(WeightsError) as error:
        load_params(folder, read_config(golden_checkpoint(GQA)), "float32")
    assert f"pickled weights only ({file})" in str(error.value)
    command = next(line for line in str(error.value).splitlines() if line.startswith("  jaxllm"))
    assert shlex.split(command) == [
        "jaxllm",
        "convert-bin",
        str(folder),
        str(folder) + "-safetensors",
    ]


def test_dtypes_and_formats_are_validated(tmp_path):
    folder = golden_checkpoint(GQA)
    config = read_config(folder)
    with pytest.raises(ConfigError, match=r"dtype='int8'.*float32, bfloat16, float16, auto"):
        load_params(folder, config, "int8")
    with pytest.raises(ConfigError, match=r"load_format='pickle'.*auto, safetensors, orbax, dummy"):
        load_params(folder, config, "float32", load_format="pickle")
    written = write(tmp_path / "odd", stored(GQA), dtype="float64")
    with pytest.raises(ConfigError, match=r"config\.json: dtype='float64'.*pass dtype as one of"):
        load_params(written, config)


def test_auto_dtype_is_that_of_the_checkpoint(tmp_path):
    bfloat16 = stored(GQA)
    assert resolve_dtype(golden_checkpoint(GQA)) == "float32"
    assert resolve_dtype(write(tmp_path / "a", bfloat16, dtype="bfloat16")) == "bfloat16"
    assert (
        resolve_dtype(write(tmp_path / "b", bfloat16, dtype=None, torch_dtype="torch.float16")) == "float16"
    )
    assert resolve_dtype(write(tmp_path / "c", bfloat16, dtype=None)) == "bfloat16"
    assert resolve_dtype(write(tmp_path / "c", bfloat16, dtype=None), load_format="dummy") == "float32"
    assert resolve_dtype(tmp_path / "absent", "float16") == "float16"


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (["bfloat16", "torch.bfloat16", "BF16"], "bfloat16"),
        (["float16", "torch.float16", "half", "torch.half", "F16"], "float16"),
        (["float32", "torch.float32", "float", "torch.float", "F32"], "float32"),
    ],
)
def test_a_dtype_has_the_same_names_wherever_it_is_named(tmp_path, names, dtype):
    assert stored(GQA)["model.norm.weight"].dtype == "bfloat16"
    for name in names:
        assert EngineConfig(model=tmp_path, dtype=name).dtype == dtype
        assert resolve_dtype(tmp_path, name) == dtype
        config = EngineConfig(model=tmp_path)
        for field in ("dtype", "torch_dtype"):
            assert resolve_dtype(tmp_path, hf_config={field: name}) == dtype
            assert settle_dtype(config, tmp_path, {field: name}, "gpu") == dtype
            assert settle_dtype(config, tmp_path, {field: name}, "cpu") == "float32"
        overrides = EngineConfig(model=tmp_path, hf_overrides={"dtype": name})
        assert settle_dtype(overrides, tmp_path, {"dtype": "float64"}, "gpu") == dtype


def test_a_dtype_that_is_not_named_is_that_of_the_weights(tmp_path):
    folder = write(tmp_path / "a", stored(GQA), dtype=None)
    assert settle_dtype(EngineConfig(model=folder), folder, {}, "gpu") == "bfloat16"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "torch.float8_e4m3fn", "float64", "F8_E4M3", 16])
def test_other_dtypes_are_refused_with_the_way_out(tmp_path, name):
    folder = write(tmp_path / "a", stored(GQA), dtype=name)
    message = f"dtype={name!r} is not supported; pass dtype as one of float32, bfloat16, float16"
    for platform in ("cpu", "gpu"):
        with pytest.raises(ConfigError, match=f"config.json: {message}"):
            settle_dtype(EngineConfig(model=folder), folder, read_hf_config(folder), platform)
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        make_llm(folder)
    with pytest.raises(ConfigError, match=f"{message}, auto"):
        EngineConfig(model=folder, dtype=name)
    assert settle_dtype(EngineConfig(model=folder, dtype="half"), folder, {"dtype": name}, "gpu") == "float16"


def test_arrays_are_committed_to_the_device():
    device = jax.devices()[-1]
    config = read_config(golden_checkpoint(GQA))
    for load_format in ("safetensors", "dummy"):
        for named in (device, jax.sharding.SingleDeviceSharding(device)):
            params = load_params(
                golden_checkpoint(GQA), config, "float32", load_format=load_format, device=named
            )
            assert all(value.committed and value.devices() == {device} for value in params.values())


def test_dummy_weights_are_random_repeatable_and_need_no_folder(tmp_path):
    config = read_config(golden_checkpoint("llama_attention_bias"))
    absent = tmp_path / "absent"
    params = load_params(absent, config, "bfloat16", load_format="dummy", seed=3)
    expected = abstract_params(config, "bfloat16")
    assert {k: (v.shape, v.dtype) for k, v in params.items()} == {
        k: (v.shape, v.dtype) for k, v in expected.items()
    }
    assert_same(load_params(absent, config, "bfloat16", load_format="dummy", seed=3), params)
    other = load_params(absent, config, "bfloat16", load_format="dummy", seed=4)
    matrix = np.asarray(params[QKV], np.float32)
    assert not np.array_equal(matrix, np.asarray(other[QKV], np.float32))
    assert not np.array_equal(matrix, np.asarray(params[QKV.replace("0", "1")], np.float32))
    assert abs(matrix.mean()) < 0.002
    assert 0.018 < matrix.std() < 0.022
    assert np.all(np.asarray(params["norm.weight"], np.float32) == 1)
    assert np.all(np.asarray(params[QKV.replace("weight", "bias")], np.float32) == 0)


def test_files_that_shrink_or_hold_unknown_numbers_are_named(tmp_path):
    folder = write(tmp_path / "checkpoint", stored(GQA))
    tensors = list_tensors(folder)
    last = max(tensors.values(), key=lambda tensor: tensor.offset)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(WeightsError, match=f"{re.escape(last.name)} has .* truncated or corrupt"):
        last.read()
    unknown = dataclasses.replace(last, stored_dtype="F4")
    with pytest.raises(WeightsError, match="is F4, which is none of"):
        unknown.read()


def test_host_memory_stays_below_a_shard(tmp_path):
    """The source dtype differs from the wanted one, so no array on the (CPU) device keeps a host buffer."""
    rng = np.random.default_rng(0)
    changes = {"intermediate_size": 2048, "num_hidden_layers": 8}
    config = config_from_dict(read_hf_config(golden_checkpoint(GQA)) | changes)
    tensors = {
        name.replace("layers.0", f"layers.{layer}"): value
        for name, value in stored(GQA).items()
        if "layers.1" not in name
        for layer in range(8 if "layers.0" in name else 1)
    }
    for name in tensors:
        if "mlp" in name:
            shape = (64, 2048) if "down" in name else (2048, 64)
            tensors[name] = rng.standard_normal(shape, np.float32).astype(np.float16)
    folder = write(tmp_path / "big", tensors, num_shards=3, **changes)
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    load_params(folder, config, "float32")  # compiles, and imports what is imported late

    def peak(work):
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert (
        peak(lambda: load_file(max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size))) > largest
    )
    assert peak(lambda: load_params(folder, config, "float32")) < 0.6 * largest


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (jnp.float32, "float32"),
        (jnp.bfloat16, "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("torch.float16", "float16"),
        (np.dtype("float16"), "float16"),
        (jnp.dtype("bfloat16"), "bfloat16"),
    ],
)
def test_dtypes_by_any_name(dtype, name):
    folder = golden_checkpoint("llama_tied")
    params = load_params(folder, config_from_dict(read_hf_config(folder)), dtype)
    assert {str(weight.dtype) for weight in params.values()} == {name}


@pytest.mark.parametrize("dtype", [np.int8, np.float64, None, 5, object, "float8"])
def test_other_dtypes_are_refused(dtype):
    folder = golden_checkpoint("llama_tied")
    with pytest.raises(
        ConfigError, match="is not supported; pass dtype as one of float32, bfloat16, float16"
    ):
        load_params(folder, config_from_dict(read_hf_config(folder)), dtype)
