"""Servers that the load generator starts: real ones, and ones that misbehave. None is ever left behind."""

import json
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from fake_openai import FakeServer, words
from server_helpers import served_by_command

from jaxllm.cli.main import main
from jaxllm.commands.signals import signals_as_interrupts
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.serving import server_process
from jaxllm.research.bench.serving.server_process import running_server
from jaxllm.research.workloads import make_conversations

SMALL = (
    "--max-num-seqs=4 --max-num-batched-tokens=32 --decode-buckets=4 --prefill-buckets=32 "
    "--max-model-len=128 --num-scheduler-steps=1"
)
_PYTHON = sys.executable
READY = "echo 'jaxllm: serving fake on http://127.0.0.1:9' >&2"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Has a shell script run instead of a server; gives the file into which it writes its process id."""

    def make(*lines):
        script, pids = tmp_path / "server", tmp_path / "pids"
        script.write_text(
            "\n".join(["#!/bin/sh", f"echo $$ >> {pids}", f"echo $* > {tmp_path}/arguments", *lines])
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(server_process.sys, "executable", str(script))
        return pids

    return make


def _ended(pid):
    """Whether a process is gone, or only waits to be collected."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def all_gone(pids):
    found = [int(line) for line in pids.read_text().split()]
    assert found
    return all(map(_ended, found))


# Stand-ins


def test_a_server_is_asked_to_stop_and_has_the_arguments(stand_in, tmp_path):
    pids = stand_in(
        f"trap 'echo asked > {tmp_path}/asked; exit 0' TERM", READY, "while :; do sleep 0.01; done"
    )
    with running_server(["--scheduler-policy", "vllm"]) as url:
        assert url == "http://127.0.0.1:9"
        assert not all_gone(pids)
    assert all_gone(pids)
    assert (tmp_path / "asked").exists()
    arguments = (tmp_path / "arguments").read_text().split()
    assert " ".join(arguments) == "-m jaxllm serve --host 127.0.0.1 --port 0 --scheduler-policy vllm"


