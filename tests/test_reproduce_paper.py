"""The paper's evaluation in simulation, on a few requests."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import reproduce_paper


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    reproduce_paper.main(["--requests", "12", "--jobs", "1", "--out-dir", str(folder)])
    return folder


def test_every_cell_is_simulated(reproduced):
    results = json.loads((reproduced / "results.json").read_text())
    cells = results["cells"]
    assert len(cells) == 4 * (4 * 3 * 2 + 3 * 6 + 3 * 5)
    assert {cell["preset"] for cell in cells} == {"adaptive", "paper", "vllm", "vllm_swap"}
    for cell in cells:
        assert cell["output_tokens_per_second"] > 0
        assert cell["mean_weighted_turnaround"] >= 1
        assert sum(cell["seconds_spent"].values()) == pytest.approx(cell["seconds"])


def test_the_report_sets_the_numbers_beside_the_papers(reproduced):
    report = (reproduced / "report.md").read_text()
    rows = [line for line in report.splitlines() if line.startswith("| opt-13b | chatbot | 1.38 |")]
    assert len(rows) == 2  # outputs of 64, and of 16 to 64 tokens
    assert all("| 2.46 |" in row for row in rows)
    for name in ("fig3.png", "fig4.png"):
        assert name in report
        assert (reproduced / name).stat().st_size > 1000
    assert str(reproduced) not in report
