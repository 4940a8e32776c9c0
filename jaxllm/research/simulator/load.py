"""`Load`: the trace of each seed, read from a file or drawn."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxllm.errors import ConfigError, shown
from jaxllm.research.workloads import (
    DATASETS,
    AllAtOnce,
    ArrivalProcess,
    ClosedLoop,
    LognormalLengths,
    Poisson,
    PromptDataset,
    Trace,
    UniformLengths,
    load_trace,
    make_trace,
    parse_arrivals,
)
from jaxllm.research.workloads.checks import MAX_LEN, MAX_REQUESTS, check_integer
from jaxllm.research.workloads.seeding import Stream, generator
from jaxllm.research.workloads.topics import TopicOutputs

_NUM_PROMPTS = 1000
_OUTPUT_LEN = 128
Lengths = UniformLengths | LognormalLengths | int | str | tuple[int, int]
"""Tokens of prompts or outputs: to draw from, a number, or a range."""


class Load:
    """What is sent; see `jaxllm.research.simulate`, whose arguments these are.

    Raises:
        ConfigError: an argument is unknown, of the wrong kind, or at odds with another.
        RequestError: the trace's file has a bad request.
    """

    def __init__(
        self,
        trace: Trace | str | os.PathLike[str] | None,
        *,
        dataset: str | PromptDataset | None,
        num_prompts: int | None,
        input_len: Lengths | None,
        output_len: Lengths | None,
        arrivals: ArrivalProcess | str | None,
        rate: float | None,
        closed: int | None,
        reading: Mapping[str, Any],
    ) -> None:
        if num_prompts is not None:
            num_prompts = check_integer("num_prompts", num_prompts, 1, MAX_REQUESTS)
        self._rate, self._arrivals = rate, _arrivals(arrivals, rate, closed)
        if input_len is not None and dataset is not None:
            raise ConfigError(
                f"input_len={shown(input_len)} and dataset={shown(dataset)} both say how long prompts are: "
                "drop one"
            )
        self._dataset = dataset or "chatbot" if input_len is None else _lengths("input_len", input_len)
        self._count = num_prompts
        self._outputs = _lengths("output_len", _OUTPUT_LEN if output_len is None else output_len)
        self._trace: Trace | None = None
        self._is_resampled = False
        if isinstance(trace, str | os.PathLike):
            self._trace = load_trace(trace, **reading)
        elif isinstance(trace, Trace):
            self._trace = trace
        elif trace is not None:
            raise ConfigError(
                "trace must be a Trace, the path of a file of one, or None for one that is drawn, got "
                f"{shown(trace)}"
            )
        drawn = {"dataset": dataset, "input_len": input_len, "output_len": output_len}
        if trace is not None and (given := [name for name, value in drawn.items() if value is not None]):
            raise ConfigError(f"trace has lengths: drop {given[0]}, or drop trace")
        if reading and not isinstance(trace, str | os.PathLike):
            raise ConfigError(
                f"{', '.join(reading)} says how a trace's file is read, and trace names none: name one, or "
                "leave it out"
            )
        if self._trace is not None and num_prompts is not None:
            if num_prompts > len(self._trace):
                raise ConfigError(
                    f"num_prompts={num_prompts}: trace {self._trace.name!r} has {len(self._trace)} requests; "
                    "ask for as many at most, or leave it out for all of them"
                )
            self._trace = self._trace.head(num_prompts)

    def draws(self, seeds: Sequence[int]) -> list[Trace]:
        """The trace of each seed.

        Raises:
            ConfigError: of a recorded trace nothing can be drawn, or its turns cannot be sent as asked.
        """
        if self._trace is None:
            return [self._drawn(seed) for seed in seeds]
        found = [self._sent(self._trace, seed) for seed in seeds]
        if len(seeds) > 1 and all(one == found[0] for one in found[1:]):
            self._is_resampled = True
            return [_resampled(one, seed) for one, seed in zip(found, seeds, strict=True)]
        return found

    def described(self, trace: Trace) -> str:
        """The load, for people."""
        how = ", as recorded" if self._trace is not None else ", all at once"
        if self._is_stretched:
            how = f", stretched in time to {self._rate:g} a second"
        elif self._arrivals is not None:
            how = f", arrivals {self._arrivals}"
        drawn = "; each seed draws its requests with replacement" if self._is_resampled else ""
        return f"{len(trace):,} requests of {trace.name}{how}{drawn}"

    @property
    def longest(self) -> int | None:
        """Tokens that a request which is drawn may have at most; None where that is not said."""
        prompts = DATASETS.get(self._dataset) if isinstance(self._dataset, str) else self._dataset
        bounds = [getattr(lengths, "longest", None) for lengths in (prompts, self._outputs)]
        if self._trace is not None or not all(isinstance(bound, int) for bound in bounds):
            return None
        return sum(bounds)  # type: ignore[arg-type]

    @property
    def _is_stretched(self) -> bool:
        """Whether the trace has times of its own, and a rate is asked for."""
        trace = self._trace
        if trace is None or self._rate is None or trace.follows is not None:
            return False
        return bool(trace.arrival_times[-1] > trace.arrival_times[0])

    def _drawn(self, seed: int) -> Trace:
        count = _NUM_PROMPTS if self._count is None else self._count
        outputs, arrivals = self._outputs, self._arrivals or AllAtOnce()
        longest = getattr(outputs, "longest", MAX_LEN)  # which bounds nothing
        return make_trace(self._dataset, count, longest, outputs=outputs, arrivals=arrivals, seed=seed)

    def _sent(self, trace: Trace, seed: int) -> Trace:
        """The trace with the arrivals that were asked for."""
        if self._is_stretched:
            assert self._rate is not None
            times = trace.arrival_times - trace.arrival_times[0]
            times = times * ((len(trace) - 1) / float(times[-1]) / self._rate)
            return dataclasses.replace(trace, arrival_times=times)
        return trace if self._arrivals is None else sent(trace, self._arrivals, seed)


def sent(trace: Trace, arrivals: ArrivalProcess | str, seed: int) -> Trace:
    """The requests of a trace, sent otherwise.

    Args:
        trace: whose requests; of conversations the first turns are sent so.
        arrivals: a process, or what `parse_arrivals` reads.
        seed: of the process.

    Raises:
        ConfigError: there are no such arrivals, or conversations are to come from clients.
    """
    if isinstance(arrivals, str):
        arrivals = parse_arrivals(arrivals)
    rng, loop = generator(seed, Stream.ARRIVALS), arrivals if isinstance(arrivals, ClosedLoop) else None
    if trace.follows is not None:
        if loop is not None:
            raise ConfigError(
                f"the turns of {trace.name!r} come after each other, not from {loop}: pass a rate, or leave "
                "closed out"
            )
        return dataclasses.replace(trace, arrival_times=_begun(trace, arrivals, rng))
    return dataclasses.replace(
        trace,
        arrival_times=arrivals.times(len(trace), rng),
        num_clients=0 if loop is None else loop.num_clients,
        think_times=None if loop is None or not loop.think else loop.think_times(len(trace), rng),
    )


def _begun(trace: Trace, arrivals: ArrivalProcess, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """When each turn's conversation begins, which is what arrives."""
    assert trace.follows is not None
    times = arrivals.times(int((trace.follows < 0).sum()), rng)
    numbers = np.cumsum(trace.follows < 0) - 1  # of conversations, of turns that follow none
    for index, followed in enumerate(trace.follows.tolist()):
        if followed >= 0:
            numbers[index] = numbers[followed]
    if (np.diff(numbers) < 0).any():
        raise ConfigError(f"turns of {trace.name!r} are mixed: sort them by conversation, or leave out rates")
    return times[numbers]


