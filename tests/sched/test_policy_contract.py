"""A policy that breaks the contract is told which rule, and of which request."""

import dataclasses
import io
import json
import re
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_llm
from scheduler_helpers import V1, LinearCosts, make_request, make_scheduler, step
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, UserCodeError
from jaxllm.predictors.base import CheckedCosts
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.plan import Plan, Planner, PlanningPolicy
from jaxllm.sched.policies import (
    AdaptiveAction,
    Decision,
    FCFSPriority,
    LatestArrivalVictim,
    LeastUrgentVictim,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SwapIfItFits,
    WriteThrough,
)
from jaxllm.sched.policies.contract import watched
from jaxllm.sched.presets import make_preset
from jaxllm.types import Request, RequestStatus


class Planned(PlanningPolicy):
    """Plans by a function of the state."""

    priority = FCFSPriority()

    def __init__(self, plan):
        self.make_plan = plan

    def planner(self, state):
        return MyPlanner(state, self.make_plan)


class MyPlanner(Planner):
    def __init__(self, state, make_plan):
        self.state, self.make_plan = state, make_plan

    def plan(self, now):
        return self.make_plan(self.state)

    def __repr__(self):
        return "MyPlanner"


def first(state):
    return next(iter(state.waiting))


def start(state):
    return [(first(state), 4)]


def changed(name, value):
    def plan(state):
        setattr(first(state), name, value)
        return Plan(starting=start(state))

    return plan


def appended(state):
    first(state).output_token_ids.append(7)
    return Plan(starting=start(state))


DROP, AT_ONCE = Decision(PreemptionAction.RECOMPUTE), ResumeDecision(ResumeAction.AT_ONCE)
PLANS = [
    (lambda state: "all", "planned 'all', which is not a Plan"),
    (
        lambda state: Plan(starting=[(make_request(9, 4), 4)]),
        "names Request('r9', waiting",
        "no request of this",
    ),
    (
        lambda state: Plan(starting=[("r0", 4)]),
        "names 'r0' in starting, which is no request of this scheduler",
    ),
    (lambda state: Plan(starting=start(state) * 2), "request 'r0' in starting and again in starting: a plan"),
    (
        lambda state: Plan(chunks=start(state)),
        "request 'r0' in chunks, which takes who has its prompt under way",
    ),
    (
        lambda state: Plan(victims=[(first(state), DROP)]),
        "request 'r0' in victims, which takes who holds blocks",
    ),
    (
        lambda state: Plan(resuming=[(first(state), AT_ONCE, 1)]),
        "'r0' in resuming, which takes who is swapped",
    ),
    (changed("arrival_time", 7.0), "MyPlanner changed request 'r0' (arrival_time from 0.0 to 7.0)"),
    (changed("sampling_params", None), "MyPlanner changed request 'r0' (sampling_params from"),
    (changed("status", RequestStatus.RUNNING), "changed request 'r0' (status from"),
    (changed("prompt_token_ids", [1]), "changed request 'r0' (prompt_token_ids from [0, 1, 2, 3] to [1])"),
    (appended, "changed request 'r0' (output_token_ids from 0 to 1 entries)"),
]


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_breaks_a_rule_is_refused_and_nothing_has_changed(case):
    plan, *messages = case
    scheduler = make_scheduler(Planned(plan))
    request = make_request(0, 4)
    scheduler.add(request)
    for message in messages:
        with pytest.raises(ConfigError, match=re.escape(message)):
            scheduler.schedule(0.0)
    assert scheduler.is_planning
    assert (request.arrival_time, request.status) == (0.0, RequestStatus.WAITING)
    assert request.prompt_token_ids == [0, 1, 2, 3]
    scheduler.check()


def test_a_plan_within_the_rules_runs():
    scheduler = make_scheduler(
        Planned(lambda state: Plan(starting=start(state)) if state.waiting else Plan())
    )
    scheduler.add(make_request(0, 4, max_new_tokens=2))
    assert [step(scheduler), step(scheduler)] == ["| r0[0:4]!", "r0"]


class Changes:
    """Any policy's methods, each of which changes the request that it is asked about."""

    def __init__(self, answer):
        self.answer = answer

    def _change(self, request, *others):
        request.num_passed += 1
        return self.answer

    score = group = choose = admits = predict = _change

    def outranks(self, queued, holder, now):
        return False

    def observe(self, request, num_tokens):
        pass

    def __repr__(self):
        return "Changes"


@pytest.mark.parametrize(
    ("question", "method", "answer"),
    [
        ("priority", "group", 1.0),
        ("admission", "admits", True),
        ("victim", "score", 1.0),
        ("action", "choose", DROP),
        ("resume", "choose", AT_ONCE),
        ("length", "predict", 3),
    ],
)
def test_whoever_changes_a_request_is_named(question, method, answer):
    policy = dataclasses.replace(V1, action=SwapIfItFits(LinearCosts()))
    policy = dataclasses.replace(policy, **{question: Changes(answer)})
    scheduler = make_scheduler(policy, num_gpu_blocks=2, num_host_blocks=2)
    with pytest.raises(
        ConfigError,
        match=rf":Changes.{method} changed request 'r[01]' \(num_passed from [01] to [12]\)",
    ):
        run_two(scheduler)


