"""Anybody's timings of iterations: read, fitted, and told how far the fits reach."""

import gzip
import json
import random

import pytest

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.research.iterations import COUNTS, fit_iterations, load_iterations, num_too_few

COLUMNS = "prefill_tokens,num_prefills,prefill_kv_tokens,num_decodes,decode_kv_tokens,latency_ms"
HEADER = f"tensor_parallel,phase,{COLUMNS}"


def rows_of(count, seed=0):
    """Steps of 5 ms and 10 us a token and 2 us a hundred cached ones, faster with GPUs; a tenth of noise."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        gpus, batch = draw.choice((1, 2, 4)), draw.randrange(1, 64)
        context = batch * draw.randrange(10, 2000)
        tokens = draw.choice((0, 0, draw.randrange(1, 2000)))
        prompts = min(tokens, draw.randrange(1, 4))
        ms = (5 + 0.01 * (batch + tokens) + 2e-5 * context) / gpus * draw.uniform(0.99, 1.01)
        rows.append(f"{gpus},x,{tokens},{prompts},0,{batch},{context},{ms:.5f}")
    return rows


@pytest.fixture
def timings(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([HEADER, *rows_of(900)]) + "\n")
    return path


def test_each_kind_is_read_by_its_counts(tmp_path):
    path = tmp_path / "steps.csv.gz"
    lines = [HEADER, "2,a,0,0,0,3,30,1.5", "1,a,100,1,7,0,0,2.5", "1,a,100,1,7,3,30,4"]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines))
    decode, prefill, mixed = load_iterations(path)
    assert (decode.kind, decode.work, decode.seconds) == ("decode", (3, 30), 0.0015)
    assert (prefill.kind, prefill.work) == ("prefill", (100, 1, 7))
    assert (mixed.kind, mixed.work) == ("mixed", (3, 30, 100, 1, 7))
    assert prefill.features[1] == 2 * decode.features[1], "two GPUs share a layer"


def test_fits_reach_less_far_where_nothing_was_measured(timings):
    found = {
        one.report.kind: one
        for one in fit_iterations(load_iterations(timings), names=["linear"], degrees=[1, 2])
    }
    assert found.keys() == {"decode", "mixed"}
    for one in found.values():
        assert one.report.test.mape < 0.05
        regions = {region.name: region for region in one.regions}
        assert "2 GPUs" in regions
        assert any(name.startswith("batch above") for name in regions)
        for region in regions.values():
            assert region.num_samples >= 60
            assert region.errors.mape < 0.5


def test_the_command_prints_and_writes_what_it_found(timings, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(fit_iterations.__kwdefaults__, "names", ("linear", "decision tree"))
    monkeypatch.setitem(fit_iterations.__kwdefaults__, "degrees", (1, 2))
    out = tmp_path / "fit.json"
    assert main(["profile", "--fit", str(timings), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "## decode" in shown
    assert "| left out | iterations | MAPE there | median |" in shown
    kinds = json.loads(out.read_text())["kinds"]
    assert {one["fit"]["kind"] for one in kinds} == {"decode", "mixed"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has no column num_decodes, decode_kv_tokens"),
        (HEADER.replace("latency_ms", "time") + "\n", "has no column latency_ms or seconds"),
        (HEADER + "\n1,x,0,0,0,3,30,1\n1,x,0,0,0,three,30,1\n", r"line 3: invalid literal"),
        (HEADER + "\n1,x,0,0,0,3,30,0\n", r"line 2: a decode sample took 0.0 seconds"),
        (HEADER + "\n0,x,0,0,0,3,30,1\n", r"line 2: tensor_parallel=0"),
        (HEADER + "\n1,x,0\n", r"line 2: "),
    ],
)
def test_malformed_files_are_refused(tmp_path, text, message):
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_iterations(path)


def test_what_cannot_be_fitted_is_refused(timings, tmp_path, capsys):
    with pytest.raises(ConfigError, match="cannot read the iterations"):
        load_iterations(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="5 iterations are too few: a fit needs 60 distinct"):
        list(fit_iterations(load_iterations(timings)[:5]))
    for options, message in (
        (["--fit", str(timings), "--model", "m"], "--model means nothing with --fit"),
        (["--fit", str(timings), "--samples", "s.json"], "--samples means nothing with --fit"),
        (["--fit", str(timings), "--seconds", "3"], "--seconds means nothing with --fit"),
        (["--fit", str(timings), "--compile-report"], "--compile-report means nothing with --fit"),
        (["--json", "x.json"], "--json does nothing without --fit"),
        (["--fit", str(timings), "--json", str(timings), "--overwrite"], "--fit and --json are one file"),
    ):
        assert main(["profile", *options]) == 2
        assert message in capsys.readouterr().err


def test_work_measured_again_and_again_is_no_more_work(tmp_path):
    path = tmp_path / "steps.csv"
    same = [f"1,x,{tokens},1,0,0,0,{tokens / 100}" for tokens in (100, 200)] * 50
    path.write_text("\n".join([HEADER, *rows_of(900), *same]) + "\n")
    samples = load_iterations(path)
    assert num_too_few(samples) == {"prefill": 2}
    found = fit_iterations(samples, names=["linear"], degrees=[1])
    assert {one.report.kind for one in found} == {"decode", "mixed"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("9" * 400 + ",0,0,0,0,5", "features must lie in"),
        ("1,1,0,0,0,1e300", "must be from 1e-09 to 1e.06: are they in another unit"),
        ("1,1,0,0,0,1e-320", "must be from 1e-09 to 1e.06: are they in another unit"),
        ("1,2", "line 2: fewer values than columns"),
    ],
)
def test_numbers_of_no_iteration_are_refused(tmp_path, row, message):
    file = tmp_path / "rows.csv"
    file.write_text(",".join([*COUNTS, "latency_ms"]) + "\n" + row + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_iterations(file)


def test_files_of_spreadsheets_are_read_and_broken_gzip_is_refused(tmp_path):
    text = ",".join([*COUNTS, "latency_ms"]) + "\n" + "1,1,0,0,0,5\n" * 50
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8-sig")
    assert len(load_iterations(tmp_path / "rows.csv")) == 50
    packed = gzip.compress(text.encode())
    for broken in (packed[:-12], packed[:20] + bytes(20) + packed[40:]):
        (tmp_path / "rows.csv.gz").write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot read the iterations"):
            load_iterations(tmp_path / "rows.csv.gz")
