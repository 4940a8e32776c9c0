"""KV blocks as files: bits, limits, damage, and processes that are killed or share a folder."""

import builtins
import errno
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, WeightsError
from jaxllm.executor.kv import disk, file_digests, file_io, whole_files
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.executor.kv.file_digests import weights_fingerprint
from jaxllm.executor.kv.file_io import FileTransfers
from jaxllm.sched.cache.names import BlockName, names_of, root
from jaxllm.types import Read

SHAPE = (2, 3, 4)
PLENTY = 2**24
NAMES = names_of(range(4000), 4, root())
FILE_BYTES = 24 + 16 + 16 + 24 * 4  # header, checksum, tokens, numbers


def keep(folder, fingerprint="a model", shape=SHAPE, dtype="float32", max_bytes=PLENTY):
    return BlockFiles(Path(folder), fingerprint, shape, np.dtype(dtype), max_bytes).open()


def block_of(number, shape=SHAPE, dtype="float32"):
    """Any bits at all, NaN payloads among them; the same for the same number."""
    dtype = np.dtype(dtype)
    content = np.random.default_rng(number).bytes(int(np.prod(shape)) * dtype.itemsize)
    return np.frombuffer(content, dtype).reshape(shape)


def equal(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def files_of(folder):
    """Block files, those used least recently first."""
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "about.json"]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def file_of(folder, name):
    (file,) = Path(folder).rglob(name.digest.hex())
    return file


def temporary_files(folder):
    return list(Path(folder).rglob("*.tmp"))


def total(folder):
    return sum(path.stat().st_size for path in files_of(folder))