class Nameless(Changes):
    __repr__ = object.__repr__


@pytest.mark.parametrize(
    ("question", "answer"),
    [("victim", "soon"), ("priority", "soon"), ("action", "swap"), ("resume", object())],
)
def test_who_breaks_the_contract_is_called_by_its_class_and_not_by_an_address(question, answer):
    class Answers(Nameless):
        def _change(self, request, *others):
            return answer

        score = group = choose = _change

    policy = dataclasses.replace(V1, action=SwapIfItFits(LinearCosts()))
    policy = dataclasses.replace(policy, **{question: Answers(answer)})
    with pytest.raises(ConfigError, match=r"test_policy_contract:.*Answers") as caught:
        run_two(make_scheduler(policy, num_gpu_blocks=2, num_host_blocks=2))
    assert " at 0x" not in str(caught.value)


def test_a_part_that_answers_nothing_is_shown_without_an_address():
    with pytest.raises(ConfigError, match=r"^victim=<object object> does not answer the question"):
        dataclasses.replace(V1, victim=object())


def run_two(scheduler):
    """One of two requests is preempted, and comes back."""
    for index in (0, 1):
        scheduler.add(make_request(index, 4, max_new_tokens=4))
    for now in range(8):
        step(scheduler, float(now))


class ByScorer(LatestArrivalVictim):
    def scorer(self, state, now):
        def score(request):
            request.arrival_index += 1
            return 0.0

        return score


def test_the_scorer_of_a_victim_policy_is_watched_too():
    scheduler = make_scheduler(dataclasses.replace(V1, victim=ByScorer()), num_gpu_blocks=2)
    with pytest.raises(ConfigError, match=r"scorer changed request 'r0' \(arrival_index from 0 to 1\)"):
        run_two(scheduler)


def test_a_scorer_is_asked_for_once_when_blocks_run_out():
    asked = []

    class Counting(LatestArrivalVictim):
        def scorer(self, state, now):
            asked.append(now)
            return lambda request: 0.0

    scheduler = make_scheduler(dataclasses.replace(V1, victim=Counting()), num_gpu_blocks=2)
    run_two(scheduler)
    assert asked
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("question", "answer", "message"),
    [
        ("victim", float("nan"), "scored Request('r0', running"),
        ("priority", float("nan"), "scores Request('r0', waiting"),
        (
            "action",
            Decision("teleport"),
            "not a Decision of PreemptionAction.RECOMPUTE or PreemptionAction.SWAP, for",
        ),
        ("action", "swap", "answered 'swap', which is not a Decision"),
        ("resume", ResumeDecision("soon"), "not a ResumeDecision of a ResumeAction, for request 'r1'"),
    ],
)
def test_an_answer_that_is_none_is_refused_with_the_request(question, answer, message):
    class Answers(Changes):
        def _change(self, request, *others):
            return self.answer

        score = group = choose = _change

    policy = dataclasses.replace(V1, action=SwapIfItFits(LinearCosts()))
    policy = dataclasses.replace(policy, **{question: Answers(answer)})
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_two(make_scheduler(policy, num_gpu_blocks=2, num_host_blocks=2))


class Raises(Changes):
    """Any policy's methods, each of which raises."""

    def _change(self, *args, **named):
        raise ZeroDivisionError("a slip")

    score = group = choose = admits = predict = observe = _change


class RaisesInCache(Raises):
    """The policies of offload and of retention."""

    loses_heads = is_eager = False
    values = keeps = num_ahead = reads = observe = Raises._change


@pytest.mark.parametrize(
    ("question", "method"),
    [
        ("priority", "group"),
        ("admission", "admits"),
        ("victim", "score"),
        ("action", "choose"),
        ("resume", "choose"),
        ("length", "predict"),
    ],
)
def test_whoever_raises_is_named_with_its_hook_and_the_request(question, method):
    policy = dataclasses.replace(V1, action=SwapIfItFits(LinearCosts()))
    scheduler = make_scheduler(
        dataclasses.replace(policy, **{question: Raises(None)}), num_gpu_blocks=2, num_host_blocks=2
    )
    said = rf"test_policy_contract:Raises\.{method} raised ZeroDivisionError: a slip \(.*\.py, line \d+\)"
    with pytest.raises(UserCodeError, match=said + r", about request 'r[01]'$") as raised:
        run_two(scheduler)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert raised.value.request_id in ("r0", "r1")


