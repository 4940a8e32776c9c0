"""A user's own policy, named by its import path."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.predictors.base import CostModel
from jaxllm.sched.policies import (
    QUESTIONS,
    LeastUrgentVictim,
    MoreUrgentFirst,
    SchedulerPolicy,
    SchedulingPolicy,
    is_policy,
    members_of,
)


def import_policy(
    path: str, base: Callable[[], SchedulerPolicy], costs: CostModel | None
) -> SchedulingPolicy:
    """The policy that an import path names.

    Args:
        path: "module:attribute", where the attribute is a `SchedulerPolicy` (or a baseline), a class or
            object that answers one question (`jaxllm.sched.policies`), or a function that returns either. A
            function gets the costs if it takes an argument, a class if that is named `costs` or has no
            default.
        base: makes what answers the other questions beside one class. A priority is also what victims are
            chosen by, and what decides whether requests start or resume.
        costs: predicted seconds, or None.

    Raises:
        ConfigError: there is no such attribute, importing or calling it fails, or it is no policy.
    """
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        where = "; a module of your own must be in the current folder, on PYTHONPATH, or installed"
        hint = where if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"cannot import the policy {path!r}: {_message(error)}{hint}") from error
    is_answer = isinstance(found, SchedulingPolicy) or _question(found) is not None
    if inspect.isclass(found) or (callable(found) and not is_answer):
        found = _called(path, found, costs)
    if is_policy(found):
        return found
    question = _question(found)
    if question is None:
        raise ConfigError(
            f"{path!r} must be a SchedulerPolicy, a policy class, or a function of the costs that returns "
            f"one; it is or returned a {type(found).__name__}, which has what none, or several, of these ask "
            f"for: {', '.join(protocol.__name__ for protocol in QUESTIONS.values())} (jaxllm.sched.policies)"
        )
    changes: dict[str, Any] = {question: found}
    if question == "priority":
        changes |= {"victim": LeastUrgentVictim(found), "restore": MoreUrgentFirst(found)}
    return dataclasses.replace(base(), **changes)


def _called(path: str, found: Any, costs: CostModel | None) -> Any:
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
        raise ConfigError(f"the policy {path!r} must take the costs or nothing: {error}") from error
    try:
        return found(*arguments)
    except Exception as error:
        raise ConfigError(f"the policy {path!r} failed: {_message(error)}") from error


def _question(found: Any) -> str | None:
    """The one question that an object answers."""
    answered = [question for question, protocol in QUESTIONS.items() if _answers(found, protocol)]
    return answered[0] if len(answered) == 1 else None


def _answers(found: Any, protocol: type) -> bool:
    """Whether an object has what the protocol asks, with as many arguments."""
    for name, member in members_of(protocol).items():
        try:
            answer = getattr(found, name)
            if inspect.isfunction(member):
                num_arguments = len(inspect.signature(member).parameters) - 1  # without self
                inspect.signature(answer).bind(*range(num_arguments))
        except (AttributeError, TypeError, ValueError):
            return False
    return True


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
