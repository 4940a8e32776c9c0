"""Every script in `examples/` runs on the embedded model and prints what it is there to show."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SHOWN = {
    "chat": r"[1-9]\d* found in the prefix cache",
    "fine_tune": r"after 50 steps: loss 0\.[01]\d*\n'    return area\(size\)",
    "offline_batch": "24 tokens, ended by 'length'",
    "own_jit": "chosen from",
    "own_policy": r"shortest   ended in the order \[8, 8, 8, 8, 32, 32, 32, 32\]",
    "policy_gradient": r"off by at most \de-0[5-9]\nreward at the end: 0\.1",
    "sampling": "beam of score",
    "speculative": "the same tokens, 1[0-9] runs for 24",
    "streaming": "second ended in step",
}


def test_all_scripts_are_known_and_short():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SHOWN.keys()
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        num_lines = sum(map(bool, text.splitlines()))
        assert num_lines <= (100 if path.stem == "policy_gradient" else 60)
        assert f"python examples/{path.name}\n" in text


@pytest.mark.parametrize("name", SHOWN)
def test_a_script_runs(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(SHOWN[name], capsys.readouterr().out)
