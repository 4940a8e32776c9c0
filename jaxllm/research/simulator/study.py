"""`simulate`: policies on a model, a device and a load that are named as commands name them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, get_args

import numpy as np

from jaxllm.errors import ConfigError, did_you_mean, is_outside, shown
from jaxllm.predictors.base import CostModel, ModelShape, check_integer
from jaxllm.predictors.devices import DeviceSpec
from jaxllm.predictors.own import checked
from jaxllm.research.shapes import Model
from jaxllm.research.simulator.drafting import SimulatedDrafts
from jaxllm.research.simulator.load import Lengths, Load
from jaxllm.research.simulator.outcome import Run, Simulation, figures_of
from jaxllm.research.simulator.run import simulate as play
from jaxllm.research.simulator.system import System, make_system
from jaxllm.research.workloads import (
    ArrivalProcess,
    PromptDataset,
    Trace,
    load_trace,
)
from jaxllm.research.workloads.checks import MAX_SEED, check_choice
from jaxllm.research.workloads.checks import check_integer as check_seed
from jaxllm.research.workloads.fitting import TooLong, fit_trace
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulingPolicy, is_policy
from jaxllm.sched.presets import as_policy

POLICIES = ("adaptive", "vllm_v1")
_MAX_SEEDS = 1000
_OF_LOAD = ("path", "limit", "seed", "name", "max_len")  # of `load_trace`, and have other words here
_RENAMED = {"num_gpu_blocks": "gpu_blocks", "num_host_blocks": "host_blocks", "policies": "policy"}
_RENAMED |= {"scheduler_policy": "policy", "enable_prefix_caching": "prefix_caching", "seed": "seeds"}
_RENAMED |= {"clip": "too_long", "skip": "too_long"}
"""What `LLM` calls them, or this did once."""
Policy = str | SchedulingPolicy | Callable[[CostModel], SchedulingPolicy]
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _plain(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose arguments may be numbers of NumPy, as those of sweeps are."""

    @functools.wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _R:
        plain: Any = {
            name: value.item() if isinstance(value, np.generic) else value for name, value in named.items()
        }
        return function(*args, **plain)

    return call


