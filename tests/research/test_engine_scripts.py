"""Scripts that run the engine itself: the sweep behind a throttled link, and the simulator's validation."""

import functools
import json
import re
import statistics
import sys

import pytest
import simulation_errors
import sweep_engine
import validate_simulator
from sweep.report import Place

from jaxllm.engine.profiling import Profiler
from jaxllm.predictors.base import step_kind
from jaxllm.research.intervals import ratio_interval
from jaxllm.sched.config import SchedulerConfig

pytestmark = pytest.mark.usefixtures("optimised")

OPTIONS = ["--requests", "8", "--gpu-blocks", "12", "--host-blocks", "12", "--max-num-seqs", "4"]
OPTIONS += ["--profile-seconds", "1"]
SWEEP_OPTIONS = [*OPTIONS, "--output-lengths", "48", "--seeds", "0,1", "--out-dir"]


@pytest.fixture(scope="module")
def llms():
    """Four: the first takes most of the time, for the others find its programs compiled."""
    args = sweep_engine.parse_args([*SWEEP_OPTIONS, "out"])
    return [sweep_engine.load(args) for _ in sweep_engine.ACTIONS]


def test_every_action_runs_every_trace(llms, tmp_path, monkeypatch, capsys):
    waiting = iter(llms)
    monkeypatch.setattr(sweep_engine, "load", lambda args: next(waiting))
    sweep_engine.main([*SWEEP_OPTIONS, str(tmp_path / "out"), "--speeds", "1,4"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["command"].startswith("python scripts/sweep_engine.py --requests 8")
    slow, fast = results["rows"]
    assert (slow["speed"], fast["speed"]) == (1.0, 4.0)
    assert fast["host_bandwidth_limit"] == pytest.approx(
        4 * results["equal_speed_bytes_per_second"], rel=1e-4
    )
    for row in (slow, fast):
        for values in (row["seconds"], row["preemptions"], row["swaps"]):
            assert {action: len(of) for action, of in values.items()} == dict.fromkeys(
                sweep_engine.ACTIONS, 2
            )
        assert row["swaps"]["recompute"] == [0, 0]
        assert 0 < row["swaps"]["swap"][0] <= row["preemptions"]["swap"][0]
        ratios = [
            statistics.median(row["rates"]["adaptive"][seed] / row["rates"][other][seed] for seed in "01")
            for other in ("swap", "recompute")
        ]
        assert row["share"] == pytest.approx(min(ratios), rel=1e-5)
    printed = re.findall(r"share ([\d.]+)", capsys.readouterr().out)
    assert float(printed[-1]) == pytest.approx(fast["share"], abs=6e-4)  # which is rounded, too
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| demo_model | uniform | 48 | 12 |" in report
    row = next(line for line in report.splitlines() if line.startswith("| demo_model | uniform | 48 | 12 |"))
    shares = [float(cell) for cell in re.findall(r"\d+\.\d{3}\b", row)]
    assert min(abs(share - slow["share"]) for share in shares) < 6e-4
    assert "Two adaptive engines on the same trace" in report
    assert "8 requests, all requests at once, prompts" in report
    assert str(tmp_path) not in report


def test_noise_is_what_two_runs_alike_differ_by():
    rates = {action: {0: 1.0, 1: 1.0, 2: 1.0} for action in ("swap", "recompute", "adaptive")}
    places = [
        Place("demo", "uniform", 64, 12, speed, rates | {sweep_engine.AGAIN: dict(enumerate(again))}, None)
        for speed, again in ((1.0, (1.01, 0.98, 1.03)), (2.0, (1.0, 0.96, 0.99)))
    ]
    text = "\n".join(sweep_engine.noise_report(places))
    assert "differ by 1.5% (median over cells and seeds; at most 4.0%)" in text
    assert "the medians over seeds, by 1.0% (at most 1.0%)" in text
    assert "The second is faster than both fixed actions in 1 of 2 cells, the first in 0." in text


def test_outputs_may_be_lognormal():
    args = validate_simulator.parse_args(
        [*OPTIONS, "--output-len", "40", "--sigma", "0.6", "--longest", "99"]
    )
    trace = validate_simulator.trace_of(args, 3)
    assert max(trace.output_lens) <= 99
    assert len(set(trace.output_lens.tolist())) > 3
    assert "sigma=0.6" in " ".join(trace.notes)


def test_every_preset_is_run_and_simulated(llms, tmp_path, monkeypatch, capsys):
    briefly = functools.partial(Profiler.fit, is_brief=True)  # the whole fit is tested elsewhere
    monkeypatch.setattr(Profiler, "fit", lambda self, samples, is_brief=False: briefly(self, samples))
    options = ["--presets", "vllm,vllm_swap_both"]
    options += ["--output-len", "48", "--repetitions", "2", "--out", str(tmp_path / "validation.json")]
    monkeypatch.setattr(validate_simulator, "load", lambda args: llms[0])
    monkeypatch.setattr(sys, "argv", ["validate_simulator.py", *OPTIONS, *options])
    validate_simulator.main()
    report = json.loads((tmp_path / "validation.json").read_text())
    assert [row["preset"] for row in report["rows"]] == ["vllm", "vllm_swap_both"]
    for row in report["rows"]:
        runs, simulated = row["seconds_of_runs"], row["simulated_seconds"]
        assert [len(of_trace) for of_trace in runs] == [2, 2]
        assert row["seconds"] == pytest.approx([statistics.fmean(of_trace) for of_trace in runs], rel=1e-4)
        errors = [one / statistics.fmean(of_trace) - 1 for one, of_trace in zip(simulated, runs, strict=True)]
        assert row["error"]["of_traces"] == pytest.approx(errors, abs=1e-4)
        assert row["noise"]["of_traces"] == pytest.approx([one / two - 1 for one, two in runs], abs=1e-4)
        assert row["seconds_error"] == pytest.approx(sum(simulated) / sum(row["seconds"]) - 1, abs=1e-4)
        assert row["preemptions"] == row["simulated_preemptions"]
        assert sum(row["preemptions"]) > 0
        for of_trace, seconds in zip(row["mean_latency"], row["seconds"], strict=True):
            assert 0 < of_trace < seconds, "all at once: nobody waits for longer than the run takes"
        for of_trace, seconds in zip(row["simulated_mean_latency"], row["simulated_seconds"], strict=True):
            assert 0 < of_trace < seconds
    first, second = (row["over_first"] for row in report["rows"])
    assert first["speed"] == first["turnaround"] == [1.0, 1.0, 1.0]
    speeds = [one / other for one, other in zip(*(row["seconds"] for row in report["rows"]), strict=True)]
    assert second["speed"] == pytest.approx(ratio_interval(speeds), rel=1e-4)
    assert list(report["host"]) == ["decode", "prefill", "mixed"]
    for of_kind in report["host"].values():
        assert of_kind["profiled"] > 0
        assert 0 <= of_kind["idle_share"] <= 1
    assert report["factor"] == pytest.approx(statistics.median(report["factors"]), rel=1e-4)
    assert len(report["factors"]) == 2, "of one more trace for each"
    printed = capsys.readouterr().out
    told = r"(beside [\d.]+ ms a \w+ step the host may work for \d+% of its time\n){3}"
    told += r".* multiplied with ([\d.]+)\nvllm: "
    assert float(re.match(told, printed)[2]) == pytest.approx(report["factor"], abs=6e-4)


@pytest.mark.parametrize(("num_seqs", "prompt_len"), [(2, 100), (3, 8), (16, 64), (32, 48), (64, 24)])
def test_work_of_each_kind_fits_a_step(num_seqs, prompt_len):
    limits = {"num_gpu_blocks": 999, "block_size": 4, "max_model_len": 256, "max_num_batched_tokens": 128}
    config = SchedulerConfig(max_num_seqs=num_seqs, **limits)
    work = validate_simulator.work_of_steps(config, prompt_len)
    for kind, one in work.items():
        assert step_kind(len(one.contexts), sum(one.lengths)) == kind
        assert len(one.contexts) + len(one.lengths) <= num_seqs
        assert len(one.contexts) + sum(one.lengths) <= 128


def test_a_step_is_longer_by_what_the_host_does_beyond_the_profiles_own_and_what_the_step_leaves_idle():
    class Costs:
        def step_seconds(self, *work):
            assert len(work) == 5
            return 4.0 * work[0] + work[2]

        def swap_out_seconds(self, num_blocks):
            return 1.0 * num_blocks

        def swap_in_seconds(self, num_blocks):
            return 2.0 * num_blocks

    made = validate_simulator.HostWork
    host = {
        "decode": made(idle_share=0.25, profiled=1.0),
        "prefill": made(idle_share=0.5, profiled=2.0),
        "mixed": made(idle_share=0.0, profiled=3.0),
    }
    costs = validate_simulator.EngineCosts(Costs(), host, 3.5, factor=2.0)
    decode, mixed = (1, 5, 0, 0, 0), (1, 5, 2, 1, 0)
    assert costs.step_seconds(*decode) == 2 * (4.0 + 1.5)  # of 3.5 s 1 is in a profile's and 1 is hidden
    assert costs.step_seconds(3, 5, 0, 0, 0) == 2 * 12.0  # all is hidden
    assert costs.step_seconds(0, 0, 2, 1, 0) == 2 * (2.0 + 0.5)
    assert costs.step_seconds(*mixed) == 2 * (6.0 + 0.5)
    assert (costs.swap_out_seconds(3), costs.swap_in_seconds(3)) == (6.0, 12.0)
    assert validate_simulator.EngineCosts(Costs(), host, 0.5).step_seconds(*decode) == 4.0


def test_which_is_faster_is_said_only_where_the_interval_allows():
    rows = [
        {"preset": "slow", "seconds": [2.0, 2.02, 2.04], "simulated_seconds": [2.0, 2.0, 2.0]},
        {"preset": "fast", "seconds": [1.0, 1.0, 1.0], "simulated_seconds": [1.5, 1.5, 1.5]},
        {"preset": "noisy", "seconds": [1.0, 3.0, 2.0], "simulated_seconds": [2.5, 2.5, 2.5]},
        {"preset": "wrong", "seconds": [1.5, 1.5, 1.5], "simulated_seconds": [1.4, 1.4, 1.4]},
    ]
    found = {(one["preset"], one["over"]): one["verdict"] for one in simulation_errors.verdicts(rows)}
    assert found == {
        ("slow", "fast"): "same",
        ("slow", "noisy"): "undecided",
        ("slow", "wrong"): "same",
        ("fast", "noisy"): "undecided",
        ("fast", "wrong"): "opposite",
        ("noisy", "wrong"): "undecided",
    }


def test_errors_are_summed_up():
    assert simulation_errors.summary([-0.25, 0.125, 0.0]) == {
        "median": 0.0,
        "least": -0.25,
        "most": 0.125,
        "median_size": 0.125,
        "of_traces": [-0.25, 0.125, 0.0],
    }


def test_an_interval_is_students():
    mean, low, high = ratio_interval([1.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert (low, high) == pytest.approx((2.0 / 2**12.706, 2.0 * 2**12.706), rel=1e-3)
    assert ratio_interval([3.0]) == (pytest.approx(3.0), 0.0, float("inf"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--speeds", "0"], "--speeds must be above 0"),
        (["--speeds", "nan"], "--speeds must be above 0"),
        (["--host-blocks", "few"], "--host-blocks: 'few' is no list with commas"),
        (["--requests", "0"], "must be at least 1"),
        (["--seeds", "1,1"], "--seeds: '1,1' names something twice"),
    ],
)
def test_wrong_options(wrong, message, capsys):
    with pytest.raises(SystemExit):
        sweep_engine.parse_args([*wrong, "--out-dir", "out"])
    assert message in capsys.readouterr().err
