"""Checks of a trace's columns: one value per request, as read-only arrays and tuples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.workloads.checks import MAX_LEN, MAX_REQUESTS, MAX_SECONDS

MAX_TOKEN_ID = 2**31 - 1
_MAX_HASH_ID = 2**32 - 1


def as_lengths(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """A read-only int64 copy of one length per request, in tokens.

    Raises:
        ConfigError: there is no request, or too many.
        RequestError: a value is no integer in `[1, 2**24]`.
    """
    array = _as_vector(name, values)
    if array.dtype.kind not in "iu":
        raise RequestError(f"{name} must hold integers, got {array.dtype}")
    _check_bounds(name, array, 1, MAX_LEN)
    return _frozen(array.astype(np.int64))


def as_token_ids(
    prompts: Sequence[Sequence[int]] | None, prompt_lens: npt.NDArray[np.int64]
) -> tuple[tuple[int, ...], ...] | None:
    """The prompts as tuples.

    Raises:
        RequestError: their number or one's length differs from `prompt_lens`, or an id is out of range.
    """
    if prompts is None:
        return None
    check_count("prompt_token_ids", prompts, len(prompt_lens))
    for index, (ids, length) in enumerate(zip(prompts, prompt_lens.tolist(), strict=True)):
        if not isinstance(ids, list | tuple):
            raise RequestError(f"prompt_token_ids[{index}] must be a list of token ids, got {ids!r}")
        if len(ids) != length:
            raise RequestError(f"prompt_token_ids[{index}] has {len(ids)} ids; prompt_lens says {length}")
        check_token_ids(f"prompt_token_ids[{index}]", ids)
    return tuple(map(tuple, prompts))


def check_token_ids(name: str, ids: Sequence[object]) -> None:
    """Verify that a prompt is of token ids.

    Raises:
        RequestError: one is no integer, or out of range.
    """
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise RequestError(f"{name} holds {token_id!r}: ids are integers in 0..{MAX_TOKEN_ID}")


def as_hash_ids(
    hashes: Sequence[Sequence[int]] | None, prompt_lens: npt.NDArray[np.int64], block_len: int
) -> tuple[tuple[int, ...], ...] | None:
    """The names of blocks as tuples.

    Raises:
        RequestError: a request does not name each block of its prompt, or a name is no integer in [0, 2**32).
    """
    if hashes is None:
        return None
    check_count("hash_ids", hashes, len(prompt_lens))
    for index, (names, length) in enumerate(zip(hashes, prompt_lens.tolist(), strict=True)):
        if not isinstance(names, list | tuple) or len(names) != -(-length // block_len):
            found = len(names) if isinstance(names, list | tuple) else type(names).__name__
            raise RequestError(
                f"hash_ids[{index}] must name the {-(-length // block_len)} blocks of {block_len} that "
                f"{length} tokens have, got {found}"
            )
        for name in names:
            if type(name) is not int or not 0 <= name <= _MAX_HASH_ID:
                raise RequestError(
                    f"hash_ids[{index}] holds {name!r}: names are integers in 0..{_MAX_HASH_ID}"
                )
    return tuple(map(tuple, hashes))


def as_texts(texts: Sequence[str] | None, prompt_lens: npt.NDArray[np.int64]) -> tuple[str, ...] | None:
    """The texts as a tuple.

    Raises:
        RequestError: their number differs from `prompt_lens`, or one is empty or no valid Unicode.
    """
    if texts is None:
        return None
    check_count("prompt_texts", texts, len(prompt_lens))
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise RequestError(f"prompt_texts[{index}] must be a non-empty string, got {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt_texts[{index}] holds a lone surrogate at character {error.start}, which is no "
                "character; decode the source with the right encoding"
            ) from error
    return tuple(texts)


def as_continued(
    follows: npt.ArrayLike | None,
    common_lens: npt.ArrayLike | None,
    prompt_lens: npt.NDArray[np.int64],
    output_lens: npt.NDArray[np.int64],
) -> dict[str, npt.NDArray[np.int64]]:
    """Read-only copies of what is given of both.

    Raises:
        RequestError: a request does not follow one before it, or has no token of its own.
    """
    values = {}
    least = np.zeros(len(prompt_lens), np.int64)
    for name, given in (("common_lens", common_lens), ("follows", follows)):
        if given is None:
            continue
        array = _as_vector(name, given)
        check_count(name, array, len(prompt_lens))
        if array.dtype.kind not in "iu":
            raise RequestError(f"{name} must hold integers, got {array.dtype}")
        values[name] = array = _frozen(array.astype(np.int64))
        if name == "common_lens":
            _check_bounds(name, array, 0, MAX_LEN)
            least = np.maximum(least, array)
            continue
        wrong = np.flatnonzero((array < -1) | (array >= np.arange(len(array))))
        if wrong.size:
            index = int(wrong[0])
            raise RequestError(
                f"follows[{index}]={array[index]} must be -1 or a request before it, below {index}"
            )
        ends = np.append(prompt_lens + output_lens, 0)
        least = np.where(array < 0, least, ends[array])
    short = np.flatnonzero(prompt_lens <= least)
    if short.size:
        index = int(short[0])
        raise RequestError(
            f"prompt_lens[{index}]={prompt_lens[index]} must be above the {least[index]} tokens that its "
            "prompt begins with"
        )
    return values


def as_times(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """A read-only copy of arrival times, in seconds.

    Raises:
        ConfigError: there is no request, or too many.
        RequestError: a time is no number in [0, 1e9], or less than the one before it.
    """
    times = as_seconds("arrival_times", values)
    falls = np.flatnonzero(np.diff(times) < 0)
    if falls.size:
        index = int(falls[0]) + 1
        raise RequestError(
            f"arrival_times must not decrease: arrival_times[{index}]={times[index]} comes after "
            f"{times[index - 1]}; sort the requests by arrival"
        )
    return times


def as_seconds(name: str, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """A read-only float64 copy of one time per request, in seconds.

    Raises:
        ConfigError: there is no request, or too many.
        RequestError: a time is no number in [0, 1e9].
    """
    array = _as_vector(name, values)
    if array.dtype.kind not in "iuf":
        raise RequestError(f"{name} must hold numbers, got {array.dtype}")
    times = array.astype(np.float64)
    _check_bounds(name, times, 0.0, MAX_SECONDS)
    return _frozen(times)


def _as_vector(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise RequestError(f"{name} must be one number per request ({error})") from error
    if array.ndim != 1:
        raise RequestError(f"{name} must be one number per request, got shape {array.shape}")
    if not 1 <= len(array) <= MAX_REQUESTS:
        raise ConfigError(f"a trace has between 1 and {MAX_REQUESTS} requests; {name} has {len(array)}")
    return array


def _check_bounds(name: str, array: npt.NDArray[Any], lower: float, upper: float) -> None:
    outside = np.flatnonzero(~((array >= lower) & (array <= upper)))  # NaN is outside
    if outside.size:
        index = int(outside[0])
        raise RequestError(f"{name}[{index}] must lie in [{lower}, {upper}], got {array[index]}")


def check_count(name: str, values: Sequence[Any] | npt.NDArray[Any], count: int) -> None:
    """Verify that there is one value per request.

    Raises:
        RequestError: there is not.
    """
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray) or len(values) != count:
        found = len(values) if isinstance(values, Sequence | np.ndarray) else type(values).__name__
        raise RequestError(f"{name} must have one entry per request: {count}, got {found}")


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False  # callers pass copies
    return array
