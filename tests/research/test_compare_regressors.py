"""The paper's regressors on measured kernels: what is drawn, what they are off by, and what choices lose."""

import json

import compare_regressors
import pytest

from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.silicon import SiliconCostModel

COSTS = SiliconCostModel(model_shape("llama-2-13b", "float16"), "a100")
OPTIONS = ["--samples", "250", "--requests", "24", "--blocks", "160", "--seeds", "1", "--jobs", "1"]
OPTIONS += ["--regressors", "linear,decision tree", "--degrees", "1,2", "--links", "6,50"]


def test_steps_are_drawn_of_each_kind_and_take_what_was_measured():
    drawn = compare_regressors.drawn_steps(COSTS, 40, 3)
    assert drawn == compare_regressors.drawn_steps(COSTS, 40, 3)
    assert [sum(one.kind == kind for one in drawn) for kind in ("decode", "prefill", "mixed")] == [40] * 3
    for sample in drawn:
        work = (0, 0, *sample.work) if sample.kind == "prefill" else sample.work
        assert sample.seconds == COSTS.step_seconds(*work)


def test_copies_are_bytes_over_a_bandwidth():
    found = compare_regressors.copies(COSTS, 500)
    for kind, seconds in (("swap_out", COSTS.swap_out_seconds), ("swap_in", COSTS.swap_in_seconds)):
        (predicted,) = found[kind].predict([[COSTS.model.block_bytes(16), 77]])
        assert predicted == pytest.approx(seconds(77), rel=1e-3)


def test_each_regressor_has_errors_and_what_its_choices_lose(tmp_path, capsys):
    out = tmp_path / "regressors.json"
    compare_regressors.main([*OPTIONS, "--out", str(out)])
    exact, *rows = json.loads(out.read_text())["rows"]
    assert exact["errors"] == {}
    assert [row["regressor"] for row in rows] == ["linear", "decision tree"]
    for row in rows:
        assert {*row["errors"]} == {"decode", "prefill", "mixed"}
    for known, *others in zip(*(row["decisions"] for row in (exact, *rows)), strict=True):
        assert known["decisions"] > 0
        assert known["regret"] < 0.01, "who knows costs chooses by them"
        assert all(one["regret"] >= 0 and 0 <= one["wrong"] <= 1 for one in others)
    assert "| the tables themselves | - | - | - | - | - | - |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regressors", "lines"], "there is no lines; there are linear"),
        (["--samples", "99"], "--samples 100"),
        (["--blocks", "0"], "--blocks must be at least 1"),
        (["--links", "nan"], "--links above 0 and finite"),
        (["--degrees", "10"], "one of them at most 5"),
        (["--load", "foo"], "--load foo: there are chat, summary"),
        (["--model", "foo"], "foo"),
        (["--device", "foo"], "foo"),
    ],
)
def test_wrong_options_are_one_error(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_regressors.main([*options, "--out", str(tmp_path / "o.json")])
    assert message in capsys.readouterr().err
