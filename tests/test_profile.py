"""`jaxllm profile`, and engines that choose policies by name."""

import dataclasses
import functools
import itertools
import logging

import pytest
from engine_helpers import make_llm, run
from test_samples import measured
from variants import golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.bench.profile import Profiler
from jaxllm.cli.main import main
from jaxllm.costs import find_costs, profile_folder, shape_of
from jaxllm.errors import ConfigError, ProfileError
from jaxllm.executor import compile_stats
from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.regression import fit
from jaxllm.predictors.samples import load_samples, save_samples
from jaxllm.predictors.store import Profile, profile_path
from jaxllm.predictors.table import TableCostModel
from jaxllm.sched.ledger import read_ledger
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.presets import PRESETS
from jaxllm.scheduling import make_scheduling

NAME = "llama_gqa"


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint(NAME), num_host_blocks=16)


@pytest.fixture(scope="module")
def profiler(llm):
    return Profiler(llm.executor, shape_of(llm.model_config, "tiny", llm.dtype), seed=1)


@pytest.fixture(scope="module")
def samples(profiler):
    compiled, _ = compile_stats.total()
    found = profiler.samples(0.1)
    assert compile_stats.total()[0] == compiled
    return found


def test_every_kind_is_measured(llm, samples):
    assert samples.keys() == set(COST_KINDS)
    config = llm.executor.config
    for kind, of_kind in samples.items():
        assert len(of_kind) >= 60
        assert {sample.kind for sample in of_kind} == {kind}
    tokens = [sample.features[2] for sample in samples["prefill"]]
    assert max(tokens) == config.buckets.prefill[-1][0]
    batches = [sample.features[2] for sample in samples["decode"]]
    assert set(config.buckets.decode) <= set(batches)


def test_a_sample_is_the_median_of_its_repetitions(llm, monkeypatch):
    profiler = Profiler(llm.executor, shape_of(llm.model_config, "tiny", llm.dtype), repetitions=3)
    times = itertools.cycle([1.0, 9.0, 2.0])
    monkeypatch.setattr(profiler, "_time", lambda scheduled: next(times))
    found = profiler.samples(0.0)
    assert {sample.seconds for kind in ("prefill", "decode") for sample in found[kind]} == {2.0}


