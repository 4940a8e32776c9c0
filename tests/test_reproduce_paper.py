"""The paper's evaluation in simulation, on a few requests."""

import json
import sys
from pathlib import Path

import pytest
from test_samples import measured
from variants import golden_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import paper.cells
import paper.models
import paper.report
import reproduce_paper

from jaxllm.costs import shape_of
from jaxllm.errors import ConfigError
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.predictors.base import model_shape
from jaxllm.predictors.samples import save_samples
from jaxllm.workloads import make_trace


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    reproduce_paper.main(["--requests", "12", "--jobs", "1", "--out-dir", str(folder)])
    return folder


def test_every_cell_is_simulated(reproduced):
    results = json.loads((reproduced / "results.json").read_text())
    cells = results["cells"]
    assert len(cells) == 6 * (4 * 3 * 2 + 3 * 6 + 3 * 5)
    assert {cell["preset"] for cell in cells} == set(paper.cells.OVERLAP)
    for cell in cells:
        assert cell["output_tokens_per_second"] > 0
        assert cell["mean_weighted_turnaround"] >= 1
        assert sum(cell["seconds_spent"].values()) == pytest.approx(cell["seconds"], rel=1e-4)


def test_the_report_sets_the_numbers_beside_the_papers(reproduced):
    report = (reproduced / "report.md").read_text()
    rows = [line for line in report.splitlines() if line.startswith("| opt-13b | chatbot | 1.38 |")]
    assert len(rows) == 2  # outputs of 64, and of 16 to 64 tokens
    table = [line.strip("| ").split(" | ") for line in report.splitlines()]
    splits = [
        list(map(float, row[3:])) for row in table if len(row) == 13 and row[2] in ("vllm", "vllm_swap")
    ]
    assert len(splits) == 2 * 24
    for cells in splits:
        for ratio, *parts in (cells[:5], cells[5:]):
            assert ratio == pytest.approx(1 + sum(parts), abs=0.03)
    assert all("| 2.46 |" in row for row in rows)
    for name in ("fig3.png", "fig4.png"):
        assert name in report
        assert (reproduced / name).stat().st_size > 1000
    assert str(reproduced) not in report


def test_a_choice_of_presets_and_limits(tmp_path, capsys):
    options = ["--requests", "8", "--jobs", "1", "--datasets", "chatbot", "--out-dir", str(tmp_path)]
    chosen = ["--parts", "fig4", "--presets", "vllm,adaptive", "--batch-limits", "64,128"]
    reproduce_paper.main([*options, *chosen])
    report = (tmp_path / "report.md").read_text()
    assert "| data | preset | 64 | 128 |" in report
    assert "adaptive against vllm" in report
    assert "paper against vllm" not in report
    for wrong, message in (
        (["--batch-limits", "48"], "choose of (8, 16"),
        (["--presets", "mine"], "there is no mine"),
        (["--presets", "vllm"], "table3 compares all presets"),
    ):
        with pytest.raises(SystemExit):
            reproduce_paper.main([*options, *wrong])
        assert message in capsys.readouterr().err


def test_noise_errors_and_overheads(tmp_path):
    save_samples(
        tmp_path / "samples.json",
        measured(90, 1.1),
        {"command": "jaxllm profile", "model": {"name": "tiny"}, "hardware": {"device": "cpu", "cpu": "x"}},
    )
    options = ["--requests", "8", "--jobs", "1", "--datasets", "chatbot", "--parts", "fig4,errors,overhead"]
    reproduce_paper.main(
        [*options, "--samples", str(tmp_path / "samples.json"), "--out-dir", str(tmp_path / "out")]
    )
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| chatbot | adaptive against vllm |" in report
    assert "Measured, not simulated: tiny on cpu (x), `jaxllm profile`" in report
    assert "| swap_out |" in report
    assert "Scheduling took" in report
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["prediction_errors"].keys() == {"prefill", "decode", "mixed", "swap_out", "swap_in"}


