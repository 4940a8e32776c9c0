"""The process that has grammars tried before the engine compiles them, each in a fork that may die of it.

It imports no JAX, and runs nothing beside a fork's making: so forking is safe, and takes it little, where
starting a process holds up all threads of an engine. Frames of JSON, each after its length, come by its
standard input: the vocabulary first, and then `StructuredOutputsParams`, one after the other. It ends with
its input, or when its parent has gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import select
import signal
import struct
import sys
import threading
import time
from typing import IO, Any

import numpy as np

from jaxllm.sampling.structured_outputs import (
    NOTHING,
    StructuredOutputsParams,
    Vocabulary,
    compiled,
    mask_width,
    problem_of,
)

STACK_BYTES = 16 * 2**20
"""Of the thread that tries grammars; those of the engine that use them have more."""
MAX_CPU_SECONDS = 5.0
"""Processor time of one grammar."""
QUICK_CPU_SECONDS = 0.1
"""Of one that may still go before others. Ordinary ones take up to 0.05, of 128,000 tokens, too."""
MAX_BYTES = 2**30
"""Memory of one grammar."""
_NICENESS = 10
"""Among the processes of a session: Linux shares out processors by session first (autogroup)."""
_SLOW_NICENESS = 9  # more
_NUM_STEPS = 8  # tokens of the walk
_SECONDS_TO_LOOK_UP = 0.2  # after which it is asked whether there is a parent


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a grammar took when it was tried.

    Attributes:
        grammar: in llguidance's form.
        mask_seconds: the longest that a mask took.
        num_bytes: memory.
    """

    grammar: str
    mask_seconds: float
    num_bytes: int


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Send a value that JSON has a form for."""
    data = json.dumps(value).encode()
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next value.

    Raises:
        EOFError: there is none, or half of one.
    """
    head = stream.read(4)
    data = stream.read(struct.unpack(">I", head)[0]) if len(head) == 4 else b""
    if not data:
        raise EOFError
    return json.loads(data)


def try_out(vocabulary: Vocabulary, params: StructuredOutputsParams) -> Proof:
    """Compile a grammar, and make the masks of some tokens that it allows, as the engine will.

    Raises:
        ValueError: it cannot be compiled, or cannot be followed.
    """
    from llguidance import LLExecutor, LLMatcher
    from llguidance.numpy import fill_next_token_bitmask_par

    executor, before = LLExecutor(2), _resident_bytes()
    if params.whitespace_pattern is not None:
        compiled(vocabulary, LLMatcher.grammar_from_regex(params.whitespace_pattern))
    grammar = params.grammar_text()
    matcher = compiled(vocabulary, grammar)
    rows = np.zeros((2, mask_width(vocabulary.size)), np.int32)
    longest = 0.0
    for step in range(_NUM_STEPS):
        began = time.perf_counter()
        fill_next_token_bitmask_par(executor, [(matcher, 0), (matcher.deep_copy(), 1)], rows)
        longest = max(longest, time.perf_counter() - began)
        if problem := problem_of(matcher):
            what = problem if problem == NOTHING else f"it is too complex: {problem}"
            raise ValueError(f"after {step} tokens {what}" if step else what)
        allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
        going_on = [token for token in allowed.tolist() if token not in vocabulary.eos_token_ids]
        if not going_on:
            break
        token = going_on[step * 7919 % len(going_on)]
        executor.consume_token_par([(matcher, token)])
    return Proof(grammar, longest, max(0, _resident_bytes() - before))


def main() -> None:
    """Have tried what comes by standard input, until it ends."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whoever started it may ignore this one
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        vocabulary = Vocabulary(**read_frame(requests))
        vocabulary.tokens  # noqa: B018  # forks have it then, and its memory is not theirs
        while True:
            params, cpu_seconds = read_frame(requests)
            write_frame(answers, _answer(vocabulary, params, cpu_seconds))


def _answer(vocabulary: Vocabulary, params: dict[str, Any], cpu_seconds: float) -> dict[str, Any]:
    """What a fork says of a grammar, or of what it died: a signal as a negative number."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        parent = os.getppid()
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_try_out, args=(vocabulary, params, cpu_seconds, writing))
        thread.start()
        while thread.is_alive() and os.getppid() == parent:
            thread.join(_SECONDS_TO_LOOK_UP)
        os._exit(0)
    os.close(writing)
    parent = os.getppid()
    with open(reading, "rb") as pipe:
        said = b""
        while True:
            if select.select([pipe], [], [], _SECONDS_TO_LOOK_UP)[0]:
                if not (part := os.read(reading, 2**16)):
                    break
                said += part
            elif os.getppid() != parent:
                os.kill(child, signal.SIGKILL)
                raise EOFError
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code or not said:
        return {"died": code}
    answer: dict[str, Any] = json.loads(said)
    return answer


def _try_out(vocabulary: Vocabulary, params: dict[str, Any], cpu_seconds: float, writing: int) -> None:
    if cpu_seconds > QUICK_CPU_SECONDS:
        with contextlib.suppress(OSError):
            os.nice(_SLOW_NICENESS)
    with contextlib.suppress(OSError, ValueError):  # where the system has no such limit the parent's clock is
        resource.setrlimit(
            resource.RLIMIT_AS, (_virtual_bytes() + MAX_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
        )
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # it is ended by SIGPROF
    try:
        answer = dataclasses.asdict(try_out(vocabulary, StructuredOutputsParams(**params)))
    except (ValueError, RecursionError) as error:
        answer = {"error": told(error)}
    except MemoryError:
        os.abort()  # as native code does
    with open(writing, "wb") as pipe:
        pipe.write(json.dumps(answer).encode())


def told(error: Exception) -> str:
    """What a grammar's error says. The library panics where something is too large."""
    what = str(error).partition("<backtrace>")[0].strip()
    return f"it is too large ({what.removeprefix('panic: ')})" if what.startswith("panic: ") else what


def _pages(column: int) -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[column]) * resource.getpagesize()
    except OSError:
        return 0


def _virtual_bytes() -> int:
    return _pages(0) or 2**40


def _resident_bytes() -> int:
    return _pages(1)
