"""What people give by mistake: an error that names it at once, and nothing lost."""

import errno
import io
import itertools
import logging
import math
import os
import shutil

import numpy as np
import pytest
from engine_helpers import SMALL, make_llm, run
from variants import golden_checkpoint

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.cli.main import main
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.ledgers import read_ledger
from jaxllm.errors import CapacityError, ConfigError, RequestError, RequestTooLargeError, SamplingParamsError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.scheduler import Scheduler

NAME = "llama_gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint(NAME))


# Files


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_ledger_overwrites_nothing(tmp_path, is_linked):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n')
    given = path
    if is_linked:
        given = tmp_path / "link"
        given.symlink_to(path)
    with pytest.raises(ConfigError, match="is there already, and no file is ever overwritten"):
        make_llm(golden_checkpoint(NAME), ledger=given)
    assert path.read_text() == '{"prompt": "a"}\n'


def test_a_ledger_is_opened_first_and_leaves_nothing_where_loading_fails(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write the ledger .*No such file"):
        LLM(tmp_path / "absent", ledger=tmp_path / "none" / "ledger")
    ledger = tmp_path / "ledger"
    with pytest.raises(ConfigError, match="does not exist"):
        LLM(tmp_path / "absent", ledger=ledger)
    assert not ledger.exists()
    llm = make_llm(golden_checkpoint(NAME), ledger=ledger)
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(read_ledger(ledger).steps) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "{a}", "--output", "{a}"], "--input and --output are one file"),
        (["--input", "{a}", "--ledger", "{link}"], "--input and --ledger are one file"),
        (["--input", "{a}", "--output", "{hard}"], "--input and --output are one file"),
        (
            ["--input", "{a}", "--output", "n", "--ledger", "./x/../n"],
            "--output and --ledger are one file",
        ),
    ],
    ids=["same", "symbolic link", "hard link", "spelling"],
)
def test_files_of_a_command_are_different_ones(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "link").symlink_to("a.jsonl")
    os.link("a.jsonl", "hard")
    names = {"a": "a.jsonl", "link": "link", "hard": "hard"}
    assert main(["generate", *(option.format(**names) for option in options)]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "a.jsonl").read_text() == '{"prompt": "a"}\n'
    assert not (tmp_path / "n").exists()


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 5}, "model=5 must be a path"),
        ({"model": ""}, "model='' must be a path"),
        ({"model": "a\0b"}, "holds characters that no path has"),
        ({"model": b"a"}, "must be a path"),
        ({"model": "x" * 5000}, "model is a path of 5000 characters"),
        ({"model": "x/" * 2500}, "model is a path of 5000 characters"),
        ({"model": __file__}, "test_bad_inputs.py' is a file; pass the path of a folder"),
        ({"model": "~/absent"}, "/absent' does not exist"),
        ({"tokenizer": 5}, "tokenizer=5 must be a path"),
        ({"ledger": 5}, "ledger=5 must be a path"),
        ({"ledger": ""}, "ledger='' must be a path"),
        ({"max_model_length": 5}, "unknown setting 'max_model_length'; did you mean max_model_len"),
    ],
    ids=range(12),
)
def test_paths_and_names_are_refused_in_words(settings, message):
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)


def test_numbers_of_numpy_are_settings():
    config = EngineConfig(max_model_len=np.int64(64), gpu_memory_utilization=np.float32(0.5))
    assert (type(config.max_model_len), config.max_model_len) == (int, 64)
    assert (type(config.gpu_memory_utilization), config.gpu_memory_utilization) == (float, 0.5)
    with pytest.raises(ConfigError, match="max_model_len=0 must be an integer from"):
        EngineConfig(max_model_len=np.int64(0))


def test_a_tilde_is_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = EngineConfig(model="~/m", tokenizer="~/t", ledger="~/l", prefix_cache_dir="~/p")
    found = config.model, config.tokenizer, config.ledger, config.prefix_cache_dir
    assert found == tuple(str(tmp_path / name) for name in "mtlp")
    shutil.copytree(demo_model_path(), tmp_path / "m")
    assert main(["generate", "a", "--model", "~/m", "--max-tokens", "0"]) == 2


