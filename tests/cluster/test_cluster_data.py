import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pyarrow.dataset
import pyarrow.parquet as parquet
import pytest
from engine_helpers import make_llm

from jaxllm import SamplingParams
from jaxllm.cli.main import main
from jaxllm.cluster.attempts import Turns
from jaxllm.cluster.batch_engine import BatchEngine, BatchSettings
from jaxllm.cluster.cpu_slices import CpuSlice
from jaxllm.cluster.parts import OutputFolder, Parts, read_parts
from jaxllm.cluster.pool import Pool, num_devices
from jaxllm.cluster.shards import RawRow, Shard, input_files, read_shard, scan, shards_of
from jaxllm.cluster.worker import ShardWorker
from jaxllm.errors import ConfigError, EngineError
from jaxllm.loading.checkpoints import demo_model_path

# Shards


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_all(paths, rows_per_shard, columns=None):
    files = [scan(os.fspath(path), rows_per_shard) for path in paths]
    shards = list(shards_of(files, rows_per_shard))
    rows = [row for shard in shards for row in read_shard(shard, columns)]
    assert [row.index for row in rows] == list(range(len(rows)))
    return shards, rows


@pytest.mark.parametrize("rows_per_shard", [1, 3, 4, 100])
def test_shards_hold_every_row_once(tmp_path, rows_per_shard):
    first = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"a{n}"} for n in range(7)])
    table = pyarrow.table({"prompt": [f"b{n}" for n in range(10)], "other": range(10)})
    parquet.write_table(table, tmp_path / "b.parquet", row_group_size=4)
    (tmp_path / "c.txt").write_text("ignored in a folder")
    paths = input_files(tmp_path)
    assert paths == [first, tmp_path / "b.parquet"]
    shards, rows = read_all(paths, rows_per_shard)
    assert all(shard.num_rows <= rows_per_shard for shard in shards)
    expected = [f"a{n}" for n in range(7)] + [f"b{n}" for n in range(10)]
    assert [json.loads(row.line)["prompt"] for row in rows] == expected


def test_inputs_are_what_their_names_say_in_any_case(tmp_path):
    names = ["a.JSONL", "b.ndjson", "c.Parquet"]
    for name in names[:2]:
        write_jsonl(tmp_path / name, [{"prompt": name}])
    parquet.write_table(pyarrow.table({"prompt": [names[2]]}), tmp_path / names[2])
    for other in ("d.csv", "e.jsonl.gz", "f.txt"):
        (tmp_path / other).write_text("ignored in a folder")
    paths = input_files(tmp_path)
    assert [path.name for path in paths] == names
    assert input_files(paths) == paths
    _, rows = read_all(paths, 4)
    assert [json.loads(row.line)["prompt"] for row in rows] == names


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("a.csv", "convert it"), ("a.CSV.gz", "unpack it"), ("a.jsonl.GZ", "unpack it"), ("a", "convert it")],
)
def test_inputs_that_a_cluster_cannot_read_are_refused_with_the_way_out(tmp_path, name, way_out, capsys):
    (tmp_path / name).write_text("x")
    options = ["--input", str(tmp_path / name), "--output", str(tmp_path / "out")]
    assert main(["generate", "--ray", *options]) == 2
    error = capsys.readouterr().err
    assert f"'{name}' must end in .jsonl, .ndjson or .parquet" in error
    assert f"{way_out}, run without --ray" in error