def test_tokens_are_right_after_profiling(llm, samples):
    data = golden_data(NAME)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(data["prompts"], greedy, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [tokens[:12] for tokens in data["greedy"]]


def test_a_profile_is_stored_and_found(llm, profiler, samples, tmp_path):
    fits = {kind: fit(of_kind, names=["ridge"], degrees=[1, 2]) for kind, of_kind in samples.items()}
    profiler.profile(samples, fits).save(tmp_path)
    shape = shape_of(llm.model_config, "tiny", "float32")
    costs, source = find_costs(shape, "cpu", llm.executor.config.block_size, tmp_path)
    assert source.startswith("profile ")
    assert 0 < costs.decode_seconds(2, 40) < 10
    assert 0 < costs.swap_out_seconds(3) < 10
    with pytest.raises(ProfileError, match="block_size"):
        find_costs(shape, "cpu", 99, tmp_path)
    with pytest.raises(ConfigError, match="swap"):
        profiler.profile(samples, {"prefill": fits["prefill"], "decode": fits["decode"]})


def test_swaps_beside_decode_steps(profiler, llm):
    shares = profiler.hidden_swap_shares(3, 2, 8, repetitions=1)
    assert all(0 <= share <= 1 for share in shares)
    assert not llm.executor._swapper.handles, "a copy is left behind"
    too_many = llm.executor.num_gpu_blocks + 1
    with pytest.raises(ConfigError, match=f"{too_many} blocks are more than the pool's"):
        profiler.hidden_swap_shares(too_many, 2, 8)


def test_without_a_profile_the_costs_are_a_roofline(llm, tmp_path, caplog, monkeypatch):
    shape = shape_of(llm.model_config, "tiny", "float32")
    costs, source = find_costs(shape, "cpu", 4, tmp_path)
    assert source == "roofline of cpu-2core"
    assert costs.prefill_seconds(100, 1) > 0
    assert find_costs(dataclasses.replace(shape, dtype="bfloat16"), "cpu", 4, tmp_path) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for settings, warns in (
        ({"num_gpu_blocks_override": 30}, True),
        ({"scheduler_policy": "vllm_swap"}, False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made = make_llm(golden_checkpoint(NAME), **settings)
        assert ("jaxllm profile" in caplog.text) == warns
        assert made.executor.config.num_host_blocks > 0


def test_a_profile_of_another_block_size_does_not_stop_the_default(llm, tmp_path, caplog):
    shape = shape_of(llm.model_config, "tiny", "float32")
    path = profile_path(tmp_path, "cpu", "tiny", "float32")
    path.write_text("{}")
    with caplog.at_level(logging.WARNING):
        scheduling = make_scheduling(None, shape, "cpu", 4, tmp_path)
    assert scheduling.source == "roofline of cpu-2core"
    assert "the stored profile is not used" in caplog.text
    assert make_scheduling("vllm", shape, "cpu", 4, tmp_path).source == "roofline of cpu-2core"
    with pytest.raises(ProfileError):
        make_scheduling("adaptive", shape, "cpu", 4, tmp_path)


def test_settings_nobody_would_use_are_refused():
    for settings, message in (
        ({"profile_seconds": 1.0, "num_host_blocks": 0}, "measure costs that nobody weighs"),
        ({"profile_seconds": 1.0, "scheduler_policy": SchedulerPolicy()}, "measure costs that nobody weighs"),
        ({"host_bandwidth_limit": 1e6, "num_host_blocks": 0}, "there are none: set num_host_blocks"),
        ({"host_bandwidth_limit": 0.0}, "must be a number from 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(golden_checkpoint(NAME), **settings)


def test_on_an_unknown_device_only_weighing_presets_need_a_measurement(llm, tmp_path):
    shape = shape_of(llm.model_config, "tiny", "float32")
    assert find_costs(shape, "Some GPU", 4, tmp_path) is None
    assert {
        name: make_scheduling(name, shape, "Some GPU", 4, tmp_path).needs_measuring for name in PRESETS
    } == {"adaptive": True, "paper": True, "vllm": False, "vllm_swap": False, "vllm_swap_both": False}
    assert make_scheduling(None, shape, "Some GPU", 4, tmp_path).needs_measuring


def test_the_host_pool_is_sized_by_need(llm):
    shape = shape_of(llm.model_config, "tiny", "float32")

    def size(name, asked, num_gpu_blocks=100, needed=200, block_bytes=2**30):
        scheduling = make_scheduling(name, shape, "cpu", 4)
        return scheduling.num_host_blocks(asked, num_gpu_blocks, needed, block_bytes)

    assert size("adaptive", None) == 4  # GiB
    assert size("adaptive", None, block_bytes=2**20) == 100
    assert size("adaptive", None, needed=100) == 0
    assert size("vllm", None) == 0
    assert size("vllm_swap", None, needed=100) == 4  # it starts only what fits
    assert (size("adaptive", 0), size("paper", 7)) == (0, 7)
    with pytest.raises(ConfigError, match="num_host_blocks=0 contradicts"):
        size("vllm_swap", 0)


def test_costs_are_measured_at_start_on_demand(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"num_gpu_blocks_override": 30, "num_host_blocks": 16, "compilation_cache_dir": None}
    llm = make_llm(golden_checkpoint(NAME), profile_seconds=0.1, **settings)
    assert llm.costs_source == "profile of 0.1 s at start"
    assert isinstance(llm.costs.model, TableCostModel)
    data = golden_data(NAME)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(data["prompts"], greedy, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [tokens[:12] for tokens in data["greedy"]]


def test_the_command_stores_a_profile(tmp_path, capsys, monkeypatch):
    quick = functools.partial(fit, names=["ridge"], degrees=[1, 2])
    monkeypatch.setattr("jaxllm.bench.profile.fit", quick)
    model = str(golden_checkpoint(NAME))
    sizes = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--decode-buckets", "2"]
    command = ["profile", "--model", model, "--seconds", "0.1", "--output-dir", str(tmp_path), *sizes]
    command += ["--num-gpu-blocks-override", "40", "--block-size", "4"]
    written, of_another = tmp_path / "samples", tmp_path / "of_another_model"
    save_samples(of_another, measured(30, 1.0), {})
    more = ["--samples", str(written), "--with-samples", str(of_another)]
    assert main([*command, "--compile-report", *more]) == 0
    (path,) = tmp_path.glob("*.json")
    assert load_samples(written).keys() == set(COST_KINDS)
    profile = Profile.load(path)
    assert profile.device == "cpu"
    ours, others = load_samples(written), load_samples(of_another)
    assert profile.num_samples == {kind: len(ours[kind]) + len(others[kind]) for kind in COST_KINDS}
    shown = capsys.readouterr()
    assert "## swap_in" in shown.out
    assert "jaxllm: decode of 2, up to 4 steps, attention xla: compiled in " in shown.err
    assert "prefill of 32 tokens" in shown.err
    assert main([*command, "--seconds", "0"]) == 2
    assert main([*command, "--repetitions", "0"]) == 2
    capsys.readouterr()
    for refused in (
        ["--num-host-blocks", "0"],
        ["--scheduler-policy", "vllm"],
        ["--profile-seconds", "3"],
        ["--host-bandwidth-limit", "1e7"],
        ["--no-async-scheduling"],
        ["--num-scheduler-steps", "2"],
        ["--samples", str(tmp_path / "absent" / "samples.json")],
        ["--with-samples", str(tmp_path / "absent.json")],
        ["--output-dir", str(written)],
    ):
        assert main([*command, *refused]) == 2
        assert "measuring for" not in capsys.readouterr().err


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_by_name_give_the_same_tokens(preset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_folder().is_relative_to(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    data = golden_data(NAME)
    llm = make_llm(
        golden_checkpoint(NAME),
        scheduler_policy=preset,
        num_host_blocks=64,
        num_gpu_blocks_override=30,
        ledger=str(ledger),
        compilation_cache_dir=None,
    )
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = run(llm.engine, [*data["prompts"]] * 2, greedy)
    assert [output.token_ids for output in outputs] == [tokens[:40] for tokens in data["greedy"]] * 2
    records = read_ledger(ledger)
    assert len(records.steps) > 40
    actions = {record.action for record in records.preemptions}
    for record in records.preemptions:
        assert record.swap_seconds is not None
        assert record.recompute_seconds > 0
    if preset == "vllm":
        assert actions == {"recompute"}
        assert any(record.measured_seconds for record in records.preemptions)
    report = llm.costs.report()
    assert report["decode"].count > 10
    assert llm.costs_source == "roofline of cpu-2core"


def test_unknown_policies_are_refused(tmp_path):
    for name, message in (
        ("fair", "no preset 'fair'"),
        ("nowhere:policy", "cannot import the policy 'nowhere:policy'"),
        ("jaxllm.sched.presets:absent", "absent"),
        ("jaxllm.errors:ConfigError", "must take the costs or nothing"),
        (5, "name of a preset or a SchedulerPolicy"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(golden_checkpoint(NAME), scheduler_policy=name)
