"""Loading, encoding once with special tokens, stop token ids."""

import json
import logging
import subprocess
import sys

import pytest
from tokenizer_helpers import write_tokenizer

from jaxllm.errors import ConfigError, RequestError
from jaxllm.tokenizer import encode, eos_token_ids, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_importing_jaxllm_tokenizer_imports_no_transformers():
    code = "import sys, jaxllm.tokenizer, jaxllm.detokenizer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_special_tokens_are_added_exactly_once(tokenizer):
    letters = tokenizer.convert_tokens_to_ids(["h", "i"])
    assert encode(tokenizer, "hi") == [0, *letters]
    assert encode(tokenizer, "<s>hi") == [0, *letters]
    assert encode(tokenizer, "<s>") == [0]
    assert encode(tokenizer, "hi<s>") == [0, *letters, 0]
    assert encode(tokenizer, "") == [0]


def test_long_prompts_do_not_warn(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(encode(tokenizer, "a" * 50)) == 51
    assert not caplog.records


def test_prompts_that_are_no_text(tokenizer):
    for prompt in (None, 5, b"hi", ["hi"]):
        with pytest.raises(RequestError, match="must be a string"):
            encode(tokenizer, prompt)
    with pytest.raises(RequestError, match=r"U\+D800 at character 1"):
        encode(tokenizer, "a\ud800")


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        (None, "not a folder"),
        ({}, "cannot load"),
        ({"tokenizer.json": "{broken"}, "cannot load"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "cannot load"),
        ({"tokenizer_config.json": "[]"}, "cannot load"),
    ],
)
def test_absent_and_broken_tokenizers(tmp_path, files, cause):
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name, content in files.items():
            (path / name).write_text(content)
    with pytest.raises(ConfigError, match=cause) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "skip_tokenizer_init=True" in str(caught.value)


def test_code_in_the_checkpoint_is_never_run(folder, tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "custom.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Custom: pass\n")
    config = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="never runs"):
        load_tokenizer(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, {1}),
        ({"eos_token_id": 5}, None, {1, 5}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": [6, 7]}, {1, 5, 6, 7}),
        ({"eos_token_id": None}, {}, {1}),
    ],
)
def test_eos_token_ids_are_the_union(tmp_path, tokenizer, config, generation, expected):
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path, tokenizer) == expected
    assert eos_token_ids(tmp_path, None) == expected - {1}


@pytest.mark.parametrize(
    "content", ["{", "[]", *(json.dumps({"eos_token_id": v}) for v in ("2", True, -1, 2.0, [[2]]))]
)
def test_broken_configs_are_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        eos_token_ids(tmp_path, None)
