"""`jaxllm validate-costs`: the scheduler on measured kernels against servers that others measured."""

import json
import pathlib

import pytest

from jaxllm.cli.main import main

MEASURED = pathlib.Path(__file__).parents[1] / "benchmarks" / "silicon"
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


def test_missing_files_and_bad_seconds_are_refused(tmp_path, capsys):
    assert main(["validate-costs", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["validate-costs", OPEN, "--host-seconds", "2"]) == 2
    assert "--host-seconds must lie in" in capsys.readouterr().err