def test_columns_of_other_names_are_read_and_nulls_are_not_there(tmp_path):
    messages = [[{"role": "user", "content": "hi", "name": None}], None]
    table = pyarrow.table({"chat": messages, "text": [None, "there"], "n": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    columns = {"messages": "chat", "prompt": "text"}
    _, rows = read_all([tmp_path / "a.parquet"], 8, columns)
    assert [json.loads(row.line) for row in rows] == [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "there"},
    ]
    write_jsonl(tmp_path / "b.jsonl", [{"text": "one", "n": 1}, {"text": None, "chat": []}])
    _, rows = read_all([tmp_path / "b.jsonl"], 8, columns)
    assert [json.loads(row.line) for row in rows] == [{"prompt": "one"}, {"messages": []}]
    with pytest.raises(ConfigError, match="has no column question"):
        read_all([tmp_path / "a.parquet"], 8, {"prompt": "question"})
    with pytest.raises(ConfigError, match="has no column prompt"):
        read_all([tmp_path / "a.parquet"], 8)


def test_lines_that_are_none_say_so(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n\xff\n\n{"prompt": "b"}')
    _, rows = read_all([tmp_path / "a.jsonl"], 2)
    assert [row.error is None for row in rows] == [True, False, True, True]
    assert "line 2: byte 0 is no UTF-8" in str(rows[1].error)
    assert rows[2].line == ""


def test_inputs_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no input file"):
        input_files(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="holds no"):
        input_files(tmp_path)
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match="must end in"):
        input_files(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ConfigError, match="no Parquet file"):
        scan(f"{tmp_path / 'a.parquet'}", 4)


# Parts

SHARD, NEXT = Shard("in", 0, 2, 0), Shard("in", 2, 1, 2)
ANSWERS = [{"index": 0, "text": "a"}, {"index": 1, "error": "bad"}]


def test_columns_of_bytes_are_text_or_an_error(tmp_path):
    when = datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)
    table = pyarrow.table(
        {
            "prompt": pyarrow.array(["d\u00eda".encode(), b"\xff\xfe", b"c"], pyarrow.binary()),
            "id": pyarrow.array([b"\xffa", None, b"b"], pyarrow.binary()),
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"prompt": [when], "id": [when]}), tmp_path / "b.parquet")
    _, rows = read_all([tmp_path / "a.parquet", tmp_path / "b.parquet"], 2)
    assert json.loads(rows[0].line) == {"prompt": "d\u00eda", "id": "\\xffa"}
    assert "a.parquet, row 2: b'\\xff\\xfe' is no UTF-8" in str(rows[1].error)
    assert json.loads(rows[2].line) == {"prompt": "c", "id": "b"}
    assert "of type datetime is neither text nor a number" in str(rows[3].error)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "id": [when]}), tmp_path / "c.parquet")
    _, [row] = read_all([tmp_path / "c.parquet"], 2)
    assert json.loads(row.line)["id"] == str(when)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_any_text_is_kept_as_an_id(tmp_path, kind):
    parts = Parts(tmp_path, kind)
    parts.write(SHARD, [{"index": 0, "id": "a\ud800", "text": "x"}, {"index": 1, "error": "\udfff"}])
    [first, second] = read_parts(tmp_path)
    assert first["id"] == {"jsonl": "a\ud800", "parquet": "a\\ud800"}[kind]
    assert second["error"] == {"jsonl": "\udfff", "parquet": "\\udfff"}[kind]


def test_a_folder_of_parquet_is_read_by_others(tmp_path):
    with OutputFolder(tmp_path / "out", {"seed": 0}, resume=False):
        Parts(tmp_path / "out", "parquet").write(SHARD, ANSWERS)
    assert pyarrow.dataset.dataset(tmp_path / "out").to_table().num_rows == 2
    assert parquet.read_table(tmp_path / "out").column("index").to_pylist() == [0, 1]


class Nodes:
    """A cluster of one node."""

    @staticmethod
    def nodes():
        return [{"Alive": True, "Resources": {"CPU": 4.0}}]


@pytest.mark.parametrize("asked", [(0, None, None), (-1, None, None), (None, -1.0, None), (None, None, 0)])
def test_no_workers_or_processors_at_all_are_refused(asked):
    with pytest.raises(ConfigError, match=r"_workers?=(0|-1|-1.0) must be at least"):
        Pool.of_cluster(Nodes, *asked, 1)


class GpuNodes:
    """A cluster of two nodes with eight and three GPUs."""

    @staticmethod
    def nodes():
        return [{"Alive": True, "Resources": {"CPU": 16.0, "GPU": count}} for count in (8.0, 3.0)]


