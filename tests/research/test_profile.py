"""`jaxllm profile`, and engines that choose policies by name."""

import dataclasses
import functools
import itertools
import logging
import re
import statistics
import types

import pytest
from engine_helpers import make_llm, run
from test_samples import measured
from variants import golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.cli.main import main
from jaxllm.engine.costs import find_costs, profile_folder, shape_of
from jaxllm.engine.ledgers import read_ledger
from jaxllm.engine.profiling import Profiler, Work
from jaxllm.engine.scheduling import make_scheduling
from jaxllm.errors import ConfigError, ProfileError
from jaxllm.executor import compile_stats
from jaxllm.executor.buckets import Buckets
from jaxllm.executor.pending import PendingStep
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.linear_formats import QUANTIZATIONS, LinearFormat, LinearFormats
from jaxllm.models.registry import head_name
from jaxllm.predictors.base import COST_KINDS, step_kind
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.regression import fit
from jaxllm.predictors.samples import load_samples, save_samples
from jaxllm.predictors.store import Profile, profile_path
from jaxllm.predictors.table import TableCostModel
from jaxllm.research.bench.beside_steps import hidden_swap_shares, idle_share, sending_seconds
from jaxllm.sched.policies import SchedulerPolicy
from jaxllm.sched.presets import PRESETS
from jaxllm.system.dtypes import KV_DTYPES

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
    prefills, decodes, mixed = ([one.work for one in samples[kind]] for kind in COST_KINDS[:3])
    most = config.buckets.sizes[-1]
    assert max(tokens for tokens, _, _ in prefills) == most
    assert {min(before, 1) for _, _, before in prefills} == {0, 1}
    assert set(config.buckets.decode) <= {batch for batch, _ in decodes}
    assert {min(before, 1) for *_, before in mixed} == {0, 1}
    assert max(batch + tokens for batch, _, tokens, _, _ in mixed) == most
    assert {batch for batch, *_ in mixed} == set(range(1, config.max_num_seqs))


def test_samples_count_the_work_that_was_timed(llm, monkeypatch):
    profiler = Profiler(llm.executor, shape_of(llm.model_config, "tiny", llm.dtype), seed=7)
    config, timed = llm.executor.config, []
    monkeypatch.setattr(profiler, "time_run", lambda scheduled: timed.append(scheduled) or 1.0 + len(timed))
    found = profiler.samples(0.0)
    by_seconds = {one.seconds: one for kind in COST_KINDS[:3] for one in found[kind]}
    assert len(by_seconds) == sum(len(found[kind]) for kind in COST_KINDS[:3])
    assert {kind for kind, of_kind in found.items() if len(of_kind) < 60} == set()
    for seconds, sample in by_seconds.items():
        scheduled = timed[int(seconds) - 2]
        chunks = scheduled.prefill
        decodes = (len(scheduled.decode), sum(one.num_tokens - 1 for one in scheduled.decode))
        prompts = (scheduled.num_prefill_tokens, len(chunks), sum(chunk.start for chunk in chunks))
        if chunks:  # rows of the program, those of its padding included
            rows = config.buckets.size(decodes[0], *prompts[:2])
            prompts = (rows - decodes[0], *prompts[1:])
        else:
            decodes = (config.buckets.decode_size(decodes[0]), decodes[1])
        assert sample.kind == step_kind(decodes[0], prompts[0])
        parts = {"decode": decodes, "prefill": prompts, "mixed": (*decodes, *prompts)}
        assert sample.work == parts[sample.kind]
        # What an engine could run: a program holds it, and nobody shares a slot or a block.
        if chunks:
            config.buckets.size(len(scheduled.decode), scheduled.num_prefill_tokens, len(chunks))
        requests = [*scheduled.decode, *(chunk.request for chunk in chunks)]
        assert len({one.slot for one in requests}) == len(requests) <= config.max_num_seqs
        block_ids = [block_id for one in requests for block_id in one.block_ids]
        assert len(set(block_ids)) == len(block_ids) <= config.num_gpu_blocks
        for one in requests:
            assert 1 < one.num_tokens <= config.max_model_len
            spare = len(one.block_ids) * config.block_size - (one.num_tokens - 1)
            assert 0 <= spare < config.block_size + (2 if one in scheduled.decode else 0)
        for chunk in chunks:
            assert chunk.start + chunk.length == chunk.request.num_tokens - 1
            assert chunk.is_last


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 64])
def test_engines_for_few_sequences_can_be_profiled(max_num_seqs, monkeypatch):
    """Of a device that takes 1 ms and 0.1 ms for each row of a program."""
    buckets = Buckets.make(max_num_seqs=max_num_seqs, max_num_batched_tokens=48)

    def seconds(step):
        num_decodes, num_tokens = len(step.decode), step.num_prefill_tokens
        rows = buckets.decode_size(num_decodes)
        if num_tokens:
            rows = buckets.size(num_decodes, num_tokens, len(step.prefill))
        return 1e-3 + 1e-4 * rows

    config = types.SimpleNamespace(
        buckets=buckets,
        max_num_seqs=max_num_seqs,
        max_model_len=112,
        num_gpu_blocks=512,
        block_size=4,
        num_host_blocks=8,
    )
    executor = types.SimpleNamespace(
        config=config, time_swap=lambda n: (1e-3 * n, 2e-3 * n), warm_up=lambda: None
    )
    profiler = Profiler(executor, model_shape("opt-13b"), seed=1)
    monkeypatch.setattr(profiler, "time_run", seconds)
    samples = profiler.samples(0.0)
    profile = profiler.profile(samples, profiler.fit(samples, is_brief=True))
    costs = profiler.costs_of(profile)
    assert costs.step_seconds(0, 0, 40, 1) == pytest.approx(5.8e-3, rel=0.02)  # 48 rows
    assert costs.step_seconds(0, 0, 20, 1) == pytest.approx(4.2e-3, rel=0.02)  # 32
    assert costs.step_seconds(max_num_seqs, 100) == pytest.approx(1e-3 + 1e-4 * max_num_seqs, rel=0.02)
    for kind, errors in profile.errors.items():
        assert errors["test"]["mape"] < 0.01
        assert errors["distilled"]["mape"] < 0.04, kind


