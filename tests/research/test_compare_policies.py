"""Candidates for the default policy: every one runs, and what the report says of them."""

import dataclasses
import json

import compare_policies
import pytest
from policies import cells, report

from jaxllm.sched.policies import FairPriority, LeastUrgentVictim, MoreUrgentFirst
from jaxllm.sched.presets import make_preset


def row(policy, setting, rate, turnaround, part="arrivals"):
    values = dict(zip(report.MEASURES, (rate, turnaround, 2.0, 5.0), strict=True))
    return {
        "part": part,
        "policy": policy,
        "dataset": "chatbot",
        "outputs": "max",
        "setting": setting,
        **values,
    }


def rows(ours=(1.0, 1.0), theirs=(1.0, 1.0)):
    return [
        *(row(baseline, "all", 0.5, 3.0) for baseline in cells.BASELINES[1:]),
        row(cells.BASELINES[0], "all", *theirs),
        row("adaptive", "all", *ours),
    ]


def test_every_candidate_runs_in_every_setting(tmp_path):
    compare_policies.main(["--requests", "14", "--jobs", "1", "--out-dir", str(tmp_path)])
    found = json.loads((tmp_path / "results.json").read_text())["cells"]
    policies = {*cells.BASELINES, *cells.OURS, *cells.CHANGED, *cells.COMBINED}
    of_arrivals = [one for one in found if one["part"] == "arrivals"]
    assert {one["policy"] for one in of_arrivals} == policies
    assert len(of_arrivals) == 36 * len(policies)
    assert len(found) - len(of_arrivals) == 2 * 2 * len(cells.DEVICES) * (8 + len(cells.ELSEWHERE))
    text = (tmp_path / "report.md").read_text()
    for policy in cells.COMBINED:
        assert f"| {policy} |" in text
    assert "| chatbot | max | 128 clients who think |" in text
    assert "What `adaptive` loses:" in text
    assert (tmp_path / "fronts.png").stat().st_size > 1000
    assert (
        f"2 presets and {len(cells.COMBINED) + len(cells.CHANGED)} candidates: {len(cells.COMBINED)} " in text
    )
    assert text.count("| paper, copies overlapped |") == 4
    assert str(tmp_path) not in text
    report.report([one for one in found if one["part"] == "devices"], "", "", tmp_path / "fronts.png")
    assert not (tmp_path / "fronts.png").exists()


def test_published_systems_copy_beside_computation_too(monkeypatch):
    overlaps = {}

    def run(device, trace, policy, *, overlap, **options):
        overlaps[len(overlaps)] = overlap, policy(device.costs())
        raise StopIteration

    monkeypatch.setattr(cells.Device, "run", run)
    for name in ("paper", "paper, copies overlapped", "adaptive"):
        cell = cells.Cell("arrivals", name, "chatbot", "max", 64, "all", "all", 1.0, 64, 4, 0, None)
        with pytest.raises(StopIteration):
            cells.run_cell(cell)
    assert [overlap for overlap, _ in overlaps.values()] == [False, True, True]
    assert repr(overlaps[0][1]) == repr(overlaps[1][1])


def test_candidates_are_what_their_names_say():
    costs = compare_policies.Device("opt-13b").costs()
    same = cells.policy_of("fair; least urgent; urgent set", costs)
    fair = FairPriority()  # the default's where nobody goes on with a conversation
    assert (same.priority, same.restore) == (fair, MoreUrgentFirst(fair))
    assert same.victim == LeastUrgentVictim(FairPriority())  # the default's until admission by growth
    assert cells.policy_of("patience 16", costs).patience == 16
    assert cells.policy_of("decodes slowed down 1.5 times", costs).iterations.slowdown == 1.5
    assert cells.policy_of("reserve 3 %", costs).admission.watermark == 0.03
    assert cells.policy_of("vllm", costs) == make_preset("vllm")
    in_order = cells.policy_of("first come; latest; in order", costs)
    assert not in_order.restore.skips
    assert in_order.admission.watermark == 0
    as_vllm = cells.policy_of("first come; latest; in order; 1 % reserve", costs)
    assert as_vllm.admission.watermark == 0.01
    assert dataclasses.replace(as_vllm, admission=in_order.admission) == in_order
    assert len(cells.COMBINED) == 30
    assert len({repr(cells.policy_of(name, costs)) for name in cells.COMBINED}) == len(cells.COMBINED)


def test_a_setting_is_lost_by_either_measure():
    assert report.scores(rows())["adaptive"].lost == []
    assert report.scores(rows(ours=(0.985, 1.015)))["adaptive"].lost == []
    assert report.scores(rows(ours=(0.97, 1.0)))["adaptive"].lost == ["chatbot, max, all"]
    assert report.scores(rows(ours=(1.0, 1.03)))["adaptive"].lost == ["chatbot, max, all"]
    (said,) = report.lost(rows(ours=(2.0, 1.5)), "adaptive")
    assert "weighted turnaround 1.500 of `vllm`'s, which has 0.50 of its tokens/s" in said
    assert report.lost(rows(), "adaptive") == ["- none"]


def test_better_balances_are_named_with_what_they_lose():
    of_two = [*rows(), row("patience 16", "all", 2.0, 1.5)]
    said = report.better_balanced(report.scores(of_two))
    assert "`patience 16` (" in said
    assert ", loses 1)" in said
    said = report.better_balanced(report.scores(rows(ours=(9.0, 0.1))))
    assert said == "None has a better balance than `adaptive`, which loses 0 settings."


def test_the_front_has_who_is_not_beaten_in_both():
    def score(rate, turnaround):
        means = dict(zip(report.MEASURES, (rate, turnaround, 1.0, 1.0), strict=True))
        return report.Score(means, means, [])

    found = {
        "fast": score(1.2, 1.1),
        "short": score(1.0, 0.9),
        "beaten": score(1.0, 1.0),
        "both": score(1.1, 0.95),
    }
    assert report.front(found, "mean_weighted_turnaround") == {"fast", "short", "both"}
    assert score(1.2, 0.8).balance == pytest.approx(1.5)


def test_wrong_arguments(tmp_path, capsys):
    for wrong, message in (
        (["--parts", "links"], "--parts links: name some of arrivals, devices"),
        (["--requests", "0"], "must be at least 1"),
        (["--seeds", "-1"], "--seeds at least 0"),
        (["--samples", str(tmp_path / "absent.json")], "--samples: cannot read the samples"),
    ):
        with pytest.raises(SystemExit):
            compare_policies.main([*wrong, "--out-dir", str(tmp_path)])
        assert message in capsys.readouterr().err
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(SystemExit):
            compare_policies.main(["--out-dir", str(folder)])
        assert f"{str(file)!r} is a file; name a folder" in capsys.readouterr().err
