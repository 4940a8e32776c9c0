"""The benchmark of what ordinary streams notice of hostile requests."""

import contextlib
import json

import bench_stalls
import pytest
from server_helpers import serving

from jaxllm import StructuredOutputsParams


@pytest.mark.parametrize("name", sorted(bench_stalls.GRAMMARS))
def test_requests_of_a_case_are_new_each_time(name):
    make = bench_stalls.GRAMMARS[name]
    first, second = (StructuredOutputsParams(**make(number)) for number in (1, 2))
    assert first != second


def test_mixes_of_options_differ():
    mixes = [bench_stalls._mix(number) for number in range(1, 65)]
    assert len({json.dumps(mix, sort_keys=True) for mix in mixes}) > 50
    assert max(map(len, mixes)) > 6


def test_gaps_are_written_with_and_without_a_case(monkeypatch, tmp_path, capsys):
    @contextlib.contextmanager
    def running_server(arguments):
        with serving() as server:
            yield server.url

    monkeypatch.setattr(bench_stalls, "running_server", running_server)
    monkeypatch.setattr(bench_stalls, "_OUTPUT_LEN", 10)
    out = tmp_path / "stalls.json"
    arguments = ["--cases", "rules,repeats,mixes", "--streams", "2", "--seconds", "0.5", "--out", str(out)]
    bench_stalls.main(arguments)
    values = json.loads(out.read_text())
    assert values["cases"].keys() == {"rules", "repeats", "mixes"}
    for case in values["cases"].values():
        for measured in (case["alone"], case["beside"]):
            assert measured["num_gaps"] > 0
            assert measured["worst_gap"] >= measured["median_gap"]
        assert case["bound"] == pytest.approx(3 * case["alone"]["median_gap"] + 0.05, rel=1e-4)
        assert case["is_within_bound"] == (case["beside"]["worst_gap"] <= case["bound"])
    assert values["cases"]["repeats"]["beside"]["statuses"].keys() == {"400"}
    assert values["cases"]["mixes"]["beside"]["statuses"].keys() == {"200"}
    assert values["seed"] == 0
    assert "--cases rules,repeats,mixes" in values["command"]
    assert "rules: median gap" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_stalls.main(["--cases", "rulez", "--out", str(out), "--overwrite"])
    assert "there are references" in capsys.readouterr().err
