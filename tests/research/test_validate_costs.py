"""`jaxllm validate-costs`: the scheduler on measured kernels against servers that others measured."""

import json
import pathlib

import pytest

from jaxllm.cli.main import main

MEASURED = pathlib.Path(__file__).parents[2] / "benchmarks" / "silicon"
OPEN, CLOSED = (str(MEASURED / f"vllm-{name}-serving.json") for name in ("h100", "h200"))


def found_by(tmp_path, *options):
    out = tmp_path / "found.json"
    assert main(["validate-costs", *options, "--json", str(out), "--overwrite"]) == 0
    return json.loads(out.read_text())


def test_a_server_on_an_h100_is_foretold_without_fitting(tmp_path, capsys):
    found = found_by(tmp_path, OPEN, "--records", "roleplay")
    assert [row["name"].split("@")[0] for row in found["records"]] == [
        "llama-2-7b-tp1-roleplay",
        "codellama-34b-tp2-roleplay",
    ]
    assert found["latency_mape"] < 0.06
    assert found["tpot_mape"] < 0.06
    assert found["throughput_mape"] < 0.01
    assert found["compared"] == {"latency": 2, "tpot": 2, "ttft": 2, "throughput": 2}
    shown = capsys.readouterr().out
    for row in found["records"]:
        assert row["name"] in shown
        latency = row["latency"]
        assert latency["error"] == pytest.approx(latency["predicted"] / latency["measured"] - 1, abs=1e-5)
        assert sum(row["sources"].values()) == pytest.approx(1.0)
        assert row["sources"]["assumed"] < 0.2
    errors = [abs(row["ttft"]["error"]) for row in found["records"]]
    assert found["ttft_mape"] == pytest.approx(sum(errors) / 2, abs=1e-5)


def test_what_is_flagged_as_biased_is_left_out_and_counted(tmp_path):
    runs = json.loads(pathlib.Path(CLOSED).read_text())
    good = next(run for run in runs if run["quality"] == "good" and run["model"] == "Qwen3-8B")
    biased = next(run for run in runs if "biased" in run["quality"] and run["num_replicas"] == 1)
    path = tmp_path / "two.json"
    path.write_text(json.dumps([good, biased]))
    found = found_by(tmp_path, str(path))
    assert len(found["records"]) == 2
    assert found["compared"]["ttft"] == 1
    assert sum(found["left_out"]["ttft"].values()) == 1
    assert found["compared"]["tpot"] == 2
    assert found["tpot_mape"] < 0.3


def test_the_assumed_seconds_can_be_given(tmp_path):
    slow, fast = (
        found_by(tmp_path, OPEN, "--records", "llama-2-7b-tp1-roleplay", "--ingress-seconds", seconds)
        for seconds in ("0.1", "0")
    )
    difference = slow["records"][0]["ttft"]["predicted"] - fast["records"][0]["ttft"]["predicted"]
    assert difference == pytest.approx(0.1, abs=0.01)
    assert slow["world"]["ingress_seconds"] == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a file holds a JSON list of runs"),
        ("{", "no valid JSON"),
        ('[{"stages": []}]', "record 0 is incomplete or malformed"),
        ("a,b\n1,2\n", "a file holds a JSON list of runs with stages, or of closed loops, or a CSV"),
    ],
)
def test_malformed_files_are_refused(tmp_path, text, message, capsys):
    path = tmp_path / "records.json"
    path.write_text(text)
    assert main(["validate-costs", str(path)]) == 2
    assert message in capsys.readouterr().err


CSV = (
    "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,tp_size,pp_size,"
)
POINT = (
    "{id},silicon_concurrency=2,{backend},0.14.0,{model},{system},bfloat16,agg,{isl},{osl},1,1,{ttft},{tpot}"
)


def points(*changes):
    default = {"backend": "vllm", "model": "Qwen/Qwen3-8B", "system": "h100_sxm", "isl": 512, "osl": 9}
    default |= {"ttft": 40.0, "tpot": 8.0}
    rows = [POINT.format(**(default | {"id": number} | change)) for number, change in enumerate(changes)]
    return "\n".join([CSV + "silicon_ttft_ms,silicon_tpot_ms", *rows]) + "\n"


def test_what_of_a_csv_cannot_be_simulated_is_counted(tmp_path):
    path = tmp_path / "points.csv"
    others = {"backend": "trtllm"}, {"system": "b300_sxm"}, {"model": "some/Other-3B"}
    path.write_text(points({}, *others, {"osl": 1}, {"tpot": ""}))
    found = found_by(tmp_path, str(path))
    assert len(found["records"]) == 6
    assert found["compared"] == {"latency": 2, "tpot": 1, "ttft": 3, "throughput": 0}
    assert sum(found["left_out"]["tpot"].values()) == 5
    assert found["left_out"]["tpot"]["another server than vLLM"] == 1
    assert found["left_out"]["tpot"]["outputs of one token have no time between tokens"] == 1
    path.write_text(points({"isl": "x"}))
    assert main(["validate-costs", str(path)]) == 2


def test_constants_are_fitted_to_servers_that_keep_up(tmp_path, capsys):
    run = next(
        run for run in json.loads(pathlib.Path(OPEN).read_text()) if run["name"].endswith("tp1-codegen")
    )
    for stage in run["load"]["stages"]:
        stage["duration"] = 6
    path = tmp_path / "short.json"
    path.write_text(json.dumps([run]))
    found = found_by(tmp_path, str(path), "--unfitted")
    fitted = found_by(tmp_path, str(path), "--fit")
    assert fitted["ttft_mape"] < found["ttft_mape"]
    assert fitted["tpot_mape"] < found["tpot_mape"]
    assert fitted["world"] != found["world"]
    assert main(["validate-costs", OPEN, "--fit", "--records", "reasoning"]) == 2
    assert "cannot be fitted to 0 figures" in capsys.readouterr().err


def test_records_that_nobody_has_are_refused(capsys):
    assert main(["validate-costs", OPEN, "--records", "none of them"]) == 2
    assert "--records 'none of them': no record has that in its name" in capsys.readouterr().err


def test_missing_files_and_bad_seconds_are_refused(tmp_path, capsys):
    assert main(["validate-costs", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["validate-costs", OPEN, "--host-seconds", "2"]) == 2
    assert "--host-seconds must lie in" in capsys.readouterr().err


def test_a_file_nested_too_deeply_is_refused(tmp_path, capsys):
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    for command in ("validate-costs", "replay-oracle"):
        assert main([command, str(tmp_path / "deep.json")]) == 2
        assert "nested too deeply" in capsys.readouterr().err
    assert main(["compare", "--from-json", str(tmp_path / "deep.json")]) == 2
