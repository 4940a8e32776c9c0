"""`jaxllm compare` and `jaxllm make-model`, with fake back-ends."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.research.bench.results import command_line
from jaxllm.research.commands import make_model
from jaxllm.research.commands.compare import MAX_MODEL_LEN
from jaxllm.research.compare import machine, report
from jaxllm.research.compare.agreement import agreement, divergences
from jaxllm.research.compare.backends import BACKENDS, WORKERS, Backend, get_backends, interpreters
from jaxllm.research.compare.process import Worker, WorkerError
from jaxllm.research.compare.runner import Comparison
from jaxllm.research.compare.workloads import (
    PROMPT_LENGTHS,
    Workload,
    get_workload,
    make_workload,
    save_workload,
)

TIMEOUT = 20.0

FAKE_WORKER = """
    import os, sys, time
    sys.path.insert(0, {workers!r})
    import protocol

    class FakeEngine(protocol.Engine):
        offset, mistakes = {offset}, {mistakes}

        def load(self):
            if self.offset is None:
                raise RuntimeError("no such model")
            return {{"load_seconds": 0.5, "compile_seconds": None}}

        def generate(self, prompts, max_tokens, variant):
            time.sleep(0.02)
            outputs = [[prompt[-1] + 1 + i for i in range(n)] for prompt, n in zip(prompts, max_tokens)]
            for place in range(min(self.mistakes, len(outputs))):
                outputs[place][-1] += self.offset
            return outputs

        def top2_gaps(self, sequences):
            return [float(len(sequence)) for sequence in sequences]

    if __name__ == "__main__":
        if {offset!r} == "die":
            sys.exit("no framework here")
        protocol.serve(FakeEngine)
