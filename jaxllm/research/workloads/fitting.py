"""Traces whose requests are all to fit a limit: what is too long is an error, is clipped or is left out."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError, RequestTooLargeError
from jaxllm.research.workloads.checks import MAX_LEN, check_choice, check_integer
from jaxllm.research.workloads.trace import Trace

TooLong = Literal["raise", "clip", "skip"]


def fit_trace(
    trace: Trace, max_len: int, too_long: TooLong = "raise", *, limit_name: str = "max_len"
) -> Trace:
    """The trace with no request of more than `max_len` tokens, prompt and output together.

    Args:
        trace: is returned as it is where all its requests fit.
        max_len: tokens that a request may have, at least 2.
        too_long: what becomes of the others. `"clip"` cuts outputs to what leaves a token for the prompt, and
            then prompts at their ends; texts, which nobody can cut, are dropped from a trace with such a
            prompt. `"skip"` leaves the request out, and in conversations all that goes on after it.
        limit_name: how an error calls the limit.

    Raises:
        ConfigError: an argument is out of range, nothing is left, or conversations are to be clipped.
        RequestTooLargeError: a request does not fit; the message names it and what to pass.
    """
    check_choice("too_long", too_long, ("raise", "clip", "skip"))
    max_len = check_integer("max_len", max_len, 2, 2 * MAX_LEN)
    long = np.flatnonzero(trace.prompt_lens + trace.output_lens > max_len)
    if not long.size:
        return trace
    if too_long == "clip":
        return _clipped(trace, max_len, len(long))
    if too_long == "skip":
        return _without(trace, long, max_len)
    first = int(long[0])
    raise RequestTooLargeError(
        f"request {first} of trace {trace.name!r} has {trace.prompt_lens[first]} prompt and "
        f"{trace.output_lens[first]} output tokens, more than {limit_name}={max_len} ({len(long)} of "
        f"{len(trace)} requests have): cut them with too_long='clip' (--clip), leave them out with "
        f"too_long='skip' (--skip), or raise {limit_name}"
    )


def _clipped(trace: Trace, max_len: int, count: int) -> Trace:
    if trace.follows is not None:
        raise ConfigError(
            "turns of conversations cannot be clipped, as later ones repeat them: pass too_long='skip' "
            "(--skip)"
        )
    output_lens = np.minimum(trace.output_lens, max_len - 1)
    prompt_lens = np.minimum(trace.prompt_lens, max_len - output_lens)
    changes: dict[str, Any] = {"prompt_lens": prompt_lens, "output_lens": output_lens}
    if trace.common_lens is not None:
        changes["common_lens"] = np.minimum(trace.common_lens, prompt_lens - 1)
    if not np.array_equal(prompt_lens, trace.prompt_lens):
        if trace.prompt_token_ids is not None:
            rows = zip(trace.prompt_token_ids, prompt_lens.tolist(), strict=True)
            changes["prompt_token_ids"] = tuple(ids[:length] for ids, length in rows)
        if trace.hash_ids is not None:
            counts = -(-prompt_lens // trace.hash_block_len)
            pairs = zip(trace.hash_ids, counts.tolist(), strict=True)
            changes["hash_ids"] = tuple(names[:number] for names, number in pairs)
        changes["prompt_texts"] = None
    note = f"clipped {count} requests to {max_len} tokens"
    return dataclasses.replace(trace, **changes, notes=(*trace.notes, note))


def _without(trace: Trace, long: npt.NDArray[np.int64], max_len: int) -> Trace:
    keep = np.ones(len(trace), bool)
    keep[long] = False
    if trace.follows is not None:
        for index, followed in enumerate(trace.follows.tolist()):
            if followed >= 0 and not keep[followed]:
                keep[index] = False
    if not keep.any():
        raise ConfigError(f"no request of trace {trace.name!r} has at most {max_len} tokens; raise the limit")
    note = f"left out {len(trace) - int(keep.sum())} requests for more than {max_len} tokens"
    chosen = trace.take(np.flatnonzero(keep))
    return dataclasses.replace(chosen, notes=(*trace.notes, note))
