"""The commands, in this process on one tiny engine; and one in its own process, killed and resumed."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from variants import golden_checkpoint

import jaxllm
from jaxllm.cli import generate
from jaxllm.cli.main import main
from jaxllm.cluster.config import ClusterConfig
from jaxllm.engine.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.jobs.prompts_io import prompts_from_arguments
from jaxllm.llm import LLM
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.commands import bench
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.presets import PRESETS
from jaxllm.server.config import ServerConfig
from jaxllm.system.options import flag, options_of

SETTINGS = {
    "load_format": "dummy",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 40,
    "decode_buckets": "4",
    "prefill_buckets": "32",
}
ENGINE_OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """JAX's compilation cache, shared with the process that is killed."""
    folder = str(tmp_path_factory.mktemp("xla"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of width 64, without weights, and the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((demo_model_path() / "config.json").read_text())
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_model_path() / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def llm(model, cache):
    sizes = SETTINGS | {"decode_buckets": [4], "prefill_buckets": [32]}
    return LLM(model, compilation_cache_dir=None, **sizes)


@pytest.fixture
def run(llm, model, monkeypatch):
    """Runs a command on the shared engine; returns its exit code."""

    def load_llm(settings, *, quiet=False, compile_report=False):
        assert settings["model"] == model
        assert settings["seed"] == 0  # that of the shared engine's weights
        return llm

    monkeypatch.setattr(generate, "load_llm", load_llm)
    monkeypatch.setattr(bench, "load_llm", load_llm)
    return lambda *argv: main([*argv, "--model", model, *ENGINE_OPTIONS])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def one_error(capsys):
    """The error, once it is known to be the only line."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("jaxllm: error: ")
    return line


def test_no_arguments_print_help(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
    assert main(["bench"]) == 0
    assert "throughput" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxllm {jaxllm.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["frobnicate"], "frobnicate"),
        (["generate"], "--input"),
        (["generate", "a", "--input", "b.txt"], "one of the two"),
        (["generate", "a", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "a", "--temperature", "-1"], "temperature"),
        (["generate", "a", "--structured-outputs", '{"regex"'], "invalid JSON object"),
        (["generate", "a", "--structured-outputs", "[]"], "invalid JSON object"),
        (["generate", "a", "--structured-outputs", '{"regexp": "a"}'], "has no 'regexp'"),
        (["generate", "a", "--resume"], "--output"),
        (["generate", "a", "--block-size", "0", "-q"], "--block-size 0"),
        (["generate", "a", "--dtype", "float8"], "float8"),
        (["generate", "a", "--model", "absent", "-q"], "absent"),
        (["generate", "--input", "absent.txt"], "absent.txt"),
        (["convert", "absent", "out"], "absent"),
        (["bench", "throughput", "--input-len", "9:8"], "--input-len: '9:8' must be a length"),
        (["bench", "throughput", "--input-len", "long"], "length or range"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert said in one_error(capsys)


def test_loggers_are_as_they_were_once_a_command_has_ended(capsys, monkeypatch):
    logger = logging.getLogger("jaxllm.executor.step_programs")

    def compile_and_fail(**settings):
        logger.info("program 1 of 3")
        raise ConfigError("no room")

    monkeypatch.setattr("jaxllm.llm.LLM", compile_and_fail)
    assert main(["generate", "a"]) == 2
    assert "jaxllm: program 1 of 3\n" in capsys.readouterr().err
    logger.info("program 2 of 3, of somebody else's engine")
    assert capsys.readouterr().err == ""
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("serve", ServerConfig),
        ("serve", ClusterConfig),
        ("generate", EngineConfig),
        ("generate", SamplingParams),
    ],
)
def test_every_setting_is_declared_once(command, settings, capsys):
    """A field is an option with a flag, whose help names its default and checks as the keyword does."""
    assert main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert {field.name for field in dataclasses.fields(settings)} == {
        name for name, _, _ in options_of(settings)
    }
    for name, default, declared in options_of(settings):
        assert declared.help.endswith(".")
        assert f" {name}: {declared.help}" in " ".join(settings.__doc__.split())
        if declared.flag is not None:
            said = text.partition(f" {flag(declared.flag or name)}")[2]
            assert declared.help.partition(". ")[0].rstrip(".").replace(" ", "") in said.replace(" ", "")
            assert not isinstance(default, int) or " (default: " in said


def test_presets_are_all_in_the_help(capsys):
    assert main(["generate", "--help"]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert ",".join(PRESETS) in text


def test_values_are_checked_as_they_are_parsed(capsys):
    for command, option, value in (
        ("generate", "--max-num-seqs", "0"),
        ("bench throughput", "--prefix-cache-dir", ""),
        ("serve", "--port", "70000"),
        ("generate x", "--min-p", "2"),
        ("generate x", "--n", "0"),
    ):
        assert main([*command.split(), option, value]) == 2
        assert f"error: {option} " in one_error(capsys)


def test_few_prompts_compile_few_programs():
    def settings_of(*prompts, **given):
        return generate.few_prompts_settings(given, prompts_from_arguments(prompts, SamplingParams()))

    assert settings_of("hello") == {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
        "decode_buckets": [1],
        "prefill_buckets": [32],
    }
    many = settings_of(*["x" * 100] * 9)
    assert (many["max_num_seqs"], many["decode_buckets"]) == (16, [1, 4, 16])
    assert (many["max_num_batched_tokens"], many["prefill_buckets"]) == (512, [128, 512])
    assert settings_of("hello", max_num_seqs=2) == {}
    assert settings_of(*["hello"] * 65) == {}
    several = prompts_from_arguments(["a", "b"], SamplingParams(n=3))
    assert generate.few_prompts_settings({}, several)["max_num_seqs"] == 8  # all samples at once
    many = prompts_from_arguments(["a", "b"], SamplingParams(n=2, best_of=33))
    assert generate.few_prompts_settings({}, many) == {}


def test_generate_to_stdout(run, llm, capsys):
    assert run("generate", "import os", "def add(", "--max-tokens=5", "--temperature=0", "--logprobs=1") == 0
    lines = {line["index"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    params = SamplingParams(temperature=0, max_tokens=5)
    outputs = llm.generate(["import os", "def add("], params, use_tqdm=False)
    for index, output in enumerate(outputs):
        line = lines[index]
        assert line["text"] == output.text
        assert line["token_ids"] == list(output.token_ids)
        assert line["finish_reason"] == output.finish_reason
        assert len(line["logprobs"]) == len(line["token_ids"])


def test_generate_from_jsonl(run, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    rows = [
        {"id": "text", "prompt": "import os"},
        {"id": "tokens", "prompt_token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}},
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "cut", "prompt_token_ids": [1, 2, 3] * 9, "num_dropped_tokens": 16},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = tmp_path / "out.jsonl"
    assert (
        run("generate", "--input", str(source), "--output", str(target), "--max-tokens=4", "--ignore-eos")
        == 0
    )
    lines = {line["id"]: line for line in read_lines(target)}
    assert {name: len(line["token_ids"]) for name, line in lines.items()} == {
        "text": 4,
        "tokens": 2,
        "chat": 4,
        "cut": 4,
    }
    assert lines["tokens"]["num_prompt_tokens"] == 3
    assert (lines["cut"]["num_prompt_tokens"], lines["cut"]["num_dropped_tokens"]) == (27, 16)
    capsys.readouterr()
    # A finished file is not run again, and never overwritten.
    arguments = [
        "generate",
        "--input",
        str(source),
        "--output",
        str(target),
        "--max-tokens=4",
        "--ignore-eos",
    ]
    assert run(*arguments) == 2
    assert "--resume" in one_error(capsys)
    assert run(*arguments, "--resume", "-q") == 0
    assert len(read_lines(target)) == 4
    assert run(*arguments, "--resume", "--seed=1") == 2
    assert "fingerprint" in one_error(capsys)


def test_generate_what_a_grammar_says(run, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    rows = [
        {"prompt": "import os"},
        {"prompt": "a " * 300, "sampling_params": {"truncate_prompt_tokens": 5, "structured_outputs": None}},
        {"prompt": "b", "sampling_params": {"structured_outputs": {"choice": ["yes", "no"]}}},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--max-tokens=20", "--structured-outputs", '{"regex": "[0-9]{3}"}']
    assert run("generate", "--input", str(source), *options) == 0
    lines = {line["index"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert len(lines[0]["text"]) == 3
    assert lines[0]["text"].isdigit()
    assert lines[1]["num_prompt_tokens"] == 5
    assert lines[2]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": "x " * 200},
        {"prompt_token_ids": [9999]},
        {"prompt": "x", "num_dropped_tokens": 7},
        {"prompt": "x", "sampling_params": {"structured_outputs": {"regex": "("}}},
    ],
)
def test_a_bad_row_is_an_error_in_its_place(run, tmp_path, capsys, bad):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [json.dumps({"prompt": "good"}), json.dumps(bad), "{", json.dumps({"prompt": "good", "id": "z"})]
    source.write_text("\n".join(rows) + "\n")
    arguments = ["generate", "--input", str(source), "--output", str(target), "--max-tokens=2"]
    assert run(*arguments) == 0
    assert "2 of 4 prompts were bad" in capsys.readouterr().err
    lines = {line["index"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert len(lines) == 4
    for number in (1, 2):
        assert f"in.jsonl, line {number + 1}" in lines[number]["error"]
        assert "text" not in lines[number]
    assert "no valid JSON" in lines[2]["error"]
    assert lines[0]["token_ids"]
    assert lines[3]["id"] == "z"
    before = target.read_text()
    assert run(*arguments, "--resume") == 0
    assert target.read_text() == before
    rows[1] = rows[2] = rows[0]
    source.write_text("\n".join(rows) + "\n")
    assert run(*arguments, "--resume") == 0
    kept, corrected = before.splitlines()[2:], target.read_text().splitlines()
    assert corrected[:2] == kept
    assert all(json.loads(line)["token_ids"] for line in corrected)
    assert len(corrected) == 4


def test_an_interruption_says_how_to_go_on(run, llm, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "generate_iter", interrupted)
    assert run("generate", "hello", "--output", str(tmp_path / "out.jsonl")) == 130
    assert "--resume" in capsys.readouterr().err
    assert llm.engine.num_live == 0


def test_killed_and_resumed_equals_uninterrupted(run, model, cache, tmp_path):
    num_prompts = 24
    source = tmp_path / "in.txt"
    source.write_text("".join(f"x = {number}\n" for number in range(num_prompts)))
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    arguments = ["generate", "--input", str(source), "--max-tokens=60", "--ignore-eos"]
    command = [sys.executable, "-m", "jaxllm", *arguments, "--output", str(killed), "--model", model]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with subprocess.Popen([*command, *ENGINE_OPTIONS], env=environment, stderr=subprocess.PIPE) as process:
        try:
            while process.poll() is None and not (killed.exists() and killed.read_bytes().count(b"\n") >= 5):
                time.sleep(0.002)
        finally:
            process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
    assert 5 <= killed.read_bytes().count(b"\n") < num_prompts
    with killed.open("ab") as file:
        file.write(b'{"index": 3, "id"')  # what a kill in the middle of a write leaves
    assert run(*arguments, "--output", str(killed), "--resume") == 0
    assert run(*arguments, "--output", str(whole)) == 0
    resumed = sorted(read_lines(killed), key=lambda line: line["index"])
    assert [line["index"] for line in resumed] == list(range(num_prompts))
    assert resumed == sorted(read_lines(whole), key=lambda line: line["index"])


def test_bench_throughput(run, llm, tmp_path, capsys):
    target = tmp_path / "bench.json"
    sizes = ["--num-prompts=6", "--input-len=3:9", "--output-len=2:6", "--repetitions=2"]
    assert run("bench", "throughput", *sizes, "--output", str(target)) == 0
    result = json.loads(target.read_text())
    assert result["command"].startswith("jaxllm bench throughput --num-prompts=6")
    assert result["versions"]["jax"] == jax.__version__
    assert result["hardware"]["platform"] == "cpu"
    assert result["engine"]["num_programs"] == len(llm.executor.programs) > 0
    assert result["engine"]["pool_bytes"] == llm.executor.pool_bytes
    assert result["engine"]["settings"].items() >= {"decode_buckets": [4], "prefill_buckets": [32]}.items()
    assert "data_parallel_size" not in result["engine"]["settings"]  # as nobody has said
    assert result["compilations_after_warm_up"] == 0
    assert result["num_preemptions"] == [0, 0]
    assert len(result["seconds"]) == 2
    rates = [result["workload"]["num_output_tokens"] / seconds for seconds in result["seconds"]]
    assert result["output_tokens_per_second"]["max"] == pytest.approx(max(rates))
    assert 0 < result["engine_overhead"]["host_share"] < 1
    assert result["ttft_seconds"]["p50"] > 0
    assert result["peak_rss_bytes"] > 10**7
    assert "output tokens/s" in capsys.readouterr().err
    rows = [{"input_length": 5, "output_length": 3}, {"input_length": 200, "output_length": 2}]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--trace", str(trace), "--repetitions=1", "--overwrite", "--output", str(target)]
    assert run("bench", "throughput", *options) == 2
    assert "the longest request has 202 tokens" in capsys.readouterr().err
    for way, tokens in (("--clip", 5 + 126), ("--skip", 5)):
        assert run("bench", "throughput", *options, way) == 0
        workload = json.loads(target.read_text())["workload"]
        assert workload["num_prompt_tokens"] == tokens
        assert workload["trace"]["name"] == "t"
    assert run("bench", "throughput", *options, "--input-len=3") == 2
    assert "--trace has lengths: drop --input-len" in capsys.readouterr().err
    assert run("bench", "throughput", "--clip") == 2
    assert "--clip does nothing without --trace: add that, or leave --clip out" in capsys.readouterr().err
    # The timers are gone.
    assert "execute" not in vars(llm.executor)
    assert all(isinstance(program, jax.stages.Compiled) for program in llm.executor.programs.values())


def test_bench_refuses_requests_that_do_not_fit(run, capsys):
    assert run("bench", "throughput", "--input-len=100", "--output-len=29") == 2
    assert "--max-model-len 128" in one_error(capsys)


def test_convert(tmp_path, capsys):
    target = tmp_path / "converted"
    assert main(["convert", str(golden_checkpoint("llama_tied")), str(target)]) == 0
    assert (target / "params").is_dir()
    assert "wrote" in capsys.readouterr().err
    assert main(["convert", str(golden_checkpoint("llama_tied")), str(target)]) == 2
    assert "exists" in one_error(capsys)


def test_text_and_output_exclude_each_other(tmp_path, capsys):
    assert main(["generate", "x", "--text", "--output", str(tmp_path / "o.jsonl")]) == 2
    assert "--text is for stdout" in capsys.readouterr().err


def test_an_interrupt_that_is_lost_where_no_exception_gets_out_comes_again(run, monkeypatch, capfd):
    """JAX is called back by the garbage collector, which swallows what is raised there."""

    class Collected:
        def __del__(self):
            raise KeyboardInterrupt

    def interrupted(args):
        Collected()
        time.sleep(60.0)
        return 0

    monkeypatch.setattr("jaxllm.cli.generate.run", interrupted)
    assert main(["generate", "a"]) == 130
    assert "jaxllm: interrupted" in capfd.readouterr().err


def test_an_interrupt_before_a_command_is_known_is_no_traceback(monkeypatch, capfd):
    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxllm.cli.main.build_parser", interrupted)
    assert main(["generate", "a"]) == 130
    assert "Traceback" not in capfd.readouterr().err
