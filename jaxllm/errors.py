"""Errors raised by jaxllm. Each message names the value, the limit and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def shown(value: object, most: int = 200) -> str:
    """A value as Python writes it, short enough for a message."""
    try:
        text = repr(value)
    except Exception:  # an integer of more than 4300 digits, or an object that cannot tell
        text = f"something of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Which of the known names a wrong one may stand for."""
    near = difflib.get_close_matches(str(name)[:100], list(known), n=1)
    return near[0] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The same as a question, with a space after it; empty if none is near."""
    near = nearest(name, known)
    return "" if near is None else f"did you mean {near}? "


class JaxllmError(Exception):
    """Base class of every error jaxllm raises on purpose."""


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


class TryAgainError(JaxllmError, RuntimeError):
    """What was asked for could not be done for a reason that is not its own: it may be asked for again."""
