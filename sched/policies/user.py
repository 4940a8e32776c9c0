"""A user's own policy: an object, a class or a function, or the import path of one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jaxllm.errors import ConfigError, nearest, shown
from jaxllm.predictors.base import CostModel
from jaxllm.sched.policies import (
    QUESTIONS,
    LeastUrgentVictim,
    MoreUrgentFirst,
    SchedulerPolicy,
    SchedulingPolicy,
    is_policy,
    members_of,
    misspelt,
)
from jaxllm.system.import_path import imported


def import_policy(
    path: str, base: Callable[[], SchedulerPolicy], costs: CostModel | None
) -> SchedulingPolicy:
    """The policy that an import path, "module:attribute", names; see `own_policy`.

    Raises:
        ConfigError: there is no such attribute, importing or calling it fails, or it is no policy.
    """
    return own_policy(imported(path, "the policy"), repr(path), base, costs)


def own_policy(
    found: Any, name: str, base: Callable[[], SchedulerPolicy], costs: CostModel | None
) -> SchedulingPolicy:
    """The policy that an object stands for.

    Args:
        found: a `SchedulerPolicy` (or a baseline), a class or object that answers one question
            (`jaxllm.sched.policies`), or a function that returns either. A function gets the costs if it
            takes an argument, a class if that is named `costs` or has no default.
        name: what messages call it.
        base: makes what answers the other questions beside one class. A priority is also what victims are
            chosen by, and what decides whether requests start or resume; there is no `max_extra_wait` then.
        costs: predicted seconds, or None.

    Raises:
        ConfigError: calling it fails, or it is no policy.
    """
    is_answer = isinstance(found, SchedulingPolicy) or _question(found) is not None
    if inspect.isclass(found) or (callable(found) and not is_answer):
        found = _called(name, found, costs)
    if is_policy(found):
        check_names(name, found)
        return found
    question = _question(found)
    if question is None:
        raise ConfigError(
            f"{name} must be a preset's name, a SchedulerPolicy, a policy class, or a function that returns "
            f"one; it is or returned a {type(found).__name__}, {_answers(found)}"
        )
    changes: dict[str, Any] = {question: found}
    if question == "priority":
        changes |= {"victim": LeastUrgentVictim(found), "restore": MoreUrgentFirst(found)}
        changes["max_extra_wait"] = None  # it is the order of arrival that this keeps to
    return dataclasses.replace(base(), **changes)


def _called(name: str, found: Any, costs: CostModel | None) -> Any:
    """What a class or function makes of the costs, if it takes them."""
    arguments: tuple[CostModel | None, ...] = ()
    try:
        signature = inspect.signature(found)
        for first in signature.parameters.values():
            may_be_left_out = first.default is not first.empty or first.kind is first.VAR_POSITIONAL
            if first.name == "costs" or not (may_be_left_out and inspect.isclass(found)):
                arguments = (costs,)
            break
        signature.bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the policy {name} must take the costs or nothing: {error}") from error
    try:
        return found(*arguments)
    except Exception as error:
        raise ConfigError(f"the policy {name} failed: {type(error).__name__}: {error}") from error


def _question(found: Any) -> str | None:
    """The one question that an object answers."""
    answered = _answered(found)
    return answered[0] if len(answered) == 1 else None


def _answered(found: Any) -> list[str]:
    return [question for question, protocol in QUESTIONS.items() if not _lacks(found, protocol)]


def _lacks(found: Any, protocol: type) -> list[str]:
    """What the protocol asks, and an object has not, or not with as many arguments."""
    lacking = []
    for name, member in members_of(protocol).items():
        try:
            answer = getattr(found, name)
            if inspect.isfunction(member):
                num_arguments = len(inspect.signature(member).parameters) - 1  # without self
                inspect.signature(answer).bind(*range(num_arguments))
        except AttributeError:
            lacking.append(name)
        except (TypeError, ValueError):
            lacking.append(f"{name}{inspect.signature(member)}".replace("(self, ", "("))
    return lacking


def _answers(found: Any) -> str:
    """Why an object answers no one question: it answers several, or lacks or misspells what is asked."""
    if several := _answered(found):
        chosen = ", ".join(f"{question}=..." for question in several)
        return f"which answers {' and '.join(several)}: say which by SchedulerPolicy({chosen})"
    said = f"which has what none of these asks for: {', '.join(one.__name__ for one in QUESTIONS.values())} "
    return f"{said}(jaxllm.sched.policies){_nearest(found)}"


def _nearest(found: Any) -> str:
    """What an object lacks of the protocols that it answers for the most part, and names nearly right."""
    asked = {protocol: _lacks(found, protocol) for protocol in QUESTIONS.values()}
    in_part = {
        one: lacking
        for one, lacking in asked.items()
        if 0 < len(lacking) < len(members_of(one)) or any("(" in name for name in lacking)
    }
    known = {*QUESTIONS, *(name for protocol in asked for name in members_of(protocol))}
    if not in_part:
        parts = [name for name in QUESTIONS if hasattr(found, name)]
        chosen = ", ".join(f"{name}=..." for name in parts)
        said = f"; parts named {', '.join(parts)} make a policy by SchedulerPolicy({chosen})" if parts else ""
        return said + misspelt(found, known)
    least = min(map(len, in_part.values()))
    lacking = [
        f"; for {one.__name__} it lacks {', '.join(names)}"
        for one, names in in_part.items()
        if len(names) == least
    ]
    return "".join(lacking) + misspelt(found, known)


def check_names(name: str, policy: Any) -> None:
    """Refuse a policy whose class has an answer under a name that is nearly that of a question.

    Raises:
        ConfigError: it has.
    """
    for own in set(dir(policy)).difference(dir(SchedulerPolicy), QUESTIONS):
        question = None if own.startswith("_") else nearest(own, QUESTIONS)
        if question is not None and not _lacks(getattr(policy, own), QUESTIONS[question]):
            raise ConfigError(f"{name} has {own!r}, which nobody asks for: did you mean {question}?")


def describe(choice: object) -> str:
    """What messages and records call a policy that was given as an object."""
    named = choice if hasattr(choice, "__qualname__") else type(choice)
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    return shown(choice) if module in (None, "builtins") else f"{module}:{name}"
