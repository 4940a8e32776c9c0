"""The sweep over actions, on a few requests."""

import dataclasses
import json
import math
import statistics

import pytest
import sweep.cells
import sweep.simulated
import sweep_actions
from sweep.report import Place, actions_report, crossover, near_report
from test_samples import measured

from jaxllm.predictors.samples import save_samples
from jaxllm.research.simulator.run import simulate


def place(speed, swap, recompute, adaptive=1.0):
    rates = {"swap": {0: swap}, "recompute": {0: recompute}, "adaptive": {0: adaptive}}
    return Place("opt-13b", "chatbot", 64, 64, speed, rates, None)


def test_the_crossover_is_interpolated_on_a_logarithmic_scale():
    line = [place(0.01, 0.5, 1.0), place(0.1, 0.5, 1.0), place(1.0, 2.0, 1.0)]
    assert crossover(line) == pytest.approx(10**-0.5)
    assert crossover(line[:2]) is None
    assert line[2].share == 0.5


def test_actions_are_compared_seed_by_seed():
    rates = {"swap": {0: 1.0, 1: 10.0, 2: 4.0}, "recompute": {0: 1.1, 1: 9.0, 2: 4.4}}
    rates["adaptive"] = {0: 1.05, 1: 10.5, 2: 4.0}
    found = Place("opt-13b", "chatbot", 64, 64, 1.0, rates, None)
    assert found.ratio("adaptive", "swap") == pytest.approx(1.05)
    assert found.ratio("adaptive", "recompute") == pytest.approx(1.05 / 1.1)
    assert found.share == pytest.approx(1.05 / 1.1)
    mean, low, high = found.interval("adaptive", "recompute")
    logarithms = [math.log(ratio) for ratio in (1.05 / 1.1, 10.5 / 9.0, 4.0 / 4.4)]
    assert math.log(mean) == pytest.approx(statistics.fmean(logarithms))
    half = 4.302653 * statistics.stdev(logarithms) / 3**0.5  # Student's t, two degrees of freedom
    assert math.log(low) == pytest.approx(math.log(mean) - half)
    assert math.log(high) == pytest.approx(math.log(mean) + half)


def test_cells_are_faster_or_slower_by_more_than_chance():
    def of(over_recompute, over_swap=(2.0, 2.0, 2.0)):
        rates = {"adaptive": dict.fromkeys(range(3), 1.0), "hindsight": dict.fromkeys(range(3), 1.2)}
        for name, ratios in (("recompute", over_recompute), ("swap", over_swap)):
            rates[name] = {seed: 1.0 / ratio for seed, ratio in enumerate(ratios)}
        return Place("opt-13b", "chatbot", 64, 64, 1.0, rates, None)

    near = [
        of((1.01, 1.011, 1.012)),
        of((0.9, 0.99, 1.2)),
        of((0.98, 0.981, 0.982)),
        of((0.98, 1.0, 1.03)),
        of((1.0, 1.0, 0.8), (0.99, 0.99, 1.2)),  # better than one by the median, than the other by the mean
        of((1.01, 1.011, 1.012), (0.98, 0.981, 0.982)),
    ]
    (verdict,) = [line for line in near_report(near) if line.startswith("Strictly faster")]
    (behind,) = [line for line in near_report(near) if line.startswith("Not strictly faster: ")]
    assert behind.count("link x1: ") == 5
    assert "link x1: 0.9810" in behind
    assert "by the median: 1 of 6 cells" in verdict
    assert "hindsight: 6. By the mean: 3." in verdict
    assert "With 95 % confidence faster than both: 1; slower than one of them: 2" in verdict
    single = Place("opt-13b", "chatbot", 64, 64, 1.0, {a: {0: 1.0} for a in near[0].rates}, None)
    assert single.interval("adaptive", "swap") == (1.0, 0.0, math.inf)


