"""What goes on beside steps, and what these take longer for it: copies, and the host's own work."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

from jaxllm.engine.profiling import RUN_STEPS, Profiler, Work
from jaxllm.errors import ConfigError
from jaxllm.sampling.params import SamplingParams
from jaxllm.types import Request, SchedulerOutput, Swap, host_blocks_of

_GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def idle_share(profiler: Profiler, seconds: float, work: Work, repetitions: int = 10) -> float:
    """For what share of a step's own time the host may compute beside it, without making it longer.

    1 where the device has processors of its own. On a CPU, whose cores do both, it is what steps leave
    idle; the rest of the host's work makes them longer by its own time. Measured with `seconds` of it before
    each step is sent, which should be more than is hidden; a Python loop of so much processor time, as a
    scheduler's is. A mean, from 0 to 1.

    Args:
        profiler: whose executor runs them.
        seconds: of the host.
        work: of a step. Kinds of steps differ in what they leave idle.
        repetitions: runs of steps, each without and with the host's work.

    Raises:
        ConfigError: the work does not fit the pool.
    """
    scheduled = profiler.schedule(work)
    profiler.time_run(scheduled)
    pairs = [
        (profiler.time_run(scheduled), profiler.time_run(scheduled, seconds)) for _ in range(repetitions)
    ]
    alone, beside = (statistics.fmean(times) for times in zip(*pairs, strict=True))
    return min(1.0, max(0.0, (seconds - (beside - alone)) / alone))


def sending_seconds(profiler: Profiler, work: Work, repetitions: int = 10) -> float:
    """Processor time that sending and reading a step takes of this thread; as `idle_share`.

    Every measured step has it within it, as far as the step does not hide it.
    """
    scheduled = profiler.schedule(work)
    profiler.time_run(scheduled)
    started = time.thread_time()
    for _ in range(repetitions):
        profiler.time_run(scheduled)
    return (time.thread_time() - started) / (repetitions * RUN_STEPS)


def hidden_swap_shares(
    profiler: Profiler, num_blocks: int, batch: int, context: int, repetitions: int = 5
) -> tuple[float, float]:
    """Shares, 0 to 1, of a copy of `num_blocks` to the host, and of one back, that decode steps hide.

    A copy runs beside as many steps of `batch` sequences of `context` tokens as take as long as it does
    alone, behind two others, as in an engine that runs ahead of the device; whatever all together take
    longer than the steps was not hidden. Medians.

    Raises:
        ConfigError: they do not fit the pool, or the engine has no host blocks.
    """
    executor = profiler.executor
    if num_blocks > profiler.config.num_gpu_blocks:
        raise ConfigError(f"{num_blocks} blocks are more than the pool's {profiler.config.num_gpu_blocks}")
    step = profiler.time_decode(batch, context)
    alone = [executor.time_swap(num_blocks) for _ in range(repetitions)]
    out_alone, in_alone = (statistics.median(times) for times in zip(*alone, strict=True))
    decode = profiler.schedule(Work(contexts=(context,) * batch))
    nobody = Request("", [0], _GREEDY, arrival_time=0.0, arrival_index=-1, max_total_tokens=2)
    host_blocks = tuple(host_blocks_of(-2, num_blocks))  # handle -1 is that of `time_swap`
    swap = Swap(nobody, -2, tuple(range(num_blocks)), host_blocks)
    dropped = tuple(dict.fromkeys(place.piece for place in host_blocks))

    def seconds(num_steps: int, first: SchedulerOutput, last: SchedulerOutput) -> float:
        started = time.perf_counter()
        steps = [executor.execute(one) for one in (decode, decode, first, *[decode] * (num_steps - 1), last)]
        for one in steps:
            one.fetch()
        while executor.copies().num_leaving:
            time.sleep(1e-5)
        return time.perf_counter() - started

    shares: tuple[list[float], list[float]] = ([], [])
    start_out = dataclasses.replace(decode, swap_out=(swap,))
    start_in = dataclasses.replace(decode, load=(swap,))
    end_in = dataclasses.replace(decode, joined=(swap,))
    drop = dataclasses.replace(decode, dropped=dropped)
    for _ in range(repetitions):
        num_steps = max(1, math.ceil(out_alone / step))
        without = seconds(num_steps, decode, decode)
        shares[0].append(1 - (seconds(num_steps, start_out, decode) - without) / out_alone)
        num_steps = max(1, math.ceil(in_alone / step))
        without = seconds(num_steps, decode, decode)
        shares[1].append(1 - (seconds(num_steps, start_in, end_in) - without) / in_alone)
        executor.execute(drop).fetch()
    out_share, in_share = (min(1.0, max(0.0, statistics.median(of))) for of in shares)
    return out_share, in_share
