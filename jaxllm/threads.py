"""Threads with as much stack as native code needs."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

_starting = threading.Lock()


def threads_of_stack(
    num_threads: int, stack_bytes: int, name: str, initializer: Callable[[], object] | None = None
) -> concurrent.futures.ThreadPoolExecutor:
    """An executor whose threads, all of which are there already, have a stack of so many bytes."""
    executor = concurrent.futures.ThreadPoolExecutor(
        num_threads, thread_name_prefix=name, initializer=initializer
    )
    all_there = threading.Barrier(num_threads + 1)
    with _starting:
        before = threading.stack_size(stack_bytes)
        try:
            for _ in range(num_threads):
                executor.submit(all_there.wait)
        finally:
            threading.stack_size(before)
    all_there.wait()
    return executor
