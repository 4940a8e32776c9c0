"""`jaxllm generate` over files: which rows, whose template, how far it is, and in whose words it answers."""

import json
import re
import threading
import time

import pytest
from variants import golden_checkpoint

from jaxllm import LLM
from jaxllm.cli import generate
from jaxllm.cli.main import build_parser, main
from jaxllm.commands import progress
from jaxllm.commands.progress import Progress
from jaxllm.commands.words import flags_of, in_flags
from jaxllm.engine.vllm_names import SETTINGS
from jaxllm.errors import ConfigError, RequestError, UnsupportedModelError
from jaxllm.jobs.prompt_files import read_prompts
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.sampling.params import SamplingParams

PARAMS = SamplingParams(max_tokens=4)
ROWS = [
    {
        "key": f"row-{number}",
        "question": f"What is {number}?",
        "split": "test" if number % 2 else "train",
        "level": number % 3,
    }
    for number in range(8)
]


@pytest.fixture(scope="module")
def llm():
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(num_gpu_blocks_override=40, decode_buckets=[4], prefill_buckets=[32], **sizes) as llm:
        yield llm


@pytest.fixture
def run(llm, monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "load_llm", lambda settings, quiet=False: llm)
    monkeypatch.chdir(tmp_path)
    return lambda *argv: main(["generate", "--max-tokens", "4", "--temperature", "0", *argv])


