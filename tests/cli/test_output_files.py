"""Files that commands and scripts write: none is written over by accident, and all are looked at first."""

import pathlib
import re
import subprocess
import sys

import bench_speculation
import pytest
import validate_simulator

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.research.workloads import make_trace
from jaxllm.system.output_files import NewFolder, OutputParser, check_writable, new_file

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
COMMANDS = {
    "bench throughput": ["bench", "throughput", "--model", "nowhere", "--output"],
    "bench serve": ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "m", "--output"],
    "explain": ["explain", "nowhere.jsonl", "--plot"],
    "profile": ["profile", "--model", "nowhere", "--samples"],
    "plan": ["plan", "jaxllm/demo_model", "--device", "h100", "--json"],
}


def test_what_is_there_is_kept_unless_told_otherwise(tmp_path):
    there, empty, new = tmp_path / "there", tmp_path / "empty", tmp_path / "new"
    there.write_text("precious")
    empty.touch()
    check_writable({"--a": new, "--b": empty, "--c": None})
    assert not new.exists()
    with pytest.raises(ConfigError, match=r"--b '.*there' exists, and nothing is overwritten.*--overwrite"):
        check_writable({"--a": new, "--b": there})
    check_writable({"--b": there}, overwrite=True)
    with pytest.raises(ConfigError, match=r"there is no folder .*none"):
        check_writable({"--a": tmp_path / "none" / "a"})
    with pytest.raises(ConfigError, match="Is a directory"):
        check_writable({"--a": tmp_path}, overwrite=True)
    check_writable({"--a": "/dev/null"})
    assert there.read_text() == "precious"


def test_a_scripts_parser_looks_at_files_and_folders(tmp_path, capsys):
    parser = OutputParser()
    parser.add_argument("folder", type=NewFolder("results.json"))
    parser.add_argument("--out", type=new_file)
    (tmp_path / "other").write_text("precious")
    given = [str(tmp_path), "--out", str(tmp_path / "new.json")]
    assert parser.parse_args(given).out == tmp_path / "new.json"
    (tmp_path / "results.json").write_text("precious")
    for arguments in (given, [str(tmp_path / "new"), "--out", str(tmp_path / "other")]):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
        assert "exists, and nothing is overwritten" in capsys.readouterr().err
        parser.parse_args([*arguments, "--overwrite"])


@pytest.mark.parametrize(
    ("script", "option"),
    [(validate_simulator, "--plot"), (bench_speculation, "--simulate")],
)
def test_a_script_names_a_picture_that_cannot_be_drawn(script, option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main([option, str(tmp_path / "picture.cvs"), "--out", str(tmp_path / "out.json")])
    assert "is no picture's name: it must end in" in capsys.readouterr().err


def test_a_run_goes_on_in_its_own_folder(tmp_path):
    parser = OutputParser()
    parser.add_argument("folder", type=NewFolder("results.json", journals=["cells.jsonl"]))
    for name in ("results.json", "cells.jsonl"):
        (tmp_path / name).write_text("{}")
    parser.parse_args([str(tmp_path)])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_look_before_they_work(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    there = tmp_path / "there.json"
    there.write_text("precious")
    if COMMANDS[command][-1] == "--plot":
        there = there.rename(tmp_path / "there.png")
    assert main([*COMMANDS[command], str(there)]) == 2
    assert "exists, and nothing is overwritten" in capsys.readouterr().err
    assert main([*COMMANDS[command], str(tmp_path / "none" / "x.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert there.read_text() == "precious"


PICTURES = {
    "bench serve": ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "m"],
    "compare": ["compare", "--backends", "nobody"],
    "explain": ["explain", "nowhere.jsonl"],
    "plan": ["plan", "nowhere", "--device", "h100", "--crossover"],
    "simulate": ["simulate", "--trace", "nowhere.jsonl"],
}


@pytest.mark.parametrize("command", PICTURES)
def test_pictures_are_told_by_their_names_before_the_work(command, tmp_path, capsys):
    for name in ("r.txt", "r"):
        assert main([*PICTURES[command], "--plot", str(tmp_path / name)]) == 2
        assert re.search(
            r"--plot .*r(\.txt)? is no picture's name: it must end in .*\.png", capsys.readouterr().err
        )
    assert not [*tmp_path.iterdir()]
    assert main([*PICTURES[command], "--plot", str(tmp_path / "r.PNG")]) != 0
    assert "picture" not in capsys.readouterr().err


def test_a_benchmarks_model_is_written_over_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"precious weights")
    make = [sys.executable, "-m", "jaxllm", "make-model", str(tmp_path), "--size", "tiny"]
    ran = subprocess.run(make, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "nothing is overwritten" in ran.stderr
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious weights"
    subprocess.run([*make, "--overwrite"], check=True, capture_output=True)
    assert (tmp_path / "model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("script", ["make_golden.py", "make_golden_beams.py"])
def test_recorded_answers_are_written_over_nothing(tmp_path, script):
    there = tmp_path / "llama_gqa" / "golden.npz"
    there.parent.mkdir()
    there.write_text("precious")
    (tmp_path / "torch.py").write_text("")  # where there is none: it is not used before the files are
    options = [str(there)] if "beams" in script else ["llama_gqa", "--out", str(tmp_path)]
    code = (
        f"import runpy, sys; sys.path.append({str(tmp_path)!r}); sys.argv[:] = {[script, *options]!r}; "
        f"runpy.run_path({str(ROOT / 'scripts' / script)!r}, run_name='__main__')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, there.read_text()) == (2, "precious"), ran.stderr
    assert "exists, and nothing is overwritten" in ran.stderr


def test_a_trace_is_saved_over_nothing(tmp_path):
    trace = make_trace("alpaca", 3, 8, outputs="uniform", seed=0)
    trace.save(tmp_path / "t.json")
    with pytest.raises(ConfigError, match=r"overwrite=True"):
        trace.save(tmp_path / "t.json")
    trace.save(tmp_path / "t.json", overwrite=True)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_option_of_a_script_that_names_a_result_is_looked_at(path):
    text = path.read_text(encoding="utf-8")
    options = re.findall(r'add_argument\(\s*"--(?:out|plot|report|ledger|out-dir)", type=(\w+)', text)
    assert set(options) <= {"new_file", "NewFolder"}
    writes = re.search(r"write_json\((args|options)\.|savefig|write_text\(", text)
    assert not (writes and "ArgumentParser(" in text)
