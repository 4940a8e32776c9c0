"""Loading, encoding once with special tokens, sandboxed chat templates, stop token ids."""

import json
import logging
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxllm.errors import ConfigError, RequestError
from jaxllm.tokenizer import apply_chat_template, check_messages, encode, eos_token_ids, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if closing is defined %}{{ closing }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def build_backend():
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build_backend().save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 8,
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture
def with_template(folder):
    """A function that loads the tokenizer with another chat template."""
    loaded = load_tokenizer(folder)

    def replace(template):
        loaded.chat_template = template
        return loaded

    return replace


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


def test_chat_template_adds_no_special_tokens(tokenizer):
    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    assert apply_chat_template(tokenizer, HELLO) == [0, *ids("<user>hi<assistant>")]
    assert apply_chat_template(tokenizer, HELLO, add_generation_prompt=False) == [0, *ids("<user>hi")]
    assert apply_chat_template(tokenizer, tuple(HELLO), closing="!")[-1:] == ids("!")


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ("hi", "must be a list"),
        ({"role": "user", "content": "hi"}, "must be a list"),
        (None, "must be a list"),
        ([], "is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([*HELLO, {"role": "user"}], r'messages\[1\] has no "content"'),
        ([{"content": "hi"}], 'has no "role"'),
        ([{"role": 1, "content": "hi"}], '"role".* must be a string'),
        ([{"role": "user", "content": [{"type": "text"}]}], '"content".* must be a string, not list'),
    ],
)
def test_malformed_messages(tokenizer, messages, cause):
    with pytest.raises(RequestError, match=cause):
        apply_chat_template(tokenizer, messages)


def test_check_messages_returns_them():
    assert check_messages(HELLO) is HELLO


def test_a_missing_template_names_the_way_out(with_template):
    with pytest.raises(ConfigError, match=r"no chat template.*plain prompt"):
        apply_chat_template(with_template(None), HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{% for i in range(10 ** 9) %}a{% endfor %}",
        "{% include 'tokenizer.json' %}",
        "{{ 1 + 'a' }}",
        "{% if %}",
    ],
)
def test_hostile_and_broken_templates_fail_cleanly(with_template, template):
    messages = [dict(HELLO[0])]
    with pytest.raises(ConfigError, match="chat template failed"):
        apply_chat_template(with_template(template), messages)
    assert messages == HELLO


def test_a_template_may_refuse_messages(with_template):
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        apply_chat_template(with_template("{{ raise_exception('roles must alternate') }}"), HELLO)


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
