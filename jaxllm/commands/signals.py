"""Signals that end a command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

_SECONDS_TO_COME_AGAIN = 0.05


@contextlib.contextmanager
def lost_interrupts_return() -> Iterator[None]:
    """Let Ctrl-C come again where no exception gets out, as of what the garbage collector calls."""
    before = sys.unraisablehook

    def again(found: sys.UnraisableHookArgs) -> None:
        if issubclass(found.exc_type, KeyboardInterrupt):
            later = threading.Timer(_SECONDS_TO_COME_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
            later.daemon = True
            later.start()  # here it would be lost, too
        else:
            before(found)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Let a request to end this process, by SIGTERM or a lost terminal, unwind the stack as Ctrl-C does.

    Raises:
        SystemExit: there was such a request; with the code by which shells tell it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not ours
        return
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script starts with "&"
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # which asyncio knows how to take

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        if not received:
            raise
        raise SystemExit(128 + received[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
