"""An engine over two processes: tokens of one device, whoever is preempted how, and an end with its cause."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm.cluster.paths import for_workers
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.processes import lead
from jaxllm.errors import ConfigError
from jaxllm.executor.processes.links import Follower
from jaxllm.executor.processes.wire import packed
from jaxllm.loading.checkpoints import demo_model_path

HERE = pathlib.Path(__file__).parent
SIZES = {
    "num_gpu_blocks_override": 24,
    "num_host_blocks": 64,
    "decode_buckets": [8],
    "prefill_buckets": [64],
    "num_scheduler_steps": 2,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 8,
}
SECONDS = 240


@pytest.fixture
def started():
    """Starts processes, and ends those that are left."""
    processes = []

    def start(*arguments):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def two(**settings):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return {**SIZES, "tensor_parallel_size": 2, "nnodes": 2, "master_port": port, **settings}


def leader(start, settings, then):
    return start(HERE / "leader.py", json.dumps(settings), then)


def follower(start, settings, rank=1):
    texts = {name: ",".join(map(str, v)) if isinstance(v, list) else v for name, v in settings.items()}
    texts |= {name: json.dumps(value) for name, value in settings.items() if isinstance(value, dict)}
    off = [name for name, value in settings.items() if value is False]
    flags = [f"--{name.replace('_', '-')}={texts[name]}" for name in texts if name not in off]
    flags += [f"--no-{name.replace('_', '-')}" for name in off]
    return start("-m", "jaxllm", "serve", *flags, "--node-rank", rank)


def results(process):
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    found = {}
    for line in out.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


def wait_for(process, name):
    for line in process.stdout:
        if line.startswith("{") and name in json.loads(line):
            return
    raise AssertionError(process.stderr.read())


def did(process, what):
    """Have a leader that takes steps do one; what it says of it."""
    process.stdin.write(what + "\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("{"):
            found = json.loads(line)
            assert "error" not in found, found
            return found
    raise AssertionError(process.stderr.read())


def parts(folder):
    """Where the files of each process of two are, by rank."""
    found = {}
    for about in folder.glob("*/about.json"):
        fingerprint = json.loads(about.read_text())["fingerprint"]
        for rank in range(2):
            if f"part {rank} of 2, of 2 devices" in fingerprint:
                found[rank] = about.parent
    return found


def blocks(folder):
    return sorted(path for path in folder.glob("??/*") if not path.name.startswith("."))


def drafting(method):
    return {"speculative_config": {"method": method, "num_speculative_tokens": 4, "policy": "fixed"}}


def test_no_token_depends_on_what_hypothesis_schedules(started):
    """Preemption, swaps, aborts and drafts of all kinds, in any order, of two processes."""
    settings = two(
        num_gpu_blocks_override=128,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        decode_buckets=[4],
        prefill_buckets=[48],
        block_size=4,
        max_model_len=112,
        num_scheduler_steps=1,
        enable_prefix_caching=False,
        speculative_config={"num_speculative_tokens": 8},
    )
    follows = follower(started, settings)
    found = results(started(HERE / "machine.py", json.dumps(settings), 12))
    assert found["examples"] >= 12
    assert found["preemptions"] > 0
    assert follows.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("policy", "others", "drafts"),
    [
        ("vllm_swap", {}, {}),
        ("vllm_v1", {"num_host_blocks": 0}, drafting("ngram")),
        ("vllm_v1", {"num_host_blocks": 0}, drafting("suffix")),
    ],
)
def test_tokens_are_those_of_one_device(started, policy, others, drafts):
    settings = two(**others, **drafts)
    follows = follower(started, settings)
    own = {"scheduler_policy": policy, "seed": 7}  # what the leader alone decides
    found = results(leader(started, {**settings, **own}, "answer"))
    assert follows.wait(SECONDS) == 0
    alone = results(leader(started, {**SIZES, **others, **own}, "answer"))
    assert found["tokens"] == alone["tokens"]
    assert found["again"] == alone["tokens"][0][0]
    assert found["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)
    assert found["preemptions"] > 0
    assert bool(drafts) == (found.get("kept", 0) > 0)
    assert (found["swaps"] > 0) == (policy == "vllm_swap")


def test_processes_share_an_output_head_of_its_own(started, tmp_path):
    """Greedy and random tokens of steps, and what is sampled apart of logits that no process has whole."""
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    noise = np.random.default_rng(0).normal(size=embeddings.shape, scale=0.1 * embeddings.std())
    weights["lm_head.weight"] = (embeddings + noise).astype(embeddings.dtype)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    settings = two(model=str(model))
    follows = follower(started, settings)
    found = results(leader(started, {**settings, "seed": 7}, "answer"))
    assert follows.wait(SECONDS) == 0
    alone = results(leader(started, {**SIZES, "model": str(model), "seed": 7}, "answer"))
    assert found["tokens"] == alone["tokens"]
    assert found["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)


def test_files_of_the_prefix_cache_are_of_all_processes_or_missing(started, tmp_path):
    shared, own = tmp_path / "shared", tmp_path / "own"
    files = {"prefix_cache_dir": str(shared)}
    settings = two(**files)
    follows = follower(started, settings)
    leads = leader(started, {**settings, "scheduler_policy": "swap_if_it_fits"}, "steps")
    wait_for(leads, "made")
    cold = did(leads, "answer")
    assert (cold["read"], cold["swaps"] > 0) == (0, True)
    assert did(leads, "answer")["tokens"] == cold["tokens"]
    leads.stdin.write("answer\n" * 20)
    leads.stdin.flush()
    follows.kill()  # in the middle of something
    assert "node_rank=1 is lost" in results(leads)["error"]
    assert all(map(blocks, parts(shared).values()))

    alone = leader(started, {**SIZES, **files}, "steps")
    wait_for(alone, "made")
    first = did(alone, "answer")
    assert (first["tokens"], first["read"]) == (cold["tokens"], 0)  # nothing of others is its own
    did(alone, "update")
    others = did(alone, "answer")["tokens"]
    assert others != cold["tokens"]
    assert results(alone) == {}

    theirs = own / parts(shared)[1].name  # on a disk of its own
    own.mkdir()
    parts(shared)[1].rename(theirs)
    settings = two(**files)
    follows = follower(started, {**settings, "prefix_cache_dir": str(own)})
    leads = leader(started, {**settings, "scheduler_policy": "vllm_v1"}, "steps")
    wait_for(leads, "made")

    def answer(tokens=cold["tokens"]):
        found = did(leads, "answer")
        assert found["tokens"] == tokens
        assert (found["preemptions"] > 0, found["swaps"]) == (True, 0)
        return found["read"]

    assert answer() > 0
    for number, path in enumerate(blocks(theirs)):
        if number % 3:
            content = bytearray(path.read_bytes())
            content[-1 - number % 90] ^= 1 << number % 8
            path.write_bytes(content[: None if number % 3 == 1 else -1])
    answer()
    for path in blocks(theirs):
        path.unlink()
    assert answer() == 0
    assert answer() > 0  # they were written again
    os.mkfifo(hung := tmp_path / "hung")
    for path in blocks(theirs):
        path.unlink()
        path.hardlink_to(hung)  # whoever opens it waits
    assert answer() == 0
    assert answer() == 0  # they were written again, and are not read
    os.close(os.open(hung, os.O_WRONLY | os.O_NONBLOCK))  # one did wait
    answer()
    assert answer() > 0
    did(leads, "update")
    assert answer(others) == 0
    assert answer(others) > 0
    did(leads, "sleep")
    assert answer(others) > 0
    assert results(leads) == {}
    assert follows.wait(SECONDS) == 0
    assert [path for path in own.glob("*") if blocks(path)] == [theirs]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("then", ["stream", "idle"])
def test_a_lost_process_ends_requests_with_its_cause(started, then):
    settings = two()
    follows, leads = follower(started, settings), leader(started, settings, then)
    wait_for(leads, "token" if then == "stream" else "made")
    follows.kill()
    follows.wait()
    if then == "idle":
        leads.stdin.write("go\n")
        leads.stdin.flush()
    found = results(leads)
    assert "node_rank=1 is lost" in found["error"]
    assert "node_rank=1 is lost" in found["cause"]


def test_a_process_that_says_nothing_is_lost_too(started):
    settings = two()
    follows, leads = follower(started, settings), leader(started, settings, "stream")
    wait_for(leads, "token")
    follows.send_signal(signal.SIGSTOP)
    for line in leads.stdout:
        if "error" in json.loads(line):
            break
    assert "node_rank=1 is lost: it has given no sign of life" in line


def test_a_follower_ends_with_an_error_when_its_leader_is_gone(started):
    settings = two()
    follows, leads = follower(started, settings), leader(started, settings, "stream")
    wait_for(leads, "token")
    leads.kill()
    assert follows.wait(SECONDS) == 1
    assert "the leader at 127.0.0.1:" in follows.stderr.read()


def test_what_fails_says_so_rather_than_that_its_leader_went(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", codes := mock.Mock())
    link = Follower.__new__(Follower)
    link._connection = mock.Mock()
    link.say("failed", "no room")
    link.leave("the leader is gone")
    assert capsys.readouterr().err == "jaxllm: error: no room\n"
    codes.assert_called_once_with(1)


@pytest.mark.parametrize("changed", [{"block_size": 16}, {"kv_cache_dtype": "bfloat16"}])
def test_other_settings_are_refused_by_name(started, changed):
    settings = two()
    follows, leads = follower(started, {**settings, **changed}), leader(started, settings, "answer")
    _, errors = leads.communicate(timeout=SECONDS)
    assert leads.returncode == 1
    name = next(iter(changed))
    assert f"setting {name} is " in errors
    assert follows.wait(SECONDS) == 2
    assert f"setting --{name.replace('_', '-')} is " in follows.stderr.read()


def test_who_does_not_come_is_named(started):
    code = (
        "from jaxllm.executor.processes import links; links.SECONDS_TO_COME = 1.0; "
        f"from jaxllm import LLM; LLM(**{two()!r})"
    )
    leads = started("-c", code)
    _, errors = leads.communicate(timeout=SECONDS)
    assert "node_rank 1 did not come to 127.0.0.1:" in errors
    assert "--node-rank" in errors


def test_strangers_are_sent_away(started):
    settings = two()
    leads = leader(started, settings, "nothing")
    stranger = None
    while stranger is None:
        try:
            stranger = socket.create_connection(("127.0.0.1", settings["master_port"]))
        except OSError:
            assert leads.poll() is None
    for message in (
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        *(packed("hello", arguments) for arguments in ([], [5], [1, [], "settings"])),
        struct.pack(">QQ", 1, 0) + b"5",
        struct.pack(">QQ", 4000, 0) + b"[" * 4000,
    ):
        with stranger or socket.create_connection(("127.0.0.1", settings["master_port"])) as one:
            one.sendall(message)
            assert one.recv(1) == b""
        stranger = None
    follows = follower(started, settings)
    assert results(leads) == {"made": True}
    assert follows.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"node_rank": 2}, "node_rank=2 is none of the 2 processes of nnodes=2, which are 0 to 1"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 is of all processes, and nnodes=2 does not"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is of one process, and nnodes=2: leave"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 is of one process, and nnodes=2: leave one of"),
        (
            {"speculative_config": {"method": "medusa", "model": "heads"}},
            r"what drafts \(medusa\).*: draft by lookup",
        ),
        ({"logits_processors": [max]}, "is a function of this process, and nnodes=2: name it as"),
        ({"nnodes": 1, "master_port": 5}, "master_port=5 is where several processes meet, and nnodes=1: set"),
        ({"master_addr": ""}, "master_addr='' must be a host name or an address"),
    ],
)
def test_what_is_of_one_process_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"nnodes": 2, "tensor_parallel_size": 2, **settings})


def test_workers_of_a_cluster_are_one_process_each():
    with pytest.raises(ConfigError, match="nnodes=2 processes have one engine, and each worker of a cluster"):
        for_workers({"nnodes": 2})


def test_weights_given_to_one_process_are_refused():
    config = EngineConfig(nnodes=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="params are of one process, and nnodes=2 read the checkpoint's"):
        lead(config, {})
    with pytest.raises(ConfigError, match="node_rank=1 follows, and node_rank=0 has the engine: run"):
        lead(dataclasses.replace(config, node_rank=1), None)
