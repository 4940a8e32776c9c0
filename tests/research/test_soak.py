"""The soak: what it says of rounds that go well, and of those that do not."""

import argparse
import subprocess
import sys

import soak


class Lone:
    """Says 1, 2, 3 whatever it is asked."""

    def generate(self, prompt, params, use_tqdm):
        return [argparse.Namespace(token_ids=[1, 2, 3])]


def judged(*lines, most_growth=10.0):
    totals = {"answered": 0, "compared": 0}
    args = argparse.Namespace(check_every=2, most_growth=most_growth)
    return soak.judge(Lone(), list(lines), args, totals), totals


def seen(*mib):
    return {"memory": [(one, 3) for one in mib], "threads": []}


def answer(*tokens):
    return {"prompt": [5], "params": {"temperature": 0}, "tokens": list(tokens)}


def test_every_other_answer_is_compared():
    problems, totals = judged(answer(1, 2, 3), answer(9), answer(1, 2, 3), seen(1.0))
    assert problems == []
    assert totals == {"answered": 3, "compared": 2}
    assert len(judged(answer(1, 2))[0]) == 1


def test_errors_threads_and_growth_are_problems():
    problems, _ = judged({"error": "KeyError: 5"}, seen(*[1.0] * 4, *[20.0] * 2) | {"threads": ["a"]})
    assert problems[0] == "KeyError: 5"
    assert problems[1] == "threads stayed: ['a']"
    assert problems[2].startswith("memory grew by 19 MiB")
    assert judged(seen(*[1.0] * 4, *[9.0] * 2))[0] == []
    assert judged(seen(*[1.0] * 2, *[20.0] * 4))[0] == []  # a pool that fills
    compiling = seen(*[1.0] * 4, *[20.0] * 2)
    compiling["memory"][4:] = [(20.0, 4), (20.0, 4)]
    assert judged(compiling)[0] == []  # a program that came late


def test_a_short_soak_finds_nothing():
    command = [sys.executable, soak.__file__, "--minutes", "0.01", "--seconds", "2"]
    ended = subprocess.run([*command, "--presets", "hicache"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert '"rounds": 1' in ended.stdout
    assert '"answered": 0' not in ended.stdout
