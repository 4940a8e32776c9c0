"""Ledger: records, lines of JSON, regret, and what the scheduler writes into it."""

import dataclasses
import io
import json
import math
import re

import pytest
from docs_helpers import DOCS
from scheduler_helpers import V1, LinearCosts, holder, make_request, make_scheduler, step

from jaxllm.engine.ledgers import read_ledger
from jaxllm.errors import ConfigError
from jaxllm.predictors.online import KindReport, OnlineCalibration
from jaxllm.research.commands.explain import summary
from jaxllm.sched.ledger import HeaderRecord, Ledger, PreemptionRecord, StepRecord, VerificationRecord
from jaxllm.sched.policies import (
    AdaptiveAction,
    Decision,
    LatestArrivalVictim,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SwapIfItFits,
)

SWAP = Decision(PreemptionAction.SWAP, swap_seconds=2.0, recompute_seconds=3.0)
RECOMPUTE = Decision(PreemptionAction.RECOMPUTE, swap_seconds=4.0, recompute_seconds=3.0)


def victim(index=0):
    return holder(index, 7, 2)


def test_a_record_is_closed_by_the_end_of_its_request():
    ledger, request = Ledger(), victim()
    ledger.preempted(request, 5, 1.5, [("r0", 0.25)], SWAP)
    ledger.resumed(request, 8, 2.5)
    ledger.resumed(request, 9, 3.5)  # a further chunk of the same restore
    ledger.measured("r0", 0.5, 99)
    ledger.measured("r0", 0.25, 99)
    assert ledger.preemptions == []
    ledger.finished("r0")
    assert ledger.preemptions == [
        PreemptionRecord(
            5, 1.5, "r0", 7, 2, [("r0", 0.25)], "swap", 2.0, 3.0, 8, 2.5, 0.75, bound_seconds=0.75
        )
    ]
    ledger.finished("r0")
    ledger.close()
    assert len(ledger.preemptions) == 1


def test_a_second_preemption_closes_the_first():
    ledger, request = Ledger(), victim()
    for step_id in (5, 9):
        ledger.preempted(request, step_id, 0.0, [], SWAP)
    assert [record.step_id for record in ledger.preemptions] == [5]
    ledger.close()
    assert [record.step_id for record in ledger.preemptions] == [5, 9]


def test_requests_that_were_not_preempted_leave_no_record():
    ledger = Ledger()
    ledger.resumed(victim(), 3, 0.0)
    ledger.measured("r0", 1.0, 99)
    ledger.finished("r0")
    ledger.close()
    assert ledger.preemptions == []


@pytest.mark.parametrize(
    ("decision", "measured", "predicted", "regret"),
    [
        (SWAP, 2.5, 2.0, 0.0),
        (SWAP, 3.5, 2.0, 0.5),  # recomputing would have taken 3 s
        (RECOMPUTE, 4.5, 3.0, 0.5),
        (SWAP, None, 2.0, None),
        (RECOMPUTE, 3.5, 3.0, 0.0),
        (Decision(PreemptionAction.SWAP), 3.5, None, None),
    ],
)
def test_regret(decision, measured, predicted, regret):
    ledger = Ledger()
    ledger.preempted(victim(), 0, 0.0, [], decision)
    if measured is not None:
        ledger.measured("r0", measured, 99)
    ledger.close()
    (record,) = ledger.preemptions
    assert (record.predicted_seconds, record.regret_seconds) == (predicted, regret)


def test_how_a_swapped_request_came_back():
    ledger = Ledger()
    ledger.returns("r0", ResumeDecision(ResumeAction.AT_ONCE, 9.0))  # nobody knows of it
    ledger.preempted(victim(), 0, 0.0, [], SWAP)
    ledger.returns("r0", ResumeDecision(ResumeAction.IN_BACKGROUND, 0.5, 1.5))
    ledger.close()
    (record,) = ledger.preemptions
    assert (record.resume_action, record.resume_swap_seconds) == ("in background", 0.5)
    assert (record.predicted_seconds, record.regret_seconds) == (2.0, None)
    assert "never resumed (in background)" in summary(ledger, 1)


def a_step(step_id):
    return StepRecord(step_id, 0.0, *[0] * 10)