@pytest.mark.parametrize(
    ("settings", "count", "size"),
    [
        ({}, 1, 11),
        ({"tensor_parallel_size": 4}, 4, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}, 8, 1),
        ({"prefill_context_parallel_size": 3}, 3, 3),
    ],
)
def test_an_engine_has_as_many_gpus_as_devices_on_one_node(settings, count, size):
    assert num_devices(settings) == count
    pool = Pool.of_cluster(GpuNodes, None, None, None, num_devices=count)
    assert (pool.gpus, pool.size) == (count, size)
    with pytest.raises(ConfigError, match="do not fit the cluster"):
        Pool.of_cluster(GpuNodes, size + 1, None, None, num_devices=count)


def test_fewer_gpus_than_devices_are_refused():
    with pytest.raises(ConfigError, match="an engine of these settings is on 4 devices: leave it out"):
        Pool.of_cluster(GpuNodes, 1, 2.0, None, name="replica", num_devices=4)
    assert Pool.of_cluster(GpuNodes, 2, 0.5, None).gpus == 0.5
    assert Pool.of_cluster(Nodes, 1, None, None, num_devices=4).gpus == 0


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_parts_are_there_as_a_whole_or_not_at_all(tmp_path, kind):
    parts = Parts(tmp_path, kind)
    assert not parts.has(SHARD)
    parts.write(SHARD, ANSWERS)
    parts.write(SHARD, ANSWERS)  # by another who was told to do the same
    (tmp_path / f".part-000000000002-000000000003.{kind}.1a2b").write_text("half of one")
    assert parts.has(SHARD)
    assert not parts.has(NEXT)
    assert parts.done() == {(0, 2)}
    assert parts.num_errors(SHARD) == 1
    rows = list(read_parts(tmp_path))
    assert [(row["index"], row.get("text"), row.get("error")) for row in rows] == [
        (0, "a", None),
        (1, None, "bad"),
    ]


def test_parts_become_one_file_in_order(tmp_path):
    parts = Parts(tmp_path / "parts", "jsonl")
    parts.folder.mkdir()
    parts.write(NEXT, [{"index": 2}])
    parts.write(SHARD, ANSWERS)
    parts.merge([SHARD, NEXT], tmp_path / "out.jsonl")
    assert [json.loads(line)["index"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
    ]
    parts.clear()
    assert not parts.done()


def test_an_output_folder_is_of_one_job_and_one_run(tmp_path):
    folder, job = tmp_path / "out", {"seed": 0, "model": "m"}
    with (
        OutputFolder(folder, job, resume=False),
        pytest.raises(ConfigError, match="another run fills"),
    ):
        OutputFolder(folder, job, resume=True)
    with pytest.raises(ConfigError, match="never overwritten"):
        OutputFolder(folder, job, resume=False)
    with pytest.raises(ConfigError, match="with other model"):
        OutputFolder(folder, {**job, "model": "other"}, resume=True)
    with OutputFolder(folder, job, resume=True):
        pass
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        OutputFolder(tmp_path, job, resume=True)


# Engines


class Failing:
    """An engine that fails at its first call, or at all."""

    def __init__(self, llm, is_lasting=False):
        self._llm, self._is_lasting, self.num_calls, self.is_closed = llm, is_lasting, 0, False

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def generate_iter(self, *args, **kwargs):
        self.num_calls += 1
        if self._is_lasting or self.num_calls == 1:
            raise EngineError("the device is gone")
        return self._llm.generate_iter(*args, **kwargs)

    def close(self):
        self.is_closed = True


@pytest.fixture(scope="module")
def llm():
    made = make_llm(demo_model_path(), skip_tokenizer_init=False)
    yield made
    made.close()


def settings(**changes):
    params = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True)
    return BatchSettings(
        **{"sampling_params": params, "chat": False, "seed": 3, "context": "", "max_retries": 1, **changes}
    )


def raw(index, **row):
    return RawRow(index, f"row {index}", json.dumps(row))


