"""Conversations: turns that each begin with all that was said before, as users of a chat send them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError, RequestError
from jaxllm.research.workloads.arrivals import AllAtOnce, ArrivalProcess, ClosedLoop
from jaxllm.research.workloads.checks import (
    MAX_LEN,
    MAX_REQUESTS,
    MAX_SECONDS,
    BadRows,
    check_integer,
    check_number,
)
from jaxllm.research.workloads.datasets import read_rows
from jaxllm.research.workloads.lengths import LognormalLengths, UniformLengths
from jaxllm.research.workloads.seeding import Stream, generator
from jaxllm.research.workloads.trace import Trace
from jaxllm.system.options import checked_path
from jaxllm.text.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MESSAGES = LognormalLengths(mean=38.0, sigma=1.0, shortest=1, longest=1024)
"""Tokens that a user says in a turn; an assumption in the manner of ShareGPT."""
ANSWERS = LognormalLengths(mean=200.0, sigma=0.8, shortest=1, longest=1024)
"""Tokens of an answer; likewise."""
SINGLE_SHARE, MEAN_TURNS = 0.27, 5.5
"""Conversations of one turn, as CachedAttention counts in ShareGPT, and the mean of all, an assumption."""
_ALL_AT_ONCE = AllAtOnce()
_COLUMNS = ("conversations", "conversation", "messages")
_SPEAKERS = dict.fromkeys(("system", "human", "user"), 0) | dict.fromkeys(("gpt", "assistant", "chatgpt"), 1)
"""Who says a message, and who an answer."""
Lengths = LognormalLengths | UniformLengths


def make_conversations(
    num_conversations: int,
    *,
    messages: Lengths = MESSAGES,
    answers: Lengths = ANSWERS,
    mean_turns: float = MEAN_TURNS,
    mean_think: float = 60.0,
    think_sigma: float | None = None,
    common_len: int = 0,
    max_len: int = 4096,
    arrivals: ArrivalProcess = _ALL_AT_ONCE,
    seed: int = 0,
    name: str = "conversations",
) -> Trace:
    """A trace of conversations, one after another in the order they begin in; turns are its requests.

    Args:
        num_conversations: how many.
        messages: tokens a user says in a turn.
        answers: tokens of an answer.
        mean_turns: of all conversations; `SINGLE_SHARE` of them have one, the others two and a geometric
            number more. At least 1 + 1 - `SINGLE_SHARE`, so that this can be.
        mean_think: mean seconds between an answer and the next turn.
        think_sigma: of their logarithm, which makes them lognormal: from 1 on with a heavy tail, as the tools
            of agents take (Continuum, arXiv 2511.02230). 0 to 5; None draws them from an exponential.
        common_len: tokens that all begin with, such as a system prompt.
        max_len: a conversation ends before the turn that would be longer with its answer.
        arrivals: when conversations begin.
        seed: of everything drawn.
        name: the trace's.

    Raises:
        ConfigError: an argument is out of range.
    """
    count = check_integer("num_conversations", num_conversations, 1, MAX_REQUESTS)
    common_len, max_len = _check_sizes(common_len, max_len, arrivals)
    pauses = _Pauses(mean_think, think_sigma)
    mean_turns = check_number("mean_turns", mean_turns, 2.0 - SINGLE_SHARE, 1000.0)
    rng = generator(seed, Stream.TURNS)
    more = (mean_turns - SINGLE_SHARE) / (1 - SINGLE_SHARE) - 2  # turns after the second, on average
    num_more = rng.geometric(1 / (1 + more), count) - 1
    turns = np.where(rng.random(count) < SINGLE_SHARE, 1, 2 + num_more)
    total = int(turns.sum())
    said = messages.sample(total, generator(seed, Stream.PROMPTS))
    answered = answers.sample(total, generator(seed, Stream.OUTPUTS))
    think = pauses.sample(total, rng)
    place = np.concatenate([[0], np.cumsum(turns)])
    spoken = [
        [(int(said[turn]), int(answered[turn])) for turn in range(place[one], place[one + 1])]
        for one in range(count)
    ]
    notes = (
        f"messages: {messages}",
        f"answers: {answers}",
        f"turns: mean {mean_turns} of {count} conversations, cut at {max_len} tokens",
    )
    return _trace_of(
        spoken,
        think,
        pauses=pauses,
        common_len=common_len,
        max_len=max_len,
        arrivals=arrivals,
        seed=seed,
        name=name,
        notes=notes,
    )


def load_conversations(
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    column: str | None = None,
    mean_think: float = 60.0,
    think_sigma: float | None = None,
    common_len: int = 0,
    max_len: int = 4096,
    arrivals: ArrivalProcess = _ALL_AT_ONCE,
    limit: int | None = None,
    on_bad: Literal["raise", "skip"] = "raise",
    seed: int = 0,
    name: str | None = None,
) -> Trace:
    """A trace with the turns and lengths of recorded conversations; its tokens are made up.

    Messages are `{"from": "human", "value": text}` (ShareGPT) or `{"role": "user", "content": text}` (LMSYS,
    WildChat, OpenAI). Those of a system belong to the first turn, several of one speaker to one another. What
    an assistant says first is left out, and what is not answered.

    Args:
        path: a JSON array of objects, JSON Lines, or a Parquet file, an object or row for each conversation.
        tokenizer: counts tokens; see `jaxllm.text.tokenizer.load_tokenizer`.
        column: where the messages are; "conversations", "conversation" or "messages" if None.
        mean_think, think_sigma, common_len, max_len, arrivals: as in `make_conversations`.
        limit: read no more conversations.
        on_bad: what to do with a conversation without an answered message, or with a malformed one: "raise",
            or "skip", which notes how many.
        seed: of thinking times, arrivals and tokens.
        name: the trace's; by default the file's, without its suffix.

    Raises:
        ConfigError: an argument is out of range, or the file cannot be read.
        RequestError: a bad conversation, with file and line; or none is usable.
    """
    limit = MAX_REQUESTS if limit is None else check_integer("limit", limit, 1, MAX_REQUESTS)
    common_len, max_len = _check_sizes(common_len, max_len, arrivals)
    pauses = _Pauses(mean_think, think_sigma)
    file, bad = Path(checked_path("path", path)), BadRows(on_bad)
    spoken: list[list[tuple[int, int]]] = []
    for where, row in read_rows(file, None, () if column is None else (column,)):
        try:
            if isinstance(row, RequestError):
                raise row
            spoken.append(_turns_of(row, column, tokenizer))
        except RequestError as error:
            bad.add(where, error)
        if len(spoken) == limit:
            break
    if not spoken:
        bad.refuse_empty(str(file))
    rng = generator(seed, Stream.TURNS)
    total = sum(map(len, spoken))
    think = pauses.sample(total, rng)
    notes: tuple[str, ...] = (f"from {file.name}: {len(spoken)} conversations, cut at {max_len} tokens",)
    if bad.count:
        notes = (*notes, f"skipped {bad.count} rows", *bad.reasons)
    return _trace_of(
        spoken,
        think,
        pauses=pauses,
        common_len=common_len,
        max_len=max_len,
        arrivals=arrivals,
        seed=seed,
        name=file.stem if name is None else name,
        notes=notes,
    )


def _turns_of(
    row: Mapping[str, Any], column: str | None, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, int]]:
    """Tokens of each message and its answer."""
    found = [name for name in ((column,) if column is not None else _COLUMNS) if row.get(name) is not None]
    if not found:
        wanted = " or ".join(map(repr, _COLUMNS if column is None else (column,)))
        raise RequestError(f"there is no column {wanted}; the columns are {', '.join(map(repr, row))}")
    messages = row[found[0]]
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(f"column {found[0]!r} must hold a list of messages")
    turns: list[tuple[list[str], list[str]]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(f"a message must be an object, not {type(message).__name__}")
        speaker = message.get("role", message.get("from"))
        text = message.get("content", message.get("value"))
        if speaker not in _SPEAKERS or not isinstance(text, str):
            raise RequestError(
                f"a message must be text of {', '.join(_SPEAKERS)} ('role' and 'content', or 'from' and "
                f"'value'), not {type(text).__name__} of {speaker!r}"
            )
        is_answer = _SPEAKERS[speaker]
        if not is_answer and (not turns or turns[-1][1]):
            turns.append(([], []))
        if turns:
            turns[-1][is_answer].append(text)
    lengths = [
        tuple(max(1, len(encode(tokenizer, "\n".join(texts), add_special_tokens=False))) for texts in turn)
        for turn in turns
        if turn[1]
    ]
    if not lengths:
        raise RequestError("no message of a user is answered")
    return [(said, answered) for said, answered in lengths]


class _Pauses:
    """Seconds between an answer and the next turn."""

    def __init__(self, mean: float, sigma: float | None) -> None:
        self._mean = check_number("mean_think", mean, 0.0, MAX_SECONDS)
        self._sigma = None if sigma is None else check_number("think_sigma", sigma, 0.0, 5.0)

    def sample(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """So many."""
        if self._sigma is None:
            drawn = rng.standard_exponential(count)
        else:
            drawn = rng.lognormal(-(self._sigma**2) / 2, self._sigma, count)  # of mean 1
        return np.minimum(self._mean * drawn, MAX_SECONDS)

    def __str__(self) -> str:
        law = "exponential" if self._sigma is None else f"lognormal, sigma {self._sigma}"
        return f"{law}, mean {self._mean} s"


def _check_sizes(common_len: int, max_len: int, arrivals: ArrivalProcess) -> tuple[int, int]:
    if isinstance(arrivals, ClosedLoop) or not hasattr(arrivals, "times"):
        raise ConfigError(f"arrivals={arrivals!r} must say when conversations begin, such as Poisson(rate)")
    return check_integer("common_len", common_len, 0, MAX_LEN), check_integer("max_len", max_len, 2, MAX_LEN)


def _trace_of(
    spoken: Sequence[Sequence[tuple[int, int]]],
    think: npt.NDArray[np.float64],
    *,
    pauses: _Pauses,
    common_len: int,
    max_len: int,
    arrivals: ArrivalProcess,
    seed: int,
    name: str,
    notes: tuple[str, ...],
) -> Trace:
    """A trace of conversations of which the tokens of messages and answers are given."""
    begin = arrivals.times(len(spoken), generator(seed, Stream.ARRIVALS))
    rows: list[tuple[float, int, int, int, float]] = []
    place = 0
    for began, turns in zip(begin, spoken, strict=True):
        length, last = common_len, -1
        for turn, (said, answered) in enumerate(turns):
            prompt = length + said
            if prompt + answered > max_len:
                break
            pause = float(think[place + turn]) if turn else 0.0
            rows.append((float(began), prompt, answered, last, pause))
            length, last = prompt + answered, len(rows) - 1
        place += len(turns)
    if not rows:
        raise ConfigError(f"max_len={max_len} leaves no turn of any conversation; raise it")
    times, prompt_lens, output_lens, follows, thinks = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    return Trace(
        name=name,
        seed=seed,
        arrival_times=times,
        prompt_lens=prompt_lens,
        output_lens=output_lens,
        think_times=thinks,
        follows=follows,
        common_lens=np.where(follows < 0, common_len, 0) if common_len else None,
        notes=(*notes, f"think: {pauses}", f"arrivals: {arrivals}"),
    )
