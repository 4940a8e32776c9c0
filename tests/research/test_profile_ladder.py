"""The ladder of models: what is measured twice, how well it is predicted, and what is said of it."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import profile_ladder
import pytest
from ladder.fits import error_floor, fit_kind
from ladder.measure import Ladder, Measured, load_ladder, measure, save_ladder
from ladder.models import Rung
from ladder.report import ladder_candidates, ladder_errors, swap_figure
from paper.measured import candidates

from jaxllm.engine.profiling import Work
from jaxllm.errors import ConfigError
from jaxllm.executor.buckets import Buckets
from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.regression import Sample
from jaxllm.predictors.samples import load_samples, save_samples

SHAPE = model_shape("opt-13b")
FACTS = {"command": "python scripts/profile_ladder.py", "hardware": {"cpu": "none"}, "versions": {}}


def swaps(kind, count, seed=0):
    """`count` sizes of two models, of a device that takes 1 ms a block, give or take 10 %."""
    rng = random.Random(seed)
    return [
        Measured(
            getattr(Sample, kind)(SHAPE, 8 << model, 1 + point, 1e-3 * (1 + point) * rng.uniform(0.9, 1.1)),
            model,
            point,
            turn,
        )
        for model in range(2)
        for turn in range(2)
        for point in range(count)
    ]


def steps(count, seed=0):
    rng = random.Random(seed)
    found = []
    for model in range(2):
        for point in range(count):
            tokens = rng.randint(1, 128)
            for turn in range(2):
                sample = Sample.step(SHAPE, 1e-3 * tokens * rng.uniform(0.9, 1.1), 0, 0, tokens, 1)
                found.append(Measured(sample, model, point, turn))
    return found


MODELS = [{"name": f"opt-{n}x64", "family": "opt", "num_layers": n, "hidden_size": 64} for n in (2, 4)]


@pytest.fixture(scope="module")
def ladder():
    return Ladder(list(MODELS), steps(40) + swaps("swap_out", 30) + swaps("swap_in", 30, seed=1), FACTS)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_rungs_are_models_that_load(family, tmp_path):
    llm = Rung(family, 1, 64).load(tmp_path)
    config = llm.model_config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.head_dim) == (1, 64, 2, 32)
    (output,) = llm.generate([[1, 2, 3]], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


def test_every_size_is_measured_twice(monkeypatch):
    """By a profiler that takes a second each time."""
    now = [0.0]
    monkeypatch.setattr("ladder.measure.time.perf_counter", lambda: now[0])
    sizes, asked = iter(range(1, 100)), []

    def measured(work):
        now[0] += 1.0
        asked.append(work.num_blocks)
        return [
            Sample.swap_out(SHAPE, 16, work.num_blocks, 1.0),
            Sample.swap_in(SHAPE, 16, work.num_blocks, 2.0),
        ]

    profiler = SimpleNamespace(
        warm_up=lambda: None, draw=lambda: [Work(num_blocks=next(sizes))], measure=measured
    )
    found = measure(profiler, 20.0, 3, seed=0)
    assert asked[:10] == list(range(1, 11))
    assert asked[10:] != asked[:10]
    assert sorted(asked[10:]) == asked[:10]
    assert {one.model for one in found} == {3}
    assert [(one.point, one.turn) for one in found[:4]] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    for one in found:
        assert one.sample.features[1] == one.point + 1
    assert sorted((one.sample.kind, one.point, one.turn) for one in found) == sorted(
        (kind, point, turn) for kind in ("swap_out", "swap_in") for point in range(10) for turn in (0, 1)
    )


def test_samples_are_kept_with_where_they_are_from(ladder, tmp_path):
    path = tmp_path / "samples.json"
    save_ladder(path, ladder)
    found = load_ladder(path)
    assert (found.models, found.facts) == (ladder.models, ladder.facts)
    for kind in COST_KINDS:
        assert found.of("opt", kind) == ladder.of("opt", kind)
    assert found.of("llama", "prefill") == []
    assert load_samples(path)["prefill"] == [one.sample for one in ladder.of("opt", "prefill")]
    save_samples(path, load_samples(path), {})
    with pytest.raises(ConfigError, match="holds no samples of a ladder"):
        load_ladder(path)


def test_the_floor_is_the_error_of_a_first_measurement():
    def of(model, point, *seconds):
        return [
            Measured(Sample.swap_out(SHAPE, 16, 5, one), model, point, turn)
            for turn, one in enumerate(seconds)
        ]

    floor = error_floor([*of(0, 0, 1.0, 2.0), *of(0, 1, 3.0, 2.0), *of(1, 0, 3.0, 2.0), *of(1, 1, 9.0)])
    assert floor == {"num_pairs": 3, "mape": 0.5, "median": 0.5, "largest": 0.5}
    assert error_floor(of(0, 0, 1.0)) == {"num_pairs": 0}


@pytest.fixture(scope="module")
def results(ladder):
    fits = [
        fit_kind("opt", kind, ladder.of("opt", kind), names=["linear", "decision tree"], degrees=[1, 2])
        for kind in ("prefill", "swap_out", "swap_in")
    ]
    return json.loads(json.dumps({"models": MODELS, "fits": fits}))


def test_predictors_are_set_beside_the_floor(results):
    for row in results["fits"]:
        assert 0 < row["derived"]["test"]["mape"] < 0.1
        assert 0 < row["floor"]["mape"] < 0.2
        for name in ("mape", "median"):
            assert row["ratio"][name] == pytest.approx(row["derived"]["test"][name] / row["floor"][name])
        assert row["work"]["num_test"] == row["derived"]["num_test"]
        assert all(candidate["test"]["mape"] > 0 for candidate in row["work"]["candidates"])
        assert ("copies" in row) == (row["kind"] != "prefill")
    copies = results["fits"][1]["copies"]
    assert len(copies) == results["fits"][1]["derived"]["num_test"]
    errors = [abs(predicted - seconds) / seconds for _, _, seconds, predicted in copies]
    assert sum(errors) / len(errors) == pytest.approx(results["fits"][1]["derived"]["test"]["mape"])


def test_the_report_says_what_was_measured(results, tmp_path):
    text = "\n".join(ladder_errors(results))
    assert (
        "Measured: 400 samples of 2 random-weight models (opt-2x64, opt-4x64; layers x hidden size)" in text
    )
    assert "| opt | prefill | 160, " in text
    assert "| 1.76 % |" in text
    assert text.count(" 1.5 times the floor: all of them.") == 2
    assert "more polynomial features than `--max-features` are skipped" in text
    row = results["fits"][0]
    errors = row["work"]["test"]["mape"], row["work"]["test"]["mape"] / row["floor"]["mape"]
    assert f"| {100 * errors[0]:.2f} % | {errors[1]:.2f} |" in text
    table = "\n".join(ladder_candidates(results))
    assert table.count("**") == 2
    assert "| regressor | degree 1 | degree 2 |" in table
    lines = swap_figure(results, tmp_path / "fig5.png")
    assert (tmp_path / "fig5.png").stat().st_size > 10_000
    assert "| direction | MiB | samples | lower quartile | median | upper quartile |" in lines
    assert sum(line.startswith("| in |") for line in lines) == 8
    counts = [int(line.split("|")[3]) for line in lines if line.startswith("| out |")]
    assert sum(counts) == len(results["fits"][1]["copies"])


def test_predictors_worse_than_the_bar_are_named(results):
    bad, unknown = ({**row, "ratio": dict(row["ratio"])} for row in results["fits"][:2])
    bad["ratio"]["mape"] = 1.6
    unknown |= {"ratio": {"mape": None, "median": None}, "floor": {}, "num_pairs": 0}
    text = "\n".join(ladder_errors({**results, "fits": [bad, unknown]}))
    derived, plain = (line for line in reversed(text.splitlines()) if "1.5 times the floor" in line)
    assert derived.endswith("1.5 times the floor: above it or unknown: opt prefill, opt swap_out.")
    assert plain.endswith("1.5 times the floor: above it or unknown: opt swap_out.")


def test_the_command_measures_and_fits(ladder, monkeypatch, tmp_path, capsys):
    loaded = []

    def load(rung, folder):
        loaded.append(rung)
        buckets = Buckets.make(max_num_seqs=1, max_num_batched_tokens=32)
        config = SimpleNamespace(max_num_seqs=1, buckets=buckets)
        executor = SimpleNamespace(config=config, release=lambda: None)
        return SimpleNamespace(executor=executor, model_config=None, dtype="float32")

    def measured(profiler, seconds, place, seed):
        return [one for one in ladder.measured if one.model == place]

    monkeypatch.setattr(profile_ladder.Rung, "load", load)
    monkeypatch.setattr(profile_ladder, "shape_of", lambda *args: SHAPE)
    monkeypatch.setattr(profile_ladder, "measure", measured)
    samples, out, report = (str(tmp_path / name) for name in ("samples.json", "out.json", "report.md"))
    options = ["--families", "opt", "--layers", "2,4", "--hidden", "64", "--max-features", "9"]
    options += ["--processes", "1"]
    profile_ladder.main([*options, "--samples", samples, "--out", out, "--report", report])
    assert loaded == [Rung("opt", 2, 64), Rung("opt", 4, 64)]
    printed = capsys.readouterr().out
    assert printed.startswith("## Prediction errors over a ladder of models")
    assert Path(report).read_text().strip() == printed.strip()
    results = json.loads(Path(out).read_text())
    assert [row["kind"] for row in results["fits"]] == ["prefill", "swap_out", "swap_in"]
    assert results["models"] == MODELS
    profile_ladder.main([*options, "--reuse", samples, "--plot", str(tmp_path / "swaps.png")])
    assert len(loaded) == 2
    assert "## Swap prediction errors by size (Fig. 5)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="cannot read the samples"):
        profile_ladder.main(["--reuse", str(tmp_path / "absent.json")])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--families", "gpt"], "there is no gpt; families are llama, opt"),
        (["--layers", "0"], "--layers must be from 1 to 64"),
        (["--hidden", "100"], "--hidden must be multiples of 64"),
        (["--seconds-per-model", "nan"], "--seconds-per-model must be above 0"),
        (["--repetitions", "0"], "--repetitions must be from 1"),
        (["--max-features", "8"], "--max-features must be from 9"),
        (["--reuse", "a.json", "--samples", "b.json"], "--reuse measures nothing"),
        (["--out", "/nowhere/out.json"], "--out /nowhere/out.json: No such file"),
    ],
)
def test_wrong_options(wrong, message, capsys):
    with pytest.raises(SystemExit):
        profile_ladder.parse_args(wrong)
    assert message in capsys.readouterr().err


def test_the_appendix_lists_every_candidate_of_every_kind(results, tmp_path):
    assert candidates(tmp_path) == []
    (tmp_path / "ladder-cpu.json").write_text(json.dumps(results))
    text = "\n".join(candidates(tmp_path))
    for kind in ("prefill", "swap_out", "swap_in"):
        assert f"Test MAPE, opt, {kind};" in text
    assert text.count("| regressor | degree 1 | degree 2 |") == 3