@pytest.mark.parametrize(
    "number",
    [Decimal(1), Fraction(1), np.float32(1), np.array(1), jnp.int32(1), jnp.bfloat16(1), np.int64(1)],
)
def test_answers_may_be_any_kind_of_number(number):
    class Answers:
        def score(self, request, now):
            return number

        def group(self, request):
            return None

        def choose(self, victim, state, now):
            return Decision(PreemptionAction.RECOMPUTE, number, number)

    parts = {"priority": Answers(), "victim": LeastUrgentVictim(Answers()), "action": Answers()}
    file = io.StringIO()
    scheduler = make_scheduler(dataclasses.replace(V1, **parts), Ledger(file), num_gpu_blocks=2)
    run_two(scheduler)
    scheduler.ledger.close()
    (record,) = [
        one for one in map(json.loads, file.getvalue().splitlines()) if one["record"] == "preemption"
    ]
    assert record["swap_seconds"] == record["recompute_seconds"] == 1


def test_a_priority_within_a_policy_of_the_package_is_named_too():
    class Touchy(FCFSPriority):
        def score(self, request, now):
            if request.block_ids:
                raise KeyError("held")
            return 0.0

    policy = dataclasses.replace(V1, victim=LeastUrgentVictim(Touchy()))
    with pytest.raises(UserCodeError, match=r"Touchy\.score raised KeyError: 'held' .*about request 'r0'"):
        run_two(make_scheduler(policy, num_gpu_blocks=2))


@pytest.mark.parametrize("part", [{"offload": RaisesInCache(None)}, {"retention": RaisesInCache(None)}])
def test_policies_of_the_cache_are_named_where_they_raise(part):
    policy = dataclasses.replace(V1, **({"offload": WriteThrough()} | part))
    scheduler = make_scheduler(policy, num_gpu_blocks=4, num_host_blocks=2, enable_prefix_caching=True)
    for index in range(8):
        scheduler.add(make_request(index, 8, max_new_tokens=2, prompt_token_ids=[index] * 8))

    def run():
        for now in range(32):
            step(scheduler, float(now))

    with pytest.raises(UserCodeError, match=r"RaisesInCache\.\w+ raised ZeroDivisionError: a slip"):
        run()


def test_a_planner_that_raises_is_named():
    scheduler = make_scheduler(Planned(lambda state: 1 // 0))
    scheduler.add(make_request(0, 4))
    with pytest.raises(UserCodeError, match=r"\.plan raised ZeroDivisionError"):
        scheduler.schedule(0.0)
    assert scheduler.is_planning


@pytest.mark.parametrize(
    ("action", "asker"),
    [
        (lambda costs: AdaptiveAction(CheckedCosts(costs)), "AdaptiveAction.choose"),
        (lambda costs: make_preset("paper", costs).action, "AdaptiveAction.choose"),
        (None, "Weighs.choose"),
    ],
)
def test_costs_that_raise_are_named_with_who_asked_and_about_whom(action, asker):
    class Weighs:
        def __init__(self, costs):
            self.costs = costs

        def choose(self, victim, state, now):
            self.costs.swap_out_seconds(1)

    class Costs(LinearCosts):
        is_there = True  # when it is given

        def swap_out_seconds(self, num_blocks):
            if not self.is_there:
                raise OSError("no table")
            return super().swap_out_seconds(num_blocks)

    costs = Costs()
    made = Weighs(CheckedCosts(costs)) if action is None else action(costs)
    costs.is_there = False
    policy = dataclasses.replace(V1, action=made)
    with pytest.raises(UserCodeError) as raised:
        run_two(make_scheduler(policy, num_gpu_blocks=2, num_host_blocks=2))
    message = str(raised.value)
    assert "Costs.swap_out_seconds(1) raised OSError: no table" in message
    assert re.search(
        rf", asked by .*{re.escape(asker)}, about request 'r1'; mend it to answer any work", message
    )
    assert isinstance(raised.value.__cause__, OSError)


def test_policies_of_the_package_are_asked_directly():
    policy = FCFSPriority()
    assert watched(policy) is policy
    assert watched(None) is None
    scheduler = make_scheduler(V1)
    assert scheduler._planner._policy is V1


def test_a_watched_policy_answers_as_it_does():
    class Outranking(LatestArrivalVictim):
        outranks = None
        label = "mine"

    mine = watched(Outranking())
    request = make_request(3, 4)
    assert type(request) is Request
    assert mine.score(request, 0.0) == LatestArrivalVictim().score(request, 0.0)
    assert (mine.outranks, mine.label) == (None, "mine")


def test_the_engine_outlives_a_policy_that_changes_a_request():
    class Once(FCFSPriority):
        is_bad = True

        def score(self, request, now):
            return 0.0

    class Admits:
        is_bad = True

        def admits(self, request, num_needed, state):
            if self.is_bad:
                request.max_total_tokens = 1
            return True

    admits = Admits()
    # Whoever has the pool to itself starts, whatever the policy says: two requests.
    llm = make_llm(golden_checkpoint("llama_tied"), scheduler_policy=admits)
    prompts = [{"prompt_token_ids": [1, 2, 3 + index]} for index in range(2)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with pytest.raises(ConfigError, match="max_total_tokens from 7 to 1"):
        llm.generate(prompts, params)
    admits.is_bad = False
    assert [len(one.outputs[0].token_ids) for one in llm.generate(prompts, params)] == [4, 4]
    llm.close()
