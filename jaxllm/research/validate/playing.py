"""Plays a record's load through the engine's scheduler, on the costs of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from jaxllm.predictors.silicon import HOST_SECONDS, LAYER_SECONDS, SYNC_SECONDS, SiliconCostModel
from jaxllm.predictors.silicon_kernels import Source
from jaxllm.research.simulator.gpu import WatchedCosts, pool_blocks
from jaxllm.research.simulator.run import simulate
from jaxllm.research.validate.records import BLOCK_SIZE, Load, Metric, Record, Server
from jaxllm.research.workloads import AllAtOnce, Trace
from jaxllm.research.workloads.result import RunResult
from jaxllm.research.workloads.seeding import random_token_ids
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset
from jaxllm.sched.scheduler import Scheduler

SETTLING_SECONDS = 60.0
"""Of an open loop: if the queue has not grown by then, it stays like that for the rest of it."""
_LATENCIES = 6  # that this time has to hold
_GROWTH = 1.05  # of latencies from the second third of that to the last
_ROUNDS = 8
"""Requests of each client where nobody says how many there were; in short loops `_LEAST_REQUESTS` at
least."""
_LEAST_REQUESTS = 24
_SPARE = 1.2
"""Requests of a closed loop that are there to send, of those that were completed in time."""
_PREFIXES = 2**33  # streams of token ids that are of no request

_Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What is assumed beside measured kernels, in seconds.

    Args:
        host_seconds, layer_seconds, sync_seconds: of `SiliconCostModel`.
        ingress_seconds, client_seconds: of `simulate`.
        token_seconds: more ingress for each token of a prompt.
    """

    host_seconds: float = HOST_SECONDS
    layer_seconds: float = LAYER_SECONDS
    sync_seconds: float = SYNC_SECONDS
    ingress_seconds: float = 0.0
    token_seconds: float = 0.0
    client_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a record would have measured.

    Args:
        means, medians: over the requests, by metric.
        sources: shares of the time of steps, by where these are from.
        num_requests: that were simulated and counted.
        has_settled: whether a part stands for the whole of an open loop.
    """

    means: Mapping[Metric, float]
    medians: Mapping[Metric, float]
    sources: Mapping[Source, float]
    num_requests: int
    has_settled: bool = False


def costs_of(server: Server, world: World) -> SiliconCostModel:
    """The costs of a server.

    Raises:
        ConfigError: its kernels were not measured.
    """
    return SiliconCostModel(
        server.shape,
        server.device,
        block_size=BLOCK_SIZE,
        weights=server.weights,
        kv=server.kv,
        tensor_parallel=server.tensor_parallel,
        pipeline_parallel=server.pipeline_parallel,
        host_seconds=world.host_seconds,
        layer_seconds=world.layer_seconds,
        sync_seconds=world.sync_seconds,
    )


def play(record: Record, world: World, *, seed: int = 0) -> Prediction:
    """Simulate what a record measured.

    An open loop is simulated for `SETTLING_SECONDS`, and as a whole only if its queue grows.

    Raises:
        ConfigError: the server's kernels were not measured.
        CapacityError: its weights do not fit.
        RequestTooLargeError: a request does not fit the pool.
    """
    server, load = record.server, record.load
    assert server is not None  # else it is left out
    assert load is not None
    costs = WatchedCosts(costs_of(server, world))
    config = _config(server, load, pool_blocks(costs.model, server.gpu_memory_utilization))

    def run(trace: Trace, scheduler: Scheduler | None = None) -> RunResult:
        return simulate(
            trace,
            config,
            make_preset("vllm_v1"),
            costs,
            overlap_swaps=True,
            scheduler=scheduler,
            ingress_seconds=world.ingress_seconds + world.token_seconds * load.prompt_len,
            client_seconds=world.client_seconds,
            async_scheduling=server.async_scheduling,
        )

    if load.rate is None:
        return _play_closed(load, config, run, costs, seed)
    return _play_open(load, load.rate, run, costs, seed)


def _config(server: Server, load: Load, num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_gpu_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max(server.max_model_len, load.prompt_len + load.output_len),
        max_num_seqs=server.max_num_seqs,
        max_num_batched_tokens=max(server.max_num_batched_tokens, server.max_num_seqs),
        enable_prefix_caching=server.prefix_caching,
    )


_Run = Callable[..., RunResult]


def _play_open(load: Load, rate: float, run: _Run, costs: WatchedCosts, seed: int) -> Prediction:
    duration = load.seconds or SETTLING_SECONDS
    num_requests = max(1, round(rate * duration))
    num_first = round(rate * SETTLING_SECONDS)
    if num_first < num_requests:
        result = run(_open_trace(load, rate, num_first, seed))
        latencies = np.array_split(result.finish_times - result.arrival_times, 3)
        is_long = latencies[2].mean() * _LATENCIES < SETTLING_SECONDS
        if is_long and latencies[2].mean() < _GROWTH * latencies[1].mean():
            # The tail, in which the last requests end, is as long in a part as in the whole.
            tail = result.finish_times.max() - result.arrival_times[-1]
            throughput = num_requests / (duration + tail)
            return _summary(load, result, slice(len(latencies[0]), None), throughput, costs, True)
    result = run(_open_trace(load, rate, num_requests, seed))
    return _summary(load, result, slice(None), num_requests / result.seconds, costs)


def _play_closed(
    load: Load, config: SchedulerConfig, run: _Run, costs: WatchedCosts, seed: int
) -> Prediction:
    rounds = load.concurrency * _ROUNDS
    num_requests = max(rounds, _LEAST_REQUESTS)
    if load.num_requests is not None:
        num_requests = load.concurrency + math.ceil(_SPARE * load.num_requests)
    trace = dataclasses.replace(_distinct(load, num_requests, seed), num_clients=load.concurrency)
    scheduler = None
    if load.known_share:
        scheduler = Scheduler(config, make_preset("vllm_v1"))
        run(_known(trace, load.known_share), scheduler)
        costs.forget()
    result = run(trace, scheduler)
    began, ends = result.arrival_times[0], result.finish_times
    # Clients stop when time is up; when the last request has been sent there is one client less.
    until = min(began + (load.seconds or math.inf), result.arrival_times[-1])
    chosen = ends <= until
    if not chosen.any():
        chosen, until = ends <= math.inf, ends.max()
    throughput = chosen.sum() / (until - began)
    return _summary(load, result, chosen, float(throughput), costs)


def _summary(
    load: Load,
    result: RunResult,
    chosen: slice | npt.NDArray[np.bool_],
    throughput: float,
    costs: WatchedCosts,
    has_settled: bool = False,
) -> Prediction:
    sent, first, ends = (
        times[chosen] for times in (result.arrival_times, result.first_token_times, result.finish_times)
    )
    values: dict[Metric, _Floats] = {"latency": ends - sent, "ttft": first - sent}
    if load.output_len > 1:
        values["tpot"] = (ends - first) / (load.output_len - 1)
    return Prediction(
        means={metric: float(array.mean()) for metric, array in values.items()} | {"throughput": throughput},
        medians={metric: float(np.median(array)) for metric, array in values.items()},
        sources=costs.shares(),
        num_requests=len(sent),
        has_settled=has_settled,
    )


def _open_trace(load: Load, rate: float, num_requests: int, seed: int) -> Trace:
    """Requests at a constant pace, of users who ask in turn."""
    trace = dataclasses.replace(
        _distinct(load, num_requests, seed), arrival_times=np.arange(num_requests) / rate
    )
    if not load.num_users:
        return trace
    prompts = []
    prefix_len = min(load.prefix_len, load.prompt_len - 1)
    for user in range(min(load.num_users, num_requests)):
        common = random_token_ids(seed, _PREFIXES + user // load.users_per_prefix, prefix_len, 2**31 - 1)
        own = random_token_ids(seed, user, load.prompt_len - prefix_len, 2**31 - 1)
        prompts.append((*common, *own))
    asked = tuple(prompts[number % len(prompts)] for number in range(num_requests))
    return dataclasses.replace(trace, prompt_token_ids=asked)


def _known(trace: Trace, share: float) -> Trace:
    """So many of the prompts of a trace, one here and one there, each with an answer of one token."""
    chosen = [number for number in range(len(trace)) if int((number + 1) * share) > int(number * share)]
    prompts = tuple(tuple(trace.token_ids(number, 2**31 - 1)) for number in chosen)
    return Trace(
        name="an earlier load",
        seed=trace.seed,
        arrival_times=np.zeros(len(chosen)),
        prompt_lens=trace.prompt_lens[chosen],
        output_lens=np.ones(len(chosen), np.int64),
        prompt_token_ids=prompts,
    )


def _distinct(load: Load, num_requests: int, seed: int) -> Trace:
    """Requests of equal lengths, all there at once, whose prompts differ."""
    return Trace(
        name="measured load",
        seed=seed,
        arrival_times=AllAtOnce().times(num_requests, np.random.default_rng(seed)),
        prompt_lens=np.full(num_requests, load.prompt_len),
        output_lens=np.full(num_requests, load.output_len),
    )
