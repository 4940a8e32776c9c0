"""The real engine under random preemptions of either kind: what users see does not change."""

import itertools

import pytest
from engine_helpers import make_llm, run
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.executor import compile_stats
from jaxllm.llm import demo_model_path
from jaxllm.sched.policies import (
    Decision,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
    WatermarkAdmission,
)
from jaxllm.sched.preemption import Preemption
from jaxllm.sched.scheduler import Scheduler

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


class ScriptedPreemption(Preemption):
    """Preempts more than it must, whom the script says."""

    def __init__(self, state, script):
        super().__init__(state)
        self.script = script

    def make_room(self, step_id, now):
        preempted, swaps = super().make_room(step_id, now)
        draw, running = next(self.script), self._state.running
        if draw % 3 == 0 and len(running) > 1:
            victim = running.requests[draw // 3 % len(running)]
            swap = self.preempt(victim, step_id, now)
            preempted.append(victim)
            swaps += [] if swap is None else [swap]
        return preempted, swaps


class ScriptedAction:
    def __init__(self, script):
        self.script = script

    def choose(self, victim, state, now):
        num_blocks, wanted = len(victim.block_ids), next(self.script) % 3
        if wanted == 1 and num_blocks <= state.num_host_free:
            return Decision(PreemptionAction.SWAP)
        most = min(num_blocks - 1, state.num_host_free - state.num_host_heads)
        if wanted == 2 and most > 0:
            return Decision(PreemptionAction.MIXED, num_blocks=1 + next(self.script) % most)
        return Decision(PreemptionAction.RECOMPUTE)


class ScriptedResume:
    def __init__(self, script):
        self.script = script

    def choose(self, request, num_lost, copied_out_at, state, now):
        actions = list(ResumeAction)
        return ResumeDecision(actions[next(self.script) % len(actions)])


@pytest.fixture(scope="module")
def llm():
    return make_llm(
        demo_model_path(), skip_tokenizer_init=False, num_gpu_blocks_override=128, num_host_blocks=64
    )


def complete(llm, script, *, num_host_blocks, lazy, async_scheduling):
    config = llm.engine.scheduler.config
    numbers = itertools.cycle(script)
    policy = SchedulerPolicy(
        admission=WatermarkAdmission(0.0),
        action=ScriptedAction(numbers),
        resume=ScriptedResume(numbers),
        lazy_eviction=lazy,
    )
    limits = {name: getattr(config, name) for name in config.__dataclass_fields__}
    scheduler = Scheduler(type(config)(**limits | {"num_host_blocks": num_host_blocks}), policy)
    scheduler._preemption = ScriptedPreemption(scheduler._state, numbers)
    engine = Engine(
        llm.executor,
        scheduler,
        vocab_size=llm.model_config.vocab_size,
        tokenizer=llm.tokenizer,
        eos_token_ids=llm.engine._eos_token_ids,
        async_scheduling=async_scheduling,
    )
    prompts = [PROMPTS[place % len(PROMPTS)] for place in range(len(PARAMS))]
    outputs = run(engine, prompts, PARAMS)
    assert scheduler.num_free_host_blocks == num_host_blocks
    return outputs


@pytest.fixture(scope="module")
def calm(llm):
    outputs = complete(llm, [1], num_host_blocks=0, lazy=False, async_scheduling=True)
    assert sum(output.metrics.num_preemptions for output in outputs) == 0
    assert {output.finish_reason for output in outputs} == {"length", "stop"}
    return outputs


@settings(max_examples=12, deadline=None)
@given(
    script=st.lists(st.integers(0, 59), min_size=5, max_size=40),
    num_host_blocks=st.sampled_from([0, 6, 64]),
    lazy=st.booleans(),
    async_scheduling=st.booleans(),
)
def test_nothing_a_user_sees_depends_on_preemptions(
    llm, calm, script, num_host_blocks, lazy, async_scheduling
):
    compiled, _ = compile_stats.total()
    outputs = complete(
        llm, script, num_host_blocks=num_host_blocks, lazy=lazy, async_scheduling=async_scheduling
    )
    assert compile_stats.total()[0] == compiled
    for output, expected in zip(outputs, calm, strict=True):
        mine, theirs = output.outputs[0], expected.outputs[0]
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


def test_the_script_does_preempt(llm, calm):
    outputs = complete(llm, [0, 1, 3, 5], num_host_blocks=64, lazy=True, async_scheduling=True)
    assert sum(output.metrics.num_preemptions for output in outputs) > 10
    assert sum(output.metrics.num_swaps for output in outputs) > 3
