"""The paper's evaluation in simulation, on a few requests."""

import dataclasses
import json

import paper.appendix
import paper.cells
import paper.models
import pytest
import reproduce_paper
from paper.bound import most_tokens_per_second
from paper.control import control, time_control
from paper.report import Cells
from paper.report_readings import nearest
from test_samples import measured
from variants import golden_checkpoint

from jaxllm.engine.costs import shape_of
from jaxllm.errors import ConfigError, RequestTooLargeError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.samples import save_samples
from jaxllm.research import simulate
from jaxllm.research.workloads import make_trace


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    options = ["--model", "opt-13b", "--model", "llama-13b", "--requests", "12", "--jobs", "1"]
    reproduce_paper.main([*options, "--out-dir", str(folder)])
    return folder


def test_the_evaluation_runs_on_measured_kernels(tmp_path):
    options = ["--costs", "silicon", "--parts", "table3", "--datasets", "summary", "--model", "opt-13b"]
    reproduce_paper.main([*options, "--requests", "12", "--jobs", "1", "--out-dir", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["device"] == "A100-80GB"
    assert {cell["costs"] for cell in results["cells"]} == {"silicon"}
    vllm = next(cell for cell in results["cells"] if cell["preset"] == "vllm")
    same = paper.cells.Cell(
        **{
            field.name: vllm[field.name]
            for field in dataclasses.fields(paper.cells.Cell)
            if field.name in vllm
        }
    )
    on_roofline = paper.cells.simulate_cell(dataclasses.replace(same, costs="roofline"))
    assert on_roofline["output_tokens_per_second"] != vllm["output_tokens_per_second"]
    assert "kernels measured on an A100-80GB" in (tmp_path / "out" / "report.md").read_text()


def test_readings_and_the_engine_have_no_measured_kernels(capsys, tmp_path):
    for options, message in (
        (["--parts", "readings"], "there is no readings"),
        (["--executor", "jax", "--model", "x"], "--costs is for --executor sim"),
    ):
        with pytest.raises(SystemExit):
            reproduce_paper.main([*options, "--costs", "silicon", "--out-dir", str(tmp_path / "out")])
        assert message in capsys.readouterr().err


def test_every_cell_is_simulated(reproduced):
    results = json.loads((reproduced / "results.json").read_text())
    cells = results["cells"]
    num_readings = sum(1 for _ in paper.cells.READINGS)
    baselines = {(reading.arrivals, reading.overhead) for reading in paper.cells.READINGS}
    groups, presets = 2 * 3, len(paper.cells.PRESETS)
    counts = {
        "table3": presets * 2 * 2,
        "fig3": presets * 6,
        "fig4": presets * 5 * 1.5,  # the arrivals beside the first for the first of the two models
        "readings": 2 * (num_readings + len(baselines)),
        "control": 2,
        "swap_both": 3 * 2,
    }
    for part, count in counts.items():
        assert sum(cell["part"] == part for cell in cells) == groups * count, part
    assert len(cells) == groups * sum(counts.values())
    for cell in cells:
        assert cell["output_tokens_per_second"] > 0
        assert cell["mean_weighted_turnaround"] >= 1
        assert sum(cell["seconds_spent"].values()) == pytest.approx(cell["seconds"], rel=1e-4)


def test_the_report_sets_the_numbers_beside_the_papers(reproduced):
    report = (reproduced / "report.md").read_text()
    rows = [line for line in report.splitlines() if line.startswith("| opt-13b | chatbot | 1.38 | 1.")]
    assert len(rows) == 4  # outputs of 64, and of 16 to 64 tokens; in a closed loop, and all at once
    assert all("| 2.46 |" in row for row in rows)
    assert "Arrivals: a closed loop of 128 clients. Outputs: all of 64 tokens." in report
    assert "| opt-13b | chatbot | 1.38 |" in report.partition("all requests at once")[0]
    for reading in paper.cells.READINGS:
        assert report.count(f"| {reading.name} | {reading.why} |") == 2
    assert "The reading nearest to the paper's ratio in each cell:" in report
    for group in ("opt-13b | chatbot | 1.38", "llama-13b | summary | 1.17"):
        (line,) = (
            line for line in report.splitlines() if line.startswith(f"| {group} | ") and " tokens) | " in line
        )
        assert line.count("|") == 7
    assert report.count(f" of {2 * len(paper.cells.READINGS)} |") == 6
    assert "At most 128 requests run, the larger limit of Fig. 4" in report
    assert "At 256 tokens, tokens/s over those of `vllm`; the paper says up to 1.3:" in report
    assert "paper at 128: turnaround over vllm_swap" in report
    assert "`paper` outside the published range against `vllm_swap` (-60% to -20%)" in report
    assert report.count("Why: ") >= 3
    assert "chatbot, alpaca, summary: lognormal with the paper's means" in report
    for name in ("fig3.png", "fig4.png", "fig4-all.png"):
        assert f"]({name})" in report
        assert (reproduced / name).stat().st_size > 1000
    assert "78.1 MiB" in report
    assert "| chatbot | alespalla/chatbot_instruction_prompts | 258,064 | 17.02 | 17.02 |" in report
    assert str(reproduced) not in report


def test_the_page_holds_its_figures(reproduced):
    page = (reproduced / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count('src="data:image/png;base64,') == 3
    assert "<table>" in page
    assert 'src="fig' not in page


def test_the_appendix_has_every_cell(reproduced):
    appendix = (reproduced / "appendix.md").read_text()
    table = [line.strip("| ").split(" | ") for line in appendix.splitlines()]
    splits = [row for row in table if len(row) == 14 and row[0] in ("opt-13b", "llama-13b")]
    assert len(splits) == 2 * 3 * len(paper.cells.PRESETS) * 4
    for row in splits:
        ratio, *parts = map(float, row[9:])
        assert ratio == pytest.approx(1 + sum(parts), abs=0.03)
    assert "## vLLM_s by another rule" in appendix
    for reading in paper.cells.READINGS:
        assert appendix.count(f"| {reading.name} |") == 2


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    options = [
        "--requests",
        "8",
        "--jobs",
        "1",
        "--datasets",
        "chatbot",
        "--model",
        "opt-13b",
        "--parts",
        "fig4",
    ]
    options += ["--arrivals", "closed:4", "--out-dir", str(tmp_path)]
    simulated = []

    def stops(cell):
        if len(simulated) == 7:
            raise KeyboardInterrupt
        simulated.append(cell)
        return paper.cells.simulate_cell(cell)

    monkeypatch.setattr(reproduce_paper, "simulate_cell", stops)
    with pytest.raises(KeyboardInterrupt):
        reproduce_paper.main(options)
    journal = tmp_path / "cells.jsonl"
    journal.write_text(journal.read_text()[:-20])  # the last line is torn
    monkeypatch.setattr(reproduce_paper, "simulate_cell", paper.cells.simulate_cell)
    reproduce_paper.main(options)
    rows = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert len(rows) == 5 * len(paper.cells.PRESETS)
    again = []
    monkeypatch.setattr(reproduce_paper, "simulate_cell", again.append)
    reproduce_paper.main(options)
    assert not again
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == rows
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(['"other sources"', *lines[1:]]) + "\n")
    monkeypatch.setattr(reproduce_paper, "simulate_cell", stops)
    simulated.clear()
    with pytest.raises(KeyboardInterrupt):
        reproduce_paper.main(options)
    assert len(journal.read_text().splitlines()) == 1 + 7


def test_a_choice_of_presets_limits_and_arrivals(tmp_path, capsys):
    options = ["--requests", "8", "--jobs", "1", "--datasets", "chatbot", "--model", "opt-13b"]
    options += ["--out-dir", str(tmp_path)]
    chosen = ["--parts", "fig4", "--presets", "vllm,adaptive", "--batch-limits", "64,128"]
    reproduce_paper.main([*options, *chosen, "--arrivals", "poisson:3,gamma:3:2"])
    report = (tmp_path / "report.md").read_text()
    assert "adaptive at 64: turnaround" in report
    assert "paper at 64" not in report
    assert "### Poisson arrivals, 3 a second" in report
    for wrong, message in (
        (["--batch-limits", "48", "--parts", "fig4"], "choose of (8, 16"),
        (["--presets", "mine"], "there is no preset 'mine'"),
        (["--presets", "vllm"], "table3 compares all presets"),
        (["--arrivals", "closed:0"], "CLIENTS must lie in"),
        (["--data", "alpaca=x:y:z"], "write NAME=FILE:COLUMN:TOKENIZER, of chatbot"),
        (["--data", "chatbot=x"], "write FILE:COLUMN:TOKENIZER"),
    ):
        with pytest.raises(SystemExit):
            reproduce_paper.main([*options, *wrong])
        assert message in capsys.readouterr().err


def test_prompts_of_a_data_sets_file(tmp_path, capsys):
    lines = [json.dumps({"prompt": "def f(x): return x " * (1 + number % 5)}) for number in range(20)]
    (tmp_path / "chatbot.jsonl").write_text("\n".join(lines) + "\n")
    data = f"chatbot={tmp_path / 'chatbot.jsonl'}:prompt:{demo_model_path()}"
    options = [
        "--jobs",
        "1",
        "--datasets",
        "chatbot",
        "--model",
        "opt-13b",
        "--parts",
        "table3",
        "--data",
        data,
    ]
    reproduce_paper.main([*options, "--requests", "20", "--out-dir", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    lengths = paper.cells.prompts_of(data.partition("=")[2]).prompt_lens
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"chatbot: `chatbot.jsonl`, 20 prompts of {lengths.mean():.2f} tokens on average" in report
    assert f"| 17.02 | {lengths.mean():.2f} | `chatbot.jsonl`, 20 prompts" in report
    assert "with the paper's means" not in report
    assert {row["num_prefill_tokens"] for row in rows if not row["num_preemptions"]} == {lengths.sum()}
    with pytest.raises(SystemExit):
        reproduce_paper.main([*options, "--requests", "21", "--out-dir", str(tmp_path / "out")])
    assert "has 20 prompts, --requests 21" in capsys.readouterr().err


def test_noise(tmp_path):
    save_samples(
        tmp_path / "samples.json",
        measured(90, 1.1),
        {"command": "jaxllm profile", "model": {"name": "tiny"}, "hardware": {"device": "cpu", "cpu": "x"}},
    )
    options = ["--requests", "8", "--jobs", "1", "--datasets", "chatbot", "--parts", "control"]
    options += ["--model", "opt-13b"]
    reproduce_paper.main(
        [*options, "--samples", str(tmp_path / "samples.json"), "--out-dir", str(tmp_path / "out")]
    )
    report = (tmp_path / "out" / "report.md").read_text()
    assert "drawn from the real profile `samples.json`" in report
    assert "| opt-13b | chatbot |" in report
    assert "us/step" in report


def test_predicting_and_recomputing_all_the_same_is_recomputing(monkeypatch):
    predicted = []
    choose = paper.cells.AdaptiveAction.choose

    def counted(action, *args):
        predicted.append(type(action.costs).__name__)
        return choose(action, *args)

    monkeypatch.setattr(paper.cells.AdaptiveAction, "choose", counted)
    cells = paper.cells.make_cells(["control"], ["opt-13b"], ["chatbot"], num_requests=150, seeds=[0])
    rows = time_control(cells, repetitions=2)
    assert len(rows) == 2
    assert len(predicted) == 2 * rows[0]["num_preemptions"]
    assert set(predicted) == {"OnlineCalibration"}
    assert rows[0]["num_preemptions"] > 10
    assert rows[0]["num_swaps"] == 0
    for name in ("seconds", "num_preemptions", "num_swaps", "mean_weighted_turnaround"):
        assert rows[0][name] == rows[1][name]
    for row in rows:
        assert len(row["scheduling_seconds_of_repetitions"]) == 2
        assert row["scheduling_seconds"] == pytest.approx(sum(row["scheduling_seconds_of_repetitions"]) / 2)
    (line,) = (line for line in control(rows, True) if line.startswith("| opt-13b |"))
    assert line.count("us/step") == 2


def test_figures_have_names_of_their_own(tmp_path):
    options = [
        "--requests",
        "8",
        "--jobs",
        "1",
        "--datasets",
        "chatbot",
        "--model",
        "opt-13b",
        "--parts",
        "fig4",
    ]
    chosen = [
        "--presets",
        "vllm,adaptive",
        "--batch-limits",
        "64",
        "--arrivals",
        "closed:4,closed:8,closed:8:0.5",
    ]
    reproduce_paper.main([*options, *chosen, "--out-dir", str(tmp_path)])
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "fig4.png",
        "fig4-closed-8.png",
        "fig4-closed-8-0.5.png",
    }


def test_the_nearest_reading_is_named():
    cells = paper.cells.make_cells(["readings"], ["opt-13b"], ["chatbot"], num_requests=4, seeds=[0])
    rows = []
    for cell in cells:
        is_near = cell.preset == "paper" and cell.arrivals == "closed:64" and cell.outputs == "max"
        rate, turnaround = (1.3, 0.65) if is_near else (1.0, 0.9 if cell.preset != "vllm" else 1.0)
        rows.append(
            {
                **dataclasses.asdict(cell),
                "output_tokens_per_second": rate,
                "mean_weighted_turnaround": turnaround,
            }
        )
    lines = nearest(Cells(rows))
    name = "scheduler and strategy, 64 clients (all of 64 tokens)"
    assert f"| opt-13b | chatbot | 1.38 | {name} | 1.30 | -6% |" in lines
    assert f"| opt-13b | chatbot | {name} | -35% | inside | 1 of 26 |" in lines
    assert all("..." not in line for line in lines)
    assert len({reading.full_name for reading in paper.cells.READINGS}) == len(paper.cells.READINGS)


def test_no_policy_beats_what_memory_allows():
    cells = paper.cells.make_cells(
        ["table3"], ["opt-13b"], ["chatbot"], num_requests=150, seeds=[0], presets=["adaptive", "vllm_v1"]
    )
    for cell in cells:
        row = paper.cells.simulate_cell(cell)
        most = most_tokens_per_second("opt-13b", "chatbot", cell.outputs, 150, 0)
        assert 0.6 * most < row["output_tokens_per_second"] < most
    assert most_tokens_per_second("opt-13b", "chatbot", "max", 150, 0, 256) < most


def test_the_engine_runs_the_same_cells(tmp_path):
    model = tmp_path / "tiny"
    model.mkdir()
    config = json.loads((golden_checkpoint("llama_gqa") / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    options = ["--executor", "jax", "--model", str(model), "--load-format", "dummy"]
    options += ["--datasets", "chatbot,summary", "--arrivals", "closed:4"]
    options += ["--max-num-seqs", "8", "--requests", "6", "--parts", "table3,fig4,control"]
    reproduce_paper.main([*options, "--out-dir", str(tmp_path / "out")])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {cell["model"] for cell in results["cells"]} == {"tiny"}
    assert len(results["cells"]) == 2 * (len(paper.cells.PRESETS) * (2 + 1) + 2)
    for cell in results["cells"]:
        assert cell["output_tokens_per_second"] > 0
        assert cell["prediction_errors"]["decode"]["count"] > 0
        assert (cell["overlap"], cell["layout"], cell["overhead"]) == (True, None, None)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| tiny | chatbot | - |" in report
    assert len((tmp_path / "out" / "engine-cells.jsonl").read_text().splitlines()) == len(results["cells"])
    assert not (tmp_path / "out" / "cells.jsonl").exists()
    assert "the real engine" in report
    assert "Whole runs on the real engine" in report
    most = max(cell["num_cut"] for cell in results["cells"])
    assert most > 0
    assert f"Prompts too long for a model's positions are cut: up to {most} of a run." in report


def test_wrong_arguments(tmp_path, capsys):
    for wrong, message in (
        (["--parts", "table4"], "there is no table4"),
        (["--executor", "jax"], "--executor jax needs --model"),
        (["--executor", "jax", "--model", "x", "--parts", "readings"], "there is no readings"),
        (["--model", "x"], "published shapes: opt-13b"),
        (["--dtype", "float16"], "are for --executor jax"),
        (["--jobs", "0"], "must be at least 1"),
        (["--seeds", "a"], "--seeds: 'a' is no list with commas"),
        (["--seeds", "-1"], "must be at least 0"),
        (["--datasets", "chatbot,chatbot"], "names something twice"),
        (["--parts", "fig3", "--batch-limits", "8"], "--batch-limits is of part fig4"),
        (["--parts", "fig4", "--max-num-seqs", "4"], "no batch limit of fig4 is within --max-num-seqs 4"),
        (["--samples", str(tmp_path / "absent.json")], "cannot read the samples"),
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
    assert paper.appendix.split_ratio(ours, theirs) == pytest.approx([2.0, 0.5, -0.1, 0.5, 0.1])


def test_prompts_are_cut_to_a_models_positions():
    trace = make_trace("summary", 50, 64, seed=0)
    cut = paper.cells.fitting(trace, 256)
    assert trace.prompt_lens.max() > 192
    assert cut.prompt_lens.tolist() == [min(192, length) for length in trace.prompt_lens.tolist()]
    assert cut.output_lens.tolist() == trace.output_lens.tolist()
    ids = tuple(tuple(range(length)) for length in trace.prompt_lens.tolist())
    with_ids = paper.cells.fitting(dataclasses.replace(trace, prompt_token_ids=ids), 256)
    assert with_ids.prompt_token_ids == tuple(tuple(range(length)) for length in cut.prompt_lens.tolist())
    with_texts = dataclasses.replace(trace, prompt_texts=("text",) * 50)
    assert paper.cells.fitting(with_texts, 256).prompt_texts is None
    assert paper.cells.fitting(with_texts, 4096).prompt_texts == with_texts.prompt_texts
    assert paper.cells.fitting(trace, 4096).prompt_lens.tolist() == trace.prompt_lens.tolist()
    with pytest.raises(ConfigError, match="leave no prompt in 64 positions"):
        paper.cells.fitting(trace, 64)


def fig4_rows(folder, *options):
    chosen = ["--parts", "fig4", "--requests", "12", "--jobs", "1", "--batch-limits", "8", *options]
    reproduce_paper.main([*chosen, "--overwrite", "--out-dir", str(folder)])
    return json.loads((folder / "results.json").read_text())


def test_settings_other_than_the_papers(tmp_path):
    options = ["--model", "llama-3-8b", "--datasets", "summary", "--arrivals", "all"]
    own = ["--device", "h100", "--link", "20", "--gpu-blocks", "40", "--host-blocks", "16"]
    results = fig4_rows(tmp_path / "own", *options, *own, "--policies", "vllm_v1,hicache")
    assert results["device"] == "H100-SXM"
    found = {cell["preset"]: cell for cell in results["cells"]}
    assert found.keys() == {"vllm_v1", "hicache"}
    cell = found["vllm_v1"]
    assert (cell["num_gpu_blocks"], cell["num_host_blocks"], cell["link"]) == (40, 16, 20e9)
    assert "trace" not in cell
    report = (tmp_path / "own" / "report.md").read_text()
    assert "40 device and 16 host blocks" in report
    assert "H100-SXM" in report
    alone = fig4_rows(tmp_path / "alone", *options, "--policies", "vllm_v1")["cells"][0]
    assert not set(paper.cells.OWN) & alone.keys()
    assert alone["output_tokens_per_second"] != cell["output_tokens_per_second"]


def test_the_evaluation_takes_a_trace_and_the_commands_machinery(tmp_path, capsys):
    rows = [
        {"timestamp": number / 4, "input_length": 20 + number, "output_length": 9} for number in range(12)
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--model", "opt-13b", "--trace", str(path), "--policies", "vllm_v1"]
    (cell,) = fig4_rows(tmp_path / "out", *options)["cells"]
    assert (cell["dataset"], cell["arrivals"]) == ("mine", "recorded")
    assert "### Arrivals as recorded" in (tmp_path / "out" / "report.md").read_text()
    found = simulate(
        path,
        model="opt-13b",
        dtype="float16",
        device="A800-80GB-PCIe",
        costs="roofline",
        policy="vllm_v1",
        gpu_blocks=128,
        max_num_seqs=8,
        max_num_batched_tokens=2560,
        overlap_swaps=False,
    )
    assert cell["output_tokens_per_second"] == pytest.approx(found.runs[0].figures["tokens_per_second"])
    for wrong, message in (
        (["--parts", "fig3"], "there is no fig3"),
        (["--gpu-blocks", "2"], "--clip"),
        (["--policies", "nobody"], "there is no preset 'nobody'"),
        (["--device", "h101"], "is not in the table"),
        (["--executor", "jax"], "--trace: of --executor sim"),
    ):
        with pytest.raises((SystemExit, RequestTooLargeError)) as raised:
            fig4_rows(tmp_path / "wrong", *options, *wrong)
        assert message in f"{capsys.readouterr().err} {raised.value}"
    clipped = fig4_rows(tmp_path / "clipped", *options, "--gpu-blocks", "2", "--clip")["cells"][0]
    assert (clipped["num_gpu_blocks"], clipped["too_long"]) == (2, "clip")


def test_kv_of_fewer_bytes_has_more_blocks_of_the_papers_pool(tmp_path):
    out = tmp_path / "out"
    options = [
        "--parts",
        "fig4",
        "--batch-limits",
        "64",
        "--costs",
        "silicon",
        "--model",
        "llama-13b",
        "--datasets",
        "chatbot",
    ]
    options += ["--presets", "vllm_v1,adaptive", "--requests", "60", "--arrivals", "all", "--jobs", "1"]
    speeds = {}
    for name in ("float16", "int8"):
        reproduce_paper.main([*options, "--kv-cache-dtype", name, "--out-dir", str(out / name)])
        cells = json.loads((out / name / "results.json").read_text())["cells"]
        assert {cell["kv_cache_dtype"] for cell in cells} == {name}
        speeds[name] = min(cell["output_tokens_per_second"] for cell in cells)
    assert speeds["int8"] > 1.2 * speeds["float16"]
    blocks = paper.cells.Device("llama-13b", kv_cache_dtype="int8").system()
    assert (blocks.num_gpu_blocks, blocks.num_host_blocks) == (248, 124)
