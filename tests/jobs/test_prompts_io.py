"""Prompts from arguments and files; an output file that survives kill -9."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, RequestError, SamplingParamsError
from jaxllm.jobs.output_file import OutputFile
from jaxllm.jobs.prompts_io import prompts_from_arguments, read_jsonl_file, read_text_file
from jaxllm.sampling.params import SamplingParams

PARAMS = SamplingParams(top_k=7)


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_rows(count=4):
    return prompts_from_arguments([f"p{i}" for i in range(count)], PARAMS)


def test_arguments():
    rows = prompts_from_arguments(["a", " b"], PARAMS)
    assert [(r.index, r.prompt, r.sampling_params) for r in rows] == [(0, "a", PARAMS), (1, " b", PARAMS)]
    with pytest.raises(RequestError, match="argument 2 is empty"):
        prompts_from_arguments(["a", ""], PARAMS)
    with pytest.raises(RequestError, match="no prompts"):
        prompts_from_arguments([], PARAMS)


@pytest.mark.parametrize("content", [b"a\n b \n", b"a\r\n b \r\n", b"\xef\xbb\xbfa\n b "])
def test_text_file(tmp_path, content):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    assert [row.prompt for row in read_text_file(path, PARAMS)] == ["a", " b "]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"a\n\nb\n", "line 2: the line is empty"),
        (b"a\n  \n", "line 2: the line is empty"),
        (b"", "the file is empty"),
        (b"a\n\xff\n", "line 2: byte 0 is no UTF-8"),
    ],
)
def test_bad_text_files(tmp_path, content, cause):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=rf"prompts\.txt.*{cause}"):
        read_text_file(path, PARAMS)


def test_unreadable_files(tmp_path):
    for read in (read_text_file, read_jsonl_file):
        for path in (tmp_path / "absent", tmp_path):
            with pytest.raises(ConfigError, match="cannot read the prompts file"):
                read(path, PARAMS)


def test_jsonl_file(tmp_path):
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", "id": "x"},
        {"prompt_token_ids": [1, 2], "id": 7, "sampling_params": {"temperature": 0, "stop": ["."]}},
        {"messages": [{"role": "user", "content": "hi"}], "num_dropped_tokens": 16},
    )
    rows = read_jsonl_file(path, PARAMS)
    assert [row.num_dropped_tokens for row in rows] == [0, 0, 16]
    assert rows[2].fingerprint() != dataclasses.replace(rows[2], num_dropped_tokens=0).fingerprint()
    assert [row.index for row in rows] == [0, 1, 2]
    assert [row.id for row in rows] == ["x", 7, None]
    assert rows[0].prompt == "a"
    assert rows[0].sampling_params is PARAMS
    assert rows[1].prompt_token_ids == (1, 2)
    assert rows[1].sampling_params == SamplingParams(top_k=7, temperature=0, stop=".")
    assert rows[2].messages == ({"role": "user", "content": "hi"},)
    assert len({row.fingerprint() for row in rows}) == 3


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "no valid JSON"),
        ('{"prompt": NaN}', "NaN is no JSON value"),
        ("[" * 100_000, "no valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "exactly one of"),
        ('{"prompt": "a", "messages": []}', "prompt and messages"),
        ('{"promt": "a"}', 'unknown key "promt". Did you mean "prompt"'),
        ('{"prompt": ""}', "non-empty string"),
        ('{"prompt": null}', "non-empty string"),
        ('{"prompt_token_ids": []}', "non-empty list"),
        ('{"prompt_token_ids": [1, -1]}', "holds -1"),
        ('{"prompt_token_ids": [true]}', "holds True"),
        ('{"messages": []}', "messages is empty"),
        ('{"prompt": "a", "id": 1.5}', '"id" must be'),
        ('{"prompt": "a", "num_dropped_tokens": -16}', '"num_dropped_tokens" must be'),
        ('{"prompt": "a", "num_dropped_tokens": true}', '"num_dropped_tokens" must be'),
        ('{"prompt": "a", "id": "first"}', "is taken by .*line 1"),
        ('{"prompt": "a", "sampling_params": {"max_new_tokens": 1}}', "use max_tokens"),
        ('{"prompt": "a", "sampling_params": []}', "must be an object"),
        ("", "the line is empty"),
    ],
)
def test_bad_jsonl_lines_name_file_and_line(tmp_path, line, cause):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "id": "first"}\n' + line + "\n")
    error = SamplingParamsError if "sampling_params" in line else RequestError
    with pytest.raises(error, match=rf"prompts\.jsonl, line 2: .*{cause}"):
        read_jsonl_file(path, PARAMS)


def test_fingerprint_depends_on_prompt_parameters_and_context():
    row = make_rows(1)[0]
    assert row.fingerprint() == make_rows(3)[0].fingerprint()
    other_prompt = prompts_from_arguments(["q"], PARAMS)[0]
    other_params = prompts_from_arguments(["p0"], SamplingParams(top_k=8))[0]
    fingerprints = [row.fingerprint(), row.fingerprint("m"), other_prompt.fingerprint()]
    assert len({*fingerprints, other_params.fingerprint()}) == 4


def test_lines_in_completion_order(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, make_rows()) as output:
        output.write([(2, {"text": "c\u2028\ud800é"})])
        output.write([(0, {"text": "a"}), (1, {"text": "b"})])
        assert output.done == {0, 1, 2}
        assert len(read_lines(path)) == 3  # on disk before close
    lines = read_lines(path)
    assert [(line["index"], line["id"], line["text"]) for line in lines] == [
        (2, None, "c\u2028\ud800é"),
        (0, None, "a"),
        (1, None, "b"),
    ]
    assert lines[0]["fingerprint"] == make_rows()[2].fingerprint()


def test_a_batch_is_one_write_and_one_sync(tmp_path):
    with OutputFile(tmp_path / "out.jsonl", make_rows()) as output:
        with mock.patch("os.fsync") as fsync, mock.patch("os.write", wraps=os.write) as write:
            output.write([(0, {}), (1, {}), (2, {})])
        assert (write.call_count, fsync.call_count) == (1, 1)


def test_misuse_writes_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, make_rows()) as output:
        output.write([(1, {})])
        before = path.read_bytes()
        for batch in (
            [(0, {}), (1, {})],
            [(0, {}), (0, {})],
            [(0, {}), (4, {})],
            [(-1, {})],
            [(0, {"id": 1})],
        ):
            with pytest.raises(RequestError):
                output.write(batch)
        assert path.read_bytes() == before
        assert output.done == {1}


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"--resume .* another --output"):
        OutputFile(path, make_rows())
    assert path.read_text() == "precious"


@pytest.mark.parametrize("content", ["precious", "precious\n", '{"a": 1}\n', "[1]\n", '{"index": true}\n'])
def test_resume_leaves_foreign_files_alone(tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"line 1: .* choose another --output or delete"):
        OutputFile(path, make_rows(), resume=True)
    assert path.read_text() == content


def test_resume_refuses_other_inputs(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, make_rows(4)) as output:
        output.write([(1, {}), (3, {})])
    content = path.read_bytes()
    other = prompts_from_arguments(["p0", "p1", "p2", "changed"], PARAMS)
    for rows, context, cause in (
        (other, "", "line 2: its fingerprint differs from that of prompt argument 4,"),
        (make_rows(4), "other model", "line 1: its fingerprint differs"),
        (make_rows(3), "", "line 2: it has index 3, which is none of the 3 prompts"),
    ):
        with pytest.raises(ConfigError, match=cause):
            OutputFile(path, rows, resume=True, context=context)
    path.write_bytes(content + content)
    with pytest.raises(ConfigError, match="line 3: it is a second line for index 1"):
        OutputFile(path, make_rows(4), resume=True)


def test_resume_drops_the_errors_of_rows_that_have_changed(tmp_path):
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    (tmp_path / "link").symlink_to(target)

    def resumed(text):
        source.write_text(text)
        return OutputFile(tmp_path / "link", read_text_file(source, PARAMS, keep_bad=True), resume=True)

    with resumed("a\n\n\nd\n") as output:
        bad = {"error": "bad"}
        output.write([(1, bad), (0, {"text": "A"}), (2, bad), (3, bad)])
    target.chmod(0o640)
    before = target.read_text().splitlines(keepends=True)
    with resumed("a\n\n\nd\n") as output:
        assert len(output.done) == 4
    assert target.read_text() == "".join(before)
    with resumed("a\nb\n\nD\n") as output:
        assert output.done == {0, 2}
        assert target.read_text() == before[1] + before[2]
        with pytest.raises(ConfigError, match="another process"):
            resumed("a\nb\n\nD\n")
        output.write([(1, {"text": "B"})])
    assert [line["index"] for line in read_lines(target)] == [0, 2, 1]
    assert (target.stat().st_mode & 0o777, len(list(tmp_path.iterdir()))) == (0o640, 3)
    with pytest.raises(ConfigError, match=r"line 1: its fingerprint differs from that of .*in\.txt, line 1,"):
        resumed("other\nb\nc\nD\n")
    assert [line["index"] for line in read_lines(target)] == [0, 2, 1]


def test_errors_that_cannot_be_dropped_stay(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "out.jsonl"
    with OutputFile(path, make_rows()) as output:
        output.write([(0, {"error": "bad"}), (1, {})])
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"No space left.*--resume"):
        OutputFile(path, prompts_from_arguments(["new", "p1"], PARAMS), resume=True)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])


def test_resume_of_an_absent_or_empty_file(tmp_path):
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        with OutputFile(path, make_rows(), resume=True) as output:
            assert output.done == frozenset()
    with OutputFile(path, make_rows()):  # an empty file holds nothing to lose
        pass


def test_outputs_that_cannot_be_opened(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, tmp_path / "absent" / "out.jsonl", fifo):
        with pytest.raises(ConfigError, match="output"):
            OutputFile(path, make_rows())


def test_two_writers_of_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, make_rows()) as output:
        for resume in (False, True):
            with pytest.raises(ConfigError, match="another process is writing"):
                OutputFile(path, make_rows(), resume=resume)
        output.close()
        OutputFile(path, make_rows(), resume=True).close()


def test_a_full_disk_keeps_earlier_lines(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, make_rows()) as output:
        output.write([(0, {})])
        before = path.read_bytes()
        real_write = os.write

        def half(fd, data):
            monkeypatch.setattr(os, "write", full)
            return real_write(fd, data[: len(data) // 2])

        def full(fd, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(ConfigError, match=r"No space left.*--resume"):
            output.write([(1, {})])
        monkeypatch.undo()
        assert path.read_bytes() == before
        output.write([(1, {})])
    assert [line["index"] for line in read_lines(path)] == [0, 1]


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(6)), st.lists(st.integers(0, 900), max_size=3), st.integers(1, 4))
def test_truncated_anywhere_resume_gives_every_index_once(tmp_path_factory, order, offsets, batch):
    path = tmp_path_factory.getbasetemp() / "truncated.jsonl"
    path.unlink(missing_ok=True)
    rows = make_rows(6)
    for offset in [*offsets, None]:
        with mock.patch("os.fsync"), OutputFile(path, rows, resume=True) as output:
            todo = [index for index in order if index not in output.done]
            for start in range(0, len(todo), batch):
                output.write((index, {"text": f"t{index}"}) for index in todo[start : start + batch])
        if offset is not None:
            os.truncate(path, min(offset, path.stat().st_size))
    lines = read_lines(path)
    assert sorted((line["index"], line["text"]) for line in lines) == [(i, f"t{i}") for i in range(6)]


def test_kill_9_loses_at_most_the_line_being_written(tmp_path):
    path = tmp_path / "out.jsonl"
    program = f"""
        from jaxllm.jobs.output_file import OutputFile
        from jaxllm.jobs.prompts_io import prompts_from_arguments
        from jaxllm.sampling.params import SamplingParams
        rows = prompts_from_arguments([f"p{{i}}" for i in range(2_000)], SamplingParams(top_k=7))
        output = OutputFile({str(path)!r}, rows)
        for index in range(2_000):
            output.write([(index, {{"text": "x" * 20_000}})])
            if index == 5:
                print("started", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"
        with pytest.raises(ConfigError, match="another process"):
            OutputFile(path, make_rows(), resume=True)
        process.send_signal(signal.SIGKILL)
    with OutputFile(path, make_rows(2_000), resume=True) as output:
        assert output.done >= set(range(6))
        assert output.done == set(range(len(output.done)))
    assert [line["index"] for line in read_lines(path)] == sorted(output.done)
