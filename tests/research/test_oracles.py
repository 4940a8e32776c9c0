"""Baselines against decisions recorded from vLLM's own schedulers, 0.2.5 and V1 (0.32)."""

import json
import pathlib

import pytest

from jaxllm.cli.main import main
from jaxllm.research.bench import oracles

RECORDS = sorted((pathlib.Path(__file__).parents[1] / "data" / "oracles").glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_preset_decides_as_vllm_did(path):
    assert oracles.first_difference(json.loads(path.read_text())) is None


def test_the_records_are_there():
    names = "vllm025-", "v1-a-", "v1-b-"
    assert [sum(path.stem.startswith(name) for path in RECORDS) for name in names] == [3, 3, 3]


@pytest.mark.parametrize(
    ("name", "field", "where", "value"),
    [
        ("v1-a-budget64", "decode", 7, 99),
        ("v1-a-budget64", "free_blocks", 31, 99),
        ("v1-a-budget64", "preempted", "32", [3]),
        ("v1-a-budget64", "admitted", "54", [13, 12]),
        ("v1-a-budget64", "finish_iteration", 5, 0),
        ("vllm025-short", "finish_iteration", 11, 0),
        ("v1-b-system", "cached_tokens", 2, 48),
        ("v1-b-turns", "cached_tokens_resumed", 29, 1),
    ],
)
def test_a_difference_is_named(name, field, where, value):
    record = json.loads((RECORDS[0].parent / f"{name}.json").read_text())
    record[field][where] = value
    found = oracles.first_difference(record)
    assert found is not None
    assert field in found
    assert str(where) in found


def test_what_is_no_record_is_refused():
    with pytest.raises(oracles.ConfigError, match="neither"):
        oracles.first_difference({"args": {}})


def test_the_command_names_what_differs(tmp_path, capsys):
    record = json.loads(RECORDS[0].read_text())
    assert main(["replay-oracle", str(RECORDS[0])]) == 0
    assert "the same decisions" in capsys.readouterr().out
    record["args"] = {}
    (tmp_path / "none.json").write_text(json.dumps(record))
    assert main(["replay-oracle", str(tmp_path / "none.json")]) == 2
    assert "none.json is no record of decisions" in capsys.readouterr().err