@contextmanager
def warnings(of=disk):
    """What a module logs meanwhile; usable inside of hypothesis, unlike caplog."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger(of.__name__)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


# Round trips


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "int8", ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("shape", [(5,), SHAPE, (2, 16, 8, 64)])
def test_blocks_come_back_bit_for_bit(tmp_path, dtype, shape):
    files = keep(tmp_path, shape=shape, dtype=dtype)
    for number, name in enumerate(NAMES[:3]):
        assert name not in files
        assert files.read(name) is None
        assert files.write(name, block_of(number, shape, dtype))
        assert name in files
    for number, name in enumerate(NAMES[:3]):
        first, again = files.read(name), files.read(name)
        assert equal(first, block_of(number, shape, dtype))
        first[:] = 0
        assert equal(again, block_of(number, shape, dtype))


@pytest.mark.parametrize(
    ("dtype", "bits", "integer"),
    [
        ("float32", [0x7F800001, 0x7FC12345, 0xFFFFFFFF, 0x80000000, 0x00000001], np.uint32),
        ("float16", [0x7C01, 0x7E23, 0xFFFF, 0x8000, 0x0001], np.uint16),
        (ml_dtypes.bfloat16, [0x7F81, 0x7FC3, 0xFFFF, 0x8000, 0x0001], np.uint16),
    ],
)
def test_nan_payloads_and_signed_zeros_survive(tmp_path, dtype, bits, integer):
    block = np.array(bits, integer).view(dtype)
    assert keep(tmp_path, shape=block.shape, dtype=dtype).write(NAMES[0], block)
    assert keep(tmp_path, shape=block.shape, dtype=dtype).read(NAMES[0]).view(integer).tolist() == bits


def test_blocks_that_are_not_contiguous(tmp_path):
    files = keep(tmp_path)
    block = block_of(0, SHAPE[::-1]).T
    assert files.write(NAMES[0], block)
    assert equal(files.read(NAMES[0]), block)


def test_a_block_is_written_once(tmp_path):
    files = keep(tmp_path)
    assert files.write(NAMES[0], block_of(0))
    assert not files.write(NAMES[0], block_of(0))
    assert not keep(tmp_path).write(NAMES[0], block_of(0))
    assert files.num_bytes == total(tmp_path) == FILE_BYTES


def test_blocks_survive_and_are_shared(tmp_path):
    first = keep(tmp_path)
    first.write(NAMES[0], block_of(0))
    second = keep(tmp_path)
    assert second.num_bytes == first.num_bytes == FILE_BYTES
    assert NAMES[0] in second
    assert equal(second.read(NAMES[0]), block_of(0))
    second.write(NAMES[1], block_of(1))
    assert NAMES[1] in first
    assert equal(first.read(NAMES[1]), block_of(1))
    assert first.num_bytes == 2 * FILE_BYTES
    second.clear()
    assert first.read(NAMES[1]) is None
    assert NAMES[1] not in first
    assert first.num_bytes == FILE_BYTES
    assert second.num_bytes == 0


def test_any_way_to_name_the_folder(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    keep(tmp_path / "below" / "..").write(NAMES[0], block_of(0))
    monkeypatch.chdir(tmp_path)
    files = keep("below/..")
    monkeypatch.chdir("/")
    assert files.read(NAMES[0]) is not None
    assert files.num_bytes == FILE_BYTES


def test_wrong_blocks_are_refused(tmp_path):
    files = keep(tmp_path)
    with pytest.raises(ValueError, match=r"float32\(2, 3\), expected float32\(2, 3, 4\)"):
        files.write(NAMES[0], block_of(0, (2, 3)))
    with pytest.raises(ValueError, match="float16"):
        files.write(NAMES[0], block_of(0, dtype="float16"))


# Fingerprints


def test_another_fingerprint_sees_nothing(tmp_path):
    ours, theirs = keep(tmp_path), keep(tmp_path, "another model")
    ours.write(NAMES[0], block_of(0))
    assert NAMES[0] not in theirs
    assert theirs.read(NAMES[0]) is None
    theirs.write(NAMES[0], block_of(1))
    assert equal(ours.read(NAMES[0]), block_of(0))
    theirs.clear()
    assert equal(ours.read(NAMES[0]), block_of(0))
    assert theirs.read(NAMES[0]) is None
    said = {json.loads(path.read_text())["fingerprint"] for path in tmp_path.rglob("about.json")}
    assert said == {"a model", "another model"}


def test_a_folder_that_says_something_else_is_refused(tmp_path):
    keep(tmp_path)
    (about,) = tmp_path.rglob("about.json")
    content = about.read_text()
    about.write_text(content.replace("a model", "no model"))
    with pytest.raises(ConfigError, match=r"'no model'.* instead of .*'a model'.*; choose another folder"):
        keep(tmp_path)
    about.write_text(content)
    keep(tmp_path)
    with pytest.raises(ConfigError, match="float16"):
        keep(tmp_path, dtype="float16")


def test_an_about_file_that_a_crash_tore_is_written_again(tmp_path):
    keep(tmp_path).write(NAMES[0], block_of(0))
    (about,) = tmp_path.rglob("about.json")
    content = about.read_text()
    about.write_text(content[:20])
    assert equal(keep(tmp_path).read(NAMES[0]), block_of(0))
    assert about.read_text() == content


@pytest.mark.parametrize("wrong", [{"max_bytes": 0}, {"shape": ()}, {"shape": (2, 0)}, {"dtype": "O"}])
def test_wrong_settings_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        keep(tmp_path, **wrong)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        with pytest.raises(ConfigError, match="choose a folder that can be made"):
            keep(tmp_path / folder)


def test_other_weights_have_another_fingerprint(tmp_path):
    def fingerprint(**files):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return weights_fingerprint(Path(folder))

    large = bytes(file_digests._CHUNK_BYTES + 5)
    same = {"config.json": b"{}", "model.safetensors": large}
    variants = [
        same,
        same | {"config.json": b"{ }"},
        same | {"model.safetensors": large + b"\0"},
        same | {"model.safetensors": large[:-1] + b"\1"},
        same | {"model.safetensors": b"\1" + large[1:]},
        same | {"a.safetensors": b""},
        same | {"params/0/data": b""},
        {"config.json": b"{}", "params/0/data": b"12", "params/1": b"3"},
        {"config.json": b"{}", "params/0/data": b"1", "params/1": b"23"},
        {"config.json": b"{}", "params/0/date": b"12", "params/1": b"3"},
        {"model.safetensors": large},
    ]
    assert len({fingerprint(**variant) for variant in variants}) == len(variants)
    assert fingerprint(**same) == fingerprint(**same, **{"README.md": b"of no weight"})
    with pytest.raises(WeightsError, match="no weights"):
        fingerprint(**{"config.json": b"{}"})
    with pytest.raises(WeightsError, match="no weights"):
        weights_fingerprint(tmp_path / "nowhere")


# Damage


@pytest.fixture(scope="module")
def damaged():
    """A function that writes a block, lets a file be edited, and expects a miss."""
    with tempfile.TemporaryDirectory() as folder:
        files = keep(folder)

        def check(edit):
            assert files.write(NAMES[0], block_of(0))
            path = file_of(folder, NAMES[0])
            content = path.read_bytes()
            path.write_bytes(edit(content))
            with warnings() as said:
                assert files.read(NAMES[0]) is None
                assert files.read(NAMES[0]) is None
            assert len(said) == 1
            assert str(path) in said[0]
            assert "it was removed" in said[0]
            assert not path.exists()
            assert NAMES[0] not in files
            assert files.num_bytes == 0

        yield check


@settings(max_examples=300)
@given(position=st.integers(0, FILE_BYTES - 1), mask=st.integers(1, 255))
def test_every_changed_byte_is_found(damaged, position, mask):
    def flip(content):
        assert len(content) == FILE_BYTES
        return content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :]

    damaged(flip)


@settings(max_examples=100)
@given(length=st.integers(0, FILE_BYTES - 1))
def test_every_truncation_is_found(damaged, length):
    damaged(lambda content: content[:length])


@settings(max_examples=100)
@given(length=st.integers(0, FILE_BYTES - 1))
def test_a_torn_file_is_found(damaged, length):
    """Of the right length, with a tail that never reached the disk."""
    damaged(lambda content: content[:length].ljust(FILE_BYTES, b"\xaa"))


@pytest.mark.parametrize("content", [b"", b"hello", bytes(FILE_BYTES), bytes(4 * FILE_BYTES)])
def test_a_foreign_file_is_a_miss(damaged, content):
    damaged(lambda _: content)


def test_a_file_that_is_longer_is_a_miss(damaged):
    damaged(lambda content: content + b"\0")


def test_a_block_of_other_tokens_is_a_miss(tmp_path):
    """As if two prefixes had one digest."""
    files = keep(tmp_path)
    same_digest = BlockName(NAMES[0].digest, NAMES[1].tokens)
    shorter = BlockName(NAMES[0].digest, NAMES[0].tokens[:8])
    for other in (same_digest, shorter):
        assert files.write(other, block_of(1))
        with warnings() as said:
            assert files.read(NAMES[0]) is None
        assert len(said) == 1
        assert files.write(NAMES[0], block_of(0))
        assert equal(files.read(NAMES[0]), block_of(0))
        files.clear()


def test_a_copy_under_another_name_or_fingerprint_is_a_miss(tmp_path):
    """Equal tokens behind another prefix have other keys and values."""
    files, others = keep(tmp_path), keep(tmp_path, "another model")
    tokens = NAMES[0].tokens
    name, behind = BlockName(NAMES[0].digest, tokens), BlockName(NAMES[1].digest, tokens)
    files.write(name, block_of(0))
    for store, wrong in ((files, behind), (others, name)):
        path = Path(store._path(wrong))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(Path(files._path(name)).read_bytes())
        with warnings() as said:
            assert store.read(wrong) is None
        assert len(said) == 1
    assert equal(files.read(name), block_of(0))


def test_a_damaged_file_that_cannot_be_removed_is_named_once(tmp_path, monkeypatch):
    files = keep(tmp_path)
    files.write(NAMES[0], block_of(0))
    path = file_of(tmp_path, NAMES[0])
    path.write_bytes(b"short")
    monkeypatch.setattr(os, "unlink", failing(errno.EACCES))
    with warnings() as said:
        for _ in range(3):
            assert files.read(NAMES[0]) is None
    assert sum(str(path) in line and "remove it" in line for line in said) == 1
    assert len(said) == 2  # and that nothing can be removed
    monkeypatch.undo()
    assert files.write(NAMES[0], block_of(0))  # its size tells that it is torn
    assert equal(files.read(NAMES[0]), block_of(0))


# Size


def test_least_recently_used_files_go_first(tmp_path):
    files = keep(tmp_path, max_bytes=4 * FILE_BYTES + 10)
    for number, name in enumerate(NAMES[:4]):
        assert files.write(name, block_of(number))
    assert files.read(NAMES[0]) is not None
    assert not files.write(NAMES[1], block_of(1))  # there already, which is a use
    for name in NAMES[4:6]:
        assert files.write(name, block_of(9))
    assert [name in files for name in NAMES[:6]] == [True, True, False, False, True, True]
    assert files.num_bytes == total(tmp_path) == 4 * FILE_BYTES


def test_times_of_use_outlive_a_restart(tmp_path):
    files = keep(tmp_path)
    for number, name in enumerate(NAMES[:6]):
        files.write(name, block_of(number))
    order = [3, 0, 5, 1, 4, 2]
    for age, number in enumerate(order):
        os.utime(file_of(tmp_path, NAMES[number]), (1000 + age, 1000 + age))
    files = keep(tmp_path, max_bytes=6 * FILE_BYTES)
    for step, name in enumerate(NAMES[6:11]):
        assert files.write(name, block_of(9))
        assert [number for number in order if NAMES[number] in files] == order[step + 1 :]


def test_what_another_process_has_used_stays(tmp_path):
    theirs = keep(tmp_path)
    for number, name in enumerate(NAMES[:3]):
        theirs.write(name, block_of(number))
    ours = keep(tmp_path, max_bytes=3 * FILE_BYTES)
    assert theirs.read(NAMES[0]) is not None
    ours.write(NAMES[3], block_of(3))  # without another look at the folder
    assert [name in ours for name in NAMES[:4]] == [True, False, True, True]


def test_all_fingerprints_share_the_limit(tmp_path):
    old, new = keep(tmp_path, "old"), keep(tmp_path, "new")
    for number, name in enumerate(NAMES[:3]):
        old.write(name, block_of(number))
        new.write(name, block_of(number))
    for store, seconds in ((old, 1000), (new, 2000)):
        for name in NAMES[:3]:
            os.utime(store._path(name), (seconds, seconds))
    os.utime(old._path(NAMES[0]), (2000, 2000))  # as old as the others, which go first then
    new = keep(tmp_path, "new", max_bytes=6 * FILE_BYTES)
    kept = []
    for name in NAMES[3:8]:
        new.write(name, block_of(0))
        kept.append(tuple(sum(os.path.exists(s._path(n)) for n in NAMES[:3]) for s in (old, new)))
        assert new.num_bytes == total(tmp_path) == 6 * FILE_BYTES
    assert kept == [(2, 3), (1, 3), (1, 2), (1, 1), (1, 0)]
    assert NAMES[1] in old  # it has not looked yet
    assert old.read(NAMES[1]) is None
    assert NAMES[1] not in old


@settings(max_examples=40)
@given(
    limit=st.integers(1, 6 * FILE_BYTES),
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "read", "restart", "clear", "foreign"]), st.integers(0, 9))
    ),
)
def test_the_limit_holds_after_every_write(limit, steps):
    """Against a model: an ordered dictionary of what was used."""
    with tempfile.TemporaryDirectory() as folder:
        files, used = keep(folder, max_bytes=limit), {}
        for action, number in steps:
            name = NAMES[number]
            if action == "write":
                is_new = name not in used and limit >= FILE_BYTES
                assert files.write(name, block_of(number)) == is_new
                if is_new or name in used:
                    used.pop(name, None)
                    used[name] = number
                while len(used) > limit // FILE_BYTES:
                    used.pop(next(iter(used)))
            elif action == "read":
                block = files.read(name)
                assert (block is not None) == (name in used)
                if name in used:
                    assert equal(block, block_of(number))
                    used[name] = used.pop(name)
            elif action == "restart":
                files = keep(folder, max_bytes=limit)
            elif action == "clear":
                files.clear()
                used = {}
            else:  # never counted or removed
                Path(folder, f"{number}.txt").write_text("not a block")
            assert [name in files for name in NAMES[:10]] == [name in used for name in NAMES[:10]]
            blocks = [path for path in files_of(folder) if path.suffix != ".txt"]
            assert files.num_bytes == len(blocks) * FILE_BYTES == len(used) * FILE_BYTES
            assert files.num_bytes <= limit


def test_a_block_above_the_limit_is_never_written(tmp_path):
    files = keep(tmp_path, max_bytes=FILE_BYTES - 1)
    with warnings() as said:
        for name in NAMES[1:4]:
            assert not files.write(name, block_of(0))
    assert len(said) == 1
    assert f"max_bytes={FILE_BYTES - 1}" in said[0]


def test_a_smaller_limit_holds_from_the_start(tmp_path):
    files = keep(tmp_path)
    for name in NAMES[:6]:
        files.write(name, block_of(0))
    assert keep(tmp_path, max_bytes=2 * FILE_BYTES).num_bytes == 2 * FILE_BYTES
    assert len(list(tmp_path.glob("*/??/*"))) == 2


def test_files_of_others_are_counted_after_a_sixteenth(tmp_path):
    limit = 64 * FILE_BYTES
    ours, theirs = keep(tmp_path, max_bytes=limit), keep(tmp_path, max_bytes=limit)
    for name in NAMES[:60]:
        theirs.write(name, block_of(0))
    assert ours.num_bytes == 0
    for name in NAMES[60:80]:
        ours.write(name, block_of(0))
        assert total(tmp_path) <= limit + limit // 16
    assert ours.num_bytes == total(tmp_path) <= limit


def test_files_that_cannot_be_removed_leave_no_room(tmp_path, monkeypatch):
    files = keep(tmp_path, max_bytes=2 * FILE_BYTES)
    for number, name in enumerate(NAMES[:2]):
        files.write(name, block_of(number))
    monkeypatch.setattr(os, "unlink", failing(errno.EACCES))
    with warnings() as said:
        for name in NAMES[2:5]:
            assert not files.write(name, block_of(9))
    assert len(said) == 1
    assert total(tmp_path) == 2 * FILE_BYTES
    monkeypatch.undo()
    assert keep(tmp_path, max_bytes=2 * FILE_BYTES).write(NAMES[2], block_of(2))


# Disks that refuse


def failing(number, *, only=lambda *args: True, real=None):
    def fail(*args, **kwargs):
        if only(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return fail


class HalfWritten:
    """A file that takes some bytes before the disk is full."""

    def __init__(self, path, mode):
        self.file = open(path, mode)  # noqa: SIM115

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        self.file.write(bytes(content)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_open(path, mode):
    return open(path, mode) if mode == "rb" else HalfWritten(path, mode)


@pytest.mark.parametrize(
    ("owner", "attribute", "fail", "remedy"),
    [
        (os, "replace", failing(errno.ENOSPC), "free space"),
        (whole_files, "open", full_open, "free space"),
        (os, "makedirs", failing(errno.ENOSPC), "free space"),
        (os, "makedirs", failing(errno.EACCES), "choose a folder that may be written"),
        (os, "replace", failing(errno.EROFS), "choose a folder that may be written"),
        (os, "utime", failing(errno.EIO), ""),
    ],
)
def test_a_disk_that_refuses_is_a_warning(tmp_path, monkeypatch, owner, attribute, fail, remedy):
    files = keep(tmp_path)
    files.write(NAMES[0], block_of(0))
    with warnings() as said, monkeypatch.context() as patch:
        patch.setattr(owner, attribute, fail, raising=False)
        for name in NAMES[1:5]:
            assert not files.write(name, block_of(1))
            assert name not in files
        assert equal(files.read(NAMES[0]), block_of(0))
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    assert remedy in said[0]
    assert temporary_files(tmp_path) == []
    assert files.num_bytes == total(tmp_path) == FILE_BYTES
    assert files.write(NAMES[1], block_of(1))
    assert equal(files.read(NAMES[1]), block_of(1))


def test_each_kind_of_problem_is_said_once(tmp_path, monkeypatch):
    files = keep(tmp_path)
    with warnings() as said:
        for number in (errno.ENOSPC, errno.EACCES, errno.ENOSPC, errno.EACCES):
            monkeypatch.setattr(os, "replace", failing(number))
            assert not files.write(NAMES[0], block_of(0))
    assert len(said) == 2


def test_a_file_that_may_not_be_read_is_a_miss(tmp_path, monkeypatch):
    files = keep(tmp_path)
    files.write(NAMES[0], block_of(0))
    monkeypatch.setattr(disk, "open", failing(errno.EACCES), raising=False)
    with warnings() as said:
        assert files.read(NAMES[0]) is None
        assert files.read(NAMES[0]) is None
    assert len(said) == 1
    monkeypatch.undo()
    assert equal(files.read(NAMES[0]), block_of(0))


def test_a_folder_that_may_only_be_read(tmp_path, monkeypatch):
    keep(tmp_path).write(NAMES[0], block_of(0))
    real = open
    for function in ("makedirs", "replace", "unlink", "utime"):
        monkeypatch.setattr(os, function, failing(errno.EROFS))
    only_reads = failing(errno.EROFS, only=lambda path, mode: mode != "rb", real=real)
    monkeypatch.setattr(whole_files, "open", only_reads, raising=False)
    files, others = keep(tmp_path), keep(tmp_path, "another model")
    assert equal(files.read(NAMES[0]), block_of(0))
    assert not files.write(NAMES[0], block_of(0))
    assert not files.write(NAMES[1], block_of(1))
    assert others.read(NAMES[0]) is None


def test_a_folder_that_vanishes(tmp_path):
    files = keep(tmp_path / "cache")
    files.write(NAMES[0], block_of(0))
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert files.read(NAMES[0]) is None
    assert NAMES[0] not in files
    assert files.write(NAMES[0], block_of(0))
    assert equal(files.read(NAMES[0]), block_of(0))


# Processes that are killed, and temporary files


def test_left_over_temporary_files_are_removed(tmp_path):
    keep(tmp_path).write(NAMES[0], block_of(0))
    block = file_of(tmp_path, NAMES[0])
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, elsewhere = whole_files._machine(), "0123abcd"
    names = {
        "dead": f".x.{here}-{ended.pid}-00000000-1.tmp",
        "an earlier process of our id": f".x.{here}-{os.getpid()}-00000000-1.tmp",
        "ours": f".x.{here}-{os.getpid()}-{whole_files._PROCESS}-1.tmp",
        "alive": f".x.{here}-{os.getppid()}-00000000-1.tmp",
        "alive but old": f".x.{here}-{os.getppid()}-00000000-2.tmp",
        "elsewhere": f".x.{elsewhere}-{ended.pid}-00000000-1.tmp",
        "elsewhere and old": f".x.{elsewhere}-{ended.pid}-00000000-2.tmp",
        "a user's": ".notes.tmp",
    }
    places = (block.parent, block.parent.parent)
    for place in places:
        for what, name in names.items():
            (place / name).write_bytes(b"half a block")
            age = 3700 if "old" in what else 3500
            os.utime(place / name, (time.time() - age, time.time() - age))
    files = keep(tmp_path)
    for place in places:
        left = {what for what, name in names.items() if (place / name).exists()}
        assert left == {"ours", "alive", "elsewhere", "a user's"}
    assert files.num_bytes == FILE_BYTES


LARGE = (2**18,)  # 1 MiB, so that a kill hits what is being written
CHILD = textwrap.dedent("""
    import os, random, signal, sys
    from pathlib import Path
    import numpy as np
    from jaxllm.executor.kv.disk import BlockFiles
    from jaxllm.sched.cache.names import names_of, root

    NAMES = names_of(range(4000), 4, root())

    def block_of(number, size):
        return np.frombuffer(np.random.default_rng(number).bytes(4 * size), np.float32)

    def keep(folder, size, max_bytes):
        return BlockFiles(Path(folder), "a model", (size,), np.dtype("float32"), max_bytes).open()
