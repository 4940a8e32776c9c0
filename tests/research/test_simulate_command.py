"""`jaxllm.research.simulate` and its command: named settings, tables, pictures and errors."""

import argparse
import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from scheduler_helpers import LinearCosts
from test_predictors_store import PROFILE
from transformers import AutoConfig

from jaxllm.cli.main import main
from jaxllm.errors import CapacityError, ConfigError, JaxllmError, RequestTooLargeError, UserCodeError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.loading.convert import convert_checkpoint
from jaxllm.predictors.devices import device_spec
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.roofline import RooflineCostModel
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research import load_shape, simulate
from jaxllm.research.commands.simulate import add_options
from jaxllm.research.simulator import run as low_level
from jaxllm.research.simulator.drawing import queue_of
from jaxllm.research.simulator.gpu import pool_blocks
from jaxllm.research.simulator.outcome import FIGURES
from jaxllm.research.simulator.study import policies_of
from jaxllm.research.simulator.system import make_system
from jaxllm.research.workloads import (
    Poisson,
    Trace,
    UniformLengths,
    load_trace,
    make_conversations,
    make_trace,
)
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import LeastUrgentVictim, SchedulerPolicy
from jaxllm.sched.presets import make_preset

SMALL = {"num_prompts": 12, "gpu_blocks": 128, "output_len": 20}
OPTIONS = ["--num-prompts=12", "--gpu-blocks=128", "--output-len=20"]


def trace(count=6, **changes):
    values = {
        "name": "small",
        "seed": 0,
        "arrival_times": np.arange(count) * 0.5,
        "prompt_lens": np.arange(1, count + 1) * 8,
        "output_lens": np.full(count, 10),
    }
    return Trace(**(values | changes))


def test_formats_of_weights_and_kv_are_part_of_the_model(tmp_path, capsys):
    shape = load_shape(
        "llama-3-8b", quantization="int4_weight", quantize_lm_head=False, kv_cache_dtype="int8"
    )
    assert (shape.weights, shape.head, shape.kv_dtype) == ("int4_weight", "auto", "int8")
    assert load_shape(demo_model_path(), quantization="int8").weights == "int8"
    out = tmp_path / "out.json"
    options = ["--num-prompts", "4", "--device", "a100", "--json", str(out), "--overwrite"]
    blocks = []
    for formats in (
        [],
        ["--kv-cache-dtype", "int8"],
        ["--quantization", "int4_weight", "--no-quantize-lm-head"],
    ):
        assert main(["simulate", *options, *formats]) == 0
        blocks.append(json.loads(out.read_text())["system"]["num_gpu_blocks"])
    assert blocks[1] / blocks[0] == pytest.approx(256 / 132, rel=1e-3)
    assert blocks[2] > 1.15 * blocks[0]
    assert "(bfloat16, weights int4_weight)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int9"}, "quantization='int9' is not supported; did you mean"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' is not supported"),
        ({"quantize_lm_head": False}, "quantize_lm_head=False leaves the output head out"),
        ({"model": model_shape("llama-3-8b"), "quantization": "int8"}, "are part of sizes, and of profiles"),
    ],
)
def test_formats_that_are_not_there_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        simulate(num_prompts=2, **options)


def test_a_quantised_checkpoint_is_what_it_is(tmp_path):
    convert_checkpoint(demo_model_path(), tmp_path / "int8", quantization="int8")
    shape = load_shape(tmp_path / "int8")
    assert (shape.weights, shape.head) == ("int8", "auto")
    for file in (tmp_path / "int8").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(
        ConfigError, match="they are not there to tell how: give a folder with them, or quantization"
    ):
        load_shape(tmp_path / "int8")
    assert load_shape(tmp_path / "int8", quantization="fp8").weights == "fp8"


