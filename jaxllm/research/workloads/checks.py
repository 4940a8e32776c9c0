"""Checks shared by the workloads: bounds of numbers, choices, and rows of files that cannot be used."""

from __future__ import annotations

import math
import numbers
import operator
from typing import NoReturn

from jaxllm.errors import ConfigError, JaxllmError, RequestError, shown

MAX_REQUESTS = 2**25  # requests of a trace; the week-long public traces have 17 and 27 million
MAX_LEN = 2**24  # tokens of a prompt or of an output; the largest max_model_len a scheduler takes
MAX_SECONDS = 1e9  # latest arrival, about 31 years
MAX_SEED = 2**63 - 1
_NUM_REASONS = 10


def check_integer(name: str, value: object, lower: int, upper: int) -> int:
    """`value` as an int; numpy's integers are welcome, booleans are not.

    Raises:
        ConfigError: it is no integer, or outside `[lower, upper]`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    integer = operator.index(value)
    if not lower <= integer <= upper:
        raise ConfigError(f"{name} must lie in [{lower}, {upper}], got {value}")
    return integer


def check_number(name: str, value: object, lower: float, upper: float) -> float:
    """`value` as a float.

    Raises:
        ConfigError: it is no number, or outside `[lower, upper]` (NaN is).
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not lower <= number <= upper:
        raise ConfigError(f"{name} must lie in [{lower:g}, {upper:g}], got {number}")
    return number


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Verify that `value` is one of `choices`.

    Raises:
        ConfigError: it is not.
    """
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose from {', '.join(choices)}")


def check_tokenizer(tokenizer: object) -> None:
    """Verify that `tokenizer` is one, and not its name.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(tokenizer, str | bytes) or not hasattr(tokenizer, "encode"):
        raise ConfigError(
            f"tokenizer={shown(tokenizer)} must be a tokenizer: "
            "jaxllm.text.tokenizer.load_tokenizer(folder) loads one"
        )


class BadRows:
    """What becomes of a file's rows that cannot be used: an error, or a counted skip.

    Args:
        on_bad: `"raise"` or `"skip"`.

    Raises:
        ConfigError: `on_bad` is neither.
    """

    def __init__(self, on_bad: str) -> None:
        check_choice("on_bad", on_bad, ("raise", "skip"))
        self.count = 0
        self.reasons: list[str] = []
        self._raises = on_bad == "raise"

    def add(self, where: str, error: JaxllmError) -> None:
        """Report what is wrong with a row; `where` names its file and line. The first ten are kept.

        Raises:
            RequestError: `on_bad` is `"raise"`.
        """
        if self._raises:
            way_out = ". Repair it, or pass on_bad='skip'."
            said = RequestError(f"{where}: {error.told(()).rstrip('.')}")
            raise said.or_else(**error.ways_out, on_bad=way_out) from error
        self.count += 1
        if len(self.reasons) < _NUM_REASONS:
            self.reasons.append(f"{where}: {str(error).rstrip('.')}")

    def refuse_empty(self, name: str) -> NoReturn:
        """Raise: no row of file `name` could be used.

        Raises:
            RequestError: always.
        """
        first = f"; {self.count} were skipped, the first because of {self.reasons[0]}" if self.count else ""
        raise RequestError(f"{name}: there is no usable row{first}. Give at least one.")
