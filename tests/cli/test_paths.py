"""What no file can be called is refused by name, wherever somebody names one."""

import pytest

from jaxllm import LLM
from jaxllm.cli.main import main
from jaxllm.engine.ledgers import open_ledger, read_ledger
from jaxllm.errors import ConfigError
from jaxllm.loading import convert_checkpoint
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.predictors.samples import load_samples, save_samples
from jaxllm.predictors.store import Profile
from jaxllm.research import simulate
from jaxllm.research.iterations import load_iterations
from jaxllm.research.shapes import load_shape
from jaxllm.research.workloads import (
    load_conversations,
    load_dataset_file,
    load_trace,
    load_trace_csv,
    make_trace,
)
from jaxllm.research.workloads.trace import Trace
from jaxllm.text.tokenizer import load_tokenizer

WAYS = {
    "load_trace": load_trace,
    "load_trace_csv": load_trace_csv,
    "load_dataset_file": lambda path: load_dataset_file(path, None, length_column="n"),
    "load_conversations": lambda path: load_conversations(path, load_tokenizer(demo_model_path())),
    "Trace.load": Trace.load,
    "Trace.save": lambda path: make_trace("chatbot", 2, 32, seed=1).save(path),
    "Profile.load": Profile.load,
    "read_ledger": read_ledger,
    "open_ledger": open_ledger,
    "load_tokenizer": load_tokenizer,
    "load_shape": load_shape,
    "load_iterations": load_iterations,
    "load_samples": load_samples,
    "save_samples": lambda path: save_samples(path, {}, {}),
    "convert from": lambda path: convert_checkpoint(path, "never"),
    "convert to": lambda path: convert_checkpoint(demo_model_path(), path),
    "simulate costs": lambda path: simulate(costs=path, gpu_blocks=64),
    "simulate trace": simulate,
    "LLM model": LLM,
    "LLM ledger": lambda path: LLM(ledger=path),
}


@pytest.mark.parametrize(
    "name", ["a\0b.json", "a\ud800b.json", "a" * 5000 + ".json"], ids=["null", "surrogate", "long"]
)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_path_is_refused_by_name(way, name, tmp_path):
    with pytest.raises(ConfigError, match=r"(holds characters that no path has|at most 4095 bytes)"):
        WAYS[way](str(tmp_path / name))


@pytest.mark.parametrize("way", sorted({*WAYS} - {"LLM model", "LLM ledger", "simulate costs"}))
def test_what_is_no_text_is_no_path(way):
    with pytest.raises(ConfigError, match="must be"):
        WAYS[way](3)


@pytest.mark.parametrize("command", [["explain"], ["profile", "--fit"], ["generate", "x", "--output"]])
def test_a_command_refuses_them_too(command, capsys):
    assert main([*command, "a\0b.jsonl"]) == main([*command, "a\ud800b.jsonl"]) == 2
    assert capsys.readouterr().err.count("holds what is no character of arguments") == 2