def test_only_those_who_chose_hear_of_a_roofline(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {**SMALL, "num_gpu_blocks_override": 8, "max_model_len": 32, "warm_up": "background"}
    for chosen, expected in (
        ({}, False),
        ({"scheduler_policy": "adaptive"}, True),
        ({"num_host_blocks": 4}, True),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            LLM(golden_checkpoint(NAME), compilation_cache_dir=None, **settings, **chosen)
        (record,) = [record for record in caplog.records if "roofline" in record.getMessage()]
        assert (record.levelno == logging.WARNING) is expected


def test_quiet_says_nothing_but_errors(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [
        "generate",
        "a",
        "-q",
        "--max-tokens",
        "2",
        "--temperature",
        "0",
        "--num-gpu-blocks-override",
        "2",
    ]
    assert main([*command, "--scheduler-policy", "adaptive", "--num-host-blocks", "4"]) == 0
    assert capfd.readouterr().err == ""
    assert main(["generate", "a", "-q", "--top-p", "2"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repetitions", "0"], "--repetitions 0 must be at least 1"),
        (["--warm-up-repetitions", "-1"], "--warm-up-repetitions -1 at least 0"),
        (["--prefix-cache-dir", "x"], "--prefix-cache-dir 'x' would let a pass find"),
        (["--max-model-len", "100"], "the longest request has 256 tokens"),
        (["--num-prompts", str(10**12)], "--num-prompts 1000000000000 must be from 1"),
        (["--input-len", f"1:{10**20}"], "--input-len 1:1"),
        (["--seed", "-1"], "--seed -1 must be"),
        (["--output", "a", "--ledger", "a"], "--output and --ledger are one file"),
    ],
    ids=range(8),
)
def test_a_benchmark_is_checked_before_it_loads_anything(options, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxllm.research.commands.bench.load_llm", None)
    assert main(["bench", "throughput", *options]) == 2
    assert message in capsys.readouterr().err


# Requests


@pytest.mark.parametrize("value", ["now", float("nan"), float("inf"), 10**5000, True, [1.0]], ids=range(6))
def test_an_arrival_is_a_time(llm, value):
    with pytest.raises(RequestError, match=r"arrival_time=.* must be a finite number"):
        llm.engine.add_request("a", [1, 2], GREEDY, arrival_time=value)
    llm.engine.add_request("a", [1, 2], GREEDY, arrival_time=0)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


def test_errors_name_the_place_in_a_list(llm):
    other = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[10**6])
    for prompts, params, message in (
        ([[1], [2], [10**6]], GREEDY, r"^prompts\[2\]: prompt token id 1000000 at position 0"),
        ([[1], [2] * 200], GREEDY, r"^prompts\[1\]: the request has 200 prompt tokens"),
        ([[1], [2]], [GREEDY, other], r"^sampling_params\[1\]: stop_token_ids: token id 1000000"),
        ([[1], [2]], [GREEDY, None, GREEDY], "3 sampling_params for 2 prompts"),
        ([[1], [2]], other, r"^prompts\[0\]: stop_token_ids"),
        (
            [[1], [2]],
            [GREEDY, 5],
            r"^sampling_params\[1\]: .* must be a SamplingParams, not int",
        ),
        ([[1], None], GREEDY, r"^prompts\[1\]: a prompt must be text or a list"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            llm.generate(prompts, params, use_tqdm=False)
        assert "llm-" not in str(error.value)
    assert not llm.engine.has_unfinished_requests


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(stop_token_ids=iter(range(10**9))),
        lambda: SamplingParams(stop=map(str, itertools.count())),
        lambda: SamplingParams(bad_words=map(str, itertools.count())),
        lambda: SamplingParams(allowed_token_ids=itertools.count()),
        lambda: SamplingParams(logit_bias=zip(itertools.count(), itertools.repeat(1.0), strict=False)),
        lambda: SamplingParams(structured_outputs={"choice": map(str, itertools.count())}),
    ],
    ids=["stop_token_ids", "stop", "bad_words", "allowed_token_ids", "logit_bias", "choice"],
)
def test_lists_without_an_end_are_read_up_to_their_limit(make):
    with pytest.raises(ValueError, match="at most"):
        make()


def test_an_array_without_axes_is_no_list_of_prompts(llm):
    for prompts in (np.array(3), np.array("a")):
        with pytest.raises(RequestError, match="prompts must be one prompt or a list of them, not array"):
            llm.generate(prompts)


def test_so_are_prompts(llm, monkeypatch):
    with pytest.raises(RequestTooLargeError, match=r"prompts\[0\]: a prompt of 1000000000 tokens is longer"):
        llm.generate([range(10**9)], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="a list of token ids, not count"):
        llm.generate({"prompt_token_ids": itertools.count()}, GREEDY, use_tqdm=False)
    monkeypatch.setattr("jaxllm.engine.inputs._MAX_PROMPTS", 1000)
    with pytest.raises(RequestError, match="prompts has more than 1000 entries"):
        llm.generate(([i] for i in itertools.count()), GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LLM(max_num_seq=4), "did you mean max_num_seqs"),
        (lambda: LLM(dtype="bfloat"), "did you mean bfloat16"),
        (lambda: LLM(load_format="safetensor"), "did you mean safetensors"),
        (lambda: LLM(scheduler_policy="adaptiv"), "did you mean adaptive"),
        (lambda: LLM(hf_overrides={"rope_thta": 1.0}), "did you mean rope_theta"),
        (lambda: SamplingParams(temprature=1), "did you mean temperature"),
        (lambda: SamplingParams(structured_outputs={"regexp": "a"}), "did you mean regex"),
    ],
    ids=range(7),
)
def test_the_nearest_name_is_suggested(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hf_overrides": {1: 2}}, "hf_overrides has 1, which is no name"),
        ({"num_host_blocks": 2**31 - 1}, "machine: lower num_host_blocks"),
        ({"attention_implementation": "mosaic"}, "computes in bfloat16 or float16"),
        ({"attention_implementation": "triton:x"}, "tiling 'x' is not of the form"),
        ({"compilation_cache_dir": __file__}, "compilation_cache_dir=.* cannot be made: File exists"),
    ],
    ids=range(5),
)
def test_settings_that_cannot_be_had_are_refused_at_once(settings, message):
    with pytest.raises((ConfigError, CapacityError), match=message):
        LLM(golden_checkpoint(NAME), **{**SMALL, **settings})


