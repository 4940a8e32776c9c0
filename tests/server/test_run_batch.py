"""`jaxllm run-batch`: OpenAI's batch format, every line answered exactly once."""

import json
import signal
import subprocess
import sys
import time

import pytest
from server_helpers import SMALL, option

import jaxllm.server.batch
from jaxllm.cli.main import main
from jaxllm.errors import EngineError
from jaxllm.llm import LLM
from jaxllm.sampling.params import SamplingParams
from jaxllm.server.parameters import PromptLimits
from jaxllm.server.service import Service

OPTIONS = [f"--{name.replace('_', '-')}={option(value)}" for name, value in SMALL.items()]


def line(custom_id, body, url="/v1/completions", **changes):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **changes}


def write(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


def run(source, output, *more):
    return main(["run-batch", "-i", str(source), "-o", str(output), "-q", *OPTIONS, *more])


def answers(path):
    found = [json.loads(one) for one in path.read_text().splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


def test_answers_have_the_form_of_openai_and_the_tokens_of_the_offline_engine(tmp_path):
    messages = [{"role": "user", "content": "add"}]
    greedy = {"max_tokens": 8, "temperature": 0}
    source = write(
        tmp_path / "in.jsonl",
        [
            line("text", {"prompt": "def add(", "model": "demo_model", **greedy}),
            line("chat", {"messages": messages, **greedy}, "/v1/chat/completions"),
            line("wrong", {"prompt": "a", "temperature": -1}),
            line("other", {"prompt": "a", "model": "gpt-4"}),
            line("stream", {"prompt": "a", "stream": True}),
            line("many", {"prompt": ["a", "b"], "n": 2, "seed": 1, "max_tokens": 4}),
        ],
    )
    assert run(source, tmp_path / "out.jsonl") == 0
    found = answers(tmp_path / "out.jsonl")
    assert all(sorted(one) == ["custom_id", "error", "id", "response"] for one in found.values())
    assert all(one["error"] is None for one in found.values())
    codes = {name: one["response"]["status_code"] for name, one in found.items()}
    assert codes == {"text": 200, "chat": 200, "wrong": 400, "other": 404, "stream": 400, "many": 200}
    with LLM(**SMALL) as llm:
        params = SamplingParams(**greedy)
        [text] = llm.generate("def add(", params, use_tqdm=False)
        [chat] = llm.chat(messages, params, use_tqdm=False)
    bodies = {name: one["response"]["body"] for name, one in found.items()}
    assert bodies["text"]["choices"][0]["text"] == text.text
    assert bodies["chat"]["choices"][0]["message"]["content"] == chat.text
    assert len(bodies["many"]["choices"]) == 4
    assert bodies["wrong"]["error"]["param"] == "temperature"
    assert bodies["stream"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("\n", "nothing but blank lines"),
        ("[" * 5000, "line 1: no valid JSON (it is nested too deeply"),
        ("{}\n", "line 1: must be an object of custom_id"),
        ("[1]\n", "line 1: must be an object"),
        (
            json.dumps(line("a", {})) + "\n" + json.dumps(line("a", {})),
            "line 2: custom_id 'a' is that of line 1",
        ),
        (json.dumps(line("", {})), "custom_id must be text"),
        (json.dumps(line(5, {})), "custom_id must be text"),
        (json.dumps(line("a", [])), "body must be an object"),
        (json.dumps(line("a", {}, "/v1/embeddings")), "url='/v1/embeddings' must be one of"),
        (json.dumps(line("a", {}, method="GET")), "method must be POST"),
        (json.dumps(line("a", {}, more=1)), "must be an object of custom_id"),
    ],
    ids=lambda text: text[:20],
)
def test_files_are_checked_before_anything_runs(tmp_path, capsys, text, words):
    (tmp_path / "in.jsonl").write_text(text)
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_other_files_are_never_continued(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [line("a", {"prompt": "a", "max_tokens": 1})])
    output = tmp_path / "out.jsonl"
    assert run(source, output) == 0
    assert run(source, output) == 2
    assert "never overwritten" in capsys.readouterr().err
    before = output.read_text()
    assert run(source, output, "--resume") == 0
    other = write(tmp_path / "other.jsonl", [line("a", {"prompt": "b", "max_tokens": 1})])
    assert run(other, output, "--resume") == 2
    assert "the request 'a' was another" in capsys.readouterr().err
    unknown = write(tmp_path / "unknown.jsonl", [line("z", {"prompt": "a"})])
    assert run(unknown, output, "--resume") == 2
    assert "no request has custom_id 'a'" in capsys.readouterr().err
    output.write_text(before * 2)
    assert run(source, output, "--resume") == 2
    assert "second line for 'a'" in capsys.readouterr().err
    assert run(source, source) == 2
    assert "one file" in capsys.readouterr().err


def test_a_request_that_was_refused_is_answered_once_it_is_corrected(tmp_path):
    good, output = line("good", {"prompt": "a", "max_tokens": 1}), tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", [good, line("bad", {"prompt": "a", "max_tokens": -1})])
    assert run(source, output) == 0
    before = answers(output)
    write(tmp_path / "in.jsonl", [good, line("bad", {"prompt": "a", "max_tokens": 1})])
    assert run(source, output, "--resume") == 0
    assert answers(output)["good"] == before["good"]
    assert [answers(output)[name]["response"]["status_code"] for name in ("good", "bad")] == [200, 200]


def test_after_kill_9_every_line_is_answered_exactly_once(tmp_path):
    body = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
    lines = [line(f"r{index}", {"prompt": [index + 1, 7, 9], **body}) for index in range(40)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "jaxllm", "run-batch", "-i", source, "-o", str(output), "-q", *OPTIONS]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while not output.exists() or output.read_bytes().count(b"\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(30)
    kept = output.read_bytes()
    assert 4 <= kept.count(b"\n") < 40
    output.write_bytes(kept + b'{"id": "batch_req_12')  # as a write that was cut off would leave it
    assert run(source, output, "--resume") == 0
    assert output.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    found = answers(output)
    assert set(found) == {one["custom_id"] for one in lines}
    with LLM(**SMALL) as llm:
        params = SamplingParams(**body)
        expected = llm.generate([one["body"]["prompt"] for one in lines], params, use_tqdm=False)
    for one, output_of in zip(lines, expected, strict=True):
        assert found[one["custom_id"]]["response"]["body"]["choices"][0]["text"] == output_of.text


def test_a_failure_ends_the_run_and_what_was_answered_stays(tmp_path, monkeypatch, capsys):
    lines = [line(f"r{index}", {"prompt": [index + 1], "max_tokens": 1}) for index in range(40)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    answer = jaxllm.server.batch._answer

    async def fail_later(app, file, one):
        if int(one.custom_id[1:]) >= 20:
            raise EngineError("the device is gone")
        return await answer(app, file, one)

    monkeypatch.setattr("jaxllm.server.batch._answer", fail_later)
    assert run(source, output) == 2
    assert "the device is gone" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(source, output, "--resume") == 0
    assert set(answers(output)) == {one["custom_id"] for one in lines}


def test_a_request_that_the_server_fails_of_is_answered_like_any_other(tmp_path, monkeypatch):
    lines = [line(f"r{index}", {"prompt": [index + 1], "max_tokens": 1}) for index in range(4)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    prompts = PromptLimits.prompts

    def fail_of_one(self, value):
        if value == [2]:
            raise KeyError("something nobody thought of")
        return prompts(self, value)

    monkeypatch.setattr(PromptLimits, "prompts", fail_of_one)
    assert run(source, output) == 0
    found = {name: one["response"] for name, one in answers(output).items()}
    assert {name: one["status_code"] for name, one in found.items()} == {
        "r0": 200,
        "r1": 500,
        "r2": 200,
        "r3": 200,
    }
    assert found["r1"]["body"]["error"]["code"] == "internal"


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch, capsys):
    lines = [line(f"r{index}", {"prompt": [index + 1], "max_tokens": 1}) for index in range(40)]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    load = Service.load

    def change_and_load(*args):
        write(tmp_path / "in.jsonl", [{**one, "custom_id": one["custom_id"].upper()} for one in lines])
        return load(*args)

    monkeypatch.setattr(Service, "load", change_and_load)
    assert run(source, output) == 2
    assert "the batch file was changed meanwhile: 'r0' is not where it was" in capsys.readouterr().err
