"""Converting checkpoints to Orbax, and loading what was converted."""

import asyncio
import gc
import logging
import sys
import threading
import time
import warnings

import pytest
from checkpoint_helpers import GQA, assert_same, read_config, stored, write
from variants import golden_checkpoint

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError, WeightsError
from jaxllm.loading import compressed_tensors, convert_checkpoint, load_params, orbax_format, resolve_dtype
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config


def test_convert_round_trips_through_orbax_quietly(tmp_path, monkeypatch, caplog, capfd):
    source = write(tmp_path / "source", stored(GQA), num_shards=2)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "notes.txt"):
        (source / name).write_text(name)
    monkeypatch.setattr(orbax_format, "_GROUP_BYTES", 40_000)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = convert_checkpoint(source, tmp_path / "new" / "converted", "bfloat16")
        config = read_config(converted)
        restored = load_params(converted, config)
        cast = load_params(converted, config, "float32")
    assert not caplog.records
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in converted.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "params",
        "tokenizer.json",
    ]
    assert len(list((converted / "params").iterdir())) > 2
    assert resolve_dtype(converted) == "bfloat16"
    assert read_hf_config(converted)["hidden_size"] == 64
    assert_same(restored, load_params(source, config, "bfloat16"))
    assert_same(cast, load_params(source, config, "float32"))  # the source is bfloat16: nothing was lost
    assert all(value.committed for value in cast.values())


@pytest.mark.parametrize("name", ["qwen2", "qwen3_bias", "granite", "phi3_longrope", "gemma3"])
def test_other_families_round_trip(tmp_path, name):
    source = golden_checkpoint(name)
    folder = convert_checkpoint(source, tmp_path / "converted", "float32")
    config = read_config(folder)
    assert config == read_config(source)
    assert_same(load_params(folder, config), load_params(source, config, "float32"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return convert_checkpoint(
        golden_checkpoint("opt_post_norm"), tmp_path_factory.mktemp("orbax") / "m", "float32"
    )


def test_converted_weights_are_checked_against_the_config(converted):
    changed = {"ffn_dim": 64, "num_hidden_layers": 1, "tie_word_embeddings": False}
    config = config_from_dict(read_hf_config(converted) | changed)
    with pytest.raises(WeightsError) as error:
        load_params(converted, config, "float32")
    missing, unexpected, wrong = str(error.value).split("; ")
    assert "lm_head.weight" in missing
    assert "layers.1.fc1.weight" in unexpected
    assert "layers.0.fc1.weight is [128, 64], expected [64, 64]" in wrong


def test_converted_checkpoints_convert_again(converted, tmp_path):
    again = convert_checkpoint(converted, tmp_path / "again", "float16")
    assert resolve_dtype(again) == "float16"
    config = read_config(again)
    assert_same(load_params(again, config), load_params(converted, config, "float16"))


def test_corrupt_converted_weights_are_named(converted, tmp_path):
    config = read_config(converted)
    (tmp_path / "params" / "00000").mkdir(parents=True)
    with pytest.raises(WeightsError, match=r"cannot read the Orbax checkpoint .*00000.*jaxllm convert"):
        load_params(tmp_path, config, "float32")
    (tmp_path / "params" / "00000").rmdir()
    with pytest.raises(WeightsError, match="missing: "):
        load_params(tmp_path, config, "float32")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = convert_checkpoint(golden_checkpoint(GQA), tmp_path_factory.mktemp("damaged") / "m", "float32")
    data = max((folder / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:100])
    return folder


def test_a_damaged_array_of_converted_weights_is_named(damaged):
    with pytest.raises(WeightsError, match="cannot read the Orbax checkpoint"):
        load_params(damaged, read_config(damaged), "float32")


def test_reads_beside_a_failed_one_end_and_print_nothing(converted, monkeypatch, caplog, capfd):
    import orbax.checkpoint

    ended = []

    async def slow():
        loop = asyncio.get_running_loop()
        future = loop.create_future()  # set by a thread, as TensorStore does
        threading.Timer(0.05, loop.call_soon_threadsafe, [future.set_result, None]).start()
        try:
            await future
            await asyncio.sleep(0.01)
            raise OSError("a read that nobody waits for")
        finally:
            ended.append("slow")

    async def failing():
        await asyncio.sleep(0)
        ended.append("failing")
        raise ValueError("damaged")

    async def read_all():
        await asyncio.gather(slow(), failing(), failing())

    def restore(*_):
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(read_all())
        finally:
            loop.close()

    monkeypatch.setattr(orbax.checkpoint.StandardCheckpointer, "restore", restore)
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    monkeypatch.setattr(threading, "excepthook", unraisable.append)
    made = asyncio.new_event_loop
    with pytest.raises(WeightsError, match=r"cannot read the Orbax checkpoint.*damaged"):
        load_params(converted, read_config(converted), "float32")
    assert ended == ["failing", "failing", "slow"]
    assert asyncio.new_event_loop is made
    gc.collect()
    assert unraisable == []
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_damaged_weights_fail_in_silence_every_time(damaged, monkeypatch, caplog, capfd):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for _ in range(10):  # where the other reads are when one fails is chance
        with pytest.raises(WeightsError, match="cannot read the Orbax checkpoint"):
            load_params(damaged, read_config(damaged), "float32")
    time.sleep(0.1)
    gc.collect()
    assert unraisable == []
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_an_interrupted_conversion_leaves_nothing_that_looks_valid(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    target = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(orbax_format, "_save_group", fail)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(golden_checkpoint(GQA), target, "float32")
    assert list(tmp_path.iterdir()) == []
    # What a killed process leaves is not `target` either, and does not stop the next attempt.
    (tmp_path / ".target.partial" / "params").mkdir(parents=True)
    target.mkdir()
    convert_checkpoint(golden_checkpoint(GQA), target, "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_convert_refuses_what_it_would_overwrite(tmp_path):
    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "file", golden_checkpoint(GQA)):
        with pytest.raises(ConfigError, match="exists and is not an empty folder"):
            convert_checkpoint(golden_checkpoint(GQA), target, "float32")


@pytest.mark.parametrize("quantization", ["int8", "int8_weight", "int4_weight", "fp8"])
def test_a_quantised_folder_gives_what_quantising_at_load_gives(quantization, tmp_path, monkeypatch):
    monkeypatch.setattr(compressed_tensors, "_SHARD_BYTES", 2**20)  # many files
    source, options = demo_model_path(), {"max_num_seqs": 2, "max_model_len": 128, "prefill_buckets": [64]}
    folder = convert_checkpoint(source, tmp_path / "quantised", quantization=quantization)
    assert (folder / "tokenizer.json").is_file()
    stored = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    assert len(stored) > 1
    whole = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=1)
    answers = []
    for model, settings in (
        (folder, {}),
        (source, {"quantization": quantization, "quantize_lm_head": False}),
    ):
        with LLM(model, dtype="float32", **options, **settings) as llm:
            answers.append(llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0])
            kinds = {type(one).__name__ for one in llm.executor._params.values()} - {"ArrayImpl", "Panels"}
        assert len(kinds) == 1
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].cumulative_logprob == pytest.approx(answers[1].cumulative_logprob, abs=1e-4)
    assert sum(stored.values()) < whole


