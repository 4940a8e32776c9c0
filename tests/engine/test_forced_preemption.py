"""The real engine under random schedules, preemptions, aborts and faults: no token changes."""

import dataclasses
import itertools

import pytest
from engine_helpers import Knowing, Scripted, make_llm
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.errors import EngineError, UserCodeError
from jaxllm.executor import compile_stats
from jaxllm.executor.draft_model import DraftModel
from jaxllm.executor.draft_programs import ModelCore
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sched.policies import (
    Decision,
    MixedIterations,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
    SeparateIterations,
)
from jaxllm.sched.policies.speculation import AsProposed
from jaxllm.sched.scheduler import Scheduler
from jaxllm.sched.speculation import Speculation

PROMPTS = ["import os\n\ndef ", "class Reader:\n    def __init__(self", "def add(a, b):\n", "for i in range("]
GREEDY = {"temperature": 0, "max_tokens": 20}
PARAMS = [
    SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=1),
    SamplingParams(**GREEDY, repetition_penalty=1.2, presence_penalty=0.5, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20, frequency_penalty=0.7, logprobs=1),
    SamplingParams(temperature=0.8, top_k=20, seed=8, max_tokens=20, min_tokens=6, stop=["\n", "):"]),
    SamplingParams(**GREEDY, stop=["self", "return"], logit_bias={3: 1.0}, min_p=0.1),
    SamplingParams(temperature=1.0, seed=9, max_tokens=20, stop_token_ids=list(range(40, 60)), logprobs=0),
]
NUM_HOST_BLOCKS = 64
MOST_DRAFTS = 8


class Chunked:
    """Prompt tokens by the script, beside decodes or instead of them."""

    def __init__(self, script, mixes):
        self.script, self.mixes = script, mixes

    def num_prompt_tokens(self, state):
        return next(self.script) % 24