def test_what_does_not_stop_is_killed_with_all_it_started(stand_in, tmp_path):
    child = f"sh -c 'echo $$ >> {tmp_path}/pids; exec sleep 600' &"
    pids = stand_in("trap '' TERM", child, READY, "wait")
    with running_server([], stop_timeout=0.2):
        while len(pids.read_text().split()) < 2:
            time.sleep(0.01)
    assert len(pids.read_text().split()) == 2
    deadline = time.monotonic() + 60  # nobody but init can wait for the second
    while not all_gone(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all_gone(pids)


def test_an_impatient_user_does_not_wait(stand_in, monkeypatch):
    pids = stand_in("trap '' TERM", READY, "while :; do sleep 0.01; done")
    server = running_server([], stop_timeout=600)  # would be the test's end
    server.__enter__()
    monkeypatch.setattr(server_process.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        server.__exit__(None, None, None)
    assert all_gone(pids)


def test_a_signal_while_it_starts_stops_it(stand_in, tmp_path, monkeypatch):
    pids = stand_in(READY, "exec sleep 600")
    start = subprocess.Popen

    def start_and_interrupt(*args, **kwargs):
        process = start(*args, **kwargs)
        while not (pids.exists() and pids.read_text().strip()):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(server_process.subprocess, "Popen", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        running_server([]).__enter__()
    assert all_gone(pids)


def test_a_failure_inside_stops_it_too(stand_in):
    pids = stand_in(READY, "exec sleep 600")
    with pytest.raises(KeyboardInterrupt), running_server([]):
        raise KeyboardInterrupt
    assert all_gone(pids)


def test_a_server_that_ends_says_why(stand_in):
    pids = stand_in("echo 'jaxllm: error: no such model' >&2", "exit 2")
    with pytest.raises(ConfigError, match=r"ended before it was ready; it said: .*no such model"):
        running_server([]).__enter__()
    assert all_gone(pids)


def test_a_server_that_is_never_ready_is_given_up(stand_in):
    pids = stand_in("echo 'jaxllm: loading' >&2", "exec sleep 600")
    with pytest.raises(ConfigError, match=r"not ready after 0\.5 s"):
        running_server([], start_timeout=0.5).__enter__()
    assert all_gone(pids)


def test_a_server_that_says_much_is_read_to_the_end(stand_in):
    pids = stand_in(
        READY, "i=0; while [ $i -lt 20000 ]; do echo 'a long line of a log' >&2; i=$((i+1)); done", "exit 0"
    )
    with running_server([]):
        while not all_gone(pids):
            time.sleep(0.01)


def test_keys_of_other_servers_are_not_theirs(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_API_KEY", "some-other-key")
    stand_in(f'echo "key=$JAXLLM_API_KEY" > {tmp_path}/key', READY, "exec sleep 600")
    with running_server([]):
        pass
    assert (tmp_path / "key").read_text() == "key=\n"


@pytest.mark.parametrize("of_interrupts", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind_the_stack(number, of_interrupts):
    before = signal.getsignal(number)
    kept = signal.signal(signal.SIGINT, of_interrupts)
    try:
        with pytest.raises(SystemExit) as caught, signals_as_interrupts():
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, kept)
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_signals_are_left_alone_in_other_threads():
    entered = []

    def enter():
        with signals_as_interrupts():
            entered.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [before]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("is_ready", [False, True])
def test_a_sweep_that_is_told_to_end_leaves_no_server(stand_in, tmp_path, number, code, is_ready):
    with FakeServer(words, together=1000) as never_answers:
        ready = READY.replace("http://127.0.0.1:9", never_answers.url) if is_ready else ":"
        pids = stand_in("trap '' INT HUP", ready, "exec sleep 600")
        program = (
            "import sys; from jaxllm.research.bench.serving import sweep\n"
            "from jaxllm.cli.main import main\n"
            "sweep.Sweep.hardware = lambda self: {}\n"
            f"sys.executable = {sys.executable!r}\n"
            "sys.exit(main(['bench', 'serve', '--sweep=vllm', '--num-warmups=0', '--output=result.json']))"
        )
        process = subprocess.Popen(
            [_PYTHON, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            while not (never_answers.bodies if is_ready else pids.exists() and pids.read_text().strip()):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.01)
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code
    assert "Traceback" not in said
    assert all_gone(pids)
    assert not (tmp_path / "result.json").exists()


# Real servers


@pytest.fixture(scope="module")
def url():
    with served_by_command("--max-queued-requests=8", "--no-log-requests") as (_, url):
        yield url


def test_a_real_server_answers_as_long_as_asked(url, capsys):
    command = ["bench", "serve", "--base-url", url, "--num-prompts=12", "--output-len=2:9"]
    assert main([*command, "--input-len=4:20", "--arrivals=closed:4", "--save-detailed"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["num_without_usage"]) == (12, 0)
    assert found["total_input_tokens"] == found["workload"]["prompt_tokens"]["total"]
    assert found["total_output_tokens"] == found["workload"]["output_tokens"]["total"]
    assert found["model_id"] == "demo_model"
    assert found["weighted_turnaround"] >= 1
    assert found["num_preemptions"] == {"swap": 0, "recompute": 0}
    assert all(found["generated_texts"])


def test_chats_with_a_real_server(url, capsys):
    command = ["bench", "serve", "--base-url", url, "--num-prompts=6", "--output-len=2:9", "--endpoint=chat"]
    assert main([*command, f"--tokenizer={demo_model_path()}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["num_without_usage"]) == (6, 0)
    assert found["total_output_tokens"] == found["workload"]["output_tokens"]["total"]


def test_conversations_with_a_real_server_find_what_was_said_before(url, tmp_path, capsys):
    def num_found():
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            text = response.read().decode()
        return sum(map(float, re.findall(r"^jaxllm:prefix_cache_hits_total{.*} (\S+)$", text, re.MULTILINE)))

    trace = make_conversations(4, mean_think=0.0, max_len=400, seed=2)
    trace.save(tmp_path / "talks.json")
    before = num_found()
    assert main(["bench", "serve", "--base-url", url, f"--trace={tmp_path}/talks.json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["failed"]) == (len(trace), 0)
    assert found["total_input_tokens"] == trace.prompt_lens.sum()
    followed = trace.follows[trace.follows >= 0]
    said_before = int((trace.prompt_lens + trace.output_lens)[followed].sum())
    assert said_before - 17 * len(followed) <= num_found() - before <= said_before  # whole blocks


def test_refusals_of_a_real_server_are_counted_apart(url, capsys):
    command = ["bench", "serve", "--base-url", url, "--num-prompts=60", "--input-len=30", "--output-len=200"]
    assert main([*command, "--arrivals=all"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["refused"] == found["failed"] > 0
    assert found["failures"] == {"503": found["refused"]}
    assert found["completed"] == 60 - found["refused"] > 0


def test_a_sweep_of_two_presets(tmp_path, capsys):
    output, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
    command = ["bench", "serve", "--sweep", "adaptive,vllm_v1", "--server-args", SMALL]
    command += ["--num-prompts=8", "--input-len=4:20", "--output-len=2:9", "--goodput", "e2el:600000"]
    assert main([*command, "--output", str(output), "--plot", str(plot)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    found = json.loads(output.read_text())
    assert [row["policy"] for row in found["rows"]] == ["adaptive", "vllm_v1"]
    assert [row["completed"] for row in found["rows"]] == [8, 8]
    assert found["hardware"]["device"]
    assert found["is_complete"]
    first, second = found["runs"]
    assert first["workload"] == second["workload"]
    assert first["total_output_tokens"] == second["total_output_tokens"]
    assert first["request_goodput"] == first["request_throughput"]
    lines = captured.err.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["adaptive", "vllm_v1"]
    assert plot.read_bytes().startswith(b"\x89PNG")


FAILS_IN_A_SERVER = """
import sys

from jaxllm.sched.presets import vllm_v1


def policy(costs):
    if sys.argv[1:2] == ["serve"]:
        raise RuntimeError("not in a server")
    return vllm_v1(costs)
"""


def test_what_a_sweep_has_measured_outlives_a_server_that_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "failing_in_servers.py").write_text(FAILS_IN_A_SERVER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "sweep.json"
    command = ["bench", "serve", "--sweep", "vllm_v1,failing_in_servers:policy", "--server-args", SMALL]
    command += ["--num-prompts=4", "--input-len=4", "--output-len=2", "--output", str(output)]
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("jaxllm: error: the server ended before it was ready")
    assert "failing_in_servers:policy" in said
    found = json.loads(output.read_text())
    assert not found["is_complete"]
    assert [run["policy"] for run in found["runs"]] == ["vllm_v1"]