def test_the_engine_runs_the_same_cells(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    config = json.loads((golden_checkpoint("llama_gqa") / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    options = ["--executor", "jax", "--model", str(model), "--load-format", "dummy"]
    options += ["--datasets", "chatbot,summary"]
    options += ["--max-num-seqs", "8", "--requests", "6", "--parts", "table3,fig4,overhead"]
    reproduce_paper.main([*options, "--out-dir", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {cell["model"] for cell in results["cells"]} == {"tiny"}
    assert len(results["cells"]) == 2 * 6 * (2 + 1)
    for cell in results["cells"]:
        assert cell["output_tokens_per_second"] > 0
        assert cell["prediction_errors"]["decode"]["count"] > 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| tiny | chatbot | - |" in report
    assert "the real engine" in report
    assert "of the run time" in report
    most = max(cell["num_cut"] for cell in results["cells"])
    assert most > 0
    assert f"Prompts too long for a model's positions are cut: up to {most} of a run." in report


def test_wrong_arguments(tmp_path, capsys):
    for wrong in (
        ["--parts", "table4"],
        ["--executor", "jax"],
        ["--model", "x"],
        ["--dtype", "float16"],
        ["--jobs", "0"],
    ):
        with pytest.raises(SystemExit):
            reproduce_paper.main([*wrong, "--out-dir", str(tmp_path)])
    assert "there is no table4" in capsys.readouterr().err
    for wrong, message in (
        (["--seeds", "a"], "--seeds: 'a' is no list with commas"),
        (["--seeds", "-1"], "must be at least 0"),
        (["--datasets", "chatbot,chatbot"], "names something twice"),
        (["--parts", "fig3", "--batch-limits", "8"], "--batch-limits is of part fig4"),
        (["--parts", "fig4", "--max-num-seqs", "4"], "no batch limit of fig4 is within --max-num-seqs 4"),
        (["--samples", str(tmp_path / "absent.json")], "--samples: cannot read the samples"),
        (["--executor", "jax", "--model", "x", "--jobs", "2"], "--jobs is for --executor sim"),
    ):
        with pytest.raises(SystemExit):
            reproduce_paper.main([*wrong, "--out-dir", str(tmp_path)])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", paper.cells.MODELS)
def test_the_papers_models_have_configurations(name, tmp_path):
    folder = paper.models.model_folder(name, "dummy", tmp_path)
    config = config_from_dict(read_hf_config(folder))
    assert shape_of(config, name, "float16") == model_shape(name)
    assert config.max_position_embeddings == 2048
    assert paper.models.model_folder(name, "auto", tmp_path) == name
    assert paper.models.model_folder(str(tmp_path), "dummy", tmp_path) == str(tmp_path)


def test_ratios_are_split_into_what_the_time_went_to():
    ours = {"output_tokens_per_second": 3.0, "seconds": 10.0}
    ours["seconds_spent"] = {"prefill": 1.0, "recompute": 1.0, "decode": 7.0, "swap_stall": 1.0, "idle": 0.0}
    theirs = {"output_tokens_per_second": 1.5, "seconds": 20.0}
    theirs["seconds_spent"] = {
        "prefill": 2.0,
        "recompute": 6.0,
        "decode": 12.0,
        "swap_stall": 0.0,
        "idle": 0.0,
    }
    assert paper.report.split_ratio(ours, theirs) == pytest.approx([2.0, 0.5, -0.1, 0.5, 0.1])


def test_prompts_are_cut_to_a_models_positions():
    trace = make_trace("summary", 50, 64, seed=0)
    cut = paper.cells.fitting(trace, 256)
    assert trace.prompt_lens.max() > 192
    assert cut.prompt_lens.tolist() == [min(192, length) for length in trace.prompt_lens.tolist()]
    assert cut.output_lens.tolist() == trace.output_lens.tolist()
    assert paper.cells.fitting(trace, 4096).prompt_lens.tolist() == trace.prompt_lens.tolist()
    with pytest.raises(ConfigError, match="leave no prompt in 64 positions"):
        paper.cells.fitting(trace, 64)
