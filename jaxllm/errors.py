"""Errors raised by jaxllm. Each message names the value, the limit and the way out."""

from __future__ import annotations

from collections.abc import Sequence


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