@pytest.mark.parametrize("in_file", [True, False])
def test_what_is_known_late_goes_to_the_preemption_that_it_is_of(in_file):
    file = io.StringIO() if in_file else None
    ledger = Ledger(file)
    ledger.preempted(victim(), 5, 0.0, [], SWAP)
    ledger.preempted(victim(), 9, 0.0, [], SWAP)  # as step 8, in which it was back, is under way
    ledger.step(a_step(9))
    ledger.measured("r0", 3.5, 8)
    ledger.measured("r0", 0.5, 9)
    ledger.step(a_step(10))
    ledger.measured("r0", 0.5, 8)  # nobody is so late
    if in_file:
        lines = [json.loads(line) for line in file.getvalue().splitlines()]
        found = [(one["measured_seconds"], one["regret_seconds"]) for one in lines if one["record"] != "step"]
        assert found == [(3.5, 0.5)]
    ledger.close()
    if in_file:
        lines = [json.loads(line) for line in file.getvalue().splitlines()]
        found = [one["measured_seconds"] for one in lines if one["record"] == "preemption"]
    else:
        found = [record.measured_seconds for record in ledger.preemptions]
    assert found == [3.5, 0.5]


def test_a_request_that_ends_takes_all_its_records_with_it():
    file = io.StringIO()
    ledger = Ledger(file)
    ledger.preempted(victim(), 5, 0.0, [], SWAP)
    ledger.preempted(victim(), 9, 0.0, [], SWAP)
    ledger.finished("r0")
    assert [json.loads(line)["step_id"] for line in file.getvalue().splitlines()] == [5, 9]
    ledger.close()
    assert len(file.getvalue().splitlines()) == 2


def test_one_iteration_of_unknown_length_leaves_a_bound():
    ledger = Ledger()
    ledger.preempted(victim(), 5, 0.0, [], SWAP)
    ledger.measured("r0", 2.0, 6)
    ledger.measured("r0", 1.5, 7, is_timed=False)
    ledger.measured("r0", 0.5, 8)
    ledger.close()
    (record,) = ledger.preemptions
    assert (record.measured_seconds, record.regret_seconds) == (None, None)
    assert (record.bound_seconds, record.regret_bound_seconds) == (4.0, 1.0)


def test_steps_before_a_preemption_are_not_charged_to_it():
    ledger = Ledger()
    ledger.preempted(victim(), 5, 0.0, [], SWAP)
    ledger.measured("r0", 8.0, 4)  # of an earlier preemption, known late
    ledger.measured("r0", 0.5, 5)
    ledger.close()
    assert [record.measured_seconds for record in ledger.preemptions] == [0.5]


def test_lines_of_json():
    file = io.StringIO()
    ledger = Ledger(file)
    for index in (0, 1):
        ledger.preempted(victim(index), 5 + index, 1.5, [("r0", 0.25)], SWAP)
    ledger.measured("r1", 4.0, 99)
    ledger.finished("r1")
    assert file.getvalue().count("\n") == 1  # r0 is not back
    ledger.close()
    assert ledger.preemptions == []
    first, second = map(json.loads, file.getvalue().splitlines())
    assert (first["request_id"], first["measured_seconds"], first["regret_seconds"]) == ("r1", 4.0, 1.0)
    assert second == {
        "record": "preemption",
        "step_id": 5,
        "time": 1.5,
        "request_id": "r0",
        "num_tokens": 7,
        "num_blocks": 2,
        "scores": [["r0", 0.25]],
        "action": "swap",
        "swap_seconds": 2.0,
        "recompute_seconds": 3.0,
        "resumed_step_id": None,
        "resumed_time": None,
        "measured_seconds": None,
        "resume_action": None,
        "resume_swap_seconds": None,
        "bound_seconds": None,
        "regret_seconds": None,
    }


def run(ledger):
    """r1 is swapped out in step 1 at 1.0 and is back in step 2 at 2.0."""
    policy = dataclasses.replace(V1, action=AdaptiveAction(LinearCosts(prefill=1.0, swap=0.5)))
    scheduler = make_scheduler(policy, ledger, num_gpu_blocks=2, num_host_blocks=2)
    scheduler.add(make_request(0, 4, max_new_tokens=2))
    scheduler.add(make_request(1, 4, max_new_tokens=2))
    trace = [step(scheduler, float(now)) for now in range(4)]
    assert trace == ["| r0[0:4]! r1[0:4]!", "r0 <r1", "r1 >r1", "-"]


