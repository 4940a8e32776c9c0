"""Conversations: turns that each begin with all that was said before, as users of a chat send them."""

from __future__ import annotations

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.workloads.arrivals import AllAtOnce, ArrivalProcess, ClosedLoop
from jaxllm.workloads.checks import MAX_LEN, MAX_REQUESTS, MAX_SECONDS, check_integer, check_number
from jaxllm.workloads.lengths import LognormalLengths, UniformLengths
from jaxllm.workloads.seeding import Stream, generator
from jaxllm.workloads.trace import Trace

MESSAGES = LognormalLengths(mean=38.0, sigma=1.0, shortest=1, longest=1024)
"""Tokens that a user says in a turn; an assumption in the manner of ShareGPT."""
ANSWERS = LognormalLengths(mean=200.0, sigma=0.8, shortest=1, longest=1024)
"""Tokens of an answer; likewise."""
SINGLE_SHARE, MEAN_TURNS = 0.27, 5.5
"""Conversations of one turn, as CachedAttention counts in ShareGPT, and the mean of all, an assumption."""
_ALL_AT_ONCE = AllAtOnce()
Lengths = LognormalLengths | UniformLengths


def make_conversations(
    num_conversations: int,
    *,
    messages: Lengths = MESSAGES,
    answers: Lengths = ANSWERS,
    mean_turns: float = MEAN_TURNS,
    mean_think: float = 60.0,
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
        mean_think: seconds between an answer and the next turn, exponential.
        common_len: tokens that all begin with, such as a system prompt.
        max_len: a conversation ends before the turn that would be longer with its answer.
        arrivals: when conversations begin.
        seed: of everything drawn.
        name: the trace's.

    Raises:
        ConfigError: an argument is out of range.
    """
    count = check_integer("num_conversations", num_conversations, 1, MAX_REQUESTS)
    common_len = check_integer("common_len", common_len, 0, MAX_LEN)
    max_len = check_integer("max_len", max_len, 2, MAX_LEN)
    mean_turns = check_number("mean_turns", mean_turns, 2.0 - SINGLE_SHARE, 1000.0)
    check_number("mean_think", mean_think, 0.0, MAX_SECONDS)
    if isinstance(arrivals, ClosedLoop) or not hasattr(arrivals, "times"):
        raise ConfigError(f"arrivals={arrivals!r} must say when conversations begin, such as Poisson(rate)")
    rng = generator(seed, Stream.TURNS)
    more = (mean_turns - SINGLE_SHARE) / (1 - SINGLE_SHARE) - 2  # turns after the second, on average
    num_more = rng.geometric(1 / (1 + more), count) - 1
    turns = np.where(rng.random(count) < SINGLE_SHARE, 1, 2 + num_more)
    total = int(turns.sum())
    said = messages.sample(total, generator(seed, Stream.PROMPTS))
    answered = answers.sample(total, generator(seed, Stream.OUTPUTS))
    think = np.minimum(mean_think * rng.standard_exponential(total), MAX_SECONDS)
    begin = arrivals.times(count, generator(seed, Stream.ARRIVALS))
    rows: list[tuple[float, int, int, int, float]] = []
    place = 0
    for conversation in range(count):
        length, last = common_len, -1
        for turn in range(int(turns[conversation])):
            here = place + turn
            prompt, output = length + int(said[here]), int(answered[here])
            if prompt + output > max_len:
                break
            rows.append(
                (float(begin[conversation]), prompt, output, last, float(think[here]) if turn else 0.0)
            )
            length, last = prompt + output, len(rows) - 1
        place += int(turns[conversation])
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
        notes=(
            f"messages: {messages}",
            f"answers: {answers}",
            f"turns: mean {mean_turns} of {count} conversations, cut at {max_len} tokens",
            f"think: exponential, mean {mean_think} s",
            f"arrivals: {arrivals}",
        ),
    )