""")


def start(code, *arguments):
    """A Python process that has printed its first line."""
    command = [sys.executable, "-c", CHILD + textwrap.dedent(code), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(disk.__file__).parents[3])}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "ready\n"
    return process


def check_whole(files, count, shape):
    """How many blocks are there; each of them must be right, and none damaged."""
    found = 0
    with warnings() as said:
        for number in range(count):
            block = files.read(NAMES[number])
            found += block is not None
            assert block is None or equal(block, block_of(number, shape))
    assert said == []
    return found


def test_a_process_killed_in_mid_write(tmp_path):
    forever = """
        folder, size = sys.argv[1], int(sys.argv[2])
        files = keep(folder, size, 2**24)
        blocks = [block_of(number, size) for number in range(20)]
        print("ready", flush=True)
        while True:
            number = random.randrange(20)
            if not files.write(NAMES[number], blocks[number]):
                os.unlink(files._path(NAMES[number]))
    """
    found = 0
    for _ in range(5):
        with start(forever, tmp_path, LARGE[0]) as process:
            time.sleep(random.uniform(0.01, 0.05))
            process.kill()
            process.wait()
        files = keep(tmp_path, shape=LARGE)
        assert temporary_files(tmp_path) == []
        assert files.num_bytes == total(tmp_path) <= PLENTY
        found += check_whole(files, 20, LARGE)
    assert found > 0


@pytest.mark.parametrize("call", ["replace", "utime"])
def test_a_process_killed_before_the_file_has_its_name(tmp_path, call):
    killed = f"""
        files = keep(sys.argv[1], 6, 2**20)
        os.{call} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        print("ready", flush=True)
        files.write(NAMES[0], block_of(0, 6))
    """
    with start(killed, tmp_path) as process:
        assert process.wait() == -signal.SIGKILL
    assert len(temporary_files(tmp_path)) == 1
    files = keep(tmp_path, shape=(6,))
    assert temporary_files(tmp_path) == []
    assert NAMES[0] not in files
    assert files.num_bytes == 0
    assert files.write(NAMES[0], block_of(0, (6,)))


# Several at once

BUSY = """
    import logging
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    folder, size, max_bytes, seed = sys.argv[1], *map(int, sys.argv[2:])
    files = keep(folder, size, max_bytes)
    blocks = [block_of(number, size) for number in range(30)]
    chosen = random.Random(seed)
    print("ready", flush=True)
    sys.stdin.readline()
    hits = writes = 0
    for _ in range(1500):
        number = chosen.randrange(30)
        if chosen.random() < 0.5:
            writes += files.write(NAMES[number], blocks[number])
        elif (block := files.read(NAMES[number])) is not None:
            assert block.tobytes() == blocks[number].tobytes(), number
            hits += 1
    assert hits and writes, (hits, writes)
