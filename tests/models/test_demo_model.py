from __future__ import annotations

import importlib.util
import json
import math
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

import jaxllm
from jaxllm.models.config import config_from_dict
from jaxllm.models.llama import LlamaConfig
from jaxllm.text.chat import apply_chat_template
from jaxllm.text.tokenizer import encode, eos_token_ids, load_tokenizer

DEMO = Path(jaxllm.__file__).parent / "demo_model"
SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo_model.py"
SEPARATOR = "<|endoftext|>"

SOURCES = [
    'def f(x, *, y=1):\n    """Doc."""\n    return x + y\n',
    "if True:\n\tpass\n\t\t# tabs\r\n\r\n\r\n   trailing   \n\n",
    "name = 'Zoë Ångström 東京 Привет'  # 🙂 👩‍👩‍👧 \U0001f1eb\U0001f1f7\n",
    " leading space, 1234567 0x_ff 1e-9 \\ \x00 \x7f \u200b\ufeff",
    "e\u0301 \u00e9 ﬁ \u00a0 ½\n",
    "",
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))  # its other half is imported from there
    spec = importlib.util.spec_from_file_location("train_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def read_json(name: str, folder: Path = DEMO) -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def demo_config(folder: Path = DEMO) -> LlamaConfig:
    config = config_from_dict(read_json("config.json", folder))
    assert isinstance(config, LlamaConfig)
    return config


def test_folder_is_complete_and_small() -> None:
    files = sorted(DEMO.iterdir())
    assert [file.name for file in files] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]
    assert sum(file.stat().st_size for file in files) < 10_000_000


def test_config_is_one_the_engine_reads() -> None:
    config = demo_config()
    assert config.vocab_size == 4096
    assert config.max_model_len == 1024
    assert config.tie_word_embeddings
    assert read_json("config.json")["dtype"] == "bfloat16"


def test_weights_have_hugging_face_names_and_shapes(script: ModuleType) -> None:
    with safe_open(DEMO / "model.safetensors", framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
        assert {name: tuple(part.get_shape()) for name, part in slices.items()} == script.weight_shapes(
            demo_config()
        )
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}


def test_training_record_states_the_held_out_loss() -> None:
    record = read_json("training.json")
    assert record["finished"]
    assert record["tokens_seen"] > 0
    assert record["seconds"] > 0
    held_out = record["held_out"]
    assert 0.01 < held_out["bytes"] / record["data"]["bytes"] < 0.06
    for key in ("float32", "bfloat16_weights"):
        loss = held_out[key]
        assert 0 < loss["nats_per_token"] < math.log(4096)
        bits = loss["nats_per_token"] / math.log(2) * held_out["tokens"] / held_out["bytes"]
        assert loss["bits_per_byte"] == pytest.approx(bits, abs=1e-4)
    assert held_out["bfloat16_weights"]["nats_per_token"] == pytest.approx(
        held_out["float32"]["nats_per_token"], abs=0.02
    )


def test_model_predicts_python(script: ModuleType) -> None:
    with safe_open(DEMO / "model.safetensors", framework="flax") as file:
        weights = {name: file.get_tensor(name).astype(jnp.float32) for name in file.keys()}  # noqa: SIM118
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    source = Path(textwrap.__file__).read_text(encoding="utf-8")  # a held-out file
    ids = np.array([tokenizer.encode(source).ids[:257]])
    loss = float(script.losses(demo_config(), weights, ids[:, :-1], ids[:, 1:]).mean())
    assert loss < 5.0  # untrained: 8.3


@pytest.mark.parametrize("text", SOURCES)
def test_tokenizer_keeps_every_character(text: str) -> None:
    tokenizer = load_tokenizer(DEMO)
    token_ids = encode(tokenizer, text)
    assert token_ids[0] == 0
    assert 0 not in token_ids[1:]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert tokenizer.decode(token_ids) == SEPARATOR + text


def test_tokenizer_agrees_with_the_config() -> None:
    tokenizer = load_tokenizer(DEMO)
    config = read_json("config.json")
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.bos_token_id == config["bos_token_id"] == 0
    assert tokenizer.eos_token_id == config["eos_token_id"] == 0
    assert eos_token_ids(DEMO, tokenizer) == {0}
    assert encode(tokenizer, SEPARATOR + "import os") == encode(tokenizer, "import os")


