"""Policies of the user's own, named by an import path."""

import dataclasses
import importlib
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_helpers import make_llm
from scheduler_helpers import LinearCosts, make_scheduler
from variants import golden_checkpoint

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.serving.sweep import Sweep
from jaxllm.sched.policies import LeastUrgentVictim, MoreUrgentFirst, SchedulerPolicy
from jaxllm.sched.presets import as_policy, make_preset

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "own-policy.md"
COSTS = LinearCosts()

OTHERS = """
import dataclasses
from jaxllm.sched.policies import (
    Decision, PreemptionAction, PriorityPolicy, ResumeAction, ResumeDecision, SchedulerPolicy,
    SeparateIterations, WatermarkAdmission,
)

class NewestFirst(PriorityPolicy):
    def score(self, request, now):
        return request.arrival_index

    def group(self, request):
        return None

class OldestVictim:
    def score(self, request, now):
        return request.arrival_index

    def outranks(self, queued, holder, now):
        return False

class NeverSwap:
    def choose(self, victim, state, now):
        return Decision(PreemptionAction.RECOMPUTE)

class AtOnce:
    def __init__(self, costs=None):
        self.costs = costs
    def choose(self, request, copied_out_at, state, now):
        return ResumeDecision(ResumeAction.AT_ONCE)

class Everyone:
    def __init__(self, costs):
        self.costs = costs
    def admits(self, request, num_needed, state):
        return True

class Changed(SchedulerPolicy):
    pass

def of_costs(costs):
    return SchedulerPolicy(resume=AtOnce(costs))

def of_nothing():
    return OldestVictim()

def fails(costs):
    raise RuntimeError("no luck")

def of_two(one, two):
    return SchedulerPolicy()

separate = SeparateIterations()
reserve = WatermarkAdmission(0.5)

class Anything:
    def choose(self, *args):
        return args[0]
"""

PRESET = """
from jaxllm.sched.plan import Plan, Planner, PlanningPolicy
from jaxllm.sched.policies import FCFSPriority

class OneAtATime(PlanningPolicy):
    priority = FCFSPriority()

    def planner(self, state):
        return OneAtATimePlanner(state)

class OneAtATimePlanner(Planner):
    def __init__(self, state):
        self.state = state

    def plan(self, now):
        state = self.state
        chunks = [(request, request.num_to_compute) for request in state.prompts]
        plan = Plan(decodes=not chunks, chunks=chunks, is_repeatable=False)
        if len(state.free_slots) == state.config.max_num_seqs and state.waiting:
            first = next(iter(state.waiting))
            plan.starting = [(first, first.num_tokens)]
        return plan
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `mine.py`, the documented example, and `others.py`."""
    folder = tmp_path_factory.mktemp("policies")
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(example.splitlines()) < 25
    (folder / "mine.py").write_text(example, encoding="utf-8")
    (folder / "others.py").write_text(OTHERS, encoding="utf-8")
    (folder / "preset.py").write_text(PRESET, encoding="utf-8")
    (folder / "broken.py").write_text("def (", encoding="utf-8")
    return folder


@pytest.fixture
def importable(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)


@pytest.mark.usefixtures("importable")
def test_the_documented_example_orders_requests():
    changed = make_preset("mine:ShortestOutputFirst", COSTS)
    default = make_preset("adaptive", COSTS)
    assert type(changed.priority).__name__ == "ShortestOutputFirst"
    policy = make_preset("mine:policy", COSTS)
    assert type(policy.priority) is type(changed.priority)
    same = {name: getattr(default, name) for name in ("priority", "patience", "max_extra_wait")}
    assert dataclasses.replace(policy, **same) == default
    assert changed.max_extra_wait is policy.max_extra_wait is None
    assert changed.victim == LeastUrgentVictim(changed.priority)
    assert changed.restore == MoreUrgentFirst(changed.priority)
    for field in dataclasses.fields(SchedulerPolicy):
        if field.name not in ("priority", "victim", "restore", "max_extra_wait"):
            assert getattr(changed, field.name) == getattr(default, field.name)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("attribute", "question", "name"),
    [
        ("OldestVictim", "victim", "OldestVictim"),
        ("NeverSwap", "action", "NeverSwap"),
        ("AtOnce", "resume", "AtOnce"),
        ("Everyone", "admission", "Everyone"),
        ("of_nothing", "victim", "OldestVictim"),
        ("separate", "iterations", "SeparateIterations"),
        ("reserve", "admission", "WatermarkAdmission"),
    ],
)
def test_a_class_changes_one_answer_of_the_default(attribute, question, name):
    policy = make_preset(f"others:{attribute}", COSTS)
    default = make_preset("adaptive", COSTS)
    changed = [
        one.name
        for one in dataclasses.fields(policy)
        if getattr(policy, one.name) != getattr(default, one.name)
    ]
    assert changed == [question]
    part = getattr(policy, question)
    assert type(part).__name__ == name
    assert getattr(part, "costs", COSTS) is COSTS
    assert getattr(part, "watermark", 0.5) == 0.5


