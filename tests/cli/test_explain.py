"""`jaxllm explain` on a ledger that a simulated run wrote."""

import dataclasses
import gc
import json

import jax
import pytest
from engine_helpers import make_llm
from variants import golden_checkpoint

import jaxllm
from jaxllm.cli.main import main
from jaxllm.engine.ledgers import read_ledger
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.research.commands.explain import summary, timeline
from jaxllm.research.ledger_report import compare, report
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import make_trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import HeaderRecord, Ledger, PreemptionRecord, StepRecord, VerificationRecord
from jaxllm.sched.presets import make_preset


class Costs:
    """Swapping wins for short requests."""

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        return 0.01 + 1e-5 * prompt_tokens if batch or prompt_tokens else 0.0

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
    assert lines.pop(0)["record"] == "header"
    assert {line["record"] for line in lines} == {"preemption", "step"}
    assert len(lines) == len(ledger.preemptions) + len(ledger.steps)
    actions = [record.action for record in ledger.preemptions]
    assert {"swap", "recompute"} == set(actions)
    assert sum(step.num_swapped_out for step in ledger.steps) == actions.count("swap")
    assert sum(step.num_dropped for step in ledger.steps) == actions.count("recompute")
    for record in ledger.preemptions:
        assert record.resumed_step_id > record.step_id
        ids = [request_id for request_id, _ in record.scores]
        assert len(set(ids)) == len(ids) > 1
        assert record.request_id in ids[:-1]  # the last one would have been next
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
    for action in ("swap", "recompute"):
        of_action = [record for record in ledger.preemptions if record.action == action]
        num_blocks = sum(record.num_blocks for record in of_action)
        (line,) = [line for line in lines if line.startswith(f"  {action}: ")]
        assert line.startswith(f"  {action}: {len(of_action)} requests, {num_blocks} blocks; ")
        for said, total in (
            ("swapping predicted to add", sum(record.swap_seconds for record in of_action)),
            ("recomputing predicted to add", sum(record.recompute_seconds for record in of_action)),
            ("added", sum(record.measured_seconds for record in of_action)),
        ):
            assert f"; {said} {total:.4g} s for {len(of_action)}" in line
    assert any("regret against the other action's estimate" in line for line in lines)
    assert sum(line.startswith("  step ") for line in lines) == 2
    drawn = [line for line in lines if "|" in line]
    assert len(drawn) == 8
    assert all(len(line.split("|")[1]) == 40 for line in drawn)
    most = max(step.num_used_blocks for step in ledger.steps)
    assert any("device blocks" in line and line.endswith(f"up to {most}") for line in drawn)
    assert plot.stat().st_size > 1000


def preemption(index, **changes):
    values = {"step_id": index, "time": 0.0, "request_id": f"r{index}", "num_tokens": 9, "num_blocks": 3}
    values |= {"scores": [], "action": "swap", "swap_seconds": 0.002, "recompute_seconds": 0.003}
    return PreemptionRecord(**(values | changes))


def test_a_summary_by_hand():
    ledger = Ledger()
    ledger.preemptions += [
        preemption(0, resumed_step_id=7, measured_seconds=0.004, resume_action="in background"),
        preemption(1, measured_seconds=0.001),
        preemption(2, action="recompute", num_blocks=5, swap_seconds=None, recompute_seconds=None),
        preemption(3, resumed_step_id=8, swap_seconds=None),
    ]
    assert summary(ledger, 3).splitlines() == [
        "0 steps, 4 preemptions",
        "  recompute: 1 requests, 5 blocks",
        "  swap: 3 requests, 9 blocks; swapping predicted to add 0.004 s for 2; "
        "recomputing predicted to add 0.009 s for 3; added 0.005 s for 2",
        "    of what was done: predicted 0.004 s, took 0.005 s, in 2; half off by at most 50% of the larger",
        "  regret against the other action's estimate: 0.001 s in 2 decisions",
        "most costly of them (3):",
        "  step 0: swap of 'r0', 9 tokens in 3 blocks; swapping predicted to add 2 ms, recomputing 3 ms, "
        "added 4 ms; resumed in step 7 (in background)",
        "  step 1: swap of 'r1', 9 tokens in 3 blocks; swapping predicted to add 2 ms, recomputing 3 ms, "
        "added 1 ms; never resumed",
        "  step 2: recompute of 'r2', 9 tokens in 5 blocks; swapping predicted to add unknown, recomputing "
        "unknown, added unknown; never resumed",
    ]
    assert summary(Ledger(), 3) == "0 steps, 0 preemptions"