@pytest.mark.parametrize("quantization", ["int8", "int8_weight", "int4_weight", "fp8"])
def test_weights_that_are_not_finite_are_not_quantised(quantization, tmp_path):
    tensors = stored(GQA)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    folder = write(tmp_path / "broken", tensors)
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight has numbers that are not finite"):
        convert_checkpoint(folder, tmp_path / "quantised", quantization=quantization)
    assert not (tmp_path / "quantised").exists()


def test_what_cannot_be_quantised_is_refused(tmp_path):
    folder = convert_checkpoint(demo_model_path(), tmp_path / "quantised", quantization="int8")
    with pytest.raises(ConfigError, match="are quantised already; convert the checkpoint"):
        convert_checkpoint(folder, tmp_path / "again", quantization="int8")
    orbax = convert_checkpoint(demo_model_path(), tmp_path / "orbax")
    with pytest.raises(ConfigError, match=r"orbax' is a converted checkpoint \(Orbax\), and tensors of"):
        convert_checkpoint(orbax, tmp_path / "again", quantization="int8")
    with pytest.raises(ConfigError, match="stays as it is; leave the dtype out"):
        convert_checkpoint(demo_model_path(), tmp_path / "again", "float32", quantization="int8")
    with pytest.raises(ConfigError, match="quantization='int5' is not supported"):
        convert_checkpoint(demo_model_path(), tmp_path / "again", quantization="int5")
    assert not (tmp_path / "again").exists()