def test_answers_do_not_depend_on_the_batch_and_bad_rows_say_why(llm):
    engine = BatchEngine(lambda: llm, settings())
    rows = [
        raw(0, prompt="def f(a):", id="x"),
        raw(1, prompt="a", sampling_params={"temperature": -1}),
        raw(2, prompt_token_ids=[10**6]),
        raw(3, prompt="x " * 500),
        RawRow(4, "row 4", "{"),
        raw(5, prompt="import os"),
    ]
    together = engine.answer(rows)
    assert [answer["index"] for answer in together] == list(range(6))
    assert [answer.get("error", "").partition(":")[0] for answer in together] == [
        "",
        "SamplingParamsError",
        "RequestError",
        "RequestTooLargeError",
        "RequestError",
        "",
    ]
    assert together[0]["id"] == "x"
    assert [engine.answer([row])[0] for row in rows] == together


def test_an_engine_that_fails_is_replaced_and_the_batch_tried_again(llm):
    made = []

    def make():
        made.append(Failing(llm) if not made else llm)
        return made[-1]

    engine = BatchEngine(make, settings())
    assert len(engine.answer([raw(0, prompt="def f(a):")])[0]["token_ids"]) == 4
    assert len(made) == 2
    assert made[0].is_closed


def test_one_that_fails_again_and_again_is_given_up(llm):
    made = []

    def make():
        made.append(Failing(llm, is_lasting=True))
        return made[-1]

    engine = BatchEngine(make, settings(max_retries=2))
    with pytest.raises(EngineError, match="gone"):
        engine.answer([raw(0, prompt="def f(a):")])
    assert [one.num_calls for one in made] == [1, 1, 1]


class Killed(BaseException):
    """What stands for the end of a process."""


class Fragile:
    """An engine that some prompts kill."""

    def __init__(self, fatal):
        self._fatal, self.batches = fatal, []

    def answer(self, rows):
        self.batches.append([row.index for row in rows])
        for row in rows:
            if row.index in self._fatal and row.error is None:
                raise Killed
        return [
            {"index": row.index, "id": None} | ({} if row.error is None else {"error": f"{row.error}"})
            for row in rows
        ]


def answer_until_done(parts, shard, fatal, max_retries):
    """Give a shard to one worker after another; returns the batches that each was given."""
    batches = []
    for _ in range(100):
        worker = object.__new__(ShardWorker)
        worker._engine, worker._max_retries, worker._turns = Fragile(fatal), max_retries, Turns()
        worker._parts, worker._columns = parts, None
        batches.append(worker._engine.batches)
        try:
            counts = worker({"shard": [json.dumps(dataclasses.asdict(shard))]})
        except Killed:
            continue
        return batches, counts
    raise AssertionError("it never ends")


@pytest.mark.parametrize("fatal", [[], [0], [3], [1, 2], [0, 1, 2, 3, 4]])
def test_rows_that_kill_their_workers_are_found(tmp_path, fatal):
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"{n}"} for n in range(5)])
    parts = Parts(tmp_path / "out", "jsonl")
    parts.folder.mkdir()
    (shard,) = shards_of([scan(f"{tmp_path / 'in.jsonl'}", 5)], 5)
    batches, counts = answer_until_done(parts, shard, fatal, max_retries=2)
    assert counts == {"num_rows": [5], "num_errors": [len(fatal)]}
    rows = list(read_parts(parts.folder))
    assert [row["index"] for row in rows] == list(range(5))
    assert [row["index"] for row in rows if "error" in row] == fatal
    assert all("died" in row["error"] for row in rows if "error" in row)
    whole = [batch for batch in batches if [0, 1, 2, 3, 4] in batch]
    assert len(whole) == (3 if fatal else 1)  # the first, and two retries
    assert len(batches) == (3 + 2 * len(fatal) + 1 if fatal else 1)
    assert [path.name for path in parts.folder.iterdir()] == ["part-000000000000-000000000005.jsonl"]


