"""Opens the files that `jaxllm.sched.ledger` writes, and reads them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import jaxllm
from jaxllm.engine.speculation import SpeculativeConfig
from jaxllm.errors import ConfigError, shown
from jaxllm.predictors.base import COST_KINDS
from jaxllm.predictors.online import KindReport
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import HeaderRecord, Ledger, PreemptionRecord, StepRecord, VerificationRecord
from jaxllm.sched.policies import PreemptionAction, ResumeAction
from jaxllm.sched.policies.user import describe
from jaxllm.system.options import checked_path

_Record = TypeVar("_Record", HeaderRecord, PreemptionRecord, StepRecord, VerificationRecord, KindReport)


def header_of(
    policy: object,
    device: str,
    costs_source: str | None,
    settings: Mapping[str, object],
    limits: SchedulerConfig,
    *,
    jax: str | None = None,
) -> HeaderRecord:
    """What a ledger begins with; the arguments are its fields, with objects instead of their names."""
    return HeaderRecord(
        jaxllm=jaxllm.__version__,
        jax=jax,
        device=device,
        policy=str(plain_setting(policy)),
        costs_source=costs_source,
        settings={name: plain_setting(value) for name, value in settings.items()},
        limits={name: plain_setting(value) for name, value in dataclasses.asdict(limits).items()},
    )


def plain_setting(value: object) -> Any:
    """A setting as JSON has it; objects by their class or name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, SpeculativeConfig):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain_setting(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_setting(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else describe(value)


def read_ledger(path: str | Path) -> Ledger:
    """The ledger that a run wrote to `path`.

    Raises:
        ConfigError: the file cannot be read, a line is not one of a ledger's, or time goes back from one step
            to the next; the last line may be cut off, as a killed run leaves it: it is left out, and
            `Ledger.cut_line` its number.
    """
    path = checked_path("path", path)
    ledger = Ledger()
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a ledger's, which are text in UTF-8: {error}") from None
    num_read = 0
    for number, values in _objects(lines, str(path)):
        try:
            _add(ledger, values, is_first=number == 1)
        except TypeError as error:
            raise ConfigError(f"{path}, line {number} is not a ledger's: {error}") from None
        num_read = number
    ledger.cut_line = len(lines) if num_read < len(lines) else None
    return ledger


def _add(ledger: Ledger, values: dict[str, Any], *, is_first: bool) -> None:
    """Read a line into a ledger.

    Raises:
        TypeError: it is none that a run would have written there.
    """
    kind = values.pop("record", None)
    values.pop("regret_seconds", None)
    if kind == "preemption":
        ledger.preemptions.append(_checked(PreemptionRecord(**values)))
    elif kind == "step":
        step = _checked(StepRecord(**values))
        if ledger.steps and step.time < ledger.steps[-1].time:
            last = ledger.steps[-1].time
            raise TypeError(f"time={step.time} is before {last}, of the step before: two runs?")
        ledger.steps.append(step)
    elif kind == "verification":
        ledger.verifications.append(_checked(VerificationRecord(**values)))
    elif kind == "header":
        if not is_first:
            raise TypeError("a header is a ledger's first line: two runs?")
        ledger.header = _checked(HeaderRecord(**values))
    elif kind == "predictions":
        of_kind = values.pop("kind", None)
        if of_kind not in COST_KINDS:
            raise TypeError(f"kind={of_kind!r} is none of {', '.join(COST_KINDS)}")
        ledger.predictions[of_kind] = _checked(KindReport(**values))
    else:
        kinds = "'header', 'preemption', 'step', 'verification' nor 'predictions'"
        raise TypeError(f"record={kind!r} is neither {kinds}")


def _objects(lines: Sequence[str], path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1:
                return
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}, line {number} must be a JSON object")
        yield number, values


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -_LARGEST <= cast(float, value) <= _LARGEST


def _is_scores(value: object) -> bool:
    pairs = value if isinstance(value, list) else [None]
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and type(pair[1]) in (int, float)
        for pair in pairs
    )


_LARGEST = 10**15
_ACTIONS = [action.value for action in PreemptionAction]
_RESUME_ACTIONS = [None, *(action.value for action in ResumeAction if action is not ResumeAction.RECOMPUTE)]
_IS_OF_TYPE: dict[str, Callable[[object], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value <= _LARGEST,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "list[tuple[str, float]]": _is_scores,
}


def _checked(record: _Record) -> _Record:
    """The record, but for fields that a run would not have written.

    Raises:
        TypeError: one is of another type, negative or beyond all that is counted, or no action.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        kind, _, none = str(field.type).partition(" | ")
        is_negative = kind == "float" and field.name != "time" and _is_number(value) and value < 0
        if not ((none and value is None) or _IS_OF_TYPE[kind](value)) or is_negative:
            rule = "" if kind not in ("int", "float") else f", or not from 0 to {_LARGEST:g}"
            raise TypeError(f"{field.name}={shown(value)} is not {field.type}{rule}")
    if isinstance(record, PreemptionRecord):
        if record.action not in _ACTIONS:
            raise TypeError(f"action={record.action!r} is none of {', '.join(_ACTIONS)}")
        if record.resume_action not in _RESUME_ACTIONS:
            raise TypeError(f"resume_action={record.resume_action!r} is none of {_RESUME_ACTIONS}")
    return record


def open_ledger(
    path: str | Path, on_record: Callable[[PreemptionRecord | StepRecord], None] | None = None
) -> tuple[Ledger, Callable[[], None]]:
    """A ledger written to a new file, and what ends both; `on_record` is told as by `Ledger`.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    path = checked_path("path", path)
    try:
        file = open(path, "x", encoding="utf-8", buffering=1)  # noqa: SIM115, open as long as the ledger
    except FileExistsError:
        raise ConfigError(
            f"the ledger {str(path)!r} is there already, and no file is ever overwritten: name another, or "
            "delete it"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write the ledger {str(path)!r}: {error.strerror}") from error
    ledger = Ledger(file, on_record=on_record)

    def close() -> None:
        ledger.close()
        file.close()

    return ledger, close