def test_a_sample_is_the_median_of_its_repetitions(llm, monkeypatch):
    profiler = Profiler(llm.executor, shape_of(llm.model_config, "tiny", llm.dtype), repetitions=3)
    times = itertools.cycle([1.0, 9.0, 2.0])
    monkeypatch.setattr(profiler, "time_run", lambda scheduled: next(times))
    monkeypatch.setattr(llm.executor, "time_swap", lambda num_blocks: (next(times), 0.5))
    found = profiler.samples(0.0)
    measured = {kind: {sample.seconds for sample in of_kind} for kind, of_kind in found.items()}
    assert measured == {kind: {0.5 if kind == "swap_in" else 2.0} for kind in COST_KINDS}


@pytest.mark.parametrize(
    ("work", "lengths"),
    [
        (Work(contexts=(5, 20)), [[3, 18], [4, 19], [5, 20], [6, 21], [7, 22]]),
        (Work(contexts=(1, 46)), [[1, 44], [1, 45], [1, 46], [2, 47], [3, 47]]),  # no shorter, no longer
        (Work(contexts=(5,), lengths=(9, 2), starts=(0, 4)), [[3], [4], [5], [6], [7]]),
    ],
)
def test_steps_are_timed_as_an_engine_runs_them(work, lengths, monkeypatch):
    """Each is dispatched before the one before it is read, on a clock that goes 1 s with each reading."""
    events, ran = [], []

    class Step:
        def fetch(self):
            events.append("read")

    def execute(scheduled):
        events.append("send")
        ran.append([one.num_tokens - 1 for one in scheduled.decode])
        assert all(len(one.block_ids) * 4 >= one.num_tokens - 1 for one in scheduled.decode)
        assert [chunk.is_first for chunk in scheduled.prefill] == [start == 0 for start in work.starts]
        return Step()

    buckets = Buckets.make(max_num_seqs=4, max_num_batched_tokens=32)
    config = types.SimpleNamespace(
        buckets=buckets, max_num_seqs=4, max_model_len=48, num_gpu_blocks=30, block_size=4, num_host_blocks=0
    )
    profiler = Profiler(types.SimpleNamespace(config=config, execute=execute), model_shape("opt-13b"))
    clock = iter([10.0, 11.0, 12.5, 16.0])
    monkeypatch.setattr("jaxllm.engine.profiling.time.perf_counter", lambda: next(clock))
    (sample,) = profiler.measure(work)
    assert events == ["send", *["send", "read"] * 4, "read"]
    assert ran == lengths
    assert sample.seconds == 2.0
    counts = (len(work.contexts), sum(work.contexts))
    chunks = (32 - len(work.contexts), len(work.lengths), sum(work.starts))  # of the one program with prompts
    assert sample.work == (counts if not work.lengths else (*counts, *chunks))


