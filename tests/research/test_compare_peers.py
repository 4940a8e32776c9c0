"""`jaxllm compare` beside servers, at a request rate, and with what a machine tells of energy."""

import json
import subprocess
import sys

import numpy as np
import pytest
from server_helpers import serving

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, RequestError, RequestTooLargeError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.compare import install as installing
from jaxllm.research.compare import machine, report
from jaxllm.research.compare.backends import WORKERS
from jaxllm.research.compare.energy import EnergyMeter
from jaxllm.research.compare.install import RECIPES, Recipe, install, python_of
from jaxllm.research.compare.latency import poisson_arrivals, summarise
from jaxllm.research.compare.workloads import get_workload

SIZES = ["--max-num-seqs", "8", "--num-requests", "6", "--threads", "1", "--repetitions", "2"]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch):
    monkeypatch.setattr(machine, "_BUSY_SAMPLE_SECONDS", 0.05)


def workload_of(tmp_path, **content):
    path = tmp_path / "some.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_server_beside_the_engine(tmp_path, capsys):
    """The same tokens, of which the server tells the ids; both wait at a rate."""
    prompts = [[5, 6, 7 + place] for place in range(6)]
    path = workload_of(tmp_path, prompts=prompts, max_tokens=[4, 5, 6, 4, 5, 6])
    with serving(engine={"max_model_len": 64}) as running:
        status = main(
            [
                *("compare", str(demo_model_path()), path, *SIZES, "--backends", "jaxllm"),
                *("--server", f"ours={running.url}/v1", "--server-token-ids", "--rate", "50"),
                *("--out", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")),
            ]
        )
    assert status == 0
    results = json.loads((tmp_path / "out.json").read_text())
    engine, server = results["rows"]
    assert (engine["backend"], server["backend"]) == ("jaxllm", "ours")
    assert server["error"] is None
    assert server["agreement"]["num_matching"] == 6
    assert len(server["seconds"]) == 2
    ratio = server["jaxllm_over_it"]
    assert ratio["num_pairs"] == 2
    assert ratio["low"] < ratio["mean"] < ratio["high"]
    for row in (engine, server):
        waits = row["latency"]
        assert 0 < waits["first_token_seconds"]["p50"] <= waits["first_token_seconds"]["p99"]
        assert waits["first_token_seconds"]["p99"] <= waits["request_seconds"]["p99"]
        assert waits["seconds_per_token"]["mean"] > 0
    assert results["workloads"][0]["latency_requests_per_second"] > 0
    table = capsys.readouterr().out
    assert "| back-end | first token p50, s | p99 |" in table
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_is_not_there_is_a_row(tmp_path, capsys):
    path = workload_of(tmp_path, prompts=[[5]], max_tokens=[2])
    words = ["compare", str(demo_model_path()), path, "--backends", "", "--threads", "1"]
    status = main([*words, "--server", "sglang=http://127.0.0.1:9/v1"])
    assert status == 1
    assert "sglang failed: ConnectionRefusedError" in capsys.readouterr().out


def test_text_is_made_tokens_of_once(tmp_path):
    path = workload_of(tmp_path, prompts=["def add(a, b):", [1, 2]], max_tokens=[3, 4])
    options = {"num_requests": 9, "vocab_size": 4096, "seed": 0}
    with pytest.raises(ConfigError, match="prompts of text: name a folder with a tokenizer"):
        get_workload(path, **options)
    workload = get_workload(path, **options, tokenizer=str(demo_model_path()))
    assert len(workload.prompts[0]) > 2
    assert workload.prompts[1] == [1, 2]
    for option in ({"too_long": "clip"}, {"benchmark": 1}):
        with pytest.raises(
            ConfigError, match=r"holds prompts, and (clip|benchmark) is of traces: leave it out"
        ):
            get_workload(path, **options, tokenizer=str(demo_model_path()), **option)


def test_traces_are_workloads(tmp_path):
    """With their own times, and prompts that begin alike where their hashes say so."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * place, "input_length": 40, "output_length": 3 + place, "hash_ids": [7]}
        for place in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = get_workload(str(path), num_requests=4, vocab_size=300, seed=0)
    assert workload.arrivals == [0.0, 0.5, 1.0, 1.5]
    assert workload.max_tokens == [3, 4, 5, 6]
    assert [len(prompt) for prompt in workload.prompts] == [40] * 4
    with open(path, "a") as file:
        file.write('{"timestamp": 3000, "input_length": 40, "output_length": "x", "hash_ids": [7]}\n')
    with pytest.raises(RequestError, match=r"line 6: .*on_bad='skip'"):
        get_workload(str(path), num_requests=9, vocab_size=300, seed=0)
    skipped = get_workload(str(path), num_requests=9, vocab_size=300, seed=0, on_bad="skip")
    assert len(skipped.prompts) == 5
    assert workload.prompts[0] == workload.prompts[1]  # the 40 tokens are of the first hash
    read = {"num_requests": 4, "vocab_size": 300, "seed": 0, "max_len": 44}
    with pytest.raises(RequestTooLargeError, match=r"request 2 of trace 'trace' .* \(--clip\)"):
        get_workload(str(path), **read)
    clipped = get_workload(str(path), **read, too_long="clip", time_unit="s", hash_block_len=40)
    assert [len(prompt) for prompt in clipped.prompts] == [40, 40, 39, 38]
    assert clipped.arrivals == [0.0, 500.0, 1000.0, 1500.0]


def test_waiting_is_summarised():
    reply = {"arrivals": [0.0, 1.0, 2.0], "first": [0.5, 1.25, 3.0], "last": [1.5, 1.25, 4.0]}
    found = summarise(reply, [11, 1, 6])
    assert found["seconds"] == 4.0
    assert found["output_tokens_per_second"] == pytest.approx(18 / 4)
    assert found["first_token_seconds"]["mean"] == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert found["seconds_per_token"]["mean"] == pytest.approx((0.1 + 0.2) / 2)  # of one token there is none
    assert found["request_seconds"]["p50"] == pytest.approx(1.5)
    assert summarise({"arrivals": [0], "first": [1], "last": [1]}, [1])["seconds_per_token"] == {}


def test_arrivals_are_poisson():
    times = poisson_arrivals(20.0, 4000, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert times == poisson_arrivals(20.0, 4000, seed=1)


def counter(folder, name, joules, most=1000.0):
    home = folder / name
    home.mkdir(exist_ok=True)
    (home / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    (home / "max_energy_range_uj").write_text(f"{int(most * 1e6)}\n")


def test_energy_is_that_of_all_packages(tmp_path):
    assert EnergyMeter(tmp_path / "none").joules() is None
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        counter(tmp_path, name, 100.0)
    meter = EnergyMeter(tmp_path)
    counter(tmp_path, "intel-rapl:0", 130.0)
    counter(tmp_path, "intel-rapl:0:0", 120.0)  # a part of the first
    counter(tmp_path, "intel-rapl:1", 105.0)
    assert meter.joules() == pytest.approx(35.0)
    counter(tmp_path, "intel-rapl:0", 10.0)  # it began anew
    assert meter.joules() == pytest.approx(880.0)


def test_pairs_have_intervals():
    rows = [
        {"backend": "jaxllm", "seconds": [1.0, 1.1, 0.9]},
        {"backend": "vllm", "seconds": [2.0, 2.2, 1.8]},
        {"backend": "openvino", "seconds": [1.5]},
        {"backend": "failed", "seconds": []},
    ]
    report.set_pairs(rows)
    assert rows[0]["jaxllm_over_it"] is None
    assert rows[1]["jaxllm_over_it"]["mean"] == pytest.approx(2.0)
    assert rows[1]["jaxllm_over_it"]["low"] == pytest.approx(2.0)
    assert rows[2]["jaxllm_over_it"] == {
        "mean": pytest.approx(1.5),
        "low": None,
        "high": None,
        "num_pairs": 1,
    }
    assert rows[3]["jaxllm_over_it"] is None
    assert report._paired(rows[1]["jaxllm_over_it"]) == "2.00x (2.00 to 2.00)"


# Environments


def test_an_environment_is_made_step_by_step(monkeypatch, tmp_path):
    """What was installed without its dependencies gets these, but for those it does without."""
    calls = []

    def run(command, **options):
        calls.append(command)
        if "-c" in command and "requires" in command[-1]:
            return subprocess.CompletedProcess(command, 0, "numpy>=2\n", "")
        if command[1:3] == ["-m", "venv"]:
            (tmp_path / "peer").mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    recipe = Recipe((("torch==2.13.0",), ("--no-deps", "peer==1")), "peer", needs="peer", skipped=("torch",))
    monkeypatch.setitem(installing.RECIPES, "peer", recipe)
    monkeypatch.setattr(installing.subprocess, "run", run)
    assert python_of("peer", tmp_path) is None
    python = install("peer", tmp_path, pip_arguments=["--quiet"])
    assert python == str(tmp_path / "peer" / "bin" / "python") == python_of("peer", tmp_path)
    words = [" ".join(command[1:]) for command in calls]
    assert words[0].startswith("-m venv --clear")
    assert words[1] == "-m pip install --quiet torch==2.13.0"
    assert words[2] == "-m pip install --quiet --no-deps peer==1"
    assert words[4] == f"-m pip install --quiet -r {tmp_path / 'peer' / 'requirements.txt'} torch==2.13.0"
    assert words[5] == "-c import peer"
    assert (tmp_path / "peer" / "requirements.txt").read_text() == "numpy>=2\n"


def test_a_step_that_fails_leaves_no_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(
        installing.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3)
    )
    with pytest.raises(ConfigError, match=r"--install vllm: .* ended with status 3"):
        install("vllm", tmp_path)
    assert python_of("vllm", tmp_path) is None
    with pytest.raises(ConfigError, match="recipes for transformers, vllm on a gpu"):
        install("openvino", tmp_path, device="gpu")


def test_what_a_package_needs_is_listed():
    code = installing._LISTING.format(package="pytest", skipped=("pluggy",))
    needed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "iniconfig" in needed
    assert "pluggy" not in needed
    assert "hypothesis" not in needed  # of an extra


def test_every_recipe_is_of_a_worker():
    workers = {path.stem.removesuffix("_worker").replace("_", "-") for path in WORKERS.glob("*_worker.py")}
    assert RECIPES.keys() <= workers
