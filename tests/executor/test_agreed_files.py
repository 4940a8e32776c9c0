"""Files of which each process has a part: a block is there for all of them or for none."""

import json
import socket
import threading
import time
import types
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from jaxllm.engine.assembly import _keep_files
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.processes import settings_of
from jaxllm.errors import EngineError
from jaxllm.executor.kv.agreement import AgreedFiles, Reporter
from jaxllm.executor.kv.disk import BlockFiles
from jaxllm.executor.kv.file_io import FileTransfers
from jaxllm.executor.processes.wire import packed, receive
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.sched.cache.names import names_of, root
from jaxllm.types import Read

NAMES = names_of(range(80), 4, root())
NUMBERS = {name: number for number, name in enumerate(NAMES)}
SHAPE = (2, 3)
FILE_BYTES = 24 + 16 + 16 + 6 * 4  # header, checksum, tokens, numbers
MOST_WRITING = 8
PATIENCE = 0.2
FOLLOWERS = (1, 2)


def part_of(rank, name):
    """What a process has of a block."""
    return np.full(SHAPE, 100 * rank + NUMBERS[name], np.float32)


class Part(BlockFiles):
    """A process's files, on a disk that may hang or fail."""

    def __init__(self, folder, rank):
        super().__init__(Path(folder) / str(rank), f"part {rank}", SHAPE, np.dtype("float32"), 2**20)
        self.goes_on, self.fails, self.is_full = threading.Event(), False, False
        self.goes_on.set()

    def _do(self, do, *arguments):
        assert self.goes_on.wait(60.0)
        if self.fails:
            raise RuntimeError("the disk fails")
        return do(*arguments)

    def read(self, name):
        return self._do(super().read, name)

    def write(self, name, block):
        return not self.is_full and self._do(super().write, name, block)


class Processes:
    """Three processes that do what they are told; the first one decides. What they say is text in between."""

    def __init__(self, folder):
        self.files = [Part(folder, rank) for rank in range(3)]
        self.transfers = [FileTransfers(files, MOST_WRITING, PATIENCE).open() for files in self.files]
        self.reporters = {rank: Reporter(self.transfers[rank]) for rank in FOLLOWERS}
        self.is_lost, self.is_silent, self.handles = False, False, iter(range(100))
        self.agreed = AgreedFiles(self.transfers[0], self)

    def ask(self, name):
        assert name == "kept"
        return {rank: json.loads(json.dumps(one.kept())) for rank, one in self.reporters.items()}

    def news(self, seconds=0.0):
        until = time.monotonic() + seconds
        while True:
            if self.is_lost:
                raise EngineError("a process is lost")
            said = [] if self.is_silent else [(rank, one.news()) for rank, one in self.reporters.items()]
            found = [(rank, json.loads(json.dumps(news))) for rank, news in said if news is not None]
            if found or time.monotonic() >= until:
                return found
            time.sleep(0.001)

    def write(self, names, ranks=(0, *FOLLOWERS)):
        for rank in ranks:
            self.transfers[rank].write([np.stack([part_of(rank, name) for name in names])], names)

    def written(self, names, ranks=(0, *FOLLOWERS)):
        self.write(names, ranks)
        for rank in ranks:
            self.transfers[rank].flush()
        self.agreed.ended()  # hears of it

    def begin(self, names):
        read = Read(next(self.handles), tuple(names))
        self.agreed.expect(read)
        for one in self.transfers:
            one.read(read)
        return read

    def read(self, names):
        """Whether each block is there; all have the right parts of those that are."""
        read, ended = self.begin(names), []
        until = time.monotonic() + 60.0
        while not ended:
            assert time.monotonic() < until
            self.agreed.wait(0.01)
            ended = self.agreed.ended()
        ((handle, was_there),) = ended
        assert handle == read.handle
        for rank, transfers in enumerate(self.transfers):
            blocks = np.concatenate(transfers.take(handle))
            for name, is_there, block in zip(names, was_there, blocks, strict=True):
                assert not is_there or np.array_equal(block, part_of(rank, name))
        return was_there

    def found(self):
        return [NUMBERS[name] for name in NAMES if name in self.agreed]

    def path(self, rank, name):
        (path,) = self.files[rank].folder.rglob(name.digest.hex())
        return path

    def close(self):
        for files, transfers in zip(self.files, self.transfers, strict=True):
            files.goes_on.set()
            transfers.close()
            transfers.flush()


