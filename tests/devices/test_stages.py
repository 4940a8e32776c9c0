"""Engines whose layers are on stages of devices: tokens, swaps, files and scores are those of one device."""

import dataclasses

import jax
import pytest
from engine_helpers import Knowing, make_llm
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_golden import (  # noqa: F401
    test_tokens_and_logprobs_equal_those_of_transformers,
)
from test_forced_preemption import (  # noqa: F401
    NUM_HOST_BLOCKS,
    PARAMS,
    SCHEDULES,
    aborts_of,
    alone,
    answers_alone,
    answers_of,
    assert_no_copy_is_left,
    assert_same,
    engine_of,
    run,
    scripted,
    test_after_a_fault_all_requests_have_ended,
)
from test_prefix_files import files_below, generate, keeping
from variants import golden_checkpoint, golden_data

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, EngineError
from jaxllm.executor import parts as executor_parts
from jaxllm.executor.placement import Placement
from jaxllm.executor.stages import BegunStep, StagedProgram
from jaxllm.executor.step_programs import StepPrograms
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.architecture import ARCHITECTURES
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.models.llama import LlamaForCausalLM
from jaxllm.models.registry import PLAIN, abstract_params
from jaxllm.predictors import pipeline
from jaxllm.sched.policies import SchedulerPolicy

GQA = golden_checkpoint("llama_gqa")
STAGES = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
KINDS = "llama_gqa", "llama_tied", "granite", "gemma2", "gemma3", "opt_pre_norm", "opt_post_norm"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def parts():
    """As many as stages take at most, also of few rows and of little context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "STAGED_ROWS", 3)
        patch.setattr(pipeline, "least_context", lambda model: 0)
        patch.setattr(executor_parts, "_FEW_TOKENS", 2)
        yield


@pytest.fixture(scope="module", params=KINDS)
def variant(request):
    with pytest.MonkeyPatch.context() as patch:  # only what is needed is compiled
        patch.setattr(StepPrograms, "begin", lambda self, num_threads=None: None)
        settings = {"warm_up": "background", "num_host_blocks": 16}
        llm = make_llm(golden_checkpoint(request.param), **STAGES, **settings)
    return llm, golden_data(request.param)


@pytest.fixture(scope="module", params=[2, 4])
def llm(request):
    with make_llm(
        demo_model_path(),
        pipeline_parallel_size=request.param,
        tensor_parallel_size=1,
        max_num_seqs=6,
        decode_buckets=[3, 6],
        skip_tokenizer_init=False,
        num_host_blocks=NUM_HOST_BLOCKS,
        speculative_config={"num_speculative_tokens": 8},
        warm_up="background",
    ) as made:
        yield made


@pytest.mark.parametrize("width", [1, 2])
def test_every_kind_of_request_is_answered_as_on_one_device(asked, on_one, width):
    settings = {"warm_up": "background", "skip_tokenizer_init": False, "num_host_blocks": 16}
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": width, "num_gpu_blocks_override": 28}
    with make_llm(demo_model_path(), **sizes, **settings) as llm:
        pool = addresses(llm)
        for output, expected in zip(llm.generate(*asked, use_tqdm=False), on_one, strict=True):
            assert_same(output, expected)
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
        assert addresses(llm) == pool
        assert_each_device_has_its_part(llm)
        llm.sleep(level=2)
        llm.wake_up()
        (output,) = llm.generate(asked[0][:1], asked[1][:1], use_tqdm=False)
        assert_same(output, on_one[0])
        assert_each_device_has_its_part(llm)


def addresses(llm):
    """Of the pool's parts, which steps and swaps update in place."""
    return [part.data.unsafe_buffer_pointer() for part in llm.executor._state.pool.addressable_shards]