"""


def fake_backend(folder: Path, name: str, *, offset: object = 0, mistakes: int = 0, batched: bool = False):
    script = folder / f"{name}_fake.py"
    text = textwrap.dedent(FAKE_WORKER).format(workers=str(WORKERS), offset=offset, mistakes=mistakes)
    if offset == "die":
        text = text.replace("offset, mistakes = die", "offset, mistakes = 0")
    script.write_text(text)
    return Backend(name, script, ("numpy", "not-installed"), batched)


def job(**changes):
    return {
        "model": "m",
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "seed": 0,
        "packages": [],
        **changes,
    }


@pytest.mark.parametrize("name", sorted(PROMPT_LENGTHS))
def test_named_workloads(name):
    low, high = {"short": (8, 64), "long": (256, 768), "mixed": (16, 768)}[name]
    workload = make_workload(name, num_requests=64, vocab_size=100, seed=3)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert len(lengths) == len(workload.max_tokens) == 64
    assert low <= min(lengths) < max(lengths) <= high
    assert 16 <= min(workload.max_tokens) < max(workload.max_tokens) <= 256
    assert {token for prompt in workload.prompts for token in prompt} == set(range(100))
    assert workload == make_workload(name, num_requests=64, vocab_size=100, seed=3)
    assert workload != make_workload(name, num_requests=64, vocab_size=100, seed=4)
    assert workload.longest <= MAX_MODEL_LEN


def test_pool_holds_the_longest_requests():
    workload = Workload("w", [[1] * 16, [1] * 17, [1]], [16, 16, 1])
    assert workload.longest == 33
    assert workload.num_blocks(max_num_seqs=2) == (2 + 1) + (3 + 1) + 1


def test_workload_file_round_trip(tmp_path):
    workload = make_workload("short", num_requests=3, vocab_size=50, seed=0)
    save_workload(workload, tmp_path / "short.json")
    options = {"num_requests": 9, "seed": 9}
    assert get_workload(str(tmp_path / "short.json"), vocab_size=50, **options) == workload
    with pytest.raises(ConfigError, match="vocabulary of 5"):
        get_workload(str(tmp_path / "short.json"), vocab_size=5, **options)
    with pytest.raises(ConfigError, match="neither a file nor one of"):
        get_workload("medium", vocab_size=50, **options)


@pytest.mark.parametrize(("prompts", "max_tokens"), [([], []), ([[1]], [1, 2]), ([[]], [1]), ([[1]], [0])])
def test_invalid_workloads(prompts, max_tokens):
    with pytest.raises(ConfigError, match="max_tokens"):
        Workload("w", prompts, max_tokens)


@pytest.mark.parametrize(
    ("prompts", "max_tokens"),
    [(5, [1]), (None, None), ("ab", [1, 1]), ([[1]], 5), ([[1.5]], [1]), ([[True]], [1]), ([[1]], [10**30])],
)
def test_files_of_prompts_that_are_none_are_refused(tmp_path, prompts, max_tokens):
    file = tmp_path / "odd.json"
    file.write_text(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"workload 'odd': (prompts are lists|.* is no token id)"):
        get_workload(str(file), num_requests=1, vocab_size=50, seed=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--timeout", "nan"], "--timeout nan must be"),
        (["--num-requests", str(10**9)], "--num-prompts 1000000000 must be at most"),
    ],
)
def test_options_that_never_end_are_refused(tmp_path, capsys, option, message):
    assert main(["compare", str(tmp_path), "short", "--out", str(tmp_path / "o.json"), *option]) == 2
    assert message in capsys.readouterr().err


def test_registry():
    assert list(BACKENDS) == [
        *("jaxllm", "jaxllm-other", "jaxllm-int8"),
        *("transformers", "transformers-cb"),
        *("vllm", "openvino", "openvino-int8", "ctranslate2", "easydel", "tunix"),
    ]
    assert all(backend.worker.is_file() for backend in BACKENDS.values())
    assert [backend.name for backend in get_backends("vllm, jaxllm")] == ["vllm", "jaxllm"]
    for names, message in (
        ("", "one at least"),
        ("jaxllm,jaxllm", "at most once"),
        ("jaxllm,vlm", "did you mean vllm"),
        ("tgi", "--server NAME=URL"),
    ):
        with pytest.raises(ConfigError, match=message):
            get_backends(names)


def test_workers_import_only_the_standard_library_at_the_top():
    allowed = set(sys.stdlib_module_names) | {"exporting", "hf_model", "protocol"}
    for path in WORKERS.glob("*.py"):
        tops = [
            line.split()[1].split(".")[0]
            for line in path.read_text().splitlines()
            if line.startswith(("import ", "from "))
        ]
        assert set(tops) <= allowed, path.name


def test_checkpoints_are_exported_once(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(WORKERS))
    from exporting import exported

    written = []

    def write(folder):
        written.append(folder)
        folder.mkdir()
        (folder / "model.xml").write_text("<net/>")

    checkpoint = tmp_path / "m"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    os.utime(checkpoint / "config.json", (1e9, 1e9))
    for _ in range(2):
        assert exported(checkpoint, "openvino", "model.xml", write) == tmp_path / "m-openvino"
    assert len(written) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m-openvino"]
    os.utime(checkpoint / "config.json", (4e9, 4e9))
    exported(checkpoint, "openvino", "model.xml", write)
    assert len(written) == 2  # the checkpoint is newer
    assert (tmp_path / "m-openvino" / "model.xml").is_file()


def test_openvino_writes_in_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(WORKERS))
    import openvino_worker

    commands = []
    monkeypatch.setattr("subprocess.run", lambda command, **options: commands.append(command))
    openvino_worker.write_export(tmp_path, "fp32", tmp_path / "out")
    assert commands[0][-1] == str(tmp_path / "out")
    assert "fp32" in commands[0]


def test_openvino_worker_asks_for_what_the_job_says(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(WORKERS))
    import openvino_worker

    class Pipeline:
        def __init__(self, *arguments):
            self.arguments = arguments

        def generate(self, inputs, configs):
            assert all(config.ignore_eos and not config.do_sample for config in configs)
            return [
                SimpleNamespace(m_generation_ids=[[int(one[0, -1])] * config.max_new_tokens])
                for one, config in zip(inputs, configs, strict=True)
            ]

    fake = SimpleNamespace(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=Pipeline,
    )
    monkeypatch.setitem(sys.modules, "openvino_genai", fake)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda array: array))
    monkeypatch.setattr(openvino_worker, "exported", lambda checkpoint, *_: checkpoint)
    monkeypatch.setenv("CI", "")
    values = job(
        dummy_weights=False,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        num_blocks=101,
        block_size=16,
        threads=2,
    )
    engine = openvino_worker.OpenvinoEngine(values)
    times = engine.load()
    assert sorted(times) == ["compile_seconds", "export_seconds", "load_seconds"]
    _, scheduler, device, properties = engine._pipeline.arguments
    assert device == "CPU"
    assert vars(scheduler) == {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "num_kv_blocks": 51,  # of 32 tokens
        "enable_prefix_caching": False,
    }
    assert properties == {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": 2,
    }
    assert engine.generate([[1, 2], [5]], [3, 1], None) == [[2, 2, 2], [5]]
    for change in ({"dtype": "bfloat16"}, {"device": "gpu"}, {"dummy_weights": True}):
        with pytest.raises(ValueError, match="in float32 on CPUs only"):
            openvino_worker.OpenvinoEngine(values | change).load()


def test_interpreters(tmp_path):
    backends = get_backends("jaxllm,transformers-cb,vllm")
    environ = {"JAXLLM_COMPARE_PYTHON_TRANSFORMERS_CB": "a", "JAXLLM_COMPARE_PYTHON_VLLM": "b"}
    assert interpreters(["vllm=c", "transformers=d"], backends, tmp_path, environ) == {
        "jaxllm": sys.executable,
        "transformers-cb": "a",
        "vllm": "c",
    }
    for option in ("vllm", "vllm=", "tgi=python"):
        with pytest.raises(ConfigError, match="NAME=PATH"):
            interpreters([option], backends, tmp_path, environ)
    home = tmp_path / "jaxllm"
    (home / "bin").mkdir(parents=True)
    assert interpreters([], backends, tmp_path, environ)["jaxllm"] == sys.executable
    (home / "complete").touch()  # what is half installed does not count
    assert interpreters([], backends, tmp_path, environ)["jaxllm"] == str(home / "bin" / "python")


def test_static_batch_sizes():
    transformers = BACKENDS["transformers"]
    assert transformers.variants([64, 8, 16, 32], 64) == [64, 32, 16, 8]
    assert transformers.variants([8, 16, 32, 64], 20) == [32, 16, 8]
    assert transformers.variants([8, 16], 3) == [8]
    assert BACKENDS["jaxllm"].variants([8], 64) == [None]


def test_agreement():
    reference = [[1, 2, 3], [4, 5], [6]]
    assert divergences(reference, reference) == []
    found = agreement("transformers, batch 8", reference, [[1, 9, 9], [4, 5], [7]])
    assert (found["num_matching"], found["num_requests"]) == (1, 3)
    places = [
        (one["request"], one["position"], one["reference_token"], one["token"])
        for one in found["divergences"]
    ]
    assert places == [(0, 1, 2, 9), (2, 0, 6, 7)]


def test_worker_answers_and_rests_between_commands(tmp_path):
    backend = fake_backend(tmp_path, "good")
    worker = Worker(sys.executable, backend.worker, job(packages=["numpy", "not-installed"]), tmp_path)
    try:
        loaded = worker.call("load", timeout=TIMEOUT)
        assert loaded["load_seconds"] == 0.5
        assert loaded["packages"] == {"numpy": np.__version__}
        save_workload(Workload("w", [[1], [5]], [2, 1]), tmp_path / "w.json")
        reply = worker.call("run", timeout=TIMEOUT, workload=str(tmp_path / "w.json"), variant=None)
        assert reply["token_ids"] == [[2, 3], [6]]
        assert 0.02 <= reply["seconds"] < 5
        assert reply["peak_rss_bytes"] > 2**20
        if Path("/proc").is_dir():
            state = Path(f"/proc/{worker._process.pid}/stat")
            deadline = time.monotonic() + TIMEOUT
            while state.read_text().rsplit(")", 1)[1].split()[0] != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert state.read_text().rsplit(")", 1)[1].split()[0] == "T"
    finally:
        worker.close()
    assert worker._process.returncode == 0
    worker.close()


def test_worker_errors(tmp_path):
    failing, dead = (
        fake_backend(tmp_path, name, offset=offset) for name, offset in (("f", None), ("d", "die"))
    )
    for backend, message in ((failing, "RuntimeError: no such model"), (dead, "status 1: no framework here")):
        home = tmp_path / backend.name
        home.mkdir()
        worker = Worker(sys.executable, backend.worker, job(), home)
        try:
            with pytest.raises(WorkerError, match=message):
                worker.call("load", timeout=TIMEOUT)
        finally:
            worker.close()


def test_worker_that_gives_no_answer(tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text("import sys\nsys.stdin.read()\n")
    worker = Worker(sys.executable, script, job(), tmp_path)
    try:
        with pytest.raises(WorkerError, match="no answer to 'load' within 0 s"):
            worker.call("load", timeout=0.2)
    finally:
        worker.close()


@pytest.fixture
def checkpoint(tmp_path):
    make_model.write_checkpoint(tmp_path / "tiny", "tiny")
    return tmp_path / "tiny"


def compare(monkeypatch, tmp_path, checkpoint, backends, *options, workloads=("w",)):
    """Exit status and JSON of a whole run with fake back-ends in the registry's place.

    Each workload has 10 requests of 3 tokens, with prompts that tell the workloads apart.
    """
    monkeypatch.setattr(
        "jaxllm.research.compare.backends.BACKENDS", {backend.name: backend for backend in backends}
    )
    names = ",".join(backend.name for backend in backends)
    out = tmp_path / "out.json"
    paths = [tmp_path / f"{name}.json" for name in workloads]
    for number, path in enumerate(paths):
        prompts = [[place, 7 + number] for place in range(10)]
        save_workload(Workload(path.stem, prompts, [3] * 10), path)
    arguments = [str(checkpoint), ",".join(map(str, paths)), "--backends", names, "--out", str(out)]
    status = main(["compare", *arguments, "--threads", "1", "--overwrite", *options])
    return status, json.loads(out.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("{}", "has no vocab_size, num_attention_heads, hidden_size, num_hidden_layers, by which"),
    ],
)
def test_a_folder_of_no_model_is_refused(tmp_path, text, message, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main(["compare", str(tmp_path), "short", "--backends", "jaxllm", "--threads", "1"]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_told_how(monkeypatch, tmp_path, checkpoint, capsys):
    broken = fake_backend(tmp_path, "vllm", offset=None)
    script = broken.worker.read_text()
    said = """ModuleNotFoundError("No module named 'vllm'")"""
    broken.worker.write_text(script.replace('RuntimeError("no such model")', said))
    compare(monkeypatch, tmp_path, checkpoint, [fake_backend(tmp_path, "jaxllm"), broken])
    assert "No module named 'vllm'; jaxllm compare --install vllm makes" in capsys.readouterr().out


def test_whole_run(monkeypatch, tmp_path, checkpoint, capsys):
    backends = [
        fake_backend(tmp_path, "jaxllm"),
        fake_backend(tmp_path, "transformers", batched=True),
        fake_backend(tmp_path, "vllm", offset=None),
    ]
    status, results = compare(
        monkeypatch,
        tmp_path,
        checkpoint,
        backends,
        *("--repetitions", "2", "--static-batch-sizes", "2,4", "--repeat-within", "1000"),
    )
    assert status == 0
    assert [(row["backend"], row["batch_size"]) for row in results["rows"]] == [
        ("jaxllm", None),
        ("transformers", 4),
        ("transformers", 2),
        ("vllm", None),
    ]
    ours, static, _, failed = results["rows"]
    assert len(ours["seconds"]) == len(static["seconds"]) == 2
    assert ours["output_tokens_per_second"]["max"] == pytest.approx(30 / min(ours["seconds"]), rel=1e-4)
    assert ours["agreement"]["num_matching"] == 10
    assert static["agreement"] is None  # it is the reference
    assert failed["error"] == "RuntimeError: no such model"
    assert failed["output_tokens_per_second"] is None
    assert sum(row["best_static"] for row in results["rows"]) == 1
    table = capsys.readouterr().out
    assert "vllm failed: RuntimeError: no such model" in table
    assert str(tmp_path) not in json.dumps(results)


def test_several_workloads(monkeypatch, tmp_path, checkpoint, capsys):
    backends = [
        fake_backend(tmp_path, "jaxllm"),
        fake_backend(tmp_path, "transformers", batched=True),
        fake_backend(tmp_path, "vllm", offset=None),
        fake_backend(tmp_path, "openvino", offset=5, mistakes=1),
    ]
    status, results = compare(
        monkeypatch,
        tmp_path,
        checkpoint,
        backends,
        *("--repetitions", "2", "--static-batch-sizes", "2,4", "--repeat-within", "1000"),
        workloads=("first", "second"),
    )
    assert status == 0
    assert [(one["name"], one["repetitions"]) for one in results["workloads"]] == [
        ("first", 2),
        ("second", 2),
    ]
    names = ["jaxllm", "transformers", "transformers", "vllm", "openvino"]
    places = [(row["workload"], row["backend"]) for row in results["rows"]]
    assert places == [(workload, name) for workload in ("first", "second") for name in names]
    for rows in (results["rows"][:5], results["rows"][5:]):
        assert sum(row["best_static"] for row in rows) == 1
        assert [row["error"] is None for row in rows] == [True, True, True, False, True]
        assert rows[0]["agreement"]["num_matching"] == 10
        assert rows[4]["agreement"]["num_matching"] == 9
    captured = capsys.readouterr()
    assert captured.err.count("jaxllm: loading") == 1  # for both
    overview = captured.out.splitlines()[:6]
    assert overview[0] == "| output tokens/s | first | second |"
    for line, name in zip(overview[2:], dict.fromkeys(names), strict=True):
        cells = [row for row in results["rows"] if row["backend"] == name]
        assert line.startswith(f"| {name} | ")
        if name == "jaxllm":
            shown = [float(cell) for cell in line.split("|")[2:-1]]
            medians = [row["output_tokens_per_second"]["median"] for row in cells]  # with six digits
            assert shown == pytest.approx(medians, abs=0.11)
    assert overview[3].count("(batch ") == 2
    assert overview[4] == "| vllm | failed | failed |"
    assert "- second: openvino differs: from transformers, batch 4: request 0 at token 2" in captured.out
    report.plot(results, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_failure_lasts_and_spares_earlier_workloads(monkeypatch, tmp_path):
    class Failing(ScriptedWorker):
        log = tmp_path / "log.txt"

        def call(self, command, **fields):
            if len(self.calls) == 1 and command == "run":
                raise WorkerError("out of memory")
            return super().call(command, **fields)

    Failing.log.write_text("")
    worker = Failing({None: [1.0]})
    monkeypatch.setattr("jaxllm.research.compare.runner.Worker", lambda *_: worker)
    errors = []
    with Comparison([BACKENDS["vllm"]], {"vllm": "python"}, job(), tmp_path, TIMEOUT) as comparison:
        for name in "abc":
            workload = Workload(name, [[1]], [1])
            list(comparison.run(workload, {"vllm": [None]}, 1, 1.3, 5.0))
            errors += [row["error"] for row in report.collect(comparison, workload)]
    assert errors == [None, "out of memory", "out of memory"]


@pytest.mark.parametrize(("mistakes", "expected"), [(1, 0), (2, 1)])
def test_too_much_disagreement_fails(monkeypatch, tmp_path, checkpoint, capsys, mistakes, expected):
    backends = [
        fake_backend(tmp_path, "jaxllm", offset=5, mistakes=mistakes),
        fake_backend(tmp_path, "transformers", batched=True),
    ]
    options = ("--repetitions", "1", "--static-batch-sizes", "4", "--max-disagreement", "0.1")
    status, results = compare(monkeypatch, tmp_path, checkpoint, backends, *options)
    assert status == expected
    first = results["rows"][0]["agreement"]["divergences"][0]
    assert (first["request"], first["position"], first["gap"]) == (0, 2, 4.0)
    captured = capsys.readouterr()
    assert "jaxllm differs: from transformers, batch 4: request 0 at token 2 (logit gap 4)" in captured.out
    assert ("differ in 20% of the requests" in captured.err) == bool(expected)


def test_missing_python_is_reported(tmp_path):
    backend = fake_backend(tmp_path, "vllm")
    pythons = {"vllm": str(tmp_path / "nowhere")}
    with Comparison([backend], pythons, job(), tmp_path, TIMEOUT) as comparison:
        workload = Workload("w", [[1]], [1])
        assert list(comparison.run(workload, {"vllm": [None]}, 1, 1.3, 5.0)) == [1]
        (row,) = report.collect(comparison, workload)
    assert row["error"] == "cannot run its Python: No such file or directory"


class ScriptedWorker:
    """Answers each variant with the next of its times."""

    def __init__(self, seconds):
        self.seconds = {variant: iter(times) for variant, times in seconds.items()}
        self.calls = []
        self.limits = []

    def call(self, command, *, timeout, workload=None, variant=None, give_up_after=None):
        if command == "load" or "beginning" in workload:
            return {}
        self.calls.append(variant)
        self.limits.append(give_up_after)
        if variant == 4:
            return {"seconds": 3.0, "gave_up_after_tokens": 6}
        return {"seconds": next(self.seconds[variant]), "token_ids": [[1]], "peak_rss_bytes": 1}

    def close(self):
        pass


def test_slow_batch_sizes_are_not_repeated(monkeypatch, tmp_path):
    worker = ScriptedWorker({32: [1.0, 9.0, 1.0], 16: [1.25, 1.5, 9.0], 8: [2.0]})
    monkeypatch.setattr("jaxllm.research.compare.runner.Worker", lambda *_: worker)
    backend = fake_backend(tmp_path, "transformers", batched=True)
    variants = {"transformers": [32, 16, 8, 4]}
    with Comparison([backend], {"transformers": "python"}, job(), tmp_path, TIMEOUT) as comparison:
        list(comparison.run(Workload("w", [[1]], [1]), variants, 3, 1.3, 5.0))
        assert [len(one.seconds) for one in comparison.measurements] == [3, 3, 1, 0]
        rows = report.collect(comparison, Workload("w", [[1]], [1]))
    assert worker.calls == [32, 16, 8, 4, 32, 16, 32, 16]
    assert worker.limits == [None, 1.3, 1.3, 1.3, None, None, None, None]
    assert rows[3]["partial"]["gave_up_after_tokens"] == 6
    assert rows[3]["output_tokens_per_second"] is None
    assert report._cells(rows[3])[:2] == ["transformers, batch 4", "stopped at 2.0"]


def fake_results():
    def row(backend, batch_size, rate):
        return {
            "workload": "mixed",
            "backend": backend,
            "batch_size": batch_size,
            "seconds": [1.0],
            "output_tokens_per_second": rate and {"median": rate, "min": rate - 5, "max": rate + 10},
            "same_tokens_every_repetition": True,
            "agreement": None,
            "peak_rss_bytes": 3 * 2**30,
            "start_up_seconds": 3.0,
            "load_seconds": 1.5,
            "compile_seconds": 20.25 if backend == "jaxllm" else None,
            "python": "3.11.0",
            "packages": {backend: "1.0"},
            "error": None if rate else "RuntimeError: no kernel",
        }

    rows = [
        row("jaxllm", None, 300.0),
        row("transformers", 8, 80.0),
        row("transformers", 16, 100.0),
        row("vllm", None, None),
    ]
    report.set_ratios(rows)
    return {
        "command": "jaxllm compare m mixed",
        "model": {"name": "m"},
        "workloads": [
            make_workload("mixed", num_requests=4, vocab_size=9, seed=0).summary() | {"repetitions": 3}
        ],
        "seed": 0,
        "device": "cpu",
        "threads": 2,
        "hardware": machine.hardware() | {"cores": 2, "busy_share_at_start": 0.05},
        "rows": rows,
    }


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(machine, "_BUSY_SAMPLE_SECONDS", 0.05)


def test_table():
    lines = report.table(fake_results()).splitlines()
    assert lines[2] == "| jaxllm | 300.0 | 295.0..310.0 | 3.00x | - | - | 3.00 | 3.0 | 1.5 | 20.2 | - |"
    assert lines[4].startswith("| transformers, batch 16 (best static) | 100.0 | 95.0..110.0 | 1.00x |")
    assert lines[5].startswith("| vllm | failed | - | - |")
    assert "- vllm failed: RuntimeError: no kernel" in lines


def test_table_of_results_of_one_workload():
    results = fake_results()
    (summary,) = results.pop("workloads")
    earlier = results | {"workload": summary, "repetitions": summary.pop("repetitions")}
    assert report.table(earlier) == report.table(fake_results())


def test_a_busy_machine_is_told():
    results = fake_results()
    assert "kept the machine busy" not in report.table(results)
    results["hardware"]["busy_share_at_start"] = 0.6
    assert "do not quote these numbers" in report.table(results)


def test_from_json_draws_again(monkeypatch, tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(fake_results()))
    arguments = ["--from-json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main(["compare", *arguments]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "| jaxllm | 300.0 |" in capsys.readouterr().out


def test_command_line_has_no_machine_paths():
    words = ["jaxllm", "compare", "/a/b/model", "mixed", "--python", "vllm=/c/d/python"]
    assert command_line(words) == "jaxllm compare model mixed --python vllm=python"


def test_wrong_arguments(checkpoint, tmp_path, capsys):
    listed, other = tmp_path / "listed.json", tmp_path / "other.json"
    listed.write_text("[]")
    other.write_text('{"rows": [{}], "hardware": {}}')
    for arguments, message in (
        ([str(checkpoint / "nowhere"), "mixed"], "has no config.json"),
        ([], "name a checkpoint folder and a workload"),
        ([str(checkpoint), "mixed", "--threads", "4096"], "cores that this process may use"),
        ([str(checkpoint), "mixed", "--rate", "0"], "a trace's own times, and 'mixed' has none"),
        ([str(checkpoint), "mixed", "--rate", "nan"], "--rate nan must be requests a second"),
        ([str(checkpoint), "mixed", "--server", "sglang"], "must be NAME=URL"),
        (["--from-json", str(checkpoint / "config.json")], "must be what `jaxllm compare --out FILE.json`"),
        (["--from-json", str(listed)], "and holds a list"),
        (["--from-json", str(other)], "and holds 'rows', 'hardware', but not all that it writes"),
        (["--from-json", str(other), "--repetitions", "4"], "--repetitions means nothing with --from-json"),
        (["--from-json", str(other), str(checkpoint)], "MODEL means nothing with --from-json"),
        ([str(checkpoint), "mixed", "--pip", "x"], "--pip does nothing without --install"),
        ([str(checkpoint), "mixed", "--server-token-ids"], "does nothing without --server"),
        (["--install", "sglang"], "there are recipes for"),
        ([str(checkpoint), "medium"], "neither a file"),
        ([str(checkpoint), "mixed", "--static-batch-sizes", "0"], "at least 1"),
        ([str(checkpoint), "mixed", "--backends", "tgi"], "is none of"),
        ([str(checkpoint), "mixed,short,mixed"], "give each name once"),
        ([str(checkpoint), "mixed,short", "--save-workload", "w.json"], "takes one workload"),
    ):
        assert main(["compare", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_bench_model(checkpoint, tmp_path):
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (128, 64)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (64, 64)
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.05, rel=0.02)
    assert all(array.dtype == np.float32 for array in weights.values())
    assert len(weights) == 2 + 9 * config["num_hidden_layers"]
    assert config["model_type"] == "llama"
    make_model.write_checkpoint(tmp_path / "again", "tiny")
    assert os.stat(tmp_path / "again" / "model.safetensors").st_size > 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(np.array_equal(again[name], array) for name, array in weights.items())


def test_opt_bench_model(monkeypatch, tmp_path):
    from safetensors.numpy import load_file

    from jaxllm.models.config import config_from_dict

    sizes = make_model.OPT_SIZES["opt-125m"]
    small = {"ffn_dim": 24, "hidden_size": 8, "num_attention_heads": 2, "word_embed_proj_dim": 8}
    monkeypatch.setitem(make_model.OPT_SIZES, "small", sizes | small | {"vocab_size": 50})
    num_parameters = make_model.write_checkpoint(tmp_path / "opt", "small")
    config = json.loads((tmp_path / "opt" / "config.json").read_text())
    weights = load_file(tmp_path / "opt" / "model.safetensors")
    assert num_parameters == sum(array.size for array in weights.values())
    assert weights["model.decoder.embed_positions.weight"].shape == (2050, 8)
    assert weights["model.decoder.layers.11.fc2.weight"].shape == (8, 24)
    assert len(weights) == 2 + 2 + 16 * config["num_hidden_layers"]
    assert config_from_dict(config).architecture == "OPTForCausalLM"
