"""Loading, encoding once with special tokens, stop token ids."""

import json
import logging
import subprocess
import sys

import pytest
from engine_helpers import make_llm
from tokenizer_helpers import build_backend, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from variants import golden_checkpoint

from jaxllm.errors import ConfigError, RequestError
from jaxllm.text.tokenizer import encode, eos_token_ids, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_importing_jaxllm_tokenizer_imports_no_transformers():
    code = (
        "import sys, jaxllm.text.tokenizer, jaxllm.text.detokenizer; sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_loading_a_tokenizer_imports_no_models_of_transformers(tmp_path, named):
    """With those comes torch, where it is installed: two seconds of each start."""
    folder = write_tokenizer(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": named}))
    code = (
        "import sys; from jaxllm.text.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1])\n"
        "sys.exit('transformers.configuration_utils' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0


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
    assert "skip_tokenizer_init" not in str(caught.value)
    with pytest.raises(ConfigError, match="skip_tokenizer_init=True and give prompts as token ids"):
        make_llm(golden_checkpoint("llama_gqa"), tokenizer=str(tmp_path), skip_tokenizer_init=False)


def with_merges(*pairs):
    """Bytes and what pairs of them become."""
    vocabulary = build_backend().get_vocab()
    for pair in pairs:
        for name in (*pair, "".join(pair)):
            vocabulary.setdefault(name, len(vocabulary))
    return models.BPE(vocabulary, list(pairs))


def byte_level(**parts):
    """A pipeline of bytes: words, then whatever else is given."""
    backend = build_backend()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def sentence_piece(normalizer, **options):
    """A pipeline of Llama 2's kind: bytes where there is no piece."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁a", "b")]
    model = models.BPE({n: i for i, n in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.add_special_tokens([AddedToken(one, special=True) for one in ("<unk>", "<s>", "</s>")])
    backend.normalizer = normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for name, part in options.items():
        setattr(backend, name, part)
    return backend


def digits():
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return pre_tokenizers.Sequence(parts)


FOLDERS = {
    "gpt2": (
        byte_level(pre_tokenizer=digits(), model=with_merges(("1", "2"), ("h", "i"))),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"},
        "llama",
    ),
    "llama": (
        sentence_piece(normalizers.Replace(" ", "▁")),
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "llama",
    ),
    "llama fast": (
        byte_level(model=with_merges(("1", "2"))),
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<s>"},
        "mistral",
    ),
    "qwen2": (
        byte_level(normalizer=None, pre_tokenizer=digits(), model=with_merges(("e", "\u0301"))),
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
        "qwen2",
    ),
    "qwen2 of its class": (
        byte_level(pre_tokenizer=digits(), model=with_merges(("1", "2"))),
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>", "pad_token": "</s>"},
        "qwen2",
    ),
    "of the model's class": (byte_level(pre_tokenizer=digits()), {"eos_token": "</s>"}, "qwen2"),
    "of no class": (byte_level(pre_tokenizer=digits()), {"tokenizer_class": "FromTomorrow"}, "llama"),
    "without a configuration": (sentence_piece(normalizers.Prepend("▁")), None, "gemma2"),
}
TEXTS = ["hi 12345", " a  ab\n", "ab ab", "e\u0301 é", "日本 🙂", "a<s>b</s> c", ""]


@pytest.mark.parametrize("kind", FOLDERS)
def test_text_becomes_what_the_file_says_whatever_the_class(tmp_path, kind):
    backend, config, model_type = FOLDERS[kind]
    backend.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        for adds in (True, False):
            expected = backend.encode(text, add_special_tokens=adds).ids
            assert loaded.encode(text, add_special_tokens=adds) == expected
        ids = backend.encode(text).ids
        assert loaded.decode(ids) == backend.decode(ids, skip_special_tokens=False)
    for name in ("bos_token", "eos_token", "pad_token"):
        if config and name in config:
            assert getattr(loaded, name) == config[name]


def test_tokens_that_the_files_describe_differently_are_found_as_tokenizer_json_says(tmp_path):
    backend = build_backend()
    backend.add_tokens([AddedToken("<|a|>", special=False, normalized=False), "<|b|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    greedy = {"lstrip": True, "rstrip": True, "single_word": True, "normalized": True}
    first = len(backend.get_vocab()) - 2
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"content": "<s>", "special": True, "__type": "AddedToken", **greedy},
        "added_tokens_decoder": {
            "0": {"content": "<s>", "special": True, **greedy},
            str(first): {"content": "<|a|>", "special": True, **greedy},
        },
        "additional_special_tokens": ["<|b|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    for text in ("h <s> i", "h<|a|>i", "h <|a|> i", "h <|b|> i"):
        assert loaded.encode(text) == backend.encode(text).ids
    ids = backend.encode("h<|a|>i").ids
    assert loaded.decode(ids, skip_special_tokens=True) == "hi"  # which are special, the others say


def test_special_tokens_are_those_of_the_class_where_no_file_names_them(tmp_path):
    def loaded(config, special=None):
        sentence_piece(None).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special or {}))
        found = load_tokenizer(tmp_path)
        return [found.bos_token, found.eos_token, found.unk_token, found.pad_token]

    assert loaded({"tokenizer_class": "LlamaTokenizer"}) == ["<s>", "</s>", "<unk>", None]
    assert loaded({"tokenizer_class": "LlamaTokenizer", "bos_token": None})[0] is None
    assert loaded({"tokenizer_class": "LlamaTokenizer"}, {"bos_token": "</s>"})[0] == "</s>"
    assert loaded({"tokenizer_class": "GPT2Tokenizer"}) == [None] * 4  # <|endoftext|> is no token here
    assert loaded({"tokenizer_class": "PreTrainedTokenizerFast"}) == [None] * 4


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_what_is_added_to_prompts_is_told_elsewhere_only_where_the_file_has_nothing_on_it(tmp_path, kind):
    def encoded(processor, **options):
        byte_level(post_processor=processor).save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", **options}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return encode(load_tokenizer(tmp_path), "a")[:1] == [0], encode(load_tokenizer(tmp_path), "a")[
            -1
        ] == 1

    said = build_backend().post_processor
    assert encoded(said, add_bos_token=False, add_eos_token=True) == (True, False)
    assert encoded(processors.ByteLevel(), add_bos_token=True) == (False, False)
    silent = processors.Sequence([])
    assert encoded(silent, add_bos_token=True) == (False, False)


def test_a_file_without_a_post_processor_leaves_it_to_the_configuration(tmp_path):
    file = json.loads(build_backend().to_str()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    for options, ends in (
        ({}, (False, False)),
        ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | options))
        ids = encode(load_tokenizer(tmp_path), "a")
        assert (ids[0] == 0, ids[-1] == 1) == ends


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_chat_templates_are_found_wherever_checkpoints_have_them(tmp_path, kind):
    def templates(in_config, files):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        (folder / "additional_chat_templates").mkdir(parents=True)
        write_tokenizer(folder, in_config)
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in files.items():
            (folder / name).write_text(text)
        return load_tokenizer(folder).chat_template

    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    of_processor = {"chat_template.json": json.dumps({"chat_template": "p"})}
    assert templates("c", {}) == "c"
    assert templates(named, {}) == {"default": "d", "tool_use": "t"}
    assert templates("c", {"chat_template.jinja": "j"}) == "j"
    assert templates("c", of_processor) == "c"
    assert templates(None, of_processor) == "p"
    assert templates(None, {}) is None
    both = {"chat_template.jinja": "j", "additional_chat_templates/tool_use.jinja": "t"}
    assert templates(None, both) == {"default": "j", "tool_use": "t"}


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