@pytest.mark.usefixtures("importable")
def test_a_class_may_derive_from_its_protocol():
    assert type(make_preset("others:NewestFirst", COSTS).priority).__name__ == "NewestFirst"


@pytest.mark.usefixtures("importable")
def test_policies_are_made_with_costs_or_without():
    assert type(make_preset("others:Changed")).__name__ == "Changed"
    assert make_preset("others:of_costs", COSTS).resume.costs is COSTS
    with pytest.raises(ConfigError, match="pass costs="):
        make_preset("others:OldestVictim")


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("others:fails", "'others:fails' failed: RuntimeError: no luck"),
        (
            "others:of_two",
            "'others:of_two' must take the costs or nothing: missing a required argument: 'two'",
        ),
        ("others:Anything", "is or returned a Anything"),
        ("others:dataclasses", "is or returned a module"),
        ("broken:policy", "cannot import the policy 'broken:policy': SyntaxError"),
        ("absent:policy", "No module named 'absent'; a module of your own must be in the current folder"),
        ("others:", "cannot import the policy 'others:'"),
    ],
)
def test_what_is_no_policy_is_refused(path, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_preset(path, COSTS)


@pytest.mark.usefixtures("importable")
def test_an_engine_runs_a_policy_of_the_users_own():
    llm = make_llm(golden_checkpoint("llama_tied"), scheduler_policy="mine:ShortestOutputFirst")
    assert type(llm.engine.scheduler.policy.priority).__name__ == "ShortestOutputFirst"


@pytest.mark.usefixtures("importable")
def test_an_engine_runs_a_preset_of_one_class_that_plans_itself():
    llm = make_llm(golden_checkpoint("llama_tied"), scheduler_policy="preset:OneAtATime")
    policy = llm.engine.scheduler.policy
    assert (policy.reads, policy.length, policy.may_swap) == (("priority", "deadline"), None, False)
    assert (policy.shares_prefixes, policy.needs_host_pool) == (False, False)
    assert not llm.engine.scheduler.lets_sit_out
    prompts = [{"prompt_token_ids": [1, 2, 3 + index]} for index in range(3)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    for before, after in itertools.pairwise(output.metrics for output in outputs):
        assert before.finished_time <= after.first_token_time
    default = make_llm(golden_checkpoint("llama_tied")).generate(prompts, params)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in default]


@pytest.mark.usefixtures("importable")
def test_a_policy_that_does_not_say_how_to_plan_is_refused():
    class Planless:
        """Answers all, but has no planner."""

        def __getattr__(self, name):
            if name == "planner":
                raise AttributeError(name)
            return getattr(SchedulerPolicy(), name)

    with pytest.raises(ConfigError, match="does not say how to plan"):
        make_scheduler(Planless())


def test_what_a_priority_does_not_declare_is_taken_to_be_read():
    class Silent:
        def score(self, request, now):
            return 0.0

        def group(self, request):
            return None

    class Declared(Silent):
        reads = ["deadline"]  # noqa: RUF012, as a user may write it

    assert SchedulerPolicy(priority=Silent()).reads == ("priority", "deadline")
    assert SchedulerPolicy(priority=Declared()).reads == ("deadline",)


def test_the_command_finds_a_policy_in_the_current_folder(folder):
    code = "import sys; sys.path.remove(''); from jaxllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    root = str(ROOT)
    command = [sys.executable, "-c", code, "generate", "x", "--model", str(demo_model_path())]
    for path, message in (
        ("mine:absent", "has no attribute 'absent'"),
        ("none:policy", "No module named 'none'"),
    ):
        done = subprocess.run(
            [*command, "--scheduler-policy", path],
            cwd=folder, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"priority": 42},
            "priority=42 does not answer the question: it must be an object that has score, group",
        ),
        ({"victim": LeastUrgentVictim}, "victim=<class"),
        ({"patience": True}, "patience must be None or an integer of at least 1, got True"),
    ],
)
def test_what_answers_no_question_is_refused(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SchedulerPolicy(**change)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("kind", ["path", "class", "object", "function"])
def test_a_single_class_changes_adaptive_however_it_is_given(kind):
    others = importlib.import_module("others")
    choice = {
        "path": "others:OldestVictim",
        "class": others.OldestVictim,
        "object": others.OldestVictim(),
        "function": others.of_nothing,
    }[kind]
    policy, default = as_policy(choice, COSTS), make_preset("adaptive", COSTS)
    assert type(policy.victim).__name__ == "OldestVictim"
    assert dataclasses.replace(policy, victim=default.victim) == default
    llm = make_llm(golden_checkpoint("llama_tied"), scheduler_policy=choice)
    engines = llm.engine.scheduler.policy
    assert type(engines.victim).__name__ == "OldestVictim"
    assert type(engines.admission) is type(default.admission)
    assert engines.action.costs is llm.costs
    llm.close()


def sweep(word):
    return Sweep(loads={}, policies=[word])


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize("take", [as_policy, make_preset, sweep, lambda word: LLM(scheduler_policy=word)])
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("adaptiv", "did you mean adaptive?"),
        ("mine:policies", "did you mean policy?"),
        ("mine:ShortestOutputfirst", "did you mean ShortestOutputFirst?"),
        ("absent:policy", "a module of your own must be in the current folder"),
    ],
)
def test_near_misses_are_named_wherever_a_word_is_taken(take, word, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        take(word)


@pytest.mark.parametrize("word", [3, None])
def test_a_preset_without_a_name_says_what_to_pass(word):
    with pytest.raises(
        ConfigError, match=f"{word} is no policy's name: pass one of adaptive, .*module:attribute"
    ):
        make_preset(word)


def test_an_answer_to_no_question_is_named():
    for call in (SchedulerPolicy, lambda **one: dataclasses.replace(SchedulerPolicy(), **one)):
        with pytest.raises(
            ConfigError, match=r"no 'victims'; did you mean victim\? it takes priority, admission"
        ):
            call(victims=LeastUrgentVictim(SchedulerPolicy().priority))


@pytest.mark.parametrize("choice", [3, object(), {}])
def test_what_is_no_policy_is_told_what_is(choice):
    with pytest.raises(
        ConfigError, match="must be a preset's name, a SchedulerPolicy, a policy class, or a function"
    ):
        as_policy(choice, COSTS)


def test_a_class_that_answers_in_part_is_told_what_it_lacks():
    class Half:
        def score(self, request):
            return 0.0

        def outranks(self, queued, holder, now):
            return False

    with pytest.raises(ConfigError, match=r"for VictimPolicy it lacks score\(request"):
        as_policy(Half(), COSTS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("score", r"PriorityPolicy it lacks score\(request"), ("choose", "choose\\(victim")],
)
def test_a_class_whose_method_takes_other_arguments_is_told_which(name, expected):
    answer = type("Mine", (), {name: lambda self: 0.0})()
    with pytest.raises(ConfigError, match=expected):
        as_policy(answer, COSTS)


