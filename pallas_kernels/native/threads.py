"""Work shared among the threads that XLA computes with.

A job is a number of independent items. Whoever is free takes the next one off an atomic counter: the
calling thread, and helpers that it asks XLA's pool for. It waits for items that were taken, never for helpers
that are still queued behind other work, so that handlers can call this from any thread of that same pool. A
helper that comes late finds nothing to do; the last to leave frees the job.

    words   0 next item   1 items done   2 items   3 users   4 workers   5 scratch bytes of each
            6 the block of memory   7 rows   8..39 arguments of the items   40..47 for calls of XLA
            then the scratch memory
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from jaxllm.pallas_kernels.native.memory import (
    call,
    fetch_add,
    free,
    give_way,
    int64s,
    malloc,
    memset,
    relax,
    words_on_stack,
)

ARGUMENTS = 8
"""Word of a job where the arguments of its items begin."""
NUM_ROWS = 7
"""Word of a job whose items are rows, or a few of them: how many there are."""
_NEXT, _DONE, COUNT, _USERS, _WORKERS, _SCRATCH = 0, 1, 2, 3, 4, 5
LAST_ARGUMENT = 39
"""The last word that may be one."""
_FOR_CALLS, _HEADER = LAST_ARGUMENT + 1, 48
_API, _CONTEXT = 2, 3  # words of XLA's call frame (`XLA_FFI_CallFrame`)
_SCHEDULE, _NUM_THREADS = 17, 18  # words of its functions (`XLA_FFI_Api`)
_SPINS = 2000


@njit
def new_job(num_items, num_threads, scratch_bytes):  # type: ignore[no-untyped-def]
    """Address of a job with so much memory, aligned to cache lines, for each of so many threads; or 0."""
    scratch = (scratch_bytes + 63) & ~63
    raw = malloc(_HEADER * 8 + num_threads * scratch + 64)
    if raw == 0:
        return raw
    job = (raw + 63) & ~63
    memset(job, 0, _HEADER * 8)
    words = int64s(job)
    words[COUNT], words[_SCRATCH], words[6] = num_items, scratch, raw
    return job


@njit
def num_threads(frame):  # type: ignore[no-untyped-def]
    """Threads of XLA's pool, at least 1."""
    place = words_on_stack()
    asked = int64s(place)
    asked[0], asked[1], asked[2], asked[3], asked[4] = 32, 0, int64s(frame)[_CONTEXT], place + 32, 1
    failed = call(int64s(int64s(frame)[_API])[_NUM_THREADS], place)
    count = asked[4]
    return count if failed == 0 and count > 1 else np.int64(1)


@njit
def _leave(job):  # type: ignore[no-untyped-def]
    if fetch_add(job + 8 * _USERS, -1) == 1:
        free(int64s(job)[6])


def worker(run_item: Any) -> Any:
    """A C function that runs items of a job, by `run_item(job, scratch, item)`, until none is left.

    Its argument is the job's address, plus 1 where a helper runs it.
    """
    compiled = njit(run_item, error_model="numpy")

    @cfunc(types.int64(types.int64))
    def work(tagged):  # type: ignore[no-untyped-def]
        job = tagged & ~1
        words = int64s(job)
        scratch = np.int64(0)
        while True:
            item = fetch_add(job + 8 * _NEXT, 1)
            if item >= words[COUNT]:
                break
            if scratch == 0:
                scratch = job + 8 * _HEADER + fetch_add(job + 8 * _WORKERS, 1) * words[_SCRATCH]
            compiled(job, scratch, item)
            fetch_add(job + 8 * _DONE, 1)
        if tagged & 1:
            _leave(job)
        return np.int64(0)

    return work


@njit
def run(frame, job, task, num_threads):  # type: ignore[no-untyped-def]
    """Do all items of a job, and give it up. `task` is the address of a `worker`."""
    words = int64s(job)
    num_items = words[COUNT]
    num_helpers = min(num_threads, num_items) - 1
    words[_USERS] = num_helpers + 1
    request = job + 8 * _FOR_CALLS
    asked = int64s(request)
    asked[0], asked[1], asked[2] = 40, 0, int64s(frame)[_CONTEXT]
    asked[3], asked[4] = task, job | 1
    schedule = int64s(int64s(frame)[_API])[_SCHEDULE]
    for _ in range(num_helpers):
        if call(schedule, request) != 0:
            fetch_add(job + 8 * _USERS, -1)
    call(task, job)
    spins = 0
    while fetch_add(job + 8 * _DONE, 0) < num_items:
        relax()
        spins += 1
        if spins > _SPINS:
            give_way()
    _leave(job)
