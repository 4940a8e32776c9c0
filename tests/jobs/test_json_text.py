"""JSON of files and options: what is refused, and by which name."""

import json
import shutil

import pytest

from jaxllm import SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, RequestError, SamplingParamsError
from jaxllm.jobs.prompts_io import read_jsonl_file
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import read_hf_config
from jaxllm.system.json_text import parse, read_object

BAD = {
    '{"a": 1, "b": {"a": 2}, "a": 3}': "the key 'a' is there twice",
    "[" * 100_000: "nested too deeply",
    '{"a":' * 100_000: "nested too deeply",
    f'{{"a": {"9" * 5000}}}': "an integer of 5000 digits",
    '{"a": 1e999}': "1e999 is larger than",
    '{"a": NaN}': "NaN is no JSON value",
    '{"a": -Infinity}': "-Infinity is no JSON value",
    '{"a": 1': "delimiter",
    '{"a": "\x00"}': "control character",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_files_and_options_say_what_is_wrong(text, message, tmp_path, capsys):
    with pytest.raises(ValueError, match=message):
        parse(text)
    shutil.copytree(demo_model_path(), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hf_config(file.parent)
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(structured_outputs={"json": text})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"prompt": "a", "sampling_params": {text}}}')
    with pytest.raises(RequestError, match=f"line 1: no valid JSON .*{message}"):
        read_jsonl_file(prompts, SamplingParams())
    if len(text) < 10_000 and "\0" not in text:
        assert main(["generate", "a", "--hf-overrides", text]) == 2
        assert message in capsys.readouterr().err


def test_files_of_other_encodings_and_kinds_are_named(tmp_path):
    file = tmp_path / "config.json"
    for content, message in (
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_object(file)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_object(tmp_path)


def test_what_is_right_is_read_as_python_reads_it():
    text = json.dumps({"a": [1, -2.5, None, True, {"b": "é"}], "c": 10**90})
    assert parse(text) == json.loads(text)


def test_only_brackets_outside_of_strings_nest():
    deepest = "[" * 128 + "]" * 128
    assert json.dumps(parse(deepest)) == deepest
    for text in ("[" + deepest + "]", '{"a":' * 129 + "1" + "}" * 129):
        for sent in (text, text.encode(), text.encode("utf-16")):
            with pytest.raises(ValueError, match="nested too deeply; at most 128 levels are read"):
                parse(sent)
    assert len(parse("[" + "[1]," * 1000 + "{}]")) == 1001
    said = {"a": "[" * 200 + '"\\' + "{" * 200, 'b"[': ["\ud800" + "[" * 200]}
    assert parse(json.dumps(said)) == said
    assert parse(json.dumps(said, ensure_ascii=False).encode("utf-8", "surrogatepass")) == said