def test_the_scheduler_tells_the_ledger_what_it_decides():
    ledger = Ledger()
    run(ledger)
    assert ledger.preemptions == [
        PreemptionRecord(
            1, 1.0, "r1", 5, 1, [("r1", 0.0), ("r0", 0.0)], "swap", 1.0, 5.0, 2, 2.0, None, "at once"
        )
    ]
    steps = [
        (s.step_id, s.num_running, s.num_swapped, s.num_used_blocks, s.num_used_host_blocks)
        for s in ledger.steps
    ]
    assert steps == [(0, 2, 0, 2, 0), (1, 1, 1, 2, 1), (2, 1, 0, 2, 1)]
    work = [
        (s.num_prefill_tokens, s.num_decoded, s.num_dropped, s.num_swapped_out, s.num_swapped_in)
        for s in ledger.steps
    ]
    assert work == [(8, 0, 0, 0, 0), (0, 1, 0, 1, 0), (0, 1, 0, 0, 1)]


class Kept(LatestArrivalVictim):
    """Keeps r0 before r2 before r1."""

    def score(self, request, now):
        return {"r0": 3.0, "r1": 1.0, "r2": 2.0}[request.request_id]


def test_scores_are_those_of_the_victims_in_order_and_of_who_would_be_next():
    ledger = Ledger()
    scheduler = make_scheduler(dataclasses.replace(V1, victim=Kept()), ledger, num_gpu_blocks=3)
    for index in range(3):
        scheduler.add(make_request(index, 4, max_new_tokens=2))
    trace = [step(scheduler, float(now)) for now in range(3)]
    assert trace == ["| r0[0:4]! r1[0:4]! r2[0:4]!", "r0 -r1 -r2", "| r1[0:5]!"]
    ledger.close()
    scores = [("r1", 1.0), ("r2", 2.0), ("r0", 3.0)]
    assert ledger.preemptions == [
        PreemptionRecord(1, 1.0, "r1", 5, 1, scores, "recompute", None, None, 2, 2.0),
        PreemptionRecord(1, 1.0, "r2", 5, 1, scores, "recompute", None, None),
    ]
    assert [step.num_dropped for step in ledger.steps] == [0, 2, 0]


@pytest.mark.parametrize("decision", [SWAP, Decision(PreemptionAction.RECOMPUTE)])
def test_costs_that_the_policy_does_not_predict_are_estimated(decision):
    costs = LinearCosts(prefill=0.5, swap=0.25)
    ledger = Ledger(costs=costs)
    ledger.preempted(victim(), 0, 0.0, [], decision)
    ledger.measured("r0", 4.0, 0)
    ledger.close()
    (record,) = ledger.preemptions
    if decision is SWAP:
        assert (record.swap_seconds, record.recompute_seconds) == (2.0, 3.0)
    else:
        swap = costs.swap_out_seconds(2) + costs.swap_in_seconds(2)
        assert (record.swap_seconds, record.recompute_seconds) == (swap, costs.step_seconds(0, 0, 7, 1))
        assert record.regret_seconds == 4.0 - swap > 0


@pytest.mark.parametrize("to_file", [False, True])
def test_how_well_costs_were_predicted_is_written_at_the_end(to_file, tmp_path):
    costs = OnlineCalibration(LinearCosts())
    costs.observe("decode", 1.0, 1.25)
    costs.observe("mixed", 3.0, 2.0)
    costs.observe_bounds("swap_in", 1.0, 0.5, 2.0)
    path = tmp_path / "ledger.jsonl"
    with path.open("w") as file:
        ledger = Ledger(file if to_file else None, costs)
        ledger.close()
    ledger = read_ledger(path) if to_file else ledger
    assert ledger.predictions == costs.report()
    shown = summary(ledger, 5)
    assert "decode: 1 times; off by 20.0%, uncorrected by 20.0%; now times 1.12" in shown
    assert "swap_in: 1 times; 1 of them within all that is known of a copy; now times 1" in shown
    assert "prefill: never" in shown
    assert "mixed: 1 times; off by 50.0%, uncorrected by 50.0%; now times 0.816" in shown