def _arrivals(
    given: ArrivalProcess | str | None, rate: float | None, closed: int | None
) -> ArrivalProcess | None:
    named = {"arrivals": given, "rate": rate, "closed": closed}
    said = [f"{name}={value!r}" for name, value in named.items() if value is not None]
    if len(said) > 1:
        raise ConfigError(f"{' and '.join(said)} contradict each other: pass one of them")
    if rate is not None:
        return Poisson(rate)
    if closed is not None:
        return ClosedLoop(check_integer("closed", closed, 1, MAX_REQUESTS))
    if given is None or not isinstance(given, str):
        if given is not None and (isinstance(given, type) or not hasattr(given, "times")):
            raise ConfigError(f"arrivals={shown(given)} is no arrival process; use Poisson(rate), ...")
        return given
    return parse_arrivals(given)


def _lengths(name: str, given: Any) -> Any:
    """What tokens of prompts or outputs are drawn from: ours, or one's own."""
    if hasattr(given, "sample") and not isinstance(given, type | TopicOutputs):
        return given
    bounds = given
    if isinstance(given, str):
        try:
            bounds = tuple(map(int, given.split(":")))
        except ValueError:
            bounds = ()
    bounds = bounds if isinstance(bounds, tuple | list) else (bounds, bounds)
    bounds = bounds * 2 if len(bounds) == 1 else bounds
    if len(bounds) != 2:
        raise ConfigError(f"{name}={shown(given)} must be a length, or a range of them, such as '64:512'")
    shortest, longest = (check_integer(name, bound, 1, MAX_LEN) for bound in bounds)
    if shortest > longest:
        raise ConfigError(f"{name}={shown(given)} must be a range whose first length is not above its last")
    return UniformLengths(shortest=shortest, longest=longest)


def _resampled(trace: Trace, seed: int) -> Trace:
    if trace.shares_prefixes:
        raise ConfigError(
            f"trace {trace.name!r} says when its requests come and what their prompts share: another seed "
            "changes nothing, and requests drawn with replacement would repeat prompts. Leave seeds at 1, or "
            "draw arrivals: arrivals='poisson:RATE'"
        )
    picks = generator(seed, Stream.RESAMPLES).integers(len(trace), size=len(trace))
    texts = trace.prompt_texts
    return dataclasses.replace(
        trace,
        prompt_lens=trace.prompt_lens[picks],
        output_lens=trace.output_lens[picks],
        prompt_texts=None if texts is None else tuple(np.array(texts, object)[picks].tolist()),
    )