@pytest.fixture
def start(tmp_path):
    made = []

    def start():
        made.append(Processes(tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_block_is_found_if_all_have_it(start):
    processes = start()
    processes.written(NAMES[:4])
    for rank in range(3):
        processes.written(NAMES[4 + rank : 5 + rank], ranks={0, 1, 2} - {rank})
    assert processes.found() == [0, 1, 2, 3]
    assert processes.read(NAMES[:4]) == [True] * 4
    again = start()  # of what it finds in the folders
    assert again.found() == [0, 1, 2, 3]
    assert again.read(NAMES[:5]) == [True] * 4 + [False]
    again.written(NAMES[4:7])
    assert again.found() == [0, 1, 2, 3, 4, 5, 6]


def delete(processes, rank):
    processes.path(rank, NAMES[1]).unlink()


def damage(processes, rank):
    path = processes.path(rank, NAMES[1])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(processes, rank):
    path = processes.path(rank, NAMES[1])
    path.write_bytes(path.read_bytes()[:-1])


def swap(processes, rank):
    """Another process's part in its place."""
    path = processes.path(rank, NAMES[1])
    path.write_bytes(processes.path((rank + 1) % 3, NAMES[1]).read_bytes())


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("hurt", [delete, damage, cut, swap])
def test_what_one_cannot_read_is_missing_for_all_until_it_is_written_again(start, hurt, rank):
    processes = start()
    processes.written(NAMES[:3])
    hurt(processes, rank)
    assert processes.read(NAMES[:3]) == [True, False, True]
    if hurt is not delete or rank:  # a look at the leader's own disk tells
        assert processes.found() == [0, 2]
    processes.written(NAMES[1:2])
    assert processes.found() == [0, 1, 2]
    assert processes.read(NAMES[:3]) == [True] * 3


@pytest.mark.parametrize("rank", range(3))
def test_nobody_waits_for_a_disk_that_hangs_anywhere(start, rank):
    processes = start()
    processes.written(NAMES[:3])
    processes.files[rank].goes_on.clear()
    began = time.monotonic()
    assert processes.read(NAMES[:3]) == [False] * 3
    assert time.monotonic() - began > PATIENCE
    assert processes.read(NAMES[:3]) == [False] * 3
    assert processes.found() == []
    processes.files[rank].goes_on.set()
    while not processes.transfers[rank]._reader.is_idle:
        time.sleep(0.001)
    processes.written(NAMES[:3])  # it is there
    assert processes.found() == [0, 1, 2]
    assert processes.read(NAMES[:3]) == [True] * 3


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("how", ["fails", "is_full"])
def test_what_one_fails_to_write_is_not_found(start, how, rank):
    processes = start()
    setattr(processes.files[rank], how, True)
    processes.written(NAMES[:2])
    assert processes.found() == []
    assert processes.agreed.write_room == MOST_WRITING // 2
    setattr(processes.files[rank], how, False)
    processes.written(NAMES[:2])
    assert processes.found() == [0, 1]


@pytest.mark.parametrize("rank", range(3))
def test_what_one_lets_go_of_is_not_found(start, rank):
    processes = start()
    processes.files[rank].max_bytes = 2 * FILE_BYTES
    processes.written(NAMES[:3])
    assert processes.found() == [1, 2]
    assert all(len(other.digests) <= 3 for other in processes.agreed._others.values())
    processes.path(rank, NAMES[1]).unlink()  # as another engine does
    processes.files[rank]._rescan()
    processes.agreed.ended()
    assert processes.found() == [2]
    if rank:
        assert len(processes.agreed._others[rank].digests) == 1


@pytest.mark.parametrize("rank", FOLLOWERS)
def test_what_is_given_up_is_not_answered_later(start, rank):
    processes = start()
    processes.written(NAMES[:3])
    processes.files[rank].goes_on.clear()
    processes.begin(NAMES[:3])
    others = [one for number, one in enumerate(processes.transfers) if number != rank]
    while not all(one._reader.is_idle for one in others):
        time.sleep(0.001)
    assert processes.agreed.ended() == []  # one is still to say
    processes.agreed.forget_reads()
    processes.is_silent = True
    processes.files[rank].goes_on.set()
    while not processes.transfers[rank]._reader.is_idle:
        time.sleep(0.001)
    late = processes.reporters[rank].news()  # before it hears that it is given up
    for one in processes.transfers:
        one.cancel_reads()
    processes.agreed._hear([(rank, late)])
    processes.is_silent = False
    assert processes.agreed.ended() == []
    assert processes.read(NAMES[:3]) == [True] * 3
    assert not any(one._pieces or one.is_reading for one in processes.transfers)


def test_room_to_write_is_that_of_all_less_what_they_have_not_heard_of(start):
    processes = start()
    assert processes.agreed.write_room == MOST_WRITING // 2
    processes.is_silent = True
    processes.write(NAMES[:3])
    for one in processes.transfers:
        one.flush()
    assert processes.agreed.ended() == []
    assert processes.agreed.write_room == 1
    processes.is_silent = False
    processes.agreed.wait(1.0)
    assert processes.agreed.write_room == 4
    processes.files[2].goes_on.clear()
    processes.write(NAMES[3:6])
    processes.transfers[0].flush()
    processes.agreed.ended()
    assert processes.agreed.write_room == 1
    while processes.agreed.write_room == 1:  # until it is stuck, and given up
        processes.agreed.wait(0.01)
    assert processes.agreed.write_room == 4
    assert processes.found() == [0, 1, 2]
    processes.agreed.flush()  # of what does nothing
    processes.files[2].goes_on.set()
    while processes.transfers[2].is_writing:
        time.sleep(0.001)
    processes.agreed.ended()
    assert processes.found() == [0, 1, 2, 3, 4, 5]


def test_a_flush_waits_for_all_that_are_there(start):
    processes = start()
    processes.files[1].goes_on.clear()
    processes.write(NAMES[:3])
    threading.Timer(0.05, processes.files[1].goes_on.set).start()
    processes.agreed.flush()
    assert processes.found() == [0, 1, 2]
    processes.is_silent = True
    processes.write(NAMES[3:6])
    threading.Timer(0.05, lambda: setattr(processes, "is_lost", True)).start()
    processes.agreed.flush()
    with pytest.raises(EngineError, match="a process is lost"):
        processes.agreed.wait(0.1)


def test_what_all_begin_anew_finds_nothing_from_before(start):
    processes = start()
    processes.written(NAMES[:3])
    processes.begin(NAMES[:3])
    processes.agreed.forget()
    for rank, one in enumerate(processes.transfers):
        one.begin_anew(f"anew {rank}")
    assert processes.agreed.ended() == []
    processes.written(NAMES[:2], ranks=[0])
    assert processes.found() == []
    assert processes.read(NAMES[:3]) == [False] * 3
    processes.written(NAMES[:2])
    assert processes.found() == [0, 1]
    assert processes.read(NAMES[:3]) == [True, True, False]
    processes.close()
    assert start().found() == [0, 1, 2]


def test_each_process_names_a_folder_of_its_own_or_none_does():
    asked = {"nnodes": 2, "tensor_parallel_size": 2}
    one, other = (settings_of(EngineConfig(**asked, prefix_cache_dir=folder)) for folder in ("one", "other"))
    none = settings_of(EngineConfig(**asked))
    assert one == other
    assert {name for name in one if one[name] != none[name]} == {"prefix_cache_dir"}


def test_processes_multiply_with_one_precision():
    plain = settings_of(EngineConfig(nnodes=2, tensor_parallel_size=2))
    with jax.default_matmul_precision("highest"):
        other = settings_of(EngineConfig(nnodes=2, tensor_parallel_size=2))
    assert {name for name in plain if plain[name] != other[name]} == {"jax_default_matmul_precision"}


def test_weights_of_each_process_tell_files_apart():
    """Converted checkpoints are of other bytes wherever they are made: nobody compares them at the start."""
    config = EngineConfig(prefix_cache_dir="files")
    folder, made = demo_model_path(), []
    sizes = types.SimpleNamespace(dtype="float32", formats=None, kv_dtype=None)
    for weights in ("a", "a", "b"):
        executor = mock.Mock(config=sizes, block_shape=SHAPE, device_kind="cpu")
        executor.others.ask.side_effect = lambda name, weights=weights: {"loaded": {1: weights}}[name]
        _keep_files(config, "weights", executor, config_from_dict(read_hf_config(folder)), "reference", 4)
        (_, fingerprint, *_) = executor.keep_files.call_args.args
        made.append(fingerprint)
    assert made[0] == made[1] != made[2]


def test_names_are_the_same_after_they_were_told():
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.sendall(packed("write_files", [5, (NAMES[0], None, NAMES[7])]))
        assert receive(theirs) == ("write_files", [5, [NAMES[0], None, NAMES[7]]])