def test_an_aborted_request_closes_its_record():
    ledger = Ledger()
    policy = dataclasses.replace(V1, action=SwapIfItFits())
    scheduler = make_scheduler(policy, ledger, num_gpu_blocks=2, num_host_blocks=2)
    swapped = make_request(1, 4, max_new_tokens=2)
    scheduler.add(make_request(0, 4, max_new_tokens=5))
    scheduler.add(swapped)
    assert [step(scheduler), step(scheduler)][1] == "r0 <r1"
    assert ledger.preemptions == []
    scheduler.finish(swapped, "abort")
    assert [record.resumed_step_id for record in ledger.preemptions] == [None]


def step_line(**changes):
    values = {field.name: 0 for field in dataclasses.fields(StepRecord)}
    return json.dumps({"record": "step", **values, **changes}) + "\n"


def preemption_line(**changes):
    values = {"step_id": 0, "time": 1.5, "request_id": "a", "num_tokens": 5, "num_blocks": 1, "scores": []}
    values |= {"action": "recompute", "swap_seconds": None, "recompute_seconds": 0.5}
    return json.dumps({"record": "preemption", **values, **changes}) + "\n"


def read_ledger_of(folder, text):
    (folder / "ledger.jsonl").write_text(text)
    return read_ledger(folder / "ledger.jsonl")


def test_a_ledger_is_read_back(tmp_path):
    in_memory = Ledger()
    run(in_memory)
    path = tmp_path / "ledger.jsonl"
    with path.open("w") as file:
        run(Ledger(file))
    for text in (path.read_text(), path.read_text() + '{"record": "st'):  # the second as a killed run left it
        path.write_text(text)
        ledger = read_ledger(path)
        assert ledger.steps == in_memory.steps
        (mine,), (theirs,) = ledger.preemptions, in_memory.preemptions
        assert dataclasses.replace(mine, scores=theirs.scores) == theirs
        assert list(map(tuple, mine.scores)) == theirs.scores


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n{}\n", "line 1 is not JSON"),
        ("[]\n", "line 1 must be a JSON object"),
        ("{}\n", "record=None is neither"),
        ('{"record": "step", "step_id": 1}\n', "line 1 is not a ledger's"),
        ("hello\n", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        (step_line(time="abc"), "line 1 is not a ledger's: time='abc' is not float"),
        (step_line(time=math.nan), "time=nan is not float"),
        (step_line(num_running="1"), "num_running='1' is not int"),
        (step_line(time=2.0) + step_line(time=1.0), "line 2 is not a ledger's: time=1.0 is before 2.0"),
        (preemption_line(num_blocks="9"), "num_blocks='9' is not int"),
        (preemption_line(swap_seconds="1"), "swap_seconds='1' is not float | None".replace("|", r"\|")),
        (preemption_line(scores=[["a"]]), "scores="),
        (preemption_line(mixed_seconds=1.0), "unexpected keyword argument 'mixed_seconds'"),
        (preemption_line(action="mixed"), "action='mixed' is none of recompute, swap$"),
        (preemption_line(action="teleport"), "action='teleport' is none of recompute, swap$"),
        (preemption_line(resume_action="teleport"), "resume_action='teleport' is none of"),
        (preemption_line(resume_action="recompute"), "resume_action='recompute' is none of"),
        (json.dumps({"record": "predictions", "kind": "x"}) + "\n", "kind='x' is none of prefill, decode"),
        (json.dumps({"record": "predictions", "kind": "decode"}) + "\n", "line 1 is not a ledger's"),
    ],
)
def test_what_is_no_ledger_is_refused(tmp_path, text, message):
    read_ledger_of(tmp_path, step_line() + preemption_line(action="swap", scores=[["a", 1]]))
    path = tmp_path / "ledger.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_ledger(path)


RECORDS = {
    "header": HeaderRecord,
    "preemption": PreemptionRecord,
    "step": StepRecord,
    "verification": VerificationRecord,
    "predictions": KindReport,
}
UNITS = {"-", "s", "tokens", "blocks", "requests", "comparisons", "share of the measurement", "the policy's"}