def assert_each_device_has_its_part(llm):
    """Of the pool its layers and KV heads, and the weights of its layers; all else is on the first stage."""
    executor, config, devices = llm.executor, llm.model_config, jax.devices()
    width, num_layers = llm.config.tensor_parallel_size, config.num_layers
    parts = {part.device: part.data for part in executor._state.pool.addressable_shards}
    assert {part.shape[1] for part in parts.values()} == {num_layers // 2}
    assert {part.shape[3] for part in parts.values()} == {max(1, config.num_kv_heads // width)}
    assert [*parts] == devices[: 2 * width]
    for name in abstract_params(config, "float32"):
        is_late = name.startswith("layers.") and int(name.split(".")[1]) >= num_layers // 2
        where = devices[width : 2 * width] if is_late else devices[:width]
        for array in jax.tree.leaves(executor._params[name]):
            assert array.sharding.device_set == {*where}
    assert executor._state.history.sharding.device_set == {*devices[:width]}


@settings(max_examples=12, deadline=None)
@given(
    **SCHEDULES,
    aborts=aborts_of(PARAMS),
    drafts=st.none() | st.lists(st.integers(0, 4095), min_size=2, max_size=20),
)
def test_no_token_depends_on_the_schedule(
    llm,
    alone,  # noqa: F811
    script,
    mixes,
    num_host_blocks,
    async_scheduling,
    aborts,
    drafts,
):
    proposer = None if drafts is None else Knowing(answers_of(alone), drafts)
    engine = engine_of(
        llm,
        scripted([*script, 7], mixes),
        num_host_blocks=num_host_blocks,
        async_scheduling=async_scheduling,
        proposer=proposer,
    )
    outputs = run(engine, aborts)
    for place, expected in enumerate(alone):
        assert_same(outputs[place], expected)
    assert_no_copy_is_left(engine, llm)


SAMPLED_IN_STEPS = [
    *(SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (5, 18, 9, 30)),
    *(SamplingParams(temperature=0.9, seed=seed, max_tokens=20) for seed in range(3)),
    SamplingParams(temperature=0, max_tokens=24, stop_token_ids=list(range(30, 90))),
    SamplingParams(temperature=0, max_tokens=24, stop=["self", "return", "e"]),
]
"""Whose tokens nothing but steps samples, so that these are sampled late."""


@pytest.fixture(scope="module")
def plain_alone(llm):
    return answers_alone(llm, SAMPLED_IN_STEPS)


@settings(max_examples=30, deadline=None)
@given(
    **SCHEDULES,
    aborts=aborts_of(SAMPLED_IN_STEPS),
)
def test_no_token_is_sampled_too_late(
    llm, plain_alone, script, mixes, num_host_blocks, async_scheduling, aborts
):
    """Of who is preempted, ends or comes into a slot while parts are yet to be sampled."""
    policy = scripted([*script, 7], mixes)
    engine = engine_of(llm, policy, num_host_blocks=num_host_blocks, async_scheduling=async_scheduling)
    outputs = run(engine, aborts, SAMPLED_IN_STEPS)
    for place, expected in enumerate(plain_alone):
        assert_same(outputs[place], expected)
    assert_no_copy_is_left(engine, llm)


@pytest.fixture
def depths(monkeypatch):
    """How many parts are yet to be sampled when one begins."""
    under_way, found = [], []
    begin, sample = StagedProgram.begin, BegunStep.sample

    def noted_begin(self, *args):
        found.append(len(under_way))
        state, step = begin(self, *args)
        under_way.append(step)
        return state, step

    def noted_sample(self, state):
        under_way.remove(self)
        return sample(self, state)

    monkeypatch.setattr(StagedProgram, "begin", noted_begin)
    monkeypatch.setattr(BegunStep, "sample", noted_sample)
    yield found
    assert not under_way


def test_a_part_is_sampled_once_the_next_ones_have_begun(llm, depths):
    """So that all stages compute; also across iterations, while others come and end."""
    run(engine_of(llm, SchedulerPolicy()), (), [GREEDY, *SAMPLED_IN_STEPS[:4] * 3])
    assert depths.count(llm.config.pipeline_parallel_size - 1) >= 0.6 * len(depths)


def test_a_prompt_alone_is_in_all_stages_at_the_same_time(llm, depths):
    """In as many parts as it may be, of one iteration after another."""
    stages, engine = llm.config.pipeline_parallel_size, engine_of(llm, SchedulerPolicy())
    engine.add_request("0", [5 + place for place in range(96)], SamplingParams(temperature=0, max_tokens=1))
    while engine.has_unfinished_requests:
        engine.step()
    assert depths == [*range(stages - 1), *[stages - 1] * (3 * stages + 1)]


def test_a_part_that_cannot_be_sampled_ends_the_engine(monkeypatch):
    """Whenever that turns out, and whatever else has begun: nobody waits for the rest."""
    sample, calls = BegunStep.sample, []

    def failing(self, state):
        calls.append(None)
        if len(calls) == 7:
            raise RuntimeError("the device is gone")
        return sample(self, state)

    with make_llm(GQA, **STAGES, warm_up="background") as llm:
        monkeypatch.setattr(BegunStep, "sample", failing)
        for _ in range(2):
            with pytest.raises(EngineError):
                llm.generate([[9 + i] * 20 for i in range(4)], GREEDY, use_tqdm=False)
    assert len(calls) == 7


def test_files_are_those_of_one_device(tmp_path):
    with keeping(tmp_path, tensor_parallel_size=1) as llm:
        tokens = generate(llm).token_ids
        generate(llm, [9] * 4)
    kept = {*files_below(tmp_path)}
    with keeping(tmp_path, **STAGES) as llm:
        output = generate(llm)
        assert output.token_ids == tokens
        assert output.cached_tokens_by_tier["disk"] == 56
        generate(llm, [9] * 4)
    assert {*files_below(tmp_path)} == kept


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_what_is_rounded_is_rounded_as_on_one_device(changes):
    answers = []
    for count in (1, 2):
        sizes = {"pipeline_parallel_size": count, "tensor_parallel_size": 1, "warm_up": "background"}
        with make_llm(GQA, **sizes, **changes) as llm:
            outputs = llm.generate([[9 + i] * 20 for i in range(4)], GREEDY, use_tqdm=False)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_a_pool_in_bytes_has_as_many_more_blocks():
    sizes = {"kv_cache_memory": 2**16, "max_model_len": 32, "skip_tokenizer_init": True}
    blocks = []
    for count in (1, 2):
        with LLM(GQA, pipeline_parallel_size=count, **sizes) as llm:
            blocks.append(llm.executor.num_gpu_blocks)
    assert blocks[1] == 2 * blocks[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 3}, "does not divide the 2 layers"),
        ({"tensor_parallel_size": 4}, "pipeline_parallel_size=2 times tensor_parallel_size=4 is more than"),
        ({"num_scheduler_steps": 2}, "are of one device program"),
        ({"attention_implementation": "fastest"}, "'fastest' measures on one device"),
        ({"speculative_config": {"method": "medusa", "model": "m"}}, "draft from what layers on one device"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(GQA, **{**STAGES, **settings})


class Renamed(LlamaForCausalLM):
    """As Llama, but that its layers have another name."""

    def __init__(self, config, dtype):
        super().__init__(config, dtype)
        self.blocks, self.layers = self.layers, None


def test_an_architecture_that_does_not_name_its_layers_is_refused(monkeypatch):
    own = dataclasses.replace(ARCHITECTURES["LlamaForCausalLM"], name="Renamed", model=Renamed)
    monkeypatch.setitem(ARCHITECTURES, own.name, own)
    config = dataclasses.replace(config_from_dict(read_hf_config(GQA)), architecture=own.name)
    with pytest.raises(ConfigError, match="weights of Renamed do not say of which layer they are"):
        Placement(tuple(jax.devices()[:2]), 2).check(config, PLAIN)


def test_the_command_takes_it(capsys):
    options = ["--max-model-len", "64", "--num-gpu-blocks-override", "16", "--max-tokens", "4"]
    options += ["--temperature", "0"]
    said = []
    for size in ("1", "2"):
        assert main(["generate", "def add(a, b):", "--text", "-q", "-pp", size, *options]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