def test_a_timeline_shows_the_largest_value_of_each_column():
    def at(time, num_waiting):
        zeros = {field.name: 0 for field in dataclasses.fields(StepRecord)}
        return StepRecord(**(zeros | {"time": time, "num_waiting": num_waiting}))

    steps = [at(10.0, 1), at(10.1, 8), at(11.0, 0), at(12.0, 2), at(13.0, 4), at(14.0, 16)]
    lines = timeline(steps, 4).splitlines()
    assert lines[0] == "timeline, 4 s from left to right"
    assert lines[1] == "        waiting |▄ ▁█| up to 16"  # 8, 0, 2 and 16, of which 4 is less
    assert lines[2] == "        running |    | none"
    assert len(lines) == 9
    assert timeline(steps[:1], 4).splitlines()[1] == "        waiting |█   | up to 1"
    assert timeline([], 4) == "no steps recorded"


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
    assert main(["explain", str(broken)]) == 2
    assert "holds no records of a ledger: name the file that a run wrote" in capsys.readouterr().err
    assert main(["explain", str(broken), "--width", "0"]) == 2


def test_a_ledger_of_a_run_without_steps_is_told(ledger_file, tmp_path, capsys):
    begun = tmp_path / "begun.jsonl"
    begun.write_text(ledger_file.read_text().splitlines(keepends=True)[0])
    assert main(["explain", str(begun)]) == 0
    printed = capsys.readouterr()
    assert "begun.jsonl has no steps" in printed.err
    assert "0 steps, 0 preemptions" in printed.out


def test_a_ledger_that_is_cut_off_is_told_and_the_rest_is_used(ledger_file, tmp_path, capsys):
    lines = ledger_file.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:20]) + lines[20][:-9])
    for arguments in ([str(cut)], [str(ledger_file), str(cut)]):
        assert main(["explain", *arguments, "--json", "-"]) == 0
        printed = capsys.readouterr()
        assert "cut.jsonl, line 21, the last, is cut off" in printed.err
        values = json.loads(printed.out)
        assert values.get("second", values)["cut_line"] == 21
    whole, rest = read_ledger(ledger_file), read_ledger(cut)
    assert (whole.cut_line, rest.cut_line) == (None, 21)
    assert rest.steps == whole.steps[: len(rest.steps)]
    assert rest.steps
    assert main(["explain", str(ledger_file)]) == 0
    assert "cut off" not in capsys.readouterr().err


