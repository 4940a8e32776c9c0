"""Where checkpoints are found: folders, ids in a Hugging Face cache, downloads."""

import json
import shutil

import huggingface_hub
import pytest
from engine_helpers import make_llm
from huggingface_hub.errors import LocalEntryNotFoundError
from variants import golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import checkpoint_folder, demo_model_path

NAME = "llama_gqa"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def cached(cache, repo_id, revision="main", without=()):
    """A checkpoint as `huggingface_hub` stores it: blobs, links to them, and references to commits."""
    repository = cache / ("models--" + repo_id.replace("/", "--"))
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / revision).write_text(COMMIT)
    for place, path in enumerate(sorted(golden_checkpoint(NAME).iterdir())):
        if path.name in without or path.name == "golden.npz":
            continue
        shutil.copy(path, repository / "blobs" / str(place))
        (snapshot / path.name).symlink_to(f"../../blobs/{place}")
    return snapshot


@pytest.fixture
def no_network(monkeypatch):
    """A Hub that is asked for nothing; what was asked is in the list."""
    asked = []
    real = huggingface_hub.snapshot_download

    def download(repo_id, *, local_files_only, **options):
        if local_files_only:
            return real(repo_id, local_files_only=True, **options)
        asked.append((repo_id, options))
        raise LocalEntryNotFoundError("no network here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_an_id_in_the_cache_is_a_model(tmp_path, no_network):
    snapshot = cached(tmp_path, "organisation/tiny")
    assert checkpoint_folder("organisation/tiny", cache_dir=tmp_path) == snapshot
    llm = make_llm("organisation/tiny", download_dir=tmp_path)
    assert repr(llm).startswith("LLM('organisation/tiny', Llama of ")
    data = golden_data(NAME)
    outputs = llm.generate(data["prompts"], GREEDY, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [tokens[:8] for tokens in data["greedy"]]
    assert no_network == []
    assert checkpoint_folder("organisation/tiny", download=True, cache_dir=tmp_path) == snapshot
    assert len(no_network) == 1  # for a tokenizer, which there is none of
    (snapshot / "tokenizer.json").touch()
    assert checkpoint_folder("organisation/tiny", download=True, cache_dir=tmp_path) == snapshot
    assert len(no_network) == 1


def test_the_environment_names_the_cache(tmp_path, monkeypatch, no_network):
    snapshot = cached(tmp_path, "tiny", revision="v2")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert checkpoint_folder("tiny", revision="v2", cache_dir=tmp_path) == snapshot
    with pytest.raises(
        ConfigError, match=r"'tiny' does not exist, and the Hugging Face cache in .*--download"
    ):
        checkpoint_folder("tiny", download=False)
    with pytest.raises(ConfigError, match="of that id at revision 'v3'"):
        checkpoint_folder("tiny", revision="v3")


def test_folders_go_first_and_have_no_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "organisation" / "tiny").mkdir(parents=True)
    found = checkpoint_folder("organisation/tiny", download=True)
    assert found.resolve() == tmp_path / "organisation" / "tiny"
    with pytest.raises(ConfigError, match=r"revision='main' is one of a Hub id, and .* is a folder here"):
        checkpoint_folder(demo_model_path(), revision="main")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_what_the_cache_lacks_is_downloaded_only_when_asked(tmp_path, no_network, missing):
    snapshot = cached(tmp_path, "organisation/tiny", without=(missing,))
    assert (
        checkpoint_folder("organisation/tiny", cache_dir=tmp_path) == snapshot
    )  # its reader says what is missing
    assert no_network == []
    with pytest.raises(ConfigError, match=r"cannot fetch 'organisation/tiny' .*no network here.*HF_TOKEN"):
        checkpoint_folder("organisation/tiny", download=True, cache_dir=tmp_path)
    [(repo_id, options)] = no_network
    assert repo_id == "organisation/tiny"
    assert options["cache_dir"] == tmp_path
    assert "*.bin" not in options["allow_patterns"]


def test_shards_are_all_needed(tmp_path, no_network):
    snapshot = cached(tmp_path, "tiny", without=("model.safetensors",))
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (snapshot / weights["a"]).touch()
    with pytest.raises(ConfigError, match="cannot fetch"):
        checkpoint_folder("tiny", download=True, cache_dir=tmp_path)
    (snapshot / weights["b"]).touch()
    assert checkpoint_folder("tiny", download=True, cache_dir=tmp_path) == snapshot


@pytest.mark.parametrize("name", ["a/b/c", "../x", "", "x" * 5000, "a\0b", "-x"])
def test_what_can_be_no_id_is_no_download(name):
    with pytest.raises(ConfigError, match="does not exist, nor is it an id"):
        checkpoint_folder(name, download=True)
    with pytest.raises(ConfigError, match=r"does not exist|must be a path|no path has|path of 5000"):
        make_llm(name)


def test_the_command_takes_ids(tmp_path, capsys, no_network):
    cached(tmp_path, "organisation/tiny")
    out = tmp_path / "answers.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    options = [
        "--model",
        "organisation/tiny",
        "--download-dir",
        str(tmp_path),
        "--num-gpu-blocks-override",
        "32",
    ]
    options += ["--tokenizer", str(demo_model_path()), "--max-tokens", "4", "--input", str(prompts)]
    assert main(["generate", *options, "--output", str(out)]) == 0
    assert "loading tiny and compiling" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 1
    assert main(["generate", *options, "--output", str(out), "--resume"]) == 0
    assert main(["generate", *options, "--revision", "v9", "--output", str(out), "--resume"]) == 2
    assert "at revision 'v9'" in capsys.readouterr().err