"""


def test_two_processes_share_a_folder(tmp_path):
    size = 1000
    max_bytes = 8 * (4 * size + 56)
    with start(BUSY, tmp_path, size, max_bytes, 1) as one, start(BUSY, tmp_path, size, max_bytes, 2) as other:
        for process in (one, other):
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in (one, other):
            assert process.communicate()[0] == ""  # no warnings
            assert process.returncode == 0
    assert 0 < total(tmp_path) <= max_bytes + 2 * (4 * size + 56)  # each may not have seen the other's last
    files = keep(tmp_path, shape=(size,), max_bytes=max_bytes)
    assert temporary_files(tmp_path) == []
    assert check_whole(files, 30, (size,)) > 0


def test_a_read_just_before_the_write_does_not_forget_what_was_written(tmp_path, monkeypatch):
    """Else there is room for one more than `max_bytes` until the file is seen again."""
    files, block = keep(tmp_path), block_of(0)

    def too_early(*_):
        monkeypatch.undo()
        assert files.write(NAMES[0], block)
        raise FileNotFoundError

    monkeypatch.setattr(disk, "open", too_early, raising=False)
    assert files.read(NAMES[0]) is None
    assert NAMES[0] in files
    assert files.num_bytes == total(tmp_path)


def test_threads_share_an_object(tmp_path):
    shape, max_bytes = (1000,), 8 * 4056
    files = keep(tmp_path, shape=shape, max_bytes=max_bytes)
    blocks = [block_of(number, shape) for number in range(30)]
    failures, hits = [], []

    def work(seed):
        chosen = random.Random(seed)
        try:
            for _ in range(600):
                number = chosen.randrange(30)
                if chosen.random() < 0.5:
                    files.write(NAMES[number], blocks[number])
                elif (block := files.read(NAMES[number])) is not None:
                    assert equal(block, blocks[number])
                    hits.append(number)
                _ = NAMES[number] in files
                assert files.num_bytes <= max_bytes
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    with warnings() as said:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert said == []
    assert len(hits) > 10
    assert temporary_files(tmp_path) == []
    assert total(tmp_path) <= max_bytes
    assert files.num_bytes == total(tmp_path)
    assert check_whole(files, 30, shape) > 0


def test_no_more_blocks_wait_to_be_written_than_may():
    """Pieces beyond the limit are left out, whole, and what is written makes room."""

    class Slow:
        shape, dtype, written, changes = (2,), np.dtype(np.float32), [], None

        def write(self, name, block):
            gate.wait()
            self.written.append(name)

    gate, files = threading.Event(), Slow()
    transfers = FileTransfers(files, most_writing=5)
    pieces = [np.zeros((size, 2), np.float32) for size in (4, 2, 1)]
    transfers.write(pieces, ["a", "b", None, "c", "d", "e", "f"])
    transfers.write(pieces[2:], ["g"])
    gate.set()
    transfers.flush()
    assert files.written == ["a", "b", "c", "g"]
    transfers.write(pieces[:1], ["h", "i", "j"])  # with a row of padding
    transfers.flush()
    assert files.written[4:] == ["h", "i", "j"]
    transfers.close()


class Gated:
    """Files on a disk that does nothing until the gate is open, and fails once after that."""

    shape, dtype, changes = (2,), np.dtype(np.float32), None

    def __init__(self):
        self.gate, self.written, self.num_failures = threading.Event(), [], 0

    def believes_in(self, name):
        return name == "known"

    def __contains__(self, name):
        self.gate.wait()
        return True

    def read(self, name):
        self.gate.wait()
        return np.ones(2, np.float32)

    def write(self, name, block):
        self.gate.wait()
        if name == "bad":
            raise RuntimeError("a fault of ours")
        self.written.append(name)


def until(is_so):
    while not is_so():
        time.sleep(0.001)


def test_nobody_waits_for_a_disk_that_hangs():
    files = Gated()
    transfers = FileTransfers(files, most_writing=4, patience=0.05)
    assert "known" in transfers
    assert "unknown" not in transfers  # nobody knows, and it does not say
    reads = [Read(1, ("a", "b", "c")), Read(2, ("d",))]
    transfers.read(reads[0])
    transfers.write([np.zeros((2, 2), np.float32)], ["e", "f"])
    assert transfers.write_room == 0
    until(lambda: transfers._reader.is_stuck and transfers._writer.is_stuck)
    transfers.read(reads[1])
    ended = transfers.ended()
    assert ended == [(reads[0], [False] * 3), (reads[1], [False])]
    assert [[len(piece) for piece in transfers.take(read.handle)] for read in reads] == [[2, 1], [1]]
    assert "known" not in transfers
    transfers.write([np.zeros((1, 2), np.float32)], ["g"])  # given up
    assert transfers.write_room == 4
    transfers.flush()
    files.gate.set()  # it goes on
    until(lambda: transfers._reader.is_idle and transfers._writer.is_idle and transfers._looker.is_idle)
    assert files.written == ["e", "f"]
    assert "unknown" in transfers
    transfers.read(reads[1])
    transfers.wait(60.0)
    assert transfers.ended() == [(reads[1], [True])]
    (piece,) = transfers.take(reads[1].handle)
    assert piece.tolist() == [[1.0, 1.0]]
    transfers.close()


def test_what_hung_is_not_written_as_what_begins_anew(tmp_path, monkeypatch):
    gate, files = threading.Event(), keep(tmp_path)
    write = files.write
    monkeypatch.setattr(files, "write", lambda name, block: gate.wait() and write(name, block))
    transfers = FileTransfers(files, most_writing=4, patience=0.05)
    transfers.write([np.stack([block_of(0), block_of(1)])], NAMES[:2])
    transfers.begin_anew("other weights")  # gives the disk up
    gate.set()
    until(lambda: transfers._writer.is_idle)
    assert [name in keep(tmp_path) for name in NAMES[:2]] == [True, True]
    assert [name in keep(tmp_path, "other weights") for name in NAMES[:2]] == [False, False]
    transfers.close()


@pytest.mark.parametrize("call", ["mkdir", "scandir", "open", "stat"])
def test_a_folder_that_hangs_ends_the_start_and_not_what_begins_anew(tmp_path, monkeypatch, call):
    """Whatever it is that the mount does not answer to."""
    folder, gate = tmp_path / "kv", threading.Event()
    keep(folder).write(NAMES[0], block_of(0))
    transfers = FileTransfers(keep(folder), most_writing=4, patience=0.05)
    real = {"open": open} if call == "open" else {call: getattr(os, call)}

    def hangs(path, *args, **kwargs):
        if not isinstance(path, int) and str(path).startswith(str(folder)):
            gate.wait()
        return real[call](path, *args, **kwargs)

    monkeypatch.setattr(builtins if call == "open" else os, call, hangs)
    files = BlockFiles(folder, "others", (2, 3), np.dtype(np.float32), 10**6)
    with pytest.raises(ConfigError, match=r"kv' is to hold KV blocks and does not answer: nothing .* 0\.1 s"):
        FileTransfers(files, most_writing=4).open(patience=0.1)
    transfers.begin_anew("other weights")
    transfers.begin_anew("still others")
    gate.set()
    until(lambda: transfers._writer.is_idle)
    assert [path.name for path in folder.iterdir() if path.is_dir()]
    transfers.close()


def test_a_folder_that_takes_long_is_waited_for(tmp_path, monkeypatch):
    files = keep(tmp_path)
    for name, number in zip(NAMES, range(4), strict=False):
        files.write(name, block_of(number))
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: time.sleep(0.02) or scandir(path))
    anew = FileTransfers(files.anew(files.fingerprint), most_writing=4)
    assert anew.open(patience=0.5)._files.believes_in(NAMES[0])
    anew.close()


def test_what_is_wrong_with_a_folder_is_raised_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    files = BlockFiles(tmp_path / "file", "a model", (2,), np.dtype(np.float32), 10**6)
    with pytest.raises(ConfigError, match="choose a folder that can be made"):
        FileTransfers(files, most_writing=4).open()


def test_what_fails_of_writing_is_said_and_the_rest_is_written():
    files = Gated()
    files.gate.set()
    transfers = FileTransfers(files, most_writing=8)
    with warnings(file_io) as said:
        for name in ("bad", "good", "bad", "fine"):
            transfers.write([np.zeros((1, 2), np.float32)], [name])
        transfers.flush()
    assert files.written == ["good", "fine"]
    assert len(said) == 1
    assert "a fault of ours" in said[0]
    assert transfers.write_room == 4
    transfers.close()


def test_threads_of_files_end_with_their_owner():
    files = Gated()
    files.gate.set()
    transfers = FileTransfers(files, most_writing=8)
    transfers.write([np.zeros((1, 2), np.float32)], ["a"])
    transfers.flush()
    thread = transfers._writer._thread
    del transfers
    gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()
