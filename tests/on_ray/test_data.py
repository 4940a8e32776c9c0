import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cluster_helpers import OBJECT_STORE, SMALL, engine_options, kill, pids_of

import jaxllm.cluster
from jaxllm import SamplingParams
from jaxllm.cluster.parts import read_parts
from jaxllm.errors import ConfigError, WeightsError

WORKER = "ray::MapWorker(MapBatches(ShardWorker))"
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
PARAMETERS = ["--max-tokens=24", "--ignore-eos"]
OPTIONS = {"cpus_per_worker": 1, "show_progress": False, **SMALL}


def write_rows(path, num_rows, bad=()):
    """Prompts of a few kinds, and rows that are bad."""
    kinds = [
        lambda n: {"prompt": f"def f{n}(a, b):", "id": f"row-{n}"},
        lambda n: {"prompt_token_ids": [5 + n, 6, 7]},
        lambda n: {"prompt": f"import os{n}", "sampling_params": {"temperature": 0, "max_tokens": 5}},
    ]
    rows = [{"prompt": ""} if n in bad else kinds[n % 3](n) for n in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def by_index(rows):
    found = {}
    for row in rows:
        assert row["index"] not in found
        found[row["index"]] = row
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What `jaxllm generate` answers to rows without bad ones."""
    folder = tmp_path_factory.mktemp("reference")
    write_rows(folder / "in.jsonl", 60)
    command = [sys.executable, "-m", "jaxllm", "generate", *PARAMETERS, *engine_options()]
    command += [f"--input={folder / 'in.jsonl'}", f"--output={folder / 'out.jsonl'}", "-q"]
    subprocess.run(command, check=True, timeout=120)  # a process with JAX must not be forked, as Ray does
    return by_index(map(json.loads, (folder / "out.jsonl").read_text().splitlines()))


def test_answers_are_those_of_one_machine_and_bad_rows_stop_nobody(cluster, reference, tmp_path):
    write_rows(tmp_path / "in.jsonl", 60, bad=(7, 31))
    output = tmp_path / "out.jsonl"
    result = jaxllm.cluster.generate(tmp_path / "in.jsonl", PARAMS, output=output, batch_size=8, **OPTIONS)
    assert (result.num_rows, result.num_answered, result.num_errors) == (60, 60, 2)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(60))
    for row in rows:
        if row["index"] in (7, 31):
            assert "non-empty string" in row["error"]
        else:
            assert row == reference[row["index"]]
    with pytest.raises(ConfigError, match="never overwritten"):
        jaxllm.cluster.generate(tmp_path / "in.jsonl", PARAMS, output=output, batch_size=8, **OPTIONS)
    again = jaxllm.cluster.generate(
        tmp_path / "in.jsonl", PARAMS, output=output, batch_size=8, resume=True, **OPTIONS
    )
    assert again.num_answered == 0


def test_parquet_in_and_out_with_columns_of_other_names(cluster, reference, tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = [f"def f{n}(a, b):" for n in range(0, 60, 3)]
    table = pyarrow.table(
        {"question": texts, "key": [f"row-{n}" for n in range(0, 60, 3)], "other": range(20)}
    )
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet", row_group_size=7)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    result = jaxllm.cluster.generate(
        [tmp_path / "in.parquet"],
        params,
        output=tmp_path / "out.parquet",
        columns={"prompt": "question", "id": "key"},
        batch_size=6,
        **OPTIONS,
    )
    assert result.num_rows == 20
    assert len(list((tmp_path / "out.parquet").glob("part-*.parquet"))) == 4
    rows = list(read_parts(tmp_path / "out.parquet"))
    assert [row["prompt"] for row in rows] == texts
    assert [row["id"] for row in rows] == table["key"].to_pylist()
    assert all(len(row["token_ids"]) == 24 and row["error"] is None for row in rows)


def test_data_sets_keep_their_columns_or_are_written(cluster, tmp_path):
    import ray

    rows = [{"index": n, "prompt": f"def f{n}(a, b):", "mine": n * n} for n in range(12)]
    data = ray.data.from_items(rows)
    lazy = jaxllm.cluster.generate(data, PARAMS, batch_size=4, **OPTIONS)
    found = by_index(lazy.take_all())
    assert [found[n]["mine"] for n in range(12)] == [n * n for n in range(12)]
    result = jaxllm.cluster.generate(
        data.drop_columns(["index"]), PARAMS, output=tmp_path / "out", batch_size=4, **OPTIONS
    )
    assert result.num_rows == 12
    written = {row["prompt"]: row for row in read_parts(tmp_path / "out")}
    assert len(written) == 12
    for row in found.values():
        assert len(row["token_ids"]) == 24
        if written[row["prompt"]]["index"] == row["index"]:  # the same seed, then
            assert row["text"] == written[row["prompt"]]["text"]


@contextlib.contextmanager
def in_thread(function):
    """Runs a function beside the block, whose end waits for it."""
    results, errors = [], []

    def run():
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join(120)
        assert not thread.is_alive()
        if errors:
            raise errors[0]


def wait_for_parts(folder, count):
    deadline = time.monotonic() + 90
    while len(list(folder.glob("part-*"))) < count:
        assert time.monotonic() < deadline, "nothing is answered"
        time.sleep(0.02)


def test_a_killed_worker_loses_and_repeats_no_row(cluster, reference, tmp_path):
    write_rows(tmp_path / "in.jsonl", 60)
    output = tmp_path / "out"
    call = lambda: jaxllm.cluster.generate(  # noqa: E731
        tmp_path / "in.jsonl", PARAMS, output=output, batch_size=2, **OPTIONS
    )
    with in_thread(call) as results:
        wait_for_parts(output, 3)
        victims = pids_of(WORKER)
        assert len(victims) == 2
        kill(victims[0])
        left = len(list(output.glob("part-*")))
        assert left < 30, "it was over already"
    assert results[0].num_rows == 60
    assert by_index(read_parts(output)) == reference


def test_a_killed_node_loses_and_repeats_no_row(cluster, reference, tmp_path):
    write_rows(tmp_path / "in.jsonl", 60)
    output = tmp_path / "out"
    call = lambda: jaxllm.cluster.generate(  # noqa: E731
        tmp_path / "in.jsonl", PARAMS, output=output, batch_size=2, num_workers=2, **OPTIONS
    )
    (victim,) = cluster.worker_nodes
    with in_thread(call) as results:
        wait_for_parts(output, 3)
        cluster.remove_node(victim, allow_graceful=False)
        assert len(list(output.glob("part-*"))) < 30, "it was over already"
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE)
    assert results[0].num_rows == 60
    assert by_index(read_parts(output)) == reference


def test_a_killed_command_goes_on_where_it_was(cluster, reference, tmp_path):
    write_rows(tmp_path / "in.jsonl", 60)
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "jaxllm", "generate", "--ray", f"--ray-address={cluster.address}"]
    command += [f"--input={tmp_path / 'in.jsonl'}", f"--output={output}", *PARAMETERS]
    command += ["--cpus-per-worker=1", "--batch-size=2", *engine_options()]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    try:
        wait_for_parts(Path(f"{output}.parts"), 3)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    assert not output.exists()
    assert 3 <= len(list(Path(f"{output}.parts").glob("part-*"))) < 30
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    second = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(60))
    assert by_index(rows) == reference


def test_what_a_worker_cannot_do_is_said_in_its_own_words(cluster, tmp_path):
    write_rows(tmp_path / "in.jsonl", 4)
    arguments = {"output": tmp_path / "out", **OPTIONS}
    with pytest.raises(ConfigError, match="do not fit the cluster"):
        jaxllm.cluster.generate(tmp_path / "in.jsonl", PARAMS, num_workers=9, **arguments)
    with pytest.raises(ConfigError, match="no input file"):
        jaxllm.cluster.generate(tmp_path / "absent.jsonl", PARAMS, **arguments)
    model = tmp_path / "model"
    model.mkdir()
    for path in (Path(jaxllm.__file__).parent / "demo_model").iterdir():
        (model / path.name).write_bytes(
            path.read_bytes()[:1000] if path.suffix == ".safetensors" else path.read_bytes()
        )
    with pytest.raises(WeightsError):
        jaxllm.cluster.generate(tmp_path / "in.jsonl", PARAMS, model=f"{model}", **arguments)