def test_a_simulations_ledger_has_a_header(ledger_file, capsys):
    header = read_ledger(ledger_file).header
    assert (header.jaxllm, header.jax, header.device) == (jaxllm.__version__, None, "simulated")
    assert header.policy == "jaxllm.sched.policies:SchedulerPolicy"
    assert header.costs_source == f"{Costs.__module__}:Costs"
    assert header.settings["overlap_swaps"] is False
    assert header.limits["num_gpu_blocks"] == 24
    assert main(["explain", str(ledger_file)]) == 0
    assert (
        f"costs {Costs.__module__}:Costs; jaxllm {jaxllm.__version__} on simulated" in capsys.readouterr().out
    )
    ledger = Ledger()
    trace, costs = make_trace("chatbot", 4, 32, seed=1), OnlineCalibration(Costs())
    sizes = {"num_gpu_blocks": 24, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    limits = SchedulerConfig(max_model_len=256, **sizes)
    simulate(trace, limits, "adaptive", costs, overlap_swaps=True, ledger=ledger)
    assert (ledger.header.policy, ledger.header.costs_source) == ("adaptive", f"{Costs.__module__}:Costs")


HEADER = HeaderRecord("0.1.0", "0.10.2", "cpu", "paper", "mine:costs", {}, {})


def written(path, records, header=HEADER):
    with path.open("w") as file:
        ledger = Ledger(file)
        if header is not None:
            ledger.begin(header)
        for record in records:
            line = {"record": "preemption", **dataclasses.asdict(record)}
            file.write(json.dumps(line) + "\n")
    return str(path)


def test_a_summary_says_whose_predictions_decided():
    ledger = Ledger(costs=OnlineCalibration(Costs()))
    ledger.begin(HEADER)
    ledger.costs.observe("decode", 1.0, 1.25)
    ledger.preemptions += [preemption(0, measured_seconds=0.004), preemption(1, measured_seconds=0.0)]
    ledger.close()
    lines = summary(ledger, 1).splitlines()
    assert lines[1] == "policy paper, costs mine:costs; jaxllm 0.1.0, jax 0.10.2 on cpu"
    assert "predictions of mine:costs compared with what was measured:" in lines
    said = (
        "    of what was done: predicted 0.004 s, took 0.004 s, in 2; half off by at most 75% of the larger"
    )
    assert said in lines  # by a half of the larger, and by all of it


def test_a_summary_is_json_too(ledger_file, tmp_path, capsys):
    assert main(["explain", str(ledger_file), "--json", "-", "--top", "3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    out = tmp_path / "summary.json"
    assert main(["explain", str(ledger_file), "--json", str(out), "--top", "3"]) == 0
    assert "preemptions" in capsys.readouterr().out
    assert json.loads(out.read_text()) == printed
    ledger = read_ledger(ledger_file)
    assert printed["num_steps"] == len(ledger.steps)
    assert len(printed["most_costly"]) == 3
    swaps = [one for one in ledger.preemptions if one.is_swap]
    assert printed["actions"]["swap"]["num_preemptions"] == len(swaps)
    assert printed["actions"]["swap"]["accuracy"]["num_decisions"] == len(swaps)
    assert printed["actions"]["swap"]["accuracy"]["median_error"] < 1e-9  # the simulator is exact
    assert printed["regret_seconds"] == pytest.approx(sum(one.regret_seconds for one in ledger.preemptions))
    assert main(["explain", str(ledger_file), "--json", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_two_runs_are_compared_preemption_by_preemption(tmp_path, capsys):
    first = [
        preemption(1, request_id="a", measured_seconds=0.001),
        preemption(5, request_id="a", measured_seconds=0.009),
        preemption(2, request_id="b", measured_seconds=0.002),
    ]
    second = [
        preemption(
            9, request_id="a", action="recompute", measured_seconds=0.004
        ),  # its second, written first
        preemption(3, request_id="a", measured_seconds=0.001),
        preemption(7, request_id="c", measured_seconds=0.003),
    ]
    found = compare(read_ledger(written(tmp_path / "1", first)), read_ledger(written(tmp_path / "2", second)))
    assert found.num_same == 1
    assert [(one.request_id, one.number) for one in found.differences] == [("a", 2), ("c", 1), ("b", 1)]
    files = [str(tmp_path / "1"), str(tmp_path / "2")]
    assert main(["explain", *files, "--top", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("first: 3 preemptions: added 0.012 s in 3, regret 0.006 s in 3: policy paper")
    assert lines[2] == (
        "1 decisions are the same, 1 of another action, 1 in the first alone, 1 in the second alone"
    )
    assert lines[3] == "  differing ones of the first: 2 preemptions: added 0.011 s in 2, regret 0.006 s in 2"
    assert (
        lines[4] == "  differing ones of the second: 2 preemptions: added 0.007 s in 2, regret 0.002 s in 2"
    )
    assert lines[5] == "  preemption 2 of 'a':"
    assert lines[6].startswith("    first: step 5: swap of 'a'")
    assert lines[7].startswith("    second: step 9: recompute of 'a'")
    assert lines[9] == "    first: none"
    assert main(["explain", *files, "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["num_same"], values["num_other_action"], len(values["differences"])) == (1, 1, 3)
    assert values["second"]["differing"]["measured_seconds"] == pytest.approx(0.007)
    assert main(["explain", *files, "--plot", str(tmp_path / "x.png")]) == 2
    assert "--plot draws one ledger" in capsys.readouterr().err
    assert main(["explain", *files, "--width", "40"]) == 2
    assert "--width is of one ledger's timeline" in capsys.readouterr().err


def test_an_engines_ledger_says_what_wrote_it(tmp_path):
    path = tmp_path / "decisions.jsonl"
    llm = make_llm(golden_checkpoint("llama_tied"), ledger=str(path), costs=Costs(), scheduler_policy="paper")
    blocks = llm.engine.scheduler.config.num_gpu_blocks
    llm.close()
    del llm
    gc.collect()  # the file ends with the engine
    header = read_ledger(path).header
    assert (header.jaxllm, header.jax, header.device) == (jaxllm.__version__, jax.__version__, "cpu")
    assert (header.policy, header.costs_source) == ("paper", f"{Costs.__module__}:Costs")
    assert header.settings["costs"] == f"{Costs.__module__}:Costs"
    assert header.settings["ledger"] == str(path)
    assert header.limits["num_gpu_blocks"] == blocks


def test_no_more_columns_than_anybody_sees(ledger_file, capsys):
    assert main(["explain", str(ledger_file), "--width", "1000000000"]) == 2
    assert "--width 1000000000 is more columns than anybody sees: at most 10000" in capsys.readouterr().err


def test_drafts_are_told_of():
    records = [VerificationRecord(step, 0.0, 2, 2, 8, 4, 3.0, 3.0, 2.0, 4.0) for step in range(2)]
    ledger = Ledger()
    for record in records:
        ledger.verified(record)
    assert report(ledger, 1)["drafts"] == {
        "num_iterations": 2,
        "num_verified": 4,
        "num_drafted": 16,
        "num_kept": 8,
        "expected_kept": 6.0,
        "predicted_gain": pytest.approx((2 + 3) / 2 * 2 / 3),
        "measured_gain": pytest.approx((2 + 4) / 2 * 2 / 4),
        "num_measured": 2,
    }
    said = "drafts: 16 in 2 iterations, 8 kept (6 expected); 1.50 times the tokens/s without, in 2; predicted"
    assert f"{said} 1.67" in summary(ledger, 1).splitlines()
    assert report(Ledger(), 1)["drafts"] is None
    assert "drafts" not in summary(Ledger(), 1)