def test_tokenizer_groups_indentation() -> None:
    tokens = load_tokenizer(DEMO).tokenize("\n        return self\n")
    assert len(tokens) <= 5


def test_chat_turns_requests_into_comments() -> None:
    tokenizer = load_tokenizer(DEMO)
    messages = [
        {"role": "user", "content": "Say hello.\nTwice."},
        {"role": "assistant", "content": "print('hello')"},
        {"role": "user", "content": "Again."},
    ]
    token_ids = apply_chat_template(tokenizer, messages)
    assert tokenizer.decode(token_ids) == (f"{SEPARATOR}# Say hello.\n# Twice.\nprint('hello')\n# Again.\n")
    assert token_ids.count(0) == 1


def test_training_script(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    (data / "tests").mkdir(parents=True)
    for number in range(4):
        lines = [f"def f{number}_{i}(x):\n    return x + {i}\n" for i in range(60)]
        (data / f"module{number}.py").write_text("\n".join(lines), encoding="utf-8")
    (data / "tests" / "test_it.py").write_text("unwanted = 1\n", encoding="utf-8")
    sizes = ["--vocab-size", "300", "--positions", "32", "--batch-tokens", "64"]
    sizes += ["--data", str(data), "--work-dir", str(tmp_path / "work")]
    model = ["--hidden-size", "16", "--intermediate-size", "24", "--layers", "1", "--head-dim", "4"]

    output = tmp_path / "model"
    script.main([*sizes, *model, "--steps", "3", "--save-minutes", "0", "--output", str(output)])

    assert {file.name for file in output.iterdir()} == {file.name for file in DEMO.iterdir()}
    record = read_json("training.json", output)
    assert record["finished"]
    assert record["steps"] == 3
    assert record["tokens_seen"] == 3 * 64
    assert record["data"]["files"] + len(record["held_out"]["files"]) == 4
    assert math.isfinite(record["held_out"]["float32"]["nats_per_token"])
    assert demo_config(output).num_layers == 1
    assert encode(load_tokenizer(output), "def f") == [0, *load_tokenizer(output)("def f").input_ids[1:]]
    assert "done: 3 steps" in capsys.readouterr().out

    again = tmp_path / "again"
    checkpoint = ["--export-only", str(tmp_path / "work" / "final.safetensors")]
    script.main([*sizes, *model, *checkpoint, "--output", str(again)])
    for file in output.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_training_windows_start_at_lines(script: ModuleType) -> None:
    documents = [(f"{i}.py", "".join(f"line {j}\n\tand more {i}\n" for j in range(50))) for i in range(3)]
    corpus = importlib.import_module("demo_model_data").Corpus(documents, [])
    tokenizer = script.train_tokenizer(corpus, 280)
    windows = script.Windows(tokenizer, documents, seed=0)
    batch = windows.batch(40, 16)
    assert batch.shape == (40, 17)
    assert (batch[:, 0] == 0).all()
    for row in batch:
        text = tokenizer.decode(row[1:].tolist(), skip_special_tokens=False)
        assert text.startswith(("line", "\tand", SEPARATOR))


def test_nothing_is_trained_over_a_model_or_what_was_saved(script, tmp_path, capsys) -> None:
    output, work, saved = tmp_path / "model", tmp_path / "work", tmp_path / "work" / "final.safetensors"
    work.mkdir()
    saved.write_text("precious")
    for options in (
        ["--output", str(output), "--work-dir", str(work)],
        ["--work-dir", str(tmp_path / "new")],
    ):
        with pytest.raises(SystemExit):
            script.parse(options)
        assert "exists, and nothing is overwritten" in capsys.readouterr().err
        script.parse([*options, "--overwrite"])
    script.parse(["--output", str(output), "--work-dir", str(work), "--export-only", str(saved)])


def test_clock_ends_the_schedule(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(script.time, "perf_counter", lambda: 60.0 * next(now))
    args = script.parse(["--steps", "1000000", "--minutes", "10", "--overwrite"])
    steps = list(script.schedule(args))
    assert len(steps) == 9
    fractions = [fraction for _, fraction, _ in steps]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(0.9)
    assert [late for _, _, late in steps] == [fraction > 0.3 for fraction in fractions]
