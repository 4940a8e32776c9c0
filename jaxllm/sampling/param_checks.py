"""What each sampling parameter may be: limits, and checks that give its stored form."""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxllm.errors import SamplingParamsError, shown
from jaxllm.sampling.structured_outputs import StructuredOutputsParams

MAX_LOGIT_BIAS = 300
"""Most entries of `logit_bias`."""
MAX_STOP_TOKEN_IDS = 128
"""Most entries of `stop_token_ids`."""
MAX_BANNED_TOKEN_IDS = 256
"""Different end-of-sequence and stop tokens that `min_tokens` can keep back."""
MAX_STOP_STRINGS = 64
"""Most entries of `stop`."""
MAX_STOP_LENGTH = 1000
"""Longest stop string, in characters."""
MAX_ALLOWED_TOKEN_IDS = 2**20
"""Most entries of `allowed_token_ids`."""
MAX_BAD_WORDS = 1000
"""Most entries of `bad_words`."""
MAX_BAD_WORDS_LENGTH = 50_000
"""Most characters of all `bad_words` together."""
MAX_LOGPROBS = 20
"""Largest `logprobs` and `prompt_logprobs`, but for -1."""
MAX_SAMPLES = 16384
"""Largest `n` and `best_of`."""
MIN_TEMPERATURE = 0.01
"""Smallest temperature that samples; 0 is greedy, and what lies between becomes this."""
MAX_INT32 = 2**31 - 1


_logger = logging.getLogger(__name__)


class RequestOutputKind(enum.Enum):
    """What each of a request's outputs holds while it streams, as in vLLM."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the one before."""
    FINAL_ONLY = 2
    """There is one, at the end."""


def show(value: object) -> str:
    """A value and its type, short enough for a message."""
    return f"{shown(value, 80)} ({type(value).__name__})"


def as_python(value: Any) -> Any:
    """A numpy (or jax) scalar as a Python one; anything else as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _limits(low: float, high: float, note: str, *, above_low: bool = False) -> str:
    interval = f"in {'(' if above_low else '['}{low}, {high}]"
    return f"{interval} ({note})" if note else interval


def check_number(
    name: str, value: object, low: float, high: float, note: str = "", *, above_low: bool = False
) -> float:
    """A number within limits, as a float.

    Raises:
        SamplingParamsError: it is none, or outside.
    """
    number = as_python(value)
    limits = _limits(low, high, note, above_low=above_low)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise SamplingParamsError(f"{name}={show(value)} must be a number {limits}.")
    # Written so that NaN fails; comparing before converting keeps huge integers from overflowing.
    if not (low <= number <= high) or (above_low and number == low):
        raise SamplingParamsError(f"{name}={show(value)} is out of range: it must be {limits}.")
    return float(number) + 0.0  # -0.0 becomes 0.0


def number_within(*limits: Any, above_low: bool = False) -> Callable[[str, object], float]:
    """A check of numbers; arguments are those of `check_number`."""
    return lambda name, value: check_number(name, value, *limits, above_low=above_low)


def to_temperature(name: str, value: object) -> float:
    """0, or what samples."""
    temperature = check_number(name, value, 0, 100, "0 is greedy")
    # The margin lets float32's 0.01, which lies just below, pass.
    if 0.0 < temperature < MIN_TEMPERATURE * (1 - 1e-6):
        _logger.warning(
            "temperature=%r becomes %s, the smallest that samples; 0 is greedy", temperature, MIN_TEMPERATURE
        )
        return MIN_TEMPERATURE
    return temperature


def check_integer(name: str, value: object, low: int, high: int, note: str = "") -> int:
    """An integer within limits.

    Raises:
        SamplingParamsError: it is none, or outside.
    """
    number = as_python(value)
    limits = _limits(low, high, note)
    if isinstance(number, bool) or not isinstance(number, int):
        raise SamplingParamsError(f"{name}={show(value)} must be an integer {limits}.")
    if not low <= number <= high:
        raise SamplingParamsError(f"{name}={show(value)} is out of range: it must be {limits}.")
    return int(number)


def integer_within(*limits: Any, **minus_one: int | None) -> Callable[[str, object], int | None]:
    """A check of integers; `minus_one` is what -1 becomes, if it may be that."""

    def check(name: str, value: object) -> int | None:
        number = as_python(value)
        if minus_one and isinstance(number, int) and number == -1:
            return minus_one["minus_one"]
        return check_integer(name, number, *limits)

    return check


def check_boolean(name: str, value: object) -> bool:
    """True or False.

    Raises:
        SamplingParamsError: it is neither.
    """
    flag = as_python(value)
    if not isinstance(flag, bool):
        raise SamplingParamsError(f"{name}={show(value)} must be True or False.")
    return flag


def _items(name: str, value: object, of_what: str, limit: int) -> list[Any]:
    """The entries of a list-like value; strings, bytes and mappings are none."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise SamplingParamsError(f"{name}={show(value)} must be a list of {of_what}.")
    items = list(itertools.islice(value, limit + 1))
    if len(items) > limit:
        raise SamplingParamsError(f"{name} holds more than {limit} entries: at most {limit} are allowed.")
    return items