def test_it_is_the_low_level_simulation_of_what_is_named():
    found = simulate(policy="vllm_v1", model="llama-13b", dtype="float16", device="a100", **SMALL)
    shape = model_shape("llama-13b", "float16")
    costs = SiliconCostModel(shape, "a100")
    drawn = make_trace("chatbot", 12, 20, outputs=UniformLengths(shortest=20, longest=20))
    config = SchedulerConfig(
        num_gpu_blocks=128,
        block_size=16,
        max_model_len=int((drawn.prompt_lens + 20).max()),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    result = low_level.simulate(drawn, config, "vllm_v1", costs, overlap_swaps=True)
    (run,) = found.runs
    assert np.array_equal(run.result.finish_times, result.finish_times)
    assert run.figures["tokens_per_second"] == result.output_tokens_per_second
    assert run.figures["token_seconds"] == pytest.approx(
        float((result.finish_times - result.first_token_times).mean()) / 19
    )
    assert set(run.figures) == set(FIGURES)


def test_stages_hold_more_and_compute_at_the_same_time():
    """Twice the memory; and decodes of long contexts take little more than half of the time."""
    load = {"num_prompts": 128, "closed": 128, "input_len": 2048, "output_len": 64}
    one, two = (
        simulate(policy="vllm_v1", device="h100", model="llama-3-8b", pipeline_parallel=count, **load)
        for count in (1, 2)
    )
    assert two.system.device == "2 x H100-SXM in 2 stages"
    assert two.system.num_gpu_blocks > 2 * one.system.num_gpu_blocks
    times = [found.figure("vllm_v1", "token_seconds").mean for found in (one, two)]
    assert 0.5 * times[0] < times[1] < 0.8 * times[0]


def test_a_config_json_is_a_shape():
    path = demo_model_path() / "config.json"
    shape = load_shape(path)
    values = json.loads(path.read_text())
    assert (shape.num_layers, shape.vocab_size) == (values["num_hidden_layers"], values["vocab_size"])
    assert load_shape(demo_model_path()) == shape
    held = json.loads((demo_model_path() / "config.json").read_text())
    of_transformers = AutoConfig.from_pretrained(demo_model_path())
    for given in (held, of_transformers):
        found = load_shape(given)
        assert dataclasses.replace(found, name=shape.name) == shape
    system = make_system(path, gpu_blocks=8)
    assert system.max_model_len == values["max_position_embeddings"]
    assert load_shape("llama-3-8b", "float16") == model_shape("llama-3-8b")
    with pytest.raises(ConfigError, match=r"did you mean llama-3-8b\? published shapes"):
        load_shape("llama-3-8bb")


def test_pools_are_what_fits():
    system = make_system("llama-3-8b", device="h100", memory_utilization=0.8)
    costs = SiliconCostModel(model_shape("llama-3-8b", "bfloat16"), "h100")
    assert system.num_gpu_blocks == pool_blocks(costs, 0.8)
    block_bytes = 2 * 32 * 8 * 128 * 2 * 16
    assert system.num_host_blocks == 4 * 2**30 // block_bytes
    assert make_system("llama-3-8b", host_memory="64GB").num_host_blocks == int(64e9 // block_bytes)
    assert make_system("llama-3-8b", host_memory=64e9).num_host_blocks == int(64e9 // block_bytes)
    assert make_system("llama-3-8b", gpu_blocks=10).num_host_blocks == 10
    roofline = make_system("llama-3-8b", device="h100", memory_utilization=0.8, costs="roofline")
    assert roofline.num_gpu_blocks == system.num_gpu_blocks
    with pytest.raises(CapacityError, match="leave no room for KV"):
        make_system("llama-3-70b")
    with pytest.raises(CapacityError, match="hold no block"):
        make_system("llama-3-8b", host_memory=1000)


def test_the_link_is_what_copies_reach():
    for costs in ("silicon", "roofline"):
        slow, fast = (make_system("llama-13b", costs=costs, link=link).costs for link in (1e9, 4e9))
        seconds = [costs.swap_out_seconds(100) - costs.swap_out_seconds(50) for costs in (slow, fast)]
        assert seconds[0] == pytest.approx(50 * model_shape("llama-13b").block_bytes(16) / 1e9)
        assert seconds[0] == pytest.approx(4 * seconds[1])


def test_costs_of_ones_own():
    costs = LinearCosts()
    system = make_system("llama-3-8b", costs=costs)
    assert (system.costs, system.source) == (costs, "LinearCosts")
    assert isinstance(make_system("llama-3-8b", costs="roofline").costs, RooflineCostModel)
    with pytest.raises(ConfigError, match="link is part of a cost model"):
        make_system("llama-3-8b", costs=costs, link=1e9)
    with pytest.raises(
        ConfigError, match=r"did you mean silicon.* a profile's JSON file or module:attribute"
    ):
        make_system("llama-3-8b", costs="sillicon")
    with pytest.raises(ConfigError, match="or a CostModel"):
        make_system("llama-3-8b", costs=3)


def test_costs_of_ones_own_are_named_by_import_path(tmp_path, monkeypatch, capsys):
    (tmp_path / "priced.py").write_text(
        "from scheduler_helpers import LinearCosts\n\ncosts = LinearCosts()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--gpu-blocks", "400", "--num-prompts", "20", "--policy", "paper"]
    assert main(["simulate", "--costs", "priced:costs", *options]) == 0
    assert "priced:costs" in capsys.readouterr().out
    assert main(["simulate", "--costs", "priced:cost", *options]) == 2
    assert "did you mean costs?" in capsys.readouterr().err


def test_costs_of_ones_own_that_raise_are_named():
    class Breaks(LinearCosts):
        num_asked = 0

        def swap_out_seconds(self, num_blocks):
            self.num_asked += 1
            if self.num_asked > 20:  # later than when it is given
                raise LookupError("no such size")
            return 1.0

    few = {"gpu_blocks": 60, "host_blocks": 60, "num_prompts": 60, "max_model_len": 900}
    with pytest.raises(UserCodeError, match=r"Breaks.swap_out_seconds\(\d+\) raised LookupError: no such"):
        simulate(model="llama-3-8b", costs=Breaks(), policy="paper", **few)


def test_a_profile_is_costs_and_names_its_model_and_device(tmp_path):
    path = PROFILE.save(tmp_path)
    system = make_system(costs=path)
    assert (system.model, system.device) == (PROFILE.model, "H100-SXM")
    assert system.source == f"the profile {path.name}"
    assert system.costs.step_seconds(4, 100) == PROFILE.table.step_seconds(4, 100)
    found = simulate(costs=path, policy="adaptive", num_prompts=4, output_len=4, gpu_blocks=32)
    assert "on H100-SXM, seconds from the profile" in found.caption()
    for asked, message in (
        ({"device": "a100"}, "device is part of what a profile measured"),
        ({"link": 1e9}, "link is part of what a profile measured"),
        ({"tensor_parallel": 2}, "tensor_parallel is part of"),
        ({"pipeline_parallel": 2}, "pipeline_parallel is part of"),
        ({"model": "llama-3-8b"}, "the profile was measured with model.name"),
    ):
        with pytest.raises(JaxllmError, match=message):
            make_system(**({"costs": path} | asked))
    unknown = dataclasses.replace(PROFILE, device="a toaster").save(tmp_path)
    with pytest.raises(ConfigError, match="pass gpu_blocks"):
        make_system(costs=unknown)
    assert make_system(costs=unknown, gpu_blocks=9).device == "unknown"


def test_figures_are_asked_for_by_names_that_are_there():
    found = simulate(trace(), policy="vllm_v1,vllm", gpu_blocks=64)
    with pytest.raises(ConfigError, match="policy 'paper' was not simulated; these were: vllm_v1, vllm"):
        found.of("paper")
    with pytest.raises(ConfigError, match="figure='speed' is unknown; choose from tokens_per_second"):
        found.figure("vllm", "speed")
    with pytest.raises(ConfigError, match="swaps is 0 in some run"):
        found.over("vllm", "vllm_v1", "swaps")


def test_seeds_give_intervals():
    found = simulate(seeds=3, policy="vllm_v1,vllm", arrivals="poisson:20", **SMALL)
    assert found.seeds == (0, 1, 2)
    values = [run.figures["first_token_seconds"] for run in found.of("vllm_v1")]
    mean, low, high = found.figure("vllm_v1", "first_token_seconds")
    half = 4.302653 * np.std(values, ddof=1) / 3**0.5  # Student's t of 2 degrees of freedom
    assert (mean, low, high) == pytest.approx((np.mean(values), mean - half, mean + half))
    assert found.over("vllm", "vllm").mean == pytest.approx(1.0)
    assert "3 seeds, ± half a 95 % interval" in found.table()
    alone = simulate(seeds=[2], policy="vllm", arrivals="poisson:20", **SMALL)
    assert alone.runs[0].figures == found.of("vllm")[2].figures


def test_a_recorded_trace_is_drawn_from_with_replacement():
    found = simulate(trace(), seeds=2, policy="vllm_v1", gpu_blocks=64)
    assert "each seed draws its requests with replacement" in found.caption()
    first, second = (run.result for run in found.runs)
    assert np.array_equal(first.arrival_times, trace().arrival_times)
    assert not np.array_equal(first.finish_times, second.finish_times)
    alone = simulate(trace(), policy="vllm_v1", gpu_blocks=64)
    assert "with replacement" not in alone.caption()
    named = trace(hash_ids=[(index,) for index in range(6)])
    with pytest.raises(ConfigError, match="another seed changes nothing"):
        simulate(named, seeds=2, gpu_blocks=64)


def test_a_rate_stretches_a_trace_or_is_poisson():
    fast = simulate(trace(), rate=20, policy="vllm_v1", gpu_blocks=64)
    assert fast.runs[0].result.arrival_times == pytest.approx(np.arange(6) * 0.05)
    assert "stretched in time to 20 a second" in fast.caption()
    at_once = trace(arrival_times=np.zeros(6))
    found = simulate(at_once, rate=20, policy="vllm_v1", gpu_blocks=64)
    expected = Poisson(20).times(6, np.random.default_rng(0))
    assert found.runs[0].result.arrival_times.shape == expected.shape
    assert "Poisson(rate=20)" in found.caption()
    clients = simulate(trace(), closed=2, policy="vllm_v1", gpu_blocks=64)
    result = clients.runs[0].result
    under_way = [
        int(((result.arrival_times <= time) & (result.finish_times > time)).sum())
        for time in result.arrival_times
    ]
    assert max(under_way) == 2


def test_conversations_begin_at_a_rate():
    said = UniformLengths(shortest=5, longest=20)
    talks = make_conversations(8, messages=said, answers=said, mean_turns=3, mean_think=0.1)
    found = simulate(talks, rate=2, seeds=2, policy="vllm_v1", gpu_blocks=64)
    firsts = talks.follows < 0
    began = [run.result.arrival_times[firsts] for run in found.runs]
    for run, times in zip(found.runs, began, strict=True):
        assert np.all(np.diff(times) >= 0)
        assert np.all(np.diff(times) > 0) or len(times) == 1
        after = run.result.arrival_times[~firsts] >= run.result.finish_times[talks.follows[~firsts]]
        assert after.all()
    assert not np.array_equal(*began)
    with pytest.raises(ConfigError, match="come after each other"):
        simulate(talks, closed=2, gpu_blocks=64)
    with pytest.raises(ConfigError, match="another seed changes nothing"):
        simulate(talks, seeds=2, gpu_blocks=64)


def test_prefixes_are_cached_where_prompts_share_them():
    named = trace(prompt_lens=np.full(6, 40), hash_ids=[(7, index) for index in range(6)], hash_block_len=32)
    found = simulate(named, policy="vllm_v1", gpu_blocks=64)
    assert found.config.enable_prefix_caching
    assert found.runs[0].figures["cached_share"] == 5 * 32 / 240
    assert "found in the cache" in found.table()
    assert "found in the cache" not in simulate(trace(), policy="vllm_v1", gpu_blocks=64).table()
    both = simulate(named, policy="vllm,vllm_v1", gpu_blocks=64)
    assert [run.figures["cached_share"] for run in both.runs] == [0, 5 * 32 / 240]
    with pytest.raises(ConfigError, match="plans without a prefix cache"):
        simulate(named, policy="vllm", gpu_blocks=64, prefix_caching=True)
    without = simulate(named, policy="vllm_v1", gpu_blocks=64, prefix_caching=False)
    assert without.runs[0].figures["cached_share"] == 0


def test_policies_are_names_objects_and_functions():
    costs = LinearCosts()
    mine = SchedulerPolicy(victim=LeastUrgentVictim())
    made = policies_of(["vllm_v1", mine, lambda costs: make_preset("adaptive", costs)])
    assert list(made) == ["vllm_v1", "SchedulerPolicy", "<lambda>"]
    copied = made["SchedulerPolicy"](costs)
    assert copied == mine
    assert copied is not mine
    assert list(policies_of({"a": "vllm", "b": "vllm"})) == ["a", "b"]
    with pytest.raises(ConfigError, match="two policies are called 'vllm'"):
        policies_of("vllm,vllm")
    for wrong in (3, lambda costs: 3, lambda: 3):
        with pytest.raises(ConfigError):
            simulate(**(SMALL | {"policy": {"mine": wrong}}))
    with pytest.raises(ConfigError, match="at least one"):
        policies_of([])


class Newest:
    outranks = None

    def score(self, request, now):
        return -request.arrival_time


def test_a_class_alone_changes_one_answer_as_everywhere():
    runs = [simulate(**(SMALL | {"policy": {"mine": given}})).runs[0].figures for given in (Newest, Newest())]
    assert runs[0] == runs[1]


def test_a_policy_of_the_users_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_simulated.py").write_text(
        "class Newest:\n    outranks = None\n\n    def score(self, request, now):\n"
        "        return -request.arrival_time\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *OPTIONS, "--policy", "mine_simulated:Newest,vllm_v1"]) == 0
    assert "| mine_simulated:Newest | " in capsys.readouterr().out


def test_requests_that_do_not_fit():
    long = trace(prompt_lens=[8, 16, 2000, 8, 8, 8])
    with pytest.raises(
        RequestTooLargeError, match=r"request 2 .* gpu_blocks x block_size=1024 .*--clip.*--skip"
    ):
        simulate(long, policy="vllm", gpu_blocks=64)
    with pytest.raises(RequestTooLargeError, match=r"request 2 of trace 'small' .* max_model_len=512 "):
        simulate(long, policy="vllm", gpu_blocks=64, max_model_len=512)
    for too_long, count in (("clip", 6), ("skip", 5)):
        found = simulate(long, policy="vllm", gpu_blocks=64, too_long=too_long)
        assert len(found.runs[0].result.finish_times) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trace": [1, 2]}, r"trace must be a Trace, the path .* got \[1, 2\]"),
        ({"rate": 1, "closed": 2}, "rate=1 and closed=2 contradict each other"),
        ({"arrivals": "poison:3"}, "write all, poisson:RATE"),
        ({"arrivals": 3}, "no arrival process"),
        ({"seeds": 0}, r"seeds must lie in \[1, 1000\]"),
        ({"seeds": [1, 1]}, "must be different"),
        ({"seeds": [[1], [2]]}, r"seed must be an integer, got \[1\]"),
        ({"num_prompts": 0}, "num_prompts must lie in"),
        ({"closed": 0}, "closed must lie in"),
        ({"output_len": 0}, "output_len must lie in"),
        ({"link": 25}, "link=25 is bytes a second, and no link is so slow: 25 GB/s are 25e9"),
        ({"link": 25, "costs": "roofline"}, "link=25 is bytes a second"),
        ({"overlap_swaps": "no"}, "overlap_swaps='no' must be True or False"),
        ({"tokenizer": "x"}, "tokenizer says how a trace's file is read, and trace names none: name one"),
        ({"device": 3}, "device=3 must be a name"),
        ({"model": 3}, "model=3 must be a published shape's name"),
        ({"dataset": 3}, "dataset=3 is neither"),
        ({"output_len": "long"}, "output_len='long' must be a length"),
        ({"device": "a101"}, "device 'a101' is not in the table"),
        ({"policy": "adaptif"}, "did you mean adaptive"),
        ({"host_blocks": 1, "host_memory": 1e9}, "say the same"),
        ({"memory_utilization": 2.0, "gpu_blocks": None}, r"memory_utilization must lie in"),
        ({"memory_utilization": 0.5}, r"both say how large the pool is"),
        ({"polices": "vllm"}, "no argument 'polices'; did you mean policy"),
        ({"num_gpu_blocks": 8}, "no argument 'num_gpu_blocks'; did you mean gpu_blocks"),
        ({"enable_prefix_caching": True}, "no argument 'enable_prefix_caching'; did you mean prefix_caching"),
        ({"input_len": 8, "dataset": "alpaca"}, "both say how long prompts are: drop one"),
        (
            {"trace": trace(), "input_len": 8, "num_prompts": None},
            "trace has lengths: drop input_len, or drop",
        ),
        (
            {"trace": trace(), "output_len": None},
            "num_prompts=12: trace '.*' has 6 requests; ask for as many",
        ),
        ({"input_len": (9, 5)}, r"input_len=\(9, 5\) must be a range whose first length"),
        ({"prefix_caching": 1}, "prefix_caching=1 must be True, False or None"),
        ({"clip": True}, "no argument 'clip'; did you mean too_long"),
        ({"input_len": "8:9:10"}, "input_len='8:9:10' must be a length, or a range of them"),
        ({"input_len": "few"}, "input_len='few' must be a length, or a range of them"),
        ({"host_memory": "64 hogsheads"}, "host_memory='64 hogsheads' must be bytes, or such as '64GB'"),
        ({"seed": 3}, "no argument 'seed'"),
        ({"model": demo_model_path(), "max_model_len": 2000}, "exceeds the 1024 positions"),
        ({"costs": "roofline", "tensor_parallel": 2}, "tensor_parallel=2 is of costs='silicon'"),
        ({"costs": "roofline", "pipeline_parallel": 2}, "pipeline_parallel=2 is of costs='silicon'"),
        ({"too_long": "cut"}, "choose from raise, clip, skip"),
        (
            {"too_long": "clip"},
            "does nothing: what is drawn has at most 84 tokens, prompt and output together",
        ),
        (
            {"too_long": "skip", "dataset": "alpaca", "max_model_len": 192},
            "max_model_len is 192; leave it out",
        ),
    ],
)
def test_errors_say_what_to_pass(arguments, message):
    with pytest.raises(ConfigError, match=message):
        simulate(**(SMALL | arguments))


def test_numbers_and_seeds_of_numpy_will_do():
    given = {"gpu_blocks": 64, "num_prompts": 8, "output_len": 8, "rate": 3.0, "max_num_seqs": 16}
    expected = simulate(policy="vllm", seeds=range(2), **given)
    plain = {name: np.float32(one) if name == "rate" else np.int64(one) for name, one in given.items()}
    assert simulate(policy="vllm", seeds=np.arange(2), **plain).to_json() == expected.to_json()


def test_lengths_and_arrivals_of_ones_own_will_do():
    class Threes:
        def sample(self, count, rng):
            return np.full(count, 3)

    class OneASecond:
        def times(self, num_requests, rng):
            return np.arange(num_requests, dtype=float)

    found = simulate(
        policy="vllm",
        **(SMALL | {"output_len": Threes(), "dataset": Threes(), "arrivals": OneASecond()}),
    )
    result = found.runs[0].result
    assert result.num_output_tokens == 3 * SMALL["num_prompts"]
    assert result.arrival_times.tolist() == list(range(SMALL["num_prompts"]))
    for name, kind in (("output_len", Threes), ("dataset", Threes), ("arrivals", OneASecond)):
        with pytest.raises(ConfigError, match=name):
            simulate(**(SMALL | {name: kind}))


def test_the_low_level_call_takes_names_and_refuses_what_is_none():
    costs = LinearCosts()
    config = SchedulerConfig(
        num_gpu_blocks=64, block_size=16, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64
    )
    named, made = (
        low_level.simulate(trace(), config, policy, costs, overlap_swaps=True)
        for policy in ("vllm_v1", make_preset("vllm_v1"))
    )
    assert np.array_equal(named.finish_times, made.finish_times)
    for arguments, message in (
        (([1, 2], config, "vllm"), r"trace must be a Trace .*load_trace reads one.* got \[1, 2\]"),
        ((trace(), {"block_size": 4}, "vllm"), "config must be a SchedulerConfig"),
        ((trace(), config, "vllmm"), "there is no preset 'vllmm'; did you mean vllm"),
        ((trace(), config, 3), "3 is no policy's name: pass one of adaptive"),
    ):
        with pytest.raises(ConfigError, match=message):
            low_level.simulate(*arguments, costs, overlap_swaps=True)
    for name in (3, None):
        with pytest.raises(ConfigError, match="is no policy's name: pass one of"):
            make_preset(name)


def test_devices_have_the_names_people_use():
    for name in ("a100", "A100-SXM", "a100-80gb", "a100-sxm4-80gb"):
        assert device_spec(name).name == "A100-80GB"


def test_the_command_prints_and_writes(tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = [*OPTIONS, "--seeds=2", "--model=llama-13b", f"--json={out}", f"--plot={picture}"]
    assert main(["simulate", *options, "--policy=adaptive,vllm_v1", "--link=20", "--host-memory=1GiB"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("Simulated: llama-13b (bfloat16) on A100-80GB, seconds from measured kernels")
    assert "\n| adaptive | " in table
    content = json.loads(out.read_text())
    assert content["command"].startswith("jaxllm simulate --num-prompts=12")
    assert {"hardware", "versions", "system", "config", "policies", "runs"} <= content.keys()
    assert [(run["policy"], run["seed"]) for run in content["runs"]] == [
        (policy, seed) for policy in ("adaptive", "vllm_v1") for seed in (0, 1)
    ]
    assert content["policies"]["vllm_v1"]["tokens_per_second"].keys() == {"mean", "low", "high"}
    assert content["system"]["num_host_blocks"] == 2**30 // (16 * 2 * 40 * 40 * 128 * 2)
    assert picture.stat().st_size > 1000
    assert main(["simulate", *options]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_the_command_reads_traces(tmp_path, capsys):
    trace(prompt_lens=[8, 16, 2000, 8, 8, 8]).save(tmp_path / "t.json")
    options = ["simulate", f"--trace={tmp_path / 't.json'}", "--gpu-blocks=64", "--policy=vllm"]
    assert main(options) == 2
    assert "request 2 of trace 'small'" in capsys.readouterr().err
    assert main([*options, "--clip", "--num-prompts=5"]) == 0
    assert "5 requests of small, as recorded" in capsys.readouterr().out
    for more, message in (
        (["--dataset=alpaca"], "--trace has lengths: drop --dataset"),
        (["--rate=1", "--closed=3"], "contradict"),
    ):
        assert main([*options, *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input-len=3", "--dataset=alpaca"], "drop one"),
        (["--dataset=prompts.json"], "a file needs --column and --tokenizer"),
        (["--tokenizer=x"], "--tokenizer does nothing without --trace or --dataset: add one of them"),
        (["--tokenizer=x", "--dataset=alpaca"], "a --dataset that is a file, and alpaca is drawn: drop them"),
        (["--on-bad=skip"], "--on-bad does nothing without --trace or --dataset"),
        (["--column=x", "--input-len=3"], "--column does nothing without --dataset: add that, or leave"),
        (["--benchmark=0"], "--benchmark does nothing without --trace: add that, or leave --benchmark out"),
        (["--time-unit=s"], "--time-unit does nothing without --trace"),
        (["--hash-block-len=16"], "--hash-block-len does nothing without --trace"),
        (["--quantize-lm-head"], "--quantize-lm-head does nothing without --quantization"),
        (["--no-quantize-lm-head"], "--no-quantize-lm-head does nothing without --quantization"),
        (["--skip", "--input-len=9", "--output-len=9"], "--skip does nothing: what is drawn has at most 18"),
        (["--host-memory=lots"], "size (bytes, or such as 64GB)"),
    ],
)
def test_the_command_refuses(options, message, capsys):
    assert main(["simulate", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_timeline_counts_requests():
    found = simulate(trace(), policy="vllm_v1", gpu_blocks=64)
    result = found.runs[0].result
    (waits, waiting), (times, running) = queue_of(found.runs[0])
    assert waiting[-1] == running[-1] == 0
    for time, count in zip(times, running, strict=True):
        begun, ended = result.first_scheduled_times <= time, result.finish_times <= time
        assert count == int(begun.sum()) - int(ended.sum())
    assert len(waits) == len(waiting)


def test_pictures_are_refused_where_they_cannot_be_written(tmp_path):
    found = simulate(trace(), policy="vllm_v1", gpu_blocks=64)
    with pytest.raises(ConfigError, match="--plot"):
        found.plot(Path(tmp_path / "picture.nothing"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--closed", "0"], "--closed must lie in [1, "),
        (["--rate", "0"], "--rate must lie in [1e-06, "),
        (["--seeds", "0"], "--seeds must lie in [1, 1000], got 0"),
        (["--num-prompts", "0"], "--num-prompts must lie in [1, "),
        (["--gpu-blocks", "0"], "--gpu-blocks must lie in [1, "),
        (["--host-blocks", "-1"], "--host-blocks must lie in [0, "),
        (
            ["--gpu-blocks", "9", "--memory-utilization", "0.5"],
            "--gpu-blocks 9 and --memory-utilization 0.5 both",
        ),
        (["--link", "0"], "--link: 0 must be GB/s, from 0.001 to"),
        (["--input-len", "0"], "--input-len: '0' must be a length of at least 1"),
        (["--input-len", "5:3"], "--input-len: '5:3' must be a length"),
        (["--arrivals", "closed:0"], "'closed:0': CLIENTS must lie in [1, "),
        (["--arrivals", "gamma:1:0"], "'gamma:1:0': CV must lie in [0.01, 20]"),
        (["--device", "a101"], "is not in the table; known: "),
        (
            ["--policy", "vllm", "--prefix-caching"],
            "--prefix-caching: policy 'vllm' plans without a prefix cache",
        ),
        (
            ["--gpu-blocks", "2"],
            "cut them with --clip, leave them out with --skip, or raise --gpu-blocks x --block",
        ),
        (["--trace", "TRACE", "--json", "TRACE", "--overwrite"], "--trace and --json are one file, '"),
        (["--trace", "TRACE"], "pass --tokenizer"),
    ],
)
def test_messages_are_in_the_commands_own_words(options, message, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "hello", "output_length": 5}\n')
    given = [str(trace) if one == "TRACE" else one for one in options]
    assert main(["simulate", *given]) == 2
    said = capsys.readouterr().err
    assert message in said
    for word in ("num_", "PosixPath", "too_long=", "DeviceSpec", "tokenizer="):
        assert word not in said.replace(str(tmp_path), "")


def test_lengths_are_a_number_a_range_or_drawn_from():
    common = {"policy": "vllm", "gpu_blocks": 128, "num_prompts": 6}
    as_drawn = UniformLengths(shortest=8, longest=9)
    found = [simulate(**common, input_len=one, output_len=one) for one in ("8:9", (8, 9), as_drawn)]
    assert found[0].to_json() == found[1].to_json() == found[2].to_json()
    assert simulate(**common, input_len=8, output_len="4").to_json() == (
        simulate(**common, input_len=UniformLengths(shortest=8, longest=8), output_len=4).to_json()
    )


def test_a_command_and_a_call_have_the_same_words():
    """But those of a command's files, and what it does with the result."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    command = {action.dest for action in parser._actions}
    call = {*inspect.signature(simulate).parameters, *inspect.signature(load_trace).parameters}
    assert command - call == {"help", "plot", "json", "overwrite", "column", "clip", "skip"}
    of_load_trace = {"path", "form", "limit", "name", "seed", "max_len"}
    assert call - command - of_load_trace == {"overlap_swaps", "too_long", "reading"}
