"""Errors raised by jaxllm. Each message names the value, the limit and the way out."""

from __future__ import annotations

import difflib
import logging
import re
import traceback
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Self

_logger = logging.getLogger(__name__)


def shown(value: object, most: int = 200) -> str:
    """A value as Python writes it, short enough for a message, and without an address that says nothing."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4300 digits, or an object that cannot tell
        text = f"something of type {type(value).__name__}"
    text = re.sub(r" at 0x[0-9a-f]+(?=>)", "", text)
    return text if len(text) <= most else text[: most - 3] + "..."


def reason(error: Exception) -> str:
    """What an error says, of a file's without its number and the file's name."""
    return getattr(error, "strerror", None) or str(error)


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Which of the known names a wrong one may stand for."""
    near = difflib.get_close_matches(str(name)[:100], list(known), n=1)
    return near[0] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The same as a question, with a space after it; empty if none is near."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean {near}? "


class JaxllmError(Exception):
    """Base class of every error jaxllm raises on purpose.

    `ways_out` end its message, by the setting that each of them names.
    """

    ways_out: Mapping[str, str] = {}

    def or_else(self, **ways_out: str) -> Self:
        """The error with more ways out, which commands without these settings do not tell."""
        self.ways_out = {**self.ways_out, **ways_out}
        return self

    def told(self, settings: Container[str] | None = None) -> str:
        """The message, with the ways out by some settings, or by all."""
        kept = [text for name, text in self.ways_out.items() if settings is None or name in settings]
        return super().__str__() + "".join(kept)

    def __str__(self) -> str:
        return self.told()


class ConfigError(JaxllmError, ValueError):
    """An engine or model setting is invalid or unsupported."""


class UnsupportedModelError(ConfigError):
    """A checkpoint asks for an architecture, rope type or field jaxllm does not implement."""


class WeightsError(JaxllmError, ValueError):
    """A checkpoint is missing, truncated, or does not match the model."""


class SamplingParamsError(JaxllmError, ValueError):
    """A sampling parameter is unknown, mistyped or out of range."""


class RequestError(JaxllmError, ValueError):
    """A request is malformed (empty prompt, token id out of range, duplicate id...)."""


class RequestTooLargeError(RequestError):
    """A request can never fit in max_model_len or in the KV block pool."""


class CapacityError(JaxllmError, RuntimeError):
    """Device memory cannot hold what the configuration asks for."""


class KVCacheError(JaxllmError, RuntimeError):
    """A broken invariant of the KV block pool (double free, unknown block, leak)."""


class ProfileError(JaxllmError, ValueError):
    """A stored profile is missing, damaged, or of another device, model or block size."""


class EngineError(JaxllmError, RuntimeError):
    """An engine has failed, or is used by two threads at once; the message says what to do.

    `finished` holds the outputs of requests that had ended by themselves when `Engine.step` failed.
    """

    finished: Sequence[object] = ()


class UserCodeError(JaxllmError, RuntimeError):
    """A policy or predictor of the user's own raised; the message names it, where, and the request.

    `__cause__` is what it raised, `request_id` whom it was asked about, if that is known.
    """

    request_id: str | None = None
    way_out = ""

    def told(self, settings: Container[str] | None = None) -> str:
        """The message."""
        return super().told(settings) + self.way_out

    def about(self, request_id: str | None, asker: str | None = None) -> None:
        """Say who asked, and about which request, if that is known and was not said."""
        if asker is not None:
            self.args = (f"{self.args[0]}, asked by {asker}",)
        if request_id is not None and self.request_id is None:
            self.request_id = request_id
            self.args = (f"{self.args[0]}, about request {request_id!r}",)


def is_outside(found: object) -> bool:
    """Whether an object's class is none of this package's."""
    return type(found).__module__.partition(".")[0] != "jaxllm"


def path_of(found: object) -> str:
    """What messages call a user's object: its class, with the module."""
    return f"{type(found).__module__}:{type(found).__qualname__}"


def called(found: object) -> str:
    """What messages call a policy or a planner: its class, if it is from outside the package."""
    return path_of(found) if is_outside(found) else shown(found)


def blame(
    owner: object, method: str, error: Exception, request_id: str | None = None, way_out: str = ""
) -> Exception:
    """What to raise where a method of a user's object raised: itself, if it is named or refuses an answer."""
    name = f"{path_of(owner)}.{method}"
    if isinstance(error, UserCodeError):
        error.about(request_id, name)
    if isinstance(error, ConfigError | UserCodeError) or not is_outside(owner):
        return error
    place = traceback.extract_tb(error.__traceback__)[-1]
    found = UserCodeError(
        f"{name} raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
    )
    found.way_out = way_out
    found.about(request_id)
    found.__cause__ = error
    return found


class Faults:
    """What user's code raised where raising at once would leave a change half made.

    As a context it logs and keeps what is raised in it; whoever makes the change raises that once it is made.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: object, place: object) -> bool:
        """Keep a named error; any other one is a fault of this package, and goes on."""
        if not isinstance(error, ConfigError | UserCodeError):
            return False
        _logger.error("%s", error)
        self._first = self._first or error
        return True

    def take(self) -> Exception | None:
        """The first error that was kept; all of them are forgotten."""
        first, self._first = self._first, None
        return first


class TryAgainError(JaxllmError, RuntimeError):
    """What was asked for could not be done for a reason that is not its own: it may be asked for again."""
