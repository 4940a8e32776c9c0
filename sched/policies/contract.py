"""What a policy must not do to the requests it is shown, verified for policies from outside the package."""

from __future__ import annotations

import dataclasses
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxllm.errors import ConfigError, UserCodeError, blame, is_outside, path_of, shown
from jaxllm.system.scalars import plain
from jaxllm.types import Request

_FIELDS = (
    "request_id",
    "prompt_token_ids",
    "sampling_params",
    "arrival_time",
    "arrival_index",
    "max_total_tokens",
    "status",
    "slot",
    "priority",
    "deadline",
    "cache_salt",
    "predicted_tokens",
    "is_protected",
    "num_passed",
    "_num_tokens",
    "_num_computed_tokens",
    "output_token_ids",
    "block_ids",
    "host_blocks",
)
_NUM_WATCHED, _THEN_EACH = 1024, 16
_NUM_LISTS = 3  # the last of them, whose lengths are compared, too
_fields_of = operator.attrgetter(*_FIELDS)
_Facts = tuple[tuple[Any, ...], int, int, int]


def watched(policy: Any) -> Any:
    """A policy that may not change the requests it is asked about, and is named where it raises.

    One of this package is as it is, but for a priority from outside that it reads.

    Numbers that it answers with become Python's (`jaxllm.system.scalars.plain`).

    The first 1,024 questions to each method are watched, which take 2 us longer, and then one in 16. A change
    is put back, but for the contents of lists.

    Raises:
        ConfigError: by the methods of what is returned, where a request was changed.
        UserCodeError: likewise, where the policy raises anything but a ConfigError.
    """
    if policy is None or is_outside(policy):
        return policy and _Watched(policy)
    priority = getattr(policy, "priority", None)
    if priority is not None and is_outside(priority) and dataclasses.is_dataclass(policy):
        return dataclasses.replace(policy, priority=watched(priority))  # type: ignore[type-var]
    return policy


def name_asker(error: UserCodeError) -> None:
    """Where predicted costs raised, name the policy of this package that asked, and about which request."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        asked = frame.f_locals.get("self")
        if type(asked).__module__.startswith("jaxllm.sched.policies.") and not isinstance(asked, _Watched):
            named = [value.request_id for value in frame.f_locals.values() if type(value) is Request]
            error.about(next(iter(named), None), f"{type(asked).__name__}.{frame.f_code.co_name}")
            return


@contextmanager
def unchanged(who: object, requests: Iterable[Request]) -> Iterator[None]:
    """Verify that what runs inside changes none of the requests.

    Raises:
        ConfigError: it did.
        UserCodeError: it raised anything but a ConfigError.
    """
    before = [(request, _facts(request)) for request in requests]
    try:
        yield
    except Exception as error:
        raise blame(who, "plan", error)  # noqa: B904, which chains
    for request, facts in before:
        if _facts(request) != facts:
            _refuse(path_of(who), request, facts)


class _Watched:
    """Stands for a policy where it is asked."""

    def __init__(self, policy: object) -> None:
        self._policy = policy
        for name in dir(policy):
            if not name.startswith("_") and callable(method := getattr(policy, name)):
                setattr(self, name, _watch(policy, name, method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __repr__(self) -> str:
        return path_of(self._policy)


def _watch(policy: object, name: str, method: Callable[..., Any], num_asked: int = 0) -> Callable[..., Any]:
    """A method that compares the requests it is given before and after."""

    def ask(*args: Any, **named: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        is_watched = num_asked <= _NUM_WATCHED or not num_asked % _THEN_EACH
        before = [(one, _facts(one)) for one in args if type(one) is Request] if is_watched else ()
        try:
            answer = method(*args, **named)
        except Exception as error:
            about = next((one.request_id for one in args if type(one) is Request), None)
            raise blame(policy, name, error, about)  # noqa: B904, which chains
        for request, facts in before:
            if _facts(request) != facts:
                _refuse(f"{path_of(policy)}.{name}", request, facts)
        # Of a victim policy the scorer of an iteration.
        return _watch(policy, name, answer, num_asked) if callable(answer) else plain(answer)

    return ask


def _facts(request: Request) -> _Facts:
    fields = _fields_of(request)
    return fields, len(fields[-3]), len(fields[-2]), len(fields[-1])


def _refuse(who: str, request: Request, facts: _Facts) -> None:
    """Put a request back, and say what was changed.

    Raises:
        ConfigError: always.
    """
    fields, *lengths = facts
    now, *lengths_now = _facts(request)
    changed = []
    for name, was, found in zip(_FIELDS, fields, now, strict=True):
        if was is not found and was != found:
            changed.append(f"{name.lstrip('_')} from {shown(was, 60)} to {shown(found, 60)}")
            setattr(request, name, was)
    for name, length, length_now in zip(_FIELDS[-_NUM_LISTS:], lengths, lengths_now, strict=True):
        if length != length_now:
            changed.append(f"{name} from {length} to {length_now} entries")
    raise ConfigError(
        f"{who} changed request {fields[0]!r} ({', '.join(changed)}): policies read requests, and change "
        "nothing of them"
    )
