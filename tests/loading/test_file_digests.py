"""Digests of weights are remembered by what a file is, and never trusted beyond that."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from jaxllm.executor.kv import file_digests
from jaxllm.executor.kv.file_digests import weights_fingerprint


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxllm" / "weights"


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that are read."""
    names, read = [], file_digests._read
    monkeypatch.setattr(
        file_digests, "_read", lambda path, size: (names.append(path.name), read(path, size))[1]
    )
    return names


def test_what_has_not_changed_is_read_once(home, checkpoint, reads):
    first = weights_fingerprint(checkpoint)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert weights_fingerprint(checkpoint) == first
    assert len(reads) == 2
    assert len(list(home.iterdir())) == 2


@pytest.mark.parametrize("how", ["longer", "same size", "same size and time", "another file"])
def test_what_has_changed_is_read_again(home, checkpoint, reads, how):
    first = weights_fingerprint(checkpoint)
    path = checkpoint / "model.safetensors"
    before = path.stat()
    if how == "another file":
        (checkpoint / "other").write_bytes(b"WEIGHTS")
        os.utime(checkpoint / "other", ns=(before.st_atime_ns, before.st_mtime_ns))
        os.replace(checkpoint / "other", path)
    else:
        path.write_bytes(b"longer weights" if how == "longer" else b"WEIGHTS")
    if how == "same size and time":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_fingerprint(checkpoint) != first
    assert reads.count("model.safetensors") == 2


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"null", b'{"file": 1}', b"[" * 100_000, b"\xff\0"])
def test_garbage_is_read_over(home, checkpoint, reads, garbage):
    first = weights_fingerprint(checkpoint)
    for record in home.iterdir():
        record.write_bytes(garbage)
    assert weights_fingerprint(checkpoint) == first
    assert len(reads) == 4
    weights_fingerprint(checkpoint)
    assert len(reads) == 4  # it was made again


def test_another_files_record_is_no_answer(home, checkpoint):
    first = weights_fingerprint(checkpoint)
    records = list(home.iterdir())
    contents = [record.read_bytes() for record in records]
    for record, content in zip(records, reversed(contents), strict=True):
        record.write_bytes(content)
    assert weights_fingerprint(checkpoint) == first


def test_a_cache_that_cannot_be_had_costs_only_time(tmp_path, checkpoint, reads, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first = weights_fingerprint(checkpoint)
    assert weights_fingerprint(checkpoint) == first
    monkeypatch.setattr(file_digests.os, "replace", _refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert weights_fingerprint(checkpoint) == first
    assert len(reads) == 6
    assert list((tmp_path / "cache" / "jaxllm" / "weights").iterdir()) == []


def test_weights_are_read_after_the_main_thread_too(checkpoint):
    code = f"""
        import pathlib, threading
        from jaxllm.executor.kv.file_digests import weights_fingerprint
        def run():
            threading.main_thread().join()
            print(weights_fingerprint(pathlib.Path({str(checkpoint)!r})))
        threading.Thread(target=run).start()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, weights_fingerprint(checkpoint)), ran.stderr
    assert not [one for one in threading.enumerate() if one.name.startswith("jaxllm-weights")]


def _refuse(*_):
    raise PermissionError(13, "Permission denied")