@_plain
def simulate(
    trace: Trace | str | os.PathLike[str] | None = None,
    *,
    model: Model | ModelShape | None = None,
    device: str | DeviceSpec | None = None,
    costs: str | os.PathLike[str] | CostModel = "silicon",
    policy: Policy | Sequence[Policy] | Mapping[str, Policy] = POLICIES,
    dataset: str | PromptDataset | None = None,
    num_prompts: int | None = None,
    input_len: Lengths | None = None,
    output_len: Lengths | None = None,
    arrivals: ArrivalProcess | str | None = None,
    rate: float | None = None,
    closed: int | None = None,
    seeds: int | Sequence[int] = 1,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    quantize_lm_head: bool = True,
    kv_cache_dtype: str = "auto",
    block_size: int = 16,
    gpu_blocks: int | None = None,
    memory_utilization: float | None = None,
    host_blocks: int | None = None,
    host_memory: float | str | None = None,
    link: float | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    prefix_caching: bool | None = None,
    overlap_swaps: bool = True,
    too_long: TooLong = "raise",
    speculative_config: SimulatedDrafts | Mapping[str, Any] | None = None,
    **reading: Any,
) -> Simulation:
    """Simulate scheduling policies: the engine's scheduler with a virtual clock.

    Policies know what steps and copies cost, as well as the simulated device does.

    Args:
        trace: requests, or the file of them (`jaxllm.research.workloads.load_trace`); None draws them.
        model, device, costs, dtype, quantization, quantize_lm_head, kv_cache_dtype, block_size, gpu_blocks,
            memory_utilization, host_blocks, host_memory, link, tensor_parallel, pipeline_parallel: what they
            run on, see `jaxllm.research.simulator.system.make_system`.
        policy: one or several: names as `LLM(scheduler_policy=...)` takes them ("adaptive",
            "module:attribute"), with commas or as a sequence; policies, of which each run gets a copy;
            functions of the costs that make one; or these by names of one's own.
        dataset: without a trace, what prompts are drawn from: as `make_trace` takes it; None is "chatbot".
        num_prompts: how many requests; None is 1,000, or all of a trace.
        input_len: in place of a dataset, tokens of prompts: a number; a range, "64:512" or (64, 512); or
            lengths to draw from.
        output_len: without a trace, tokens of outputs, likewise; None is 128.
        arrivals: when requests come: a process, or what `parse_arrivals` reads; None is all at once, or as
            the trace says. In place of it:
        rate: requests a second: a recorded trace is stretched in time, and what has no times, or is drawn,
            comes in a Poisson process.
        closed: clients who each send their next request when they have an answer.
        seeds: how many draws of the load, or their seeds. Of a trace in which nothing else is drawn each draw
            takes requests with replacement, at the trace's times.
        max_model_len: tokens of a request, prompt and output together; None takes the model's, and at most
            what the pool holds.
        max_num_seqs, max_num_batched_tokens: of a step.
        prefix_caching: None caches where prompts of the trace may begin alike, and the policy plans
            with a cache.
        overlap_swaps: whether copies run beside computation, or stop it.
        too_long: what becomes of requests that do not fit: see `fit_trace`.
        speculative_config: how requests draft: `SimulatedDrafts`, or a dictionary of its arguments. A draft
            model has the device, costs, dtype and block size of the model; its weights and KV take no room.
        reading: further arguments of `load_trace`, such as `tokenizer`.

    Raises:
        ConfigError: a name is unknown, a value is out of range, or two of them are at odds.
        RequestError: the trace has a bad request.
        CapacityError: the weights leave no room for KV.
    """
    known = {**inspect.signature(simulate).parameters, **inspect.signature(load_trace).parameters}
    for name in reading:
        if name not in known or name in _OF_LOAD:
            way_out = did_you_mean(_RENAMED.get(name, name), known)
            raise ConfigError(f"simulate has no argument {name!r}; {way_out}".rstrip("; "))
    system = make_system(
        model,
        device=device,
        costs=costs,
        dtype=dtype,
        quantization=quantization,
        quantize_lm_head=quantize_lm_head,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        gpu_blocks=gpu_blocks,
        memory_utilization=memory_utilization,
        host_blocks=host_blocks,
        host_memory=host_memory,
        link=link,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )
    if not isinstance(prefix_caching, bool | None):
        raise ConfigError(f"prefix_caching={shown(prefix_caching)} must be True, False or None")
    if not isinstance(overlap_swaps, bool):
        raise ConfigError(f"overlap_swaps={shown(overlap_swaps)} must be True or False")
    drafts, draft_costs = SimulatedDrafts.of(speculative_config), None
    if drafts is not None and drafts.model is not None:
        draft_costs = make_system(
            drafts.model,
            device=device,
            costs=costs,
            dtype=dtype,
            block_size=block_size,
            gpu_blocks=1,
            tensor_parallel=tensor_parallel,
        ).costs
    asked = checked(system.costs) if is_outside(system.costs) else system.costs
    chosen = policies_of(policy)
    for make in chosen.values():
        make(asked)  # what is no policy is refused before anything is read
    load = Load(
        trace,
        dataset=dataset,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        arrivals=arrivals,
        rate=rate,
        closed=closed,
        reading=reading,
    )
    numbers = _seeds(seeds)
    limit, limit_name = _limit(system, max_model_len)
    _check_too_long(too_long, load.longest, limit, limit_name)
    traces = [fit_trace(drawn, limit, too_long, limit_name=limit_name) for drawn in load.draws(numbers)]
    caches = traces[0].shares_prefixes if prefix_caching is None else prefix_caching
    config = SchedulerConfig(
        num_gpu_blocks=system.num_gpu_blocks,
        block_size=system.block_size,
        max_model_len=max(2, *(int((one.prompt_lens + one.output_lens).max()) for one in traces)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_host_blocks=system.num_host_blocks,
        enable_prefix_caching=caches,
    )
    runs = []
    for name, make in chosen.items():
        for seed, drawn in zip(numbers, traces, strict=True):
            planner = make(asked)
            if prefix_caching is True and not planner.shares_prefixes:
                raise ConfigError(
                    f"prefix_caching=True: policy {name!r} plans without a prefix cache; leave it "
                    "out, or take vllm_v1, adaptive or another preset"
                )
            own = dataclasses.replace(
                config,
                num_host_blocks=config.num_host_blocks if planner.may_swap else 0,
                enable_prefix_caching=caches and planner.shares_prefixes,
            )
            result = play(
                drawn,
                own,
                planner,
                asked,
                overlap_swaps=overlap_swaps,
                drafts=drafts,
                draft_costs=draft_costs,
            )
            runs.append(Run(name, seed, result, figures_of(result, drawn)))
    return Simulation(system, config, load.described(traces[0]), traces[0].notes, tuple(runs))


def policies_of(
    given: Policy | Sequence[Policy] | Mapping[str, Policy],
) -> dict[str, Callable[[CostModel], SchedulingPolicy]]:
    """What makes each policy anew, by name.

    Raises:
        ConfigError: there is none, one is of the wrong kind, or two have one name.
    """
    named: list[tuple[str, Policy]]
    if isinstance(given, Mapping):
        named = [(str(name), policy) for name, policy in given.items()]
    else:
        if not isinstance(given, str | Sequence):
            given = [given]
        parts = given.split(",") if isinstance(given, str) else given
        named = [(one if isinstance(one, str) else _name_of(one), one) for one in parts]
    found: dict[str, Callable[[CostModel], SchedulingPolicy]] = {}
    for name, policy in named:
        if name in found:
            raise ConfigError(
                f"two policies are called {name!r}: leave one out, or name them with a dictionary"
            )
        found[name] = _maker(policy)
    if not found:
        raise ConfigError("policy must name at least one, such as 'adaptive'")
    return found


def _name_of(policy: Any) -> str:
    return str(getattr(policy, "__name__", type(policy).__name__))


def _maker(policy: Policy) -> Callable[[CostModel], SchedulingPolicy]:
    is_made = is_policy(policy) or not (callable(policy) or isinstance(policy, str))
    return lambda costs: as_policy(copy.deepcopy(policy) if is_made else policy, costs)  # some learn


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, Sequence | np.ndarray) and not isinstance(seeds, str):
        found = tuple(check_seed("seed", one, 0, MAX_SEED) for one in seeds)
        if not found or len(set(found)) < len(found):
            raise ConfigError(f"seeds={seeds!r} must be different ones, at least one")
        return found
    check_integer("seeds", seeds, 1, _MAX_SEEDS)
    assert isinstance(seeds, int)
    return tuple(range(seeds))


def _check_too_long(too_long: str, longest: int | None, limit: int, limit_name: str) -> None:
    """Refuse to clip or skip of what is drawn, and cannot be too long.

    Raises:
        ConfigError: likewise.
    """
    check_choice("too_long", too_long, get_args(TooLong))
    if too_long != "raise" and longest is not None and longest <= limit:
        raise ConfigError(
            f"too_long='{too_long}' (--{too_long}) does nothing: what is drawn has at most {longest} tokens, "
            f"prompt and output together, and {limit_name} is {limit}; leave it out, or name a trace"
        )


def _limit(system: System, asked: int | None) -> tuple[int, str]:
    """Tokens that a request may have, and what says so."""
    if asked is not None:
        check_integer("max_model_len", asked, 2, 2**24)
        if system.max_model_len is not None and asked > system.max_model_len:
            raise ConfigError(
                f"max_model_len={asked} exceeds the {system.max_model_len} positions of {system.model.name}"
            )
    pool = system.num_gpu_blocks * system.block_size
    model = min(one for one in (asked, system.max_model_len, 2**24) if one is not None)
    return (pool, "gpu_blocks x block_size") if pool < model else (model, "max_model_len")