def test_every_cell_is_simulated_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.simulated, "NUM_GPU_BLOCKS", 24)
    samples = tmp_path / "samples.json"
    save_samples(samples, measured(90, 1.2), {})
    command = ["--requests", "10", "--seeds", "0,1", "--jobs", "1", "--datasets", "chatbot"]
    command += ["--models", "llama-13b", "--output-lengths", "64", "--link-speeds", "0.01,1"]
    command += ["--samples", str(samples), "--out-dir", str(tmp_path / "out"), "--parts", "actions"]
    sweep_actions.main(command)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["places"]) == 2 * 3
    for found in results["places"]:
        has_hindsight = found["host"] == sweep.cells.ORACLE_HOST_BLOCKS
        assert found["rates"].keys() == set(sweep.cells.ACTIONS if has_hindsight else sweep.cells.ACTIONS[:3])
        assert found["regret"] is None or found["regret"] >= 0
        assert found["share"] > 0.5
    assert any(found["regret"] is not None for found in results["places"])
    slow, fast = (found for found in results["places"] if found["host"] == 64)
    assert slow["rates"]["swap"]["0"] < slow["rates"]["recompute"]["0"] == fast["rates"]["recompute"]["0"]
    assert fast["rates"]["swap"]["0"] > slow["rates"]["swap"]["0"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| llama-13b | chatbot | 64 | 64 |" in report
    assert "Regret of the adaptive choice, all decisions together" in report
    assert str(tmp_path) not in report


def test_cells_near_a_crossover_are_simulated_again(tmp_path):
    earlier = [place(0.02, 0.5, 1.0), place(0.08, 0.9, 1.0), place(0.12, 1.1, 1.0), place(4.0, 2.0, 1.0)]
    (tmp_path / "results.json").write_text(
        json.dumps({"places": [{**dataclasses.asdict(one), "share": one.share} for one in earlier]})
    )
    command = ["--parts", "near", "--near-of", str(tmp_path / "results.json"), "--requests", "20"]
    sweep_actions.main([*command, "--seeds", "0,1", "--jobs", "1", "--out-dir", str(tmp_path / "near")])
    results = json.loads((tmp_path / "near" / "results.json").read_text())
    assert results["places"] == []
    assert [found["speed"] for found in results["near"]] == [0.08, 0.12]
    for found in results["near"]:
        assert found["rates"].keys() == set(sweep.cells.ACTIONS)
        assert all(len(rates) == 2 for rates in found["rates"].values())
    report = (tmp_path / "near" / "report.md").read_text()
    assert "| opt-13b | chatbot | 64 | 64 | 0.08 |" in report
    assert "of 2 cells (median share" in report
    del found["share"]
    mean, low, high = min(Place(**found).interval("adaptive", fixed) for fixed in ("swap", "recompute"))
    assert f"| {mean:.4f} ({low:.4f} to {high:.4f}) |" in report
    (tmp_path / "results.json").write_text(json.dumps({"places": []}))
    with pytest.raises(SystemExit, match="no cell of these sweeps is near a crossover"):
        sweep_actions.main([*command, "--out-dir", str(tmp_path / "none")])


def test_regret_is_that_of_its_own_part():
    row = {"model": "opt-13b", "dataset": "chatbot", "max_output_len": 64, "num_host_blocks": 64}
    row |= {"link_speed": 1.0, "seed": 0, "output_tokens_per_second": 1.0, "seconds": 50.0}
    regret = {"seconds": 1.0, "best_seconds": 100.0}
    rows = [row | {"part": "actions", "variant": variant} for variant in ("recompute", "swap")]
    rows.append(row | {"part": "actions", "variant": "adaptive", "regret": regret})
    rows.append(
        row | {"part": "near", "variant": "adaptive", "regret": {"seconds": 9.0, "best_seconds": 1.0}}
    )
    assert "all decisions together: 2.00% of the time of the runs, 1.0% of" in "\n".join(actions_report(rows))


@pytest.mark.parametrize("noisy", [True, False])
def test_predictions_are_corrected_where_there_is_noise(tmp_path, monkeypatch, noisy):
    calibrations = []

    def watched(*args, calibration, **options):
        calibrations.append(calibration)
        return simulate(*args, calibration=calibration, **options)

    monkeypatch.setattr(sweep.simulated, "simulate", watched)
    monkeypatch.setattr(sweep.simulated, "NUM_GPU_BLOCKS", 24)
    samples = tmp_path / "samples.json"
    save_samples(samples, measured(90, 1.2), {})
    cell = sweep.cells.Cell(
        "actions", "llama-13b", "chatbot", 64, 16, 0.1, "adaptive", 20, 0, str(samples) if noisy else None
    )
    assert sweep.cells.run_cell(cell)["num_preemptions"]
    (calibration,) = calibrations
    assert (calibration is not None) == noisy
    if noisy:
        assert all(kind.count for kind in calibration.report().values())
        assert calibration.factor("decode") != 1.0


def test_a_journal_is_of_sources_and_files(tmp_path):
    samples, prompts = tmp_path / "samples.json", tmp_path / "prompts.jsonl"
    samples.write_text("1")
    prompts.write_text("a")
    cell = sweep.simulated.Device("opt-13b", samples=str(samples))
    ran = []

    @dataclasses.dataclass(frozen=True)
    class Prompts:
        data: str

    def run(cells):
        ran.clear()
        sweep.simulated.run_all(
            cells, lambda one: ran.append(one) or {"row": 1}, jobs=1, journal=tmp_path / "cells.jsonl"
        )
        return len(ran)

    cells = [cell, Prompts(f"{prompts}:prompt:nowhere")]
    assert run(cells) == 2
    assert run(cells) == 0
    samples.write_text("2")
    assert run(cells) == 2
    prompts.write_text("b")
    assert run(cells) == 2
    assert run(cells) == 0
    names = {path.name for path in sweep.simulated.source_files()}
    assert {"request.py", "scheduler.py", "truth.py", "simulated.py", "cells.py"} <= names
    assert "report.py" not in names


def test_wrong_arguments(tmp_path, capsys):
    for wrong in (
        ["--parts", "all"],
        ["--datasets", "x"],
        ["--models", "gpt"],
        ["--link-speeds", "0"],
        ["--requests", "0"],
        ["--parts", "near"],
    ):
        with pytest.raises(SystemExit):
            sweep_actions.main([*wrong, "--out-dir", str(tmp_path)])
    assert "--parts all: name some of actions, near" in capsys.readouterr().err
    for wrong, message in (
        (["--parts", "near", "--link-speeds", "1"], "--link-speeds is of part actions, not of near"),
        (["--arrivals", "closed"], "arrivals 'closed': write all, poisson:RATE"),
        (["--parts", "typo", "--link-speeds", "1"], "--parts typo: name some of"),
        (["--host-blocks", "many"], "--host-blocks: 'many' is no list with commas"),
        (["--seeds", "1,1"], "--seeds: '1,1' names something twice"),
        (["--link-speeds", "nan"], "--link-speeds must be above 0, and finite"),
        (["--output-lengths", "5000"], "--output-lengths must be from 1 to 1024"),
        (["--samples", str(tmp_path / "absent.json")], "cannot read the samples"),
    ):
        with pytest.raises(SystemExit):
            sweep_actions.main([*wrong, "--out-dir", str(tmp_path)])
        assert message in capsys.readouterr().err
    malformed = tmp_path / "results.json"
    malformed.write_text("{}")
    for path in (malformed, tmp_path / "absent.json"):
        with pytest.raises(SystemExit, match="not the results of a sweep"):
            sweep_actions.main(
                ["--parts", "near", "--near-of", str(path), "--out-dir", str(tmp_path / "out")]
            )
