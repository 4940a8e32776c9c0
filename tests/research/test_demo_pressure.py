"""The demo of memory pressure, as `make demo` runs it but smaller."""

import sys

import demo_pressure
import pytest

from jaxllm.engine.ledgers import read_ledger

pytestmark = pytest.mark.usefixtures("optimised")


def test_the_demo_prints_presets_decisions_and_a_timeline(monkeypatch, capsys, tmp_path):
    ledger = tmp_path / "decisions.jsonl"
    options = ["--requests", "20", "--gpu-blocks", "20", "--host-blocks", "8", "--profile-seconds", "0.1"]
    monkeypatch.setattr(sys, "argv", ["demo_pressure.py", *options, "--ledger", str(ledger)])
    demo_pressure.main()
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("| ") and "tokens/s" not in line]
    assert [row.split(" | ")[0] for row in rows] == ["| adaptive", "| vllm", "| vllm_swap"]
    assert "profile of 0.1 s at start" in shown
    assert "device blocks |" in shown
    records = read_ledger(ledger).preemptions
    assert records
    assert all(record.swap_seconds is not None and record.recompute_seconds is not None for record in records)
    assert f" steps, {len(records)} preemptions" in shown