class ScriptedAction:
    def __init__(self, script):
        self.script = script

    def choose(self, victim, state, now):
        num_blocks = -(-victim.num_computed_tokens // state.block_size)
        if next(self.script) % 2 and 0 < num_blocks <= state.num_host_free:
            return Decision(PreemptionAction.SWAP)
        return Decision(PreemptionAction.RECOMPUTE)


class ScriptedResume:
    def __init__(self, script):
        self.script = script

    def choose(self, request, copied_out_at, state, now):
        actions = list(ResumeAction)
        return ResumeDecision(actions[next(self.script) % len(actions)])


class Fails:
    """A part of an engine that raises once, when it is called for the `place`-th time."""

    def __init__(self, part, name, place):
        self.part, self.name, self.place = part, name, place

    def __getattr__(self, name):
        found = getattr(self.part, name)
        if name != self.name:
            return found

        def call(*args):
            self.place -= 1
            if self.place == 0:
                raise RuntimeError("a fault")
            return found(*args)

        return call


class FailingExecutor(Fails):
    """As its `part`, which others go on to use; with results whose `fetch` may fail."""

    def execute(self, scheduled):
        result = self.__getattr__("execute")(scheduled)
        if self.name != "fetch":
            return result
        failing = Fails(result, "fetch", self.place)
        self.place -= 1
        return failing

    def release(self):
        """Copies of the failed engine's requests are not to arrive in blocks of those that come after it."""
        swapper = self.part.swapper
        for handle in swapper.loads:
            swapper.discard(handle)
        for piece in swapper.pieces:
            swapper.drop(piece)


@pytest.fixture(scope="module")
def llm():
    return make_llm(
        demo_model_path(),
        skip_tokenizer_init=False,
        num_gpu_blocks_override=128,
        num_host_blocks=NUM_HOST_BLOCKS,
        prefill_buckets=[16, 48],
        num_scheduler_steps=4,
        speculative_config={"num_speculative_tokens": MOST_DRAFTS},
    )


def engine_of(
    llm, policy, *, num_host_blocks=NUM_HOST_BLOCKS, executor=None, proposer=None, num_drafts=8, **settings
):
    config = dataclasses.replace(llm.engine.scheduler.config, num_host_blocks=num_host_blocks)
    speculation = None
    if proposer is not None and policy.iterations.mixes:
        speculation = Speculation(proposer, AsProposed(), num_drafts, 4 * MOST_DRAFTS)
    return Engine(
        executor or llm.executor,
        Scheduler(config, policy, speculation=speculation),
        vocab_size=llm.model_config.vocab_size,
        tokenizer=llm.tokenizer,
        eos_token_ids=frozenset([llm.tokenizer.eos_token_id]),
        **settings,
    )


def run(engine, aborts=(), params=PARAMS):
    """The outputs by place; `aborts` are pairs of a step and whom it ends; faults of policies pass."""
    for place, one in enumerate(params):
        engine.add_request(str(place), PROMPTS[place % len(PROMPTS)], one)
    outputs = {}
    num_steps = 0
    while engine.has_unfinished_requests:
        for at, place in aborts:
            if at == num_steps and engine.is_live(str(place)):
                engine.abort(str(place))
        try:
            finished = engine.step()
        except UserCodeError as error:
            assert str(error.__cause__) == "a fault"  # noqa: PT017
            finished = []
        outputs.update({int(output.request_id): output for output in finished})
        engine.scheduler.check()
        num_steps += 1
    assert sorted(outputs) == list(range(len(params)))
    config = engine.scheduler.config
    assert engine.scheduler.num_free_blocks == config.num_gpu_blocks
    assert engine.scheduler.num_free_host_blocks == config.num_host_blocks
    return outputs


def assert_no_copy_is_left(engine, llm):
    """Executors are told of what nobody will read with the next step that runs."""
    engine.add_request("last", PROMPTS[0], SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests:
        try:
            engine.step()
        except RuntimeError as error:
            assert str(error) == "a fault"  # noqa: PT017
    assert not llm.executor.swapper.pieces
    assert not llm.executor.swapper.loads


@pytest.fixture(scope="module")
def weights(llm):
    return llm.executor._params


@pytest.fixture(scope="module")
def draft_model(llm, weights):
    """The model itself without its upper half, which is right now and then, in a pool for two of them."""
    executor, num_layers = llm.executor, llm.model_config.num_layers // 2
    upper = tuple(f"layers.{layer}." for layer in range(num_layers, 2 * num_layers))
    config = dataclasses.replace(executor.config, num_gpu_blocks=16)
    model = DraftModel(
        ModelCore(dataclasses.replace(llm.model_config, num_layers=num_layers), config),
        lambda: {name: one for name, one in weights.items() if not name.startswith(upper)},
        config,
        MOST_DRAFTS,
        executor._device,
    )
    model.warm_up()
    return model


def answers_alone(llm, params):
    """The answers of each request when nobody else is there, a token an iteration."""
    engine, answers = engine_of(llm, SchedulerPolicy()), []
    for place, one in enumerate(params):
        engine.add_request(str(place), PROMPTS[place % len(PROMPTS)], one)
        while engine.has_unfinished_requests:
            answers += engine.step()
    return answers


@pytest.fixture(scope="module")
def alone(llm):
    answers = answers_alone(llm, PARAMS)
    assert sum(output.metrics.num_preemptions for output in answers) == 0
    assert {output.finish_reason for output in answers} == {"length", "stop"}
    return answers


def answers_of(alone):
    return {str(place): output.token_ids for place, output in enumerate(alone)}


def assert_same(output, expected):
    mine, theirs = output.outputs[0], expected.outputs[0]
    if mine.finish_reason == "abort":
        assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
        assert theirs.text.startswith(mine.text)
        return
    assert mine.token_ids == theirs.token_ids
    assert (mine.text, mine.finish_reason, mine.stop_reason) == (
        theirs.text,
        theirs.finish_reason,
        theirs.stop_reason,
    )
    assert (output.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for scores, reference in (
        *zip(mine.logprobs or [], theirs.logprobs or [], strict=True),
        *zip((output.prompt_logprobs or [])[1:], (expected.prompt_logprobs or [])[1:], strict=True),
    ):
        assert scores.keys() == reference.keys()
        assert all(scores[i].logprob == pytest.approx(reference[i].logprob, abs=1e-4) for i in scores)


def scripted(script, mixes):
    numbers = itertools.cycle(script)
    return Scripted(
        script=numbers,
        action=ScriptedAction(numbers),
        resume=ScriptedResume(numbers),
        iterations=Chunked(numbers, mixes),
    )


SCRIPTS = st.lists(st.integers(0, 59), min_size=5, max_size=40)
SCHEDULES = {
    "script": SCRIPTS,
    "mixes": st.booleans(),
    "num_host_blocks": st.sampled_from([0, 6, NUM_HOST_BLOCKS]),
    "async_scheduling": st.booleans(),
}
"""What `engine_of` and `scripted` take."""


def aborts_of(params):
    """Pairs of a step and whom it ends."""
    return st.lists(st.tuples(st.integers(0, 30), st.integers(0, len(params) - 1)), max_size=2)


@settings(max_examples=24, deadline=None)
@given(
    **SCHEDULES,
    num_scheduler_steps=st.sampled_from([1, 4]),
    aborts=aborts_of(PARAMS),
    policy_fault=st.integers(0, 40),
    drafts=st.none() | st.just("model") | st.lists(st.integers(0, 4095), min_size=2, max_size=20),
    num_drafts=st.integers(0, MOST_DRAFTS),
)
def test_no_token_depends_on_the_schedule_or_on_drafts(
    llm,
    alone,
    draft_model,
    script,
    mixes,
    aborts,
    policy_fault,
    num_host_blocks,
    async_scheduling,
    num_scheduler_steps,
    drafts,
    num_drafts,
):
    compiled, num_programs = compile_stats.total()[0], len(llm.executor.programs)
    policy = scripted([*script, 7], mixes)
    policy = dataclasses.replace(policy, action=Fails(policy.action, "choose", policy_fault))
    proposer = None
    if drafts is not None:
        proposer = draft_model if drafts == "model" else Knowing(answers_of(alone), drafts)
    engine = engine_of(
        llm,
        policy,
        num_host_blocks=num_host_blocks,
        async_scheduling=async_scheduling,
        num_scheduler_steps=num_scheduler_steps,
        proposer=proposer,
        num_drafts=num_drafts,
    )
    outputs = run(engine, aborts)
    new_programs = len(llm.executor.programs) - num_programs  # requests that had not met before
    assert compile_stats.total()[0] == compiled + new_programs
    for place, expected in enumerate(alone):
        assert_same(outputs[place], expected)
    assert_no_copy_is_left(engine, llm)
    assert draft_model.num_free_blocks == draft_model.config.num_gpu_blocks


@settings(max_examples=12, deadline=None)
@given(
    script=SCRIPTS,
    mixes=st.booleans(),
    async_scheduling=st.booleans(),
    name=st.sampled_from(["execute", "copies", "fetch"]),
    place=st.integers(1, 30),
)
def test_after_a_fault_all_requests_have_ended(llm, alone, script, mixes, async_scheduling, name, place):
    executor = FailingExecutor(llm.executor, name, place)
    policy, proposer = scripted([*script, 7], mixes), Knowing(answers_of(alone), [*script, 3])
    engine = engine_of(llm, policy, executor=executor, proposer=proposer, async_scheduling=async_scheduling)
    finished = {}
    try:
        finished = run(engine)
    except EngineError as error:
        assert isinstance(error.__cause__, RuntimeError)  # noqa: PT017
        assert "RuntimeError: a fault" in str(error)  # noqa: PT017
        finished = {int(output.request_id): output for output in error.finished}
        with pytest.raises(EngineError, match="the engine has failed"):
            engine.step()
        with pytest.raises(EngineError, match="a new LLM works"):
            engine.add_request("another", PROMPTS[0])
    assert not engine.has_unfinished_requests
    assert engine.scheduler.num_free_blocks == engine.scheduler.config.num_gpu_blocks
    assert engine.scheduler.num_free_host_blocks == NUM_HOST_BLOCKS
    for request, output in finished.items():
        assert_same(output, alone[request])
    executor.release()
    # Nothing of it is left on the device that could disturb others.
    if place % 5 == 0:
        for request, output in run(engine_of(llm, SchedulerPolicy())).items():
            assert_same(output, alone[request])


@pytest.mark.parametrize("iterations", [MixedIterations(), SeparateIterations()])
def test_the_script_does_preempt(llm, iterations):
    policy = dataclasses.replace(scripted([0, 1, 3, 5, 7], mixes=True), iterations=iterations)
    engine = engine_of(llm, policy)
    outputs = run(engine).values()
    assert sum(output.metrics.num_preemptions for output in outputs) > 10
    assert sum(output.metrics.num_swaps for output in outputs) > 3
    assert_no_copy_is_left(engine, llm)


def test_who_is_preempted_drafts_again(llm, alone):
    policy, proposer = scripted([0, 1, 3, 5, 7], mixes=True), Knowing(answers_of(alone), [8, 3, 5, 2])
    engine = engine_of(llm, policy, proposer=proposer)
    for place, output in run(engine).items():
        assert_same(output, alone[place])
    counts = engine.scheduler.speculation.counts
    assert engine.scheduler.progress.num_preempted > 3
    assert counts.num_drafted > counts.num_kept > 10
    assert_no_copy_is_left(engine, llm)