def test_one_death_of_something_else_costs_no_row(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"{n}"} for n in range(5)])
    parts = Parts(tmp_path / "out", "jsonl")
    parts.folder.mkdir()
    (shard,) = shards_of([scan(f"{tmp_path / 'in.jsonl'}", 5)], 5)
    attempts = parts.attempts(shard)
    for _ in range(3):
        attempts.begin()
    attempts.begin_row(0)
    attempts.end_row(0)
    attempts.begin_row(1)  # when its worker's node was switched off
    _, counts = answer_until_done(parts, shard, [3], max_retries=2)
    assert counts == {"num_rows": [5], "num_errors": [1]}
    assert [row["index"] for row in read_parts(parts.folder) if "error" in row] == [3]


def test_a_row_is_answered_alone_when_nobody_else_is_at_work():
    turns, done = Turns(), []

    def work(name, seconds):
        with turns.together():
            time.sleep(seconds)
            done.append(name)

    def be_alone():
        with turns.alone():
            done.append("alone")
            time.sleep(0.1)
            done.append("still alone")

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(work, "first", 0.1)
        while not turns._num_together:
            time.sleep(0.001)
        pool.submit(be_alone)
        first.result()
        while "alone" not in done:
            time.sleep(0.001)
        pool.submit(work, "second", 0)
    assert done == ["first", "alone", "still alone", "second"]


def test_a_full_disk_is_told_in_words(tmp_path):
    attempts = Parts(tmp_path / "absent", "jsonl").attempts(Shard("in.jsonl", 0, 5, 0))
    with pytest.raises(ConfigError, match=r"cannot write .*No such file.*--resume"):
        attempts.begin()


def test_workers_that_die_of_something_else_cost_no_row(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"{n}"} for n in range(5)])
    parts = Parts(tmp_path / "out", "jsonl")
    parts.folder.mkdir()
    (shard,) = shards_of([scan(f"{tmp_path / 'in.jsonl'}", 5)], 5)
    for _ in range(7):
        parts.attempts(shard).begin()  # and no more
    batches, counts = answer_until_done(parts, shard, [], max_retries=2)
    assert counts == {"num_rows": [5], "num_errors": [0]}
    assert batches == [[[0], [1], [2], [3], [4]]]


def test_a_resumed_job_begins_anew(tmp_path):
    with OutputFolder(tmp_path / "out", {}, resume=False):
        attempts = Parts(tmp_path / "out", "jsonl").attempts(Shard("in.jsonl", 0, 5, 0))
        assert [attempts.begin(), attempts.begin()] == [0, 1]
    with OutputFolder(tmp_path / "out", {}, resume=True):
        assert attempts.begin() == 0


# Processors


def test_slices_of_processors_are_apart_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    first, second = CpuSlice(1), CpuSlice(2)
    assert (first.cpus, second.cpus) == ((0,), (1, 2))
    assert CpuSlice(1).cpus == ()  # there is none left, so it stays unbound
    first.release()
    assert CpuSlice(1).cpus == (0,)
    assert CpuSlice(3).cpus == ()  # all of them is no slice


def test_a_bound_process_computes_on_its_slice(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor")
    code = (
        "import os, threading, time\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        "from jaxllm.cluster.cpu_slices import CpuSlice\n"
        "one = CpuSlice(1)\n"
        "one.bind()\n"
        "bound = {tuple(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}\n"
        "print(bound == {one.cpus}, len(one.cpus))\n"
    )
    environment = {**os.environ, "TMPDIR": f"{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True 1\n"


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-workers=2", "x"], "--num-workers does nothing without --ray"),
        (["--ray", "x"], "--ray is for data sets"),
        (["--ray", "--input=a.jsonl"], "where answers go"),
        (["--ray", "--input=a.jsonl", "--output=b", "--compile-report"], "of one engine"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, arguments, message):
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_ray_it_is_said_how_to_have_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    command = ["generate", "--ray", f"--input={tmp_path / 'a.jsonl'}", f"--output={tmp_path / 'b'}"]
    assert main(command) == 2
    assert 'pip install "jaxllm[ray]"' in capsys.readouterr().err
