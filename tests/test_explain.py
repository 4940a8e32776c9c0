"""`jaxllm explain` on a ledger that a simulated run wrote."""

import json

import pytest

from jaxllm.cli.main import main
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger, read_ledger
from jaxllm.sched.presets import make_preset
from jaxllm.simulator.run import simulate
from jaxllm.workloads import make_trace


class Costs:
    """Swapping wins for short requests."""

    def prefill_seconds(self, num_tokens, num_seqs, context_tokens=0):
        return 0.01 + 1e-5 * num_tokens

    def decode_seconds(self, batch, context_tokens):
        return 0.01

    def swap_out_seconds(self, num_blocks):
        return 0.002 * num_blocks

    swap_in_seconds = swap_out_seconds


@pytest.fixture(scope="module")
def ledger_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    config = SchedulerConfig(
        num_gpu_blocks=24,
        block_size=16,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_host_blocks=8,
    )
    with path.open("w") as file:
        ledger = Ledger(file)
        costs = Costs()
        simulate(
            make_trace("chatbot", 60, 32, seed=1),
            config,
            make_preset("paper", costs),
            costs,
            overlap_swaps=False,
            ledger=ledger,
        )
        ledger.close()
    return path


def test_every_line_is_a_record_and_reads_back(ledger_file):
    lines = [json.loads(line) for line in ledger_file.read_text().splitlines()]
    ledger = read_ledger(ledger_file)
    assert {line["record"] for line in lines} == {"preemption", "step"}
    assert len(lines) == len(ledger.preemptions) + len(ledger.steps)
    actions = [record.action for record in ledger.preemptions]
    assert {"swap", "recompute"} == set(actions)
    assert sum(step.num_swapped_out for step in ledger.steps) == actions.count("swap")
    assert sum(step.num_dropped for step in ledger.steps) == actions.count("recompute")
    for record in ledger.preemptions:
        assert record.resumed_step_id > record.step_id
        assert len(record.scores) > 1
        if record.action == "swap":  # the simulator is exact, and nobody shares a copy
            assert record.measured_seconds == pytest.approx(record.swap_seconds)
            assert record.regret_seconds == 0.0
        assert record.measured_seconds > 0


def test_explain_prints_a_summary_and_a_timeline(ledger_file, capsys, tmp_path):
    plot = tmp_path / "timeline.png"
    assert main(["explain", str(ledger_file), "--top", "2", "--width", "40", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ledger = read_ledger(ledger_file)
    assert lines[0] == f"{len(ledger.steps)} steps, {len(ledger.preemptions)} preemptions"
    assert any(line.startswith("  swap: ") and "predicted" in line and "took" in line for line in lines)
    assert any("regret against the other action's estimate" in line for line in lines)
    assert sum(line.startswith("  step ") for line in lines) == 2
    drawn = [line for line in lines if "|" in line]
    assert len(drawn) == 8
    assert all(len(line.split("|")[1]) == 40 for line in drawn)
    most = max(step.num_used_blocks for step in ledger.steps)
    assert any("device blocks" in line and line.endswith(f"up to {most}") for line in drawn)
    assert plot.stat().st_size > 1000


def test_explain_refuses_what_is_no_ledger(tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    for text, message in (
        ('{"record": "step"}\n{}\n', "line 1"),
        ('{"record": "other"}\n', "neither"),
        ("nonsense\n{}\n", "line 1 is not JSON"),
        ("[1]\n", "JSON object"),
    ):
        broken.write_text(text)
        assert main(["explain", str(broken)]) == 2
        assert message in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err
    broken.write_bytes(b"\xff\xfe\x00")
    assert main(["explain", str(broken)]) == 2
    assert "text in UTF-8" in capsys.readouterr().err
    broken.write_text("")
    assert main(["explain", str(broken), "--plot", str(tmp_path / "x.unknown")]) == 2
    assert "--plot" in capsys.readouterr().err
    assert main(["explain", str(broken)]) == 0
    assert main(["explain", str(broken), "--width", "0"]) == 2