def strings_at_most(limit: int) -> Callable[[str, object], tuple[str, ...]]:
    """A check of so many strings."""
    return lambda name, value: _different_strings(name, value, limit)


def _different_strings(name: str, value: object, limit: int) -> tuple[str, ...]:
    """Different strings, none of them empty or long; one alone is a list of one for `stop`."""
    if value is None:
        return ()
    is_one = name == "stop" and isinstance(value, str)
    strings = [value] if is_one else _items(name, value, "strings", limit)
    for string in strings:
        if not isinstance(string, str):
            instead = " Use stop_token_ids for token ids." if name == "stop" else ""
            raise SamplingParamsError(
                f"{name} holds {show(string)}: it must be a string or a list of strings.{instead}"
            )
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise SamplingParamsError(
                f"{name} holds a string of {len(string)} characters ({string[:20]!r}): each must have "
                f"1..{MAX_STOP_LENGTH}. Remove or shorten it."
            )
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise SamplingParamsError(
                f"{name} holds {string[:20]!r}, in which a lone surrogate is no character: remove it."
            )
    if name == "bad_words" and sum(map(len, strings)) > MAX_BAD_WORDS_LENGTH:
        raise SamplingParamsError(
            f"bad_words hold {sum(map(len, strings))} characters together; at most {MAX_BAD_WORDS_LENGTH} "
            "are allowed: name fewer."
        )
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    items = _items(name, value, "token ids", limit)
    return tuple(dict.fromkeys(check_integer(f"{name} entry", item, 0, MAX_INT32) for item in items))


def to_stop_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Different token ids, or none."""
    return () if value is None else _token_ids(name, value, MAX_STOP_TOKEN_IDS)


def to_allowed_token_ids(name: str, value: object) -> tuple[int, ...]:
    """Different token ids in ascending order, or none."""
    # What is stored for None is what dataclasses.replace gives back.
    if value is None or (isinstance(value, tuple) and not value):
        return ()
    ids = _token_ids(name, value, MAX_ALLOWED_TOKEN_IDS)
    if not ids:
        raise SamplingParamsError("allowed_token_ids=[] allows nothing: name tokens, or leave it out.")
    return tuple(sorted(ids))


def to_output_kind(name: str, value: object) -> RequestOutputKind:
    """A kind, or its name."""
    names = [kind.name for kind in RequestOutputKind]
    if isinstance(value, str) and value.upper() in names:
        return RequestOutputKind[value.upper()]
    if not isinstance(value, RequestOutputKind):
        raise SamplingParamsError(f"{name}={show(value)} must be a RequestOutputKind: {', '.join(names)}.")
    return value


def to_logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Token ids, in ascending order, and their biases."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:  # the stored form, so that dataclasses.replace works
        pairs = _items("logit_bias", value, "(token id, bias) pairs, or a dict", MAX_LOGIT_BIAS)
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
            raise SamplingParamsError(f"logit_bias={show(value)} must be a dict of token id to bias.")
    if len(pairs) > MAX_LOGIT_BIAS:
        raise SamplingParamsError(
            f"logit_bias holds {len(pairs)} entries: at most {MAX_LOGIT_BIAS} are allowed."
        )
    biases: dict[int, float] = {}
    for key, bias in pairs:
        is_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token_id = check_integer("logit_bias key", int(key) if is_digits else key, 0, MAX_INT32)
        if token_id in biases:
            raise SamplingParamsError(f"logit_bias names token id {token_id} twice: keep one entry.")
        biases[token_id] = check_number(f"logit_bias[{token_id}]", bias, -100, 100)
    return tuple(sorted(biases.items()))


def to_structured_outputs(name: str, value: object) -> StructuredOutputsParams | None:
    """The parameters that it stands for."""
    return StructuredOutputsParams.of(value)