def test_work_that_does_not_fit_is_refused(profiler):
    with pytest.raises(ConfigError, match="800 tokens of 8 sequences do not fit the pool"):
        profiler.measure(Work(contexts=(100,) * 8))


def test_tokens_are_right_after_profiling(llm, samples):
    data = golden_data(NAME)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(data["prompts"], greedy, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [tokens[:12] for tokens in data["greedy"]]


@pytest.fixture(scope="module")
def fits(samples):
    return {kind: fit(of_kind, names=["ridge"], degrees=[1, 2]) for kind, of_kind in samples.items()}


def test_a_profile_is_stored_and_found(llm, profiler, samples, fits, tmp_path):
    profiler.profile(samples, fits).save(tmp_path)
    shape = shape_of(llm.model_config, "tiny", "float32")
    costs, source = find_costs(shape, "cpu", llm.executor.config.block_size, tmp_path)
    assert source.startswith("profile ")
    assert 0 < costs.step_seconds(2, 40) < 10
    assert 0 < costs.step_seconds(0, 0, 30, 2) < 10
    assert 0 < costs.step_seconds(2, 40, 30, 2, 7) < 10
    assert 0 < costs.swap_out_seconds(3) < 10
    with pytest.raises(ProfileError, match="block_size"):
        find_costs(shape, "cpu", 99, tmp_path)
    for missing in COST_KINDS:
        with pytest.raises(ConfigError, match=f"a profile needs {missing} too"):
            profiler.profile(samples, {kind: found for kind, found in fits.items() if kind != missing})


def test_a_profile_reports_errors_of_the_fit_and_of_what_is_left_of_it(profiler, samples, fits):
    profile = profiler.profile(samples, fits)
    assert profile.errors.keys() == set(COST_KINDS)
    assert profile.num_samples == {kind: len(of_kind) for kind, of_kind in samples.items()}
    for kind, found in fits.items():
        errors = profile.errors[kind]
        assert errors["test"]["mape"] == found.report.test.mape > 0
        assert errors["num_test"] == len(found.test) > 0
        # The table's own errors are those on the same samples.
        off = []
        for sample in found.test:
            work = (0, 0, *sample.work) if kind == "prefill" else sample.work
            asked = getattr(profile.table, f"{kind}_seconds" if kind.startswith("swap") else "step_seconds")
            off.append(abs(asked(*work) - sample.seconds) / sample.seconds)
        assert errors["distilled"] == {
            "mape": pytest.approx(statistics.fmean(off)),
            "median": pytest.approx(statistics.median(off)),
            "largest": pytest.approx(max(off)),
        }


def test_swaps_beside_decode_steps(profiler, llm):
    shares = hidden_swap_shares(profiler, 3, 2, 8, repetitions=1)
    assert all(0 <= share <= 1 for share in shares)
    assert not llm.executor.swapper.pieces, "a copy is left behind"
    assert not llm.executor.swapper.loads
    too_many = llm.executor.num_gpu_blocks + 1
    with pytest.raises(ConfigError, match=f"{too_many} blocks are more than the pool's"):
        hidden_swap_shares(profiler, too_many, 2, 8)


def test_how_much_a_host_may_compute_beside_a_step(profiler, monkeypatch):
    work = Work(contexts=(8, 8))
    assert 0 < sending_seconds(profiler, work, repetitions=2) < 10
    asked, time_step, hidden = [], profiler.time_run, 0.5

    def timed(scheduled, host_seconds=0.0):
        asked.append(host_seconds)
        assert time_step(scheduled, host_seconds) > 0
        return 2.0 + max(0.0, host_seconds - hidden)

    monkeypatch.setattr(profiler, "time_run", timed)
    assert idle_share(profiler, 2e-3, work, repetitions=2) == pytest.approx(1e-3)  # all of it is hidden
    assert asked == [0.0] + [0.0, 2e-3] * 2
    hidden = 1e-3
    assert idle_share(profiler, 2e-3, work, repetitions=2) == pytest.approx(0.5e-3)
    hidden = -1e-3  # steps get longer by more than the host's work
    assert idle_share(profiler, 2e-3, work, repetitions=2) == 0.0
    with pytest.raises(ConfigError, match="do not fit the pool"):
        idle_share(profiler, 2e-3, Work(contexts=(10**6,) * 2))


def test_without_a_profile_the_costs_are_a_roofline(llm, tmp_path, caplog, monkeypatch):
    shape = shape_of(llm.model_config, "tiny", "float32")
    costs, source = find_costs(shape, "cpu", 4, tmp_path)
    assert source == "roofline of cpu-2core"
    assert costs.step_seconds(0, 0, 100, 1) > 0
    assert find_costs(dataclasses.replace(shape, dtype="bfloat16"), "cpu", 4, tmp_path) is None
    half = dataclasses.replace(shape, dtype="bfloat16", head_dim=64)
    costs, source = find_costs(half, "NVIDIA H100 80GB HBM3", 4, tmp_path)
    assert source == "measured kernels of H100-SXM"
    assert costs.swap_out_seconds(100) == pytest.approx(20e-6 + 100 * half.block_bytes(4) / 50e9)
    assert find_costs(shape, "NVIDIA H200", 4, tmp_path)[1] == "roofline of H200", "in float32"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for settings, warns in (
        ({"num_gpu_blocks_override": 30}, False),
        ({"num_gpu_blocks_override": 30, "scheduler_policy": "adaptive"}, True),
        ({"scheduler_policy": "vllm_swap"}, False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made = make_llm(golden_checkpoint(NAME), **settings)
        assert ("jaxllm profile" in caplog.text) == warns
        assert made.executor.config.num_host_blocks > 0


def test_costs_of_several_devices_are_those_of_their_parts(llm, tmp_path):
    shapes = [shape_of(llm.model_config, "tiny", "float32", tensor_parallel=count) for count in (1, 2)]
    assert [shape.name for shape in shapes] == ["tiny", "tiny-tp2"]  # profiles of each
    half = dataclasses.replace(shapes[1], dtype="bfloat16", head_dim=64)
    for shape, kind in ((half, "NVIDIA H100 80GB HBM3"), (shapes[1], "NVIDIA H200")):
        one, two = (find_costs(shape, kind, 4, tmp_path, tensor_parallel=count)[0] for count in (1, 2))
        alone, both = (costs.swap_out_seconds(10**6) for costs in (one, two))
        assert both == pytest.approx(alone / 2, rel=0.01)
    assert two.step_seconds(0, 0, 10**5, 1) < 0.7 * one.step_seconds(0, 0, 10**5, 1)
    staged = shape_of(llm.model_config, "tiny", "float32", tensor_parallel=2, pipeline_parallel=2)
    assert staged.name == shapes[1].name + "-pp2"
    one, two = (find_costs(shapes[1], "cpu", 4, tmp_path, tensor_parallel=count)[0] for count in (1, 2))
    assert two.step_seconds(0, 0, 100, 1) == one.step_seconds(0, 0, 100, 1)  # they share its cores


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
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(golden_checkpoint(NAME), **settings)


def test_on_an_unknown_device_only_weighing_presets_need_a_measurement(llm, tmp_path):
    shape = shape_of(llm.model_config, "tiny", "float32")
    assert find_costs(shape, "Some GPU", 4, tmp_path) is None
    needs = {name: make_scheduling(name, shape, "Some GPU", 4, tmp_path).needs_measuring for name in PRESETS}
    assert {name for name, is_needed in needs.items() if not is_needed} == {
        "vllm",
        "vllm_swap",
        "vllm_swap_both",
        "vllm_v1",
        "hicache",
        "sglang",
        "cached_attention",
        "flashgen",
    }
    assert needs["adaptive"]
    assert needs["paper"]
    assert make_scheduling(None, shape, "Some GPU", 4, tmp_path).needs_measuring


def test_the_host_pool_is_sized_by_need(llm):
    shape = shape_of(llm.model_config, "tiny", "float32")

    def size(name, asked, num_gpu_blocks=100, needed=200, block_bytes=2**30):
        scheduling = make_scheduling(name, shape, "cpu", 4)
        return scheduling.num_host_blocks(asked, num_gpu_blocks, needed, block_bytes)

    assert size("adaptive", None) == 4  # GiB
    assert size("adaptive", None, block_bytes=2**20) == 100
    assert size("adaptive", None, needed=100) == 0
    assert size("vllm_v1", None) == 0  # it never swaps
    assert size("vllm", None) == 4  # it swaps the samples of a prompt
    assert size("vllm_swap", None, needed=100) == 4  # it starts only what fits
    assert (size("adaptive", 0), size("paper", 7)) == (0, 7)
    with pytest.raises(ConfigError, match="num_host_blocks=0 contradicts"):
        size("vllm_swap", 0)


def test_costs_are_measured_at_start_on_demand(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"num_gpu_blocks_override": 30, "num_host_blocks": 16, "compilation_cache_dir": None}
    llm = make_llm(golden_checkpoint(NAME), profile_seconds=0.1, **settings)
    assert llm.costs_source == "profile of 0.1 s at start"
    assert isinstance(llm.costs.model.costs, TableCostModel)
    data = golden_data(NAME)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(data["prompts"], greedy, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [tokens[:12] for tokens in data["greedy"]]


def test_the_command_stores_a_profile(tmp_path, capsys, monkeypatch):
    quick = functools.partial(fit, names=["ridge"], degrees=[1, 2])
    monkeypatch.setattr("jaxllm.engine.profiling.fit", quick)
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
    assert [line for line in shown.out.splitlines() if line.startswith("## ")] == [
        f"## {kind}" for kind in COST_KINDS
    ]
    for kind in COST_KINDS:
        assert profile.errors[kind]["test"]["mape"] > 0
        assert profile.errors[kind]["distilled"]["mape"] > 0
    attention = "attention xla (not native: block_size is 4, not a multiple of 16): compiled in "
    assert f"jaxllm: decode of 2, up to 4 steps, {attention}" in shown.err
    assert f"jaxllm: decode of 2, up to 4 steps, random, {attention}" in shown.err
    assert f"jaxllm: step of 32 tokens, up to 2 prompts, random, {attention}" in shown.err
    with_own = ["--quantization", "int8", "--kv-cache-dtype", "int8", "--with-samples", str(written)]
    assert main([*command, *with_own]) == 2
    shown = capsys.readouterr()
    assert re.search("kv_dtype 'auto', not 'int8'; weights '\\w+', not 'int8'; head", shown.err)
    assert "measuring for" not in shown.err
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


def test_profiles_are_of_one_format_of_weights_and_kv(tmp_path):
    """Whatever an engine holds, it finds the costs of that, or those of a data sheet."""
    config = config_from_dict(read_hf_config(golden_checkpoint(NAME)))
    head = head_name(config)
    formats = [
        LinearFormats.named(name, head, quantize_lm_head=all_) for name in QUANTIZATIONS for all_ in (0, 1)
    ]
    formats += [LinearFormats(), LinearFormats(LinearFormat("e4m3", 128, "fp8_128"))]
    formats += [LinearFormats(LinearFormat(stored="bfloat16", is_native=True))]
    shapes = [shape_of(config, "model", "float32", held, kv) for held in formats for kv in KV_DTYPES]
    paths = {profile_path(tmp_path, "cpu", shape.name, shape.dtype) for shape in shapes}
    assert len(paths) == len(shapes) == len(formats) * len(KV_DTYPES)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_by_name_give_the_same_tokens(preset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # A step that has ended before the host looks is not timed: whether it has is chance.
    monkeypatch.setattr(PendingStep, "is_ready", lambda self: False)
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
    assert actions <= {"recompute", "swap"}
    for record in records.preemptions:
        assert record.swap_seconds >= 0
        assert record.recompute_seconds >= 0
    assert any(record.bound_seconds is not None for record in records.preemptions)
    if preset in ("vllm", "vllm_v1"):
        assert actions == {"recompute"}
        for record in records.preemptions:  # alone
            assert record.recompute_seconds > 0
            assert record.swap_seconds > 0
        assert any(record.bound_seconds for record in records.preemptions)
    report = llm.costs.report()
    assert report["decode"].count > 10
    assert report["prefill"].count + report["mixed"].count > 0
    assert llm.costs_source == "roofline of cpu-2core"


def test_unknown_policies_are_refused(tmp_path):
    for name, message in (
        ("fair", "no preset 'fair'"),
        ("nowhere:policy", "cannot import the policy 'nowhere:policy'"),
        ("jaxllm.sched.presets:absent", "absent"),
        ("jaxllm.errors:ConfigError", "must take the costs or nothing"),
        (5, "5 must be a preset's name, a SchedulerPolicy, a policy class"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(golden_checkpoint(NAME), scheduler_policy=name)