def test_a_score_of_the_longest_hypothesis_is_a_number():
    with pytest.raises(SamplingParamsError, match="length_penalty=100"):
        BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=100)
    longest, penalty = 2**24, BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=40).length_penalty
    assert math.isfinite(-1.0 / longest**penalty)
    assert math.isfinite(-1.0 / longest**-penalty)


def test_a_ledger_that_cannot_be_written_any_more_ends_no_request(llm, caplog):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(Full())
    scheduler = Scheduler(llm.engine.scheduler.config, SchedulerPolicy(), ledger=ledger)
    engine = Engine(llm.executor, scheduler, vocab_size=llm.model_config.vocab_size)
    (output,) = run(engine, [[1, 2, 3]], GREEDY)
    assert output.finish_reason == "length"
    assert caplog.text.count("the ledger ends here") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "a", "--temprature", "1"], "did you mean --temperature"),
        (["bench", "throughput", "--max-num-seq5=1"], "did you mean --max-num-seqs"),
        (["plan", "m", "--device", "h100", "--json", "m/config.json"], "MODEL and --json are one file"),
        (["plan", "m", "--device", "h100", "--json", "none/plan.json"], "none/plan.json"),
        (["profile", "--samples", "s", "--with-samples", "./s"], "--samples and --with-samples are one file"),
    ],
    ids=range(5),
)
def test_commands_refuse_what_would_lose_something(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    shutil.copytree(demo_model_path(), "m")
    (tmp_path / "s").write_text("{}")
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "m" / "config.json").read_bytes() == (demo_model_path() / "config.json").read_bytes()