def write(path, rows):
    """The rows in the form that a file's name says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_rows_are_chosen_by_their_columns(name, tmp_path):
    path = tmp_path / name
    write(path, ROWS)
    options = {"column": "question", "id_column": "key"}
    rows = read_prompts(str(path), PARAMS, **options, where={"split": "test", "level": "1"})
    assert [(row.index, row.id, row.prompt) for row in rows] == [
        (1, "row-1", "What is 1?"),
        (7, "row-7", "What is 7?"),
    ]
    assert rows[0].error is None
    assert rows[0].extras.keys() == {"split", "level"}
    assert len(read_prompts(str(path), PARAMS, **options)) == 8
    with pytest.raises(RequestError, match="none of its 8 rows is what --where asks for"):
        read_prompts(str(path), PARAMS, **options, where={"split": "dev"})


def test_columns_that_are_not_there_are_named(tmp_path):
    path = tmp_path / "rows.csv"
    write(path, ROWS)
    with pytest.raises(ConfigError, match="no column 'name', which --id-column names: key, question"):
        read_prompts(str(path), PARAMS, "question", id_column="name")
    with pytest.raises(ConfigError, match="no column 'kind', which --where names"):
        read_prompts(str(path), PARAMS, "question", where={"kind": "a"})
    path = tmp_path / "rows.jsonl"
    write(path, ROWS)
    (first, *_) = read_prompts(str(path), PARAMS, "question", id_column="name")
    assert "there is no 'name', as --id-column says" in str(first.error)
    text = tmp_path / "rows.txt"
    text.write_text("a\n")
    for options in ({"id_column": "key"}, {"where": {"a": "b"}}):
        with pytest.raises(ConfigError, match=r"--(id-column|where) is of tables"):
            read_prompts(str(text), PARAMS, **options)


def test_bad_lines_are_told_whatever_part_of_a_file_is_asked_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [
        b'{"prompt": "a", "split": "test"}',
        b'{"prompt": "b", "split": "test", "sampling_parms": {"max_tokens": 2}}',
        b'{"prompt": "c", "Split": "test"}',
        b'{"prompt": "d", "split": "test"',
        b'{"prompt": 5, "split": "test"}',
        b'{"prompt": "\xff", "split": "test"}',
        b'{"prompt": "g", "split": "train"}',
        b'{"prompt": "h", "level": 2}',
    ]
    path.write_bytes(b"\n".join(lines))
    rows = read_prompts(str(path), PARAMS, where={"split": "test", "level": "1"})
    assert [row.index for row in rows if "no 'level', as --where says" in str(row.error)] == [0, 1, 4]
    assert 7 not in [row.index for row in rows]
    rows = {row.index: str(row.error) for row in read_prompts(str(path), PARAMS, where={"split": "test"})}
    assert rows.pop(0) == "None"
    for index, message in {
        1: 'unknown key "sampling_parms". Did you mean "sampling_params"?',
        2: "there is no 'split', as --where says. Did you mean 'Split'?",
        3: "no valid JSON",
        4: '"prompt" must be a non-empty string, not 5',
        5: "no UTF-8",
        7: "there is no 'split', as --where says.",
    }.items():
        assert message in rows.pop(index)
    assert not rows
    with pytest.raises(RequestError, match="no line has 'spilt', which --where names"):
        read_prompts(str(path), PARAMS, where={"spilt": "test"})
    without = read_prompts(str(path), PARAMS, "prompt")
    assert [row.index for row in without if row.error is not None] == [1, 3, 4, 5]


def test_parts_of_a_file_have_the_indices_and_answers_of_the_whole(run, tmp_path):
    write(tmp_path / "rows.jsonl", ROWS)
    options = ["--input", "rows.jsonl", "--column", "question", "--id-column", "key", "-q"]
    assert run(*options, "--output", "whole.jsonl") == 0
    assert run(*options, "--output", "part.jsonl", "--rows", "2:5") == 0
    assert run(*options, "--output", "tests.jsonl", "--where", "split=test", "--rows", "3:") == 0

    def read(name):
        return {row["index"]: row for row in map(json.loads, (tmp_path / name).read_text().splitlines())}

    whole = read("whole.jsonl")
    assert read("part.jsonl") == {index: whole[index] for index in (2, 3, 4)}
    assert read("tests.jsonl") == {index: whole[index] for index in (3, 5, 7)}
    lines = (tmp_path / "part.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(lines[:1]))
    assert run(*options, "--output", "part.jsonl", "--rows", "2:5", "--resume") == 0
    assert read("part.jsonl") == {index: whole[index] for index in (2, 3, 4)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "5"], r"--rows '5' must be START:STOP"),
        (["--rows", "5:5"], "and not empty"),
        (["--rows=-3:"], "must be START:STOP"),
        (["--rows", "90:"], "has none of these, its rows are 0 to 7"),
        (["--where", "split"], r"--where 'split' must be a column and its value"),
        (["--where", "split=a", "--where", "split=b"], "two values of 'split', which no row has"),
        (["--chat-template", "none.jinja"], "there is no such file"),
    ],
)
def test_bad_choices_are_named(options, message, run, tmp_path, capsys):
    write(tmp_path / "rows.jsonl", ROWS)
    assert run("--input", "rows.jsonl", "--column", "question", *options) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_template_of_ones_own(run, llm, tmp_path, capsys):
    """As a file, as text, and resumed with another one, which is refused."""
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    (tmp_path / "mine.jinja").write_text(template)
    for given in ("mine.jinja", template):
        assert run("hello", "--chat", "--chat-template", given) == 0
        (line,) = capsys.readouterr().out.splitlines()
        rendered = llm.get_tokenizer().encode("<hello>", add_special_tokens=False)
        assert json.loads(line)["num_prompt_tokens"] == len(rendered)
        (expected,) = llm.generate([rendered], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert json.loads(line)["token_ids"] == list(expected.token_ids)
    write(tmp_path / "one.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    options = ["--input", "one.jsonl", "--output", "out.jsonl", "-q"]
    assert run(*options, "--chat-template", "mine.jinja") == 0
    assert run(*options, "--chat-template", template + "!", "--resume") == 2
    assert "fingerprint differs" in capsys.readouterr().err


def test_a_job_without_a_terminal_says_how_far_it_is(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.001)
    write(tmp_path / "rows.jsonl", ROWS)
    assert run("--input", "rows.jsonl", "--column", "question", "--max-tokens", "64", "--ignore-eos") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 8 prompts in " in line]
    assert len(lines) > 1
    last = (
        r"jaxllm: 8 of 8 prompts in [\d.]+ s; [\d,]+ output tokens/s; \d+ preemptions; \d+% of prompt tokens"
    )
    assert re.match(last, lines[-1])
    assert "left" not in lines[-1]


def test_nothing_is_said_after_the_last_line(monkeypatch):
    said, is_saying = [], threading.Event()

    def note(line):
        if threading.current_thread() is not threading.main_thread():
            is_saying.set()
            time.sleep(0.05)
        said.append(threading.current_thread())

    monkeypatch.setattr(progress, "note", note)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.001)
    with Progress(8, 0, "prompt", quiet=False) as job:
        job.advance(8)
        assert is_saying.wait(30)
    assert said[-1] is threading.main_thread()
    assert "jaxllm-progress" not in [thread.name for thread in threading.enumerate()]


def test_progress_counts_what_is_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(1000, 100, "prompt", quiet=True) as job:
        now[0] = 90.0
        job.advance(300)
        assert job.line() == "400 of 1,000 prompts in 1 min 30 s; about 3 min 0 s left"
        now[0] = 8000.0
        job.advance(600)
        assert job.line() == "1,000 of 1,000 prompts in 2 h 13 min"


def test_a_quiet_job_says_nothing(run, capsys):
    assert run("hello", "-q") == 0
    assert capsys.readouterr().err == ""


# In whose words


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("max_num_seqs=0 must be an integer", "--max-num-seqs 0 must be an integer"),
        ("lower max_model_len or enlarge the pool", "lower --max-model-len or enlarge the pool"),
        ("pass max_model_len<=128", "pass --max-model-len of at most 128"),
        ("enable_prefix_caching=False and it", "--no-enable-prefix-caching and it"),
        ("or download=True (--download) to", "or --download to"),
        ("dtype='int4' is not", "--dtype 'int4' is not"),
        ("num_host_blocks=None)", "no --num-host-blocks)"),
        ("raise --max-model-len", "raise --max-model-len"),
        ("seed must lie in [0, 9], got -1", "--seed must lie in [0, 9], got -1"),
        ("a seed must lie in [0, 9]", "a seed must lie in [0, 9]"),
        ("cut them with too_long='clip' (--clip), or pass x= (--x)", "cut them with --clip, or pass --x"),
        ("the dtype of the model", "the dtype of the model"),
        ("'max_num_seqs=5' is text", "'max_num_seqs=5' is text"),
        ("sampling_params.max_tokens", "sampling_params.max_tokens"),
        ("x=Array(0.001, dtype=float32)", "x=Array(0.001, dtype=float32)"),
        (
            "seed=Array([[1], [2]], dtype=f(seed=1)) must",
            "--seed Array([[1], [2]], dtype=f(seed=1)) must",
        ),
        ("raised X(max_num_seqs, seed=1...", "raised X(max_num_seqs, seed=1..."),
        ("said 'a seed=1 and max_num_seqs', so seed=2", "said 'a seed=1 and max_num_seqs', so --seed 2"),
        ('said "a seed=1", so (seed=2)', 'said "a seed=1", so (--seed 2)'),
        ("<Model dtype=int8 max_num_seqs> has seed=2", "<Model dtype=int8 max_num_seqs> has --seed 2"),
        ("fields: rope_theta, rope_scaling", "fields: rope_theta, rope_scaling"),
        ("rope_theta=3 is not supported", "--rope-theta 3 is not supported"),
        ("the model's seed=1 isn't max_num_seqs", "the model's --seed 1 isn't --max-num-seqs"),
    ],
)
def test_errors_name_flags(message, said):
    assert in_flags(message, flags_of(build_parser("generate"))) == said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["-pp", "2"],
            "--pipeline-parallel-size 2 times --tensor-parallel-size 1 is more than the devices that JAX "
            "sees, 1 of cpu: take fewer",
        ),
        (
            ["-tp", "2"],
            "--tensor-parallel-size 2 is more than the devices that JAX sees, 1 of cpu: take fewer",
        ),
        (["--quantization", "awq"], "--quantization 'awq' is how a checkpoint says that it is quantised"),
        (["--enable-lora"], "--enable-lora is not supported: there are no LoRA adapters; merge them"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0 must be an integer from 1"),
        (["--max-model-len", "99999"], "pass --max-model-len of at most 1024"),
    ],
)
def test_the_command_answers_in_its_own_words(options, message, capsys):
    assert main(["generate", "hi", "-q", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "_" not in re.sub(r"'[^']*'|\(.*?\)", "", error)


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "--trace", "{conversation}", "--tokenizer", "nope", "--gpu-blocks", "64"],
        ["simulate", "--model", "no/such", "--gpu-blocks", "64"],
        ["simulate", "--model", "{odd}", "--gpu-blocks", "64"],
        ["plan", "no/such", "--no-compile"],
        ["plan", "{odd}", "--no-compile"],
        ["convert", "no/such", "{folder}/out"],
        ["convert", "{odd}", "{folder}/out"],
        ["eval-quantised", "no/such", "no/such", "--text", "{conversation}"],
        ["bench", "throughput", "--trace", "{blocks}", "--output", "{folder}/out"],
        ["bench", "throughput", "--trace", "{benchmarks}", "--output", "{folder}/out"],
        ["generate", "x", "-q", "--tokenizer", "{odd}"],
    ],
)
def test_no_command_tells_of_options_that_it_has_not(command, tmp_path, capsys):
    """Nor of Python's: what is in quotes is the user's, and what the trace says of itself is in the line."""
    odd = tmp_path / "odd"
    odd.mkdir()
    config = json.loads((golden_checkpoint("llama_gqa") / "config.json").read_text(encoding="utf-8"))
    (odd / "config.json").write_text(json.dumps({**config, "strange": 3}), encoding="utf-8")
    files = {
        "conversation": {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
        "blocks": {"timestamp": 1, "input_length": 50, "output_length": 5, "hash_ids": [1, 2]},
        "benchmarks": {"benchmarks": [{}, {}]},
    }
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (tmp_path / "benchmarks.jsonl").rename(tmp_path / "benchmarks.json")
    paths = {name: tmp_path / f"{name}.jsonl" for name in files} | {"odd": odd, "folder": tmp_path}
    paths["benchmarks"] = tmp_path / "benchmarks.json"
    assert main([part.format_map(paths) for part in command]) == 2
    error = capsys.readouterr().err.replace("input_length=50", "").replace("strange=3", "")
    known = flags_of(build_parser(command[0])).values()
    assert {*re.findall(r"(?<!`)--[a-z-]+", error)} <= {*known, "--on-bad"}
    assert not re.search(r"_[a-z]+=", error)


def test_values_of_vllm_that_change_nothing_are_taken(run, capsys):
    neutral = ["-tp", "1", "-pp", "1", "--no-enable-lora", "--no-trust-remote-code"]
    assert run("hello", "-q", *neutral, "--kv-cache-memory-bytes", "64MiB") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    taken = build_parser("generate").parse_args(["generate", *neutral])
    assert {name for name in SETTINGS if hasattr(taken, name)} == {"enable_lora", "trust_remote_code"}


def test_checkpoints_that_are_not_read_are_named_for_what_they_are(tmp_path):
    gguf, adapter = tmp_path / "gguf", tmp_path / "adapter"
    gguf.mkdir()
    adapter.mkdir()
    (gguf / "model-Q4_K.gguf").touch()
    (adapter / "adapter_config.json").write_text("{}")
    for folder in (gguf, gguf / "model-Q4_K.gguf"):
        with pytest.raises(UnsupportedModelError, match="is GGUF, which is not read; make a"):
            read_hf_config(folder)
    with pytest.raises(UnsupportedModelError, match=r"is an adapter \(LoRA\).*merge it into its model"):
        read_hf_config(adapter)
    quantised = read_hf_config(golden_checkpoint("llama_gqa")) | {
        "quantization_config": {"quant_method": "hqq"}
    }
    with pytest.raises(UnsupportedModelError, match=r"quantised by 'hqq'.*or in 16 bits$"):
        config_from_dict(quantised)