@pytest.mark.parametrize("path", ["absent.jsonl", "", 3, None])
def test_a_ledger_that_cannot_be_read_is_refused(tmp_path, path):
    with pytest.raises(ConfigError, match=r"cannot read .*: |must be a path"):
        read_ledger(tmp_path / path if isinstance(path, str) else path)


@pytest.mark.parametrize(
    "change",
    [{"num_waiting": 10**400}, {"num_running": -1}, {"time": -1e308}],
)
def test_numbers_that_no_run_writes_are_refused(tmp_path, change):
    with (tmp_path / "ledger.jsonl").open("w") as file:
        run(Ledger(file))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if json.loads(line)["record"] == "step")
    lines[place] = json.dumps(json.loads(lines[place]) | change)
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines))
    with pytest.raises(
        ConfigError, match=rf"{next(iter(change))}=.* is not (int|float), or not from 0 to 1e.15"
    ):
        read_ledger(tmp_path / "ledger.jsonl")


def test_the_page_has_every_field_with_its_type_and_unit():
    text = (DOCS / "ledger.md").read_text(encoding="utf-8")
    sections = dict(zip(RECORDS, re.split(r"^## \w+$", text, flags=re.MULTILINE)[1:], strict=True))
    for name, record in RECORDS.items():
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+) \|$", sections[name], flags=re.MULTILINE)
        fields = [(field.name, str(field.type).replace("|", r"\|")) for field in dataclasses.fields(record)]
        assert [row[:2] for row in rows] == fields
        for field, kind, unit, _ in rows:
            assert unit in UNITS
            is_time = field.endswith(("seconds", "time"))
            assert (unit == "s") == is_time, (field, kind)
            assert field.startswith("num_") <= (unit in ("tokens", "blocks", "requests", "comparisons"))


HEADER = HeaderRecord("0.1.0", None, "simulated", "adaptive", "mine:costs", {"seed": 0}, {"block_size": 4})


def test_a_file_begins_with_what_wrote_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with path.open("w") as file:
        ledger = Ledger(file)
        ledger.begin(HEADER)
        run(ledger)
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == {"record": "header", **dataclasses.asdict(HEADER)}
    assert read_ledger(path).header == HEADER
    path.write_text("\n".join(lines[1:]))
    assert read_ledger(path).header is None  # as older versions wrote them
    assert len(read_ledger(path).steps) == 3
    path.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(ConfigError, match="a header is a ledger's first line: two runs"):
        read_ledger(path)
    path.write_text(lines[0].replace('"adaptive"', "3"))
    with pytest.raises(ConfigError, match="policy=3 is not str"):
        read_ledger(path)


def test_columns_are_arrays_of_plain_types():
    ledger = Ledger(costs=OnlineCalibration(LinearCosts()))
    run(ledger)
    ledger.preempted(victim(7), 9, 4.0, [("r7", 0.5)], RECOMPUTE)
    ledger.measured("r7", 4.5, 99)
    ledger.close()
    table = ledger.columns()
    names = [field.name for field in dataclasses.fields(PreemptionRecord)]
    assert list(table) == [*names, "predicted_seconds", "regret_seconds", "regret_bound_seconds"]
    assert {len(column) for column in table.values()} == {2}
    assert {column.dtype.kind for column in table.values()} == {"i", "f", "U"}
    assert table["request_id"].tolist() == ["r1", "r7"]
    assert table["resume_action"].tolist() == ["at once", ""]
    assert table["resumed_step_id"][0] == 2.0
    assert math.isnan(table["resumed_step_id"][1])
    assert math.isnan(table["regret_seconds"][0])
    assert table["regret_seconds"][1] == 0.5
    assert json.loads(table["scores"][1]) == [["r7", 0.5]]
    assert ledger.columns("steps")["num_running"].tolist() == [2, 1, 1]
    predictions = ledger.columns("predictions")
    assert predictions["kind"].tolist() == ["prefill", "decode", "mixed", "swap_out", "swap_in"]
    assert math.isnan(predictions["error_before"][0])
    assert {len(column) for column in Ledger().columns().values()} == {0}
    with pytest.raises(
        ConfigError, match="no table 'step': use one of preemptions, steps, verifications, predictions"
    ):
        ledger.columns("step")
