"""The GPU benchmark, rehearsed: its parts run, and what is missing from the results has a reason."""

import gc
import importlib.metadata
import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import bench_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import engine, kernels, parts
from gpu.inputs import CONFIGS, REHEARSAL, Sizes, sharegpt_like
from gpu.report import Report, attempt

from jaxllm.cli.main import build_parser
from jaxllm.errors import EngineError
from jaxllm.executor import compile_stats
from jaxllm.research.commands import compare
from jaxllm.research.compare.workloads import get_workload
from jaxllm.system import hardware


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch):
    """`main` sets what its processes inherit, and how it ends."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_part_is_known():
    own = {
        name
        for call in bench_gpu.CALLS.values()
        for name, (_, command) in call.items()
        if command is bench_gpu.own_process
    }
    assert own == set(parts.PARTS)
    assert list(bench_gpu.chosen_parts("opt-13b,first")) == ["opt-13b", *bench_gpu.CALLS["first"]]
    for call, minutes in (("first", 5), ("second", 8), ("third", 10)):
        assert sum(seconds for seconds, _ in bench_gpu.CALLS[call].values()) < 60 * minutes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "fourth"], "'fourth' is unknown: use first, second, third or kernels-triton"),
        (["--parts", "first", "--in-process"], "not --parts first"),
        (["--parts", "same-tokens", "--in-process"], "no comparison, not --parts same-tokens"),
        (["--limit", "0"], "--limit 0 must be a positive number"),
    ],
)
def test_wrong_arguments_are_named(options, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main([*options, "--out", str(tmp_path / "o.json")])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_kernels_part(tmp_path):
    out = tmp_path / "kernels.json"
    options = ["--parts", "kernels-xla", "--rehearsal", "--in-process", "--limit", "900", "--seed", "3"]
    assert bench_gpu.main([*options, "--out", str(out)]) == 0
    values = read(out)
    results = values["results"]
    assert values["missing"] == {}
    assert len(results["checks"]) == 2 * 2 * 3 + 2 * 3 + 2 * 3
    assert all(row["passed"] and row["same_bits_again"] for row in results["checks"])
    assert [row["batch"] for row in results["decode attention"]] == [1, 4]
    assert [row["tokens"] for row in results["prefill attention"]] == [32]
    assert results["ceilings"][0]["copy_bytes_per_second"] > 0
    assert values["versions"]["jax"] == jax.__version__
    assert values["hardware"]["platform"] == "cpu"


def test_codes_part(tmp_path):
    out = tmp_path / "codes.json"
    options = ["--parts", "codes", "--rehearsal", "--in-process", "--limit", "900", "--out", str(out)]
    assert bench_gpu.main(options) == 0
    values = read(out)
    results = values["results"]
    assert values["missing"] == {}
    assert len(results["checks"]) == 5 * 4 + 2 + 3 + 2 * 2 * 3 * 3
    assert all(row["passed"] and row["same_bits_again"] for row in results["checks"])
    assert {row["format"] for row in results["products"]} == {
        "auto",
        "int8",
        "fp8",
        "int8_weight",
        "int4_weight",
    }
    assert [row["kv_dtype"] for row in results["decode attention"][::2]] == ["int8", "fp8_e4m3", "fp8_e5m2"]


def test_a_check_compiles_nothing_when_it_runs():
    rows = kernels.check("xla", REHEARSAL, 0)
    compile_stats.start()
    first = next(rows)  # compiles the programs of all of them
    before, _ = compile_stats.total()
    assert [first["passed"], *(row["passed"] for row in rows)] == [True] * 12
    assert compile_stats.total()[0] - before <= 11  # those still under way when the first was ready


def test_a_loop_chains_its_kernels_over_the_tables_in_turn():
    def op(q, pool, table, add):
        return 2 * q + pool[table[0]] + add

    pool, tables = jnp.asarray([1.0, 10.0, 100.0]), [jnp.asarray([block]) for block in (0, 2)]
    sizes = Sizes(chain=3, loop_kernels=6)
    loop = kernels.Loop.of(op, 1e-9, sizes, jnp.float32(0), pool, tables, jnp.float32(5))
    assert (loop.turns, loop.chain) == (2, 3)
    program = loop.lower().compile()
    expected = 0.0
    for block in [1.0, 100.0, 1.0] * 2:
        expected = 2 * expected + block + 5
    assert float(program(*loop.arguments)) == expected
    assert loop.seconds(program) > 0


def test_moved_blocks_change_halves():
    contents = np.arange(4 * 2 * 2 * 1 * 1 * 4, dtype=np.float32).reshape(4, 2, 2, 1, 1, 4)
    seconds, pool = engine.move_seconds(jnp.asarray(contents), 2)
    assert seconds > 0
    np.testing.assert_array_equal(np.asarray(pool), contents[[0, 1, 0, 1]])


class FakeLLM:
    """An executor with one array."""

    def __init__(self, *args, **settings):
        self.executor = types.SimpleNamespace(pool=jnp.zeros(2**20), release=self.release)

    def release(self):
        del self.executor.pool


def test_memory_is_free_between_models(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "LLM", FakeLLM)
    jax.clear_caches()
    gc.collect()  # what other tests left
    before = engine.live_bytes()
    with engine.loaded("rehearsal", tmp_path, REHEARSAL, None) as llm:
        assert engine.live_bytes() >= before + 2**22
    assert engine.live_bytes() < before + 2**20
    with (
        pytest.raises(EngineError, match=r"4194304 bytes of arrays outlive rehearsal, more than 1048576"),
        engine.loaded("rehearsal", tmp_path, REHEARSAL, None) as llm,
    ):
        kept = llm.executor.pool
    assert kept.nbytes == 2**22


def test_model_parts_in_processes_of_their_own(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    options = ["--rehearsal", "--parts", "llama-3-8b,llama-3-8b-memory", "--limit", "900", "--out", str(out)]
    assert bench_gpu.main(options) == 0, capsys.readouterr().err
    values = read(out)
    steps, memory = (part["results"] for part in values["parts"].values())
    assert [(row["batch"], row["tokens_per_step"] >= row["batch"]) for row in steps["dispatch"]] == [
        (1, True),
        (4, True),
    ]
    assert all(0 < row["blocked_share"] < 1 for row in steps["dispatch"])
    assert [row["step"] for row in steps["steps"]] == ["decode", "decode", "prefill"]
    assert all(row["most_running"] == 4 and row["requests"] == 8 for row in steps["sharegpt"])
    assert [row["blocks"] for row in memory["swaps"]] == [1, 3]
    assert all(row["move_share_of_copy"] > 0 < row["out_call_seconds"] for row in memory["swaps"])
    assert memory["second start"][0]["warm_up_seconds"] < memory["start"][0]["warm_up_seconds"]
    hidden = memory["swaps beside decode"]
    assert [(row["blocks"], row["batch"]) for row in hidden] == [(1, 4), (3, 4)]
    assert {row["preset"] for row in memory["presets"]} == set(engine.MEMORY_PRESETS)
    assert {"decode", "swap_out"} < {row["kind"] for row in memory["predictors"]}
    assert values["versions"] == hardware.versions()
    assert values["hardware"]["platform"] == "cpu"
    assert "| llama-3-8b | steps | decode, batch 4, context 32 | seconds " in capsys.readouterr().out


def test_rows_are_kept_until_time_is_up_or_it_fails(tmp_path):
    out = tmp_path / "r.json"
    report = Report(out, 3600, {"seed": 1})

    def rows():
        yield {"batch": 1}
        assert read(out)["results"] == {"steps": [{"batch": 1}]}  # on disk before the next
        yield attempt({"batch": 2}, lambda: {"share": 1 / 0})
        raise ValueError("no\nmore")

    report.rows("steps", rows())
    Report.rows(report, "good", [{"batch": 3}])
    written = read(out)
    assert written["results"]["steps"][1] == {"batch": 2, "error": "ZeroDivisionError: division by zero"}
    assert written["results"]["good"] == [{"batch": 3}]
    assert written["missing"] == {
        "steps, row 2": "ZeroDivisionError: division by zero",
        "steps": "ValueError: no more",
    }
    report = Report(out, 0, {})
    report.rows("late", iter([{"batch": 1}]))
    assert read(out)["missing"] == {"late": "stopped after 0 rows: the part's 0 s are used up"}


def test_what_a_part_had_outlives_it(tmp_path, capsys):
    out, part = tmp_path / "gpu.json", tmp_path / "part.json"
    values = {"results": {"steps": [{"batch": 1, "seconds": 0.5}]}, "missing": {}}
    part.write_text(json.dumps(values))
    results = bench_gpu.Results(out, {"command": "c"})
    bench_gpu.run_part([sys.executable, "-c", "import time; time.sleep(600)"], "slow", part, results, 1.0)
    bench_gpu.run_part([sys.executable, "-c", "exit(3)"], "dead", tmp_path / "none.json", results, 60.0)
    written = read(out)["parts"]
    assert written["slow"]["results"] == values["results"]
    assert list(results.problems()) == [
        "slow: slow is missing: ended after 1 s, its part of --limit: raise it, or choose fewer --parts",
        "dead: dead is missing: its process ended with status 3",
    ]
    assert "| slow | steps | batch 1 | seconds 0.5 |" in results.table()


def test_no_time_is_a_reason(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    assert bench_gpu.main(["--parts", "first", "--limit", "3", "--out", str(out)]) == 1
    for name, part in read(out)["parts"].items():
        assert part["missing"][name].startswith("skipped with ")
        assert "--limit 3: raise it" in part["missing"][name]


def test_a_failed_check_and_a_failed_framework_are_problems(tmp_path):
    results, part = bench_gpu.Results(tmp_path / "o.json", {}), tmp_path / "part.json"
    checks = [{"op": "decode", "passed": passed, "same_bits_again": True} for passed in (True, False)]
    part.write_text(json.dumps({"results": {"checks": checks}}))
    results.merge("kernels-triton", part)
    rows = [{"backend": "transformers-cb", "error": "no torch"}, {"backend": "jaxllm", "error": None}]
    part.write_text(json.dumps({"rows": rows}))
    results.merge("against-transformers", part)
    assert list(results.problems()) == [
        f"kernels-triton: kernel check failed: {checks[1]}",
        "against-transformers: transformers-cb is missing: no torch",
    ]
    assert "| kernels-triton | checks | passed | 1 of 2 |" in results.table()


@pytest.mark.parametrize("sizes", [Sizes(), REHEARSAL], ids=["gpu", "rehearsal"])
def test_comparison_commands_are_taken(sizes, tmp_path):
    run = bench_gpu.Run(tmp_path, sizes, ())
    command = bench_gpu.against_transformers(run, "n", tmp_path / "o.json", 60.0)
    _, share, _, _, module, *words = command
    assert (module, words[0]) == ("jaxllm", "compare")
    args = build_parser("compare").parse_args(words)
    config = CONFIGS[sizes.llama]
    workload = get_workload(args.workload, num_requests=1, vocab_size=config["vocab_size"], seed=0)
    job = compare.make_job(args, config, workload)
    assert (job["max_num_seqs"], job["dummy_weights"]) == (sizes.compare_seqs, True)
    assert len(workload.prompts) == sizes.compare_requests
    assert workload.longest <= 2 * sizes.longest
    gib = job["num_blocks"] * 16 * 2 * config["num_hidden_layers"] * 8 * 128 * 2 / 2**30
    assert (
        gib + 15 < float(share.rpartition("=")[2]) * 79
    )  # beside the weights; the other engine has the rest


def test_sharegpt_like_lengths():
    prompts, outputs = sharegpt_like(20_000, longest=4096, vocab_size=10)
    assert abs(np.mean([len(prompt) for prompt in prompts]) - 161.31) < 8
    assert abs(np.mean(outputs) - 337.99) < 16
    assert max(outputs) <= 4096
    assert {token for prompt in prompts[:100] for token in prompt} == set(range(10))


def test_versions_need_no_installed_package(monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name == "jaxllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert hardware.versions()["jaxllm"] == __import__("jaxllm").__version__


def test_the_process_that_waits_does_without_jax():
    code = "import sys; sys.path.insert(0, 'scripts'); import bench_gpu; print('jax' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