def methods(*names):
    """An object of a class that has these methods, each of which takes a request and the time."""
    return type("Mine", (), {name: lambda self, request, now: 0.0 for name in names})()


@pytest.mark.parametrize(
    ("choice", "messages"),
    [
        (
            methods("scores", "outrank"),
            ["'scores': did you mean score?", "'outrank': did you mean outranks?"],
        ),
        (methods("score", "outrank"), ["VictimPolicy it lacks outranks", "did you mean outranks?"]),
        (type("Mine", (), {"victims": methods("score", "outranks")})(), ["'victims': did you mean victim?"]),
        (
            type("Mine", (), {"victim": methods("score", "outranks"), "actions": None})(),
            ["parts named victim make a policy by SchedulerPolicy(victim=...)", "did you mean action?"],
        ),
        (
            type("Mine", (), {name: lambda self, *of: 0.0 for name in ("score", "group", "outranks")})(),
            ["answers priority and victim: say which by SchedulerPolicy(priority=..., victim=...)"],
        ),
        (
            type("Mine", (SchedulerPolicy,), {"victims": methods("score", "outranks")})(),
            ["has 'victims', which nobody asks for: did you mean victim?"],
        ),
    ],
)
def test_nearly_right_names_within_a_class_are_named(choice, messages):
    given = choice, lambda: choice
    for one in given:
        with pytest.raises(ConfigError) as raised:
            as_policy(one, COSTS)
        for message in messages:
            assert message in str(raised.value)


def test_a_part_with_a_nearly_right_name_is_told_the_right_one():
    with pytest.raises(ConfigError, match=r"it has 'scores': did you mean score\?"):
        SchedulerPolicy(victim=methods("scores", "outranks"))


def test_names_that_mean_something_else_are_left_alone():
    own = type("Mine", (SchedulerPolicy,), {"victim_log": [], "prior": 3})()
    assert as_policy(own, COSTS) is own
