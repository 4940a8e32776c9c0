"""Replays decisions recorded from vLLM's own schedulers through the presets that re-implement them.

Two formats: of vLLM 0.2.5 (`kinds`, one letter per iteration) for preset `vllm`, and of vLLM V1, 0.32
(`decode`, `prefill`, `free_blocks` per iteration) for preset `vllm_v1`, with and without prefix caching. In
both a token is known when its iteration ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import SchedulerPolicy, WatermarkAdmission
from jaxllm.sched.presets import make_preset
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import Request, SchedulerOutput

_PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 2**20


def first_difference(record: Mapping[str, Any]) -> str | None:
    """Where the preset first decides differently than the record says; None if nowhere.

    Raises:
        ConfigError: the record is of neither format.
    """
    if "kinds" in record:
        decided = _replay_vllm025(record)
    elif "free_blocks" in record and "arrival_iteration" in record:
        decided = _replay_v1(record)
    else:
        raise ConfigError("this is neither a record of vLLM 0.2.5 (kinds) nor of V1 (free_blocks)")
    for name, ours in decided.items():
        found = _difference(record[name], ours)
        if found is not None:
            return f"{name}{found}"
    return None


def _difference(theirs: Any, ours: Any) -> str | None:
    if isinstance(theirs, Mapping):
        for key in sorted({*theirs, *ours}, key=int):
            if theirs.get(key) != ours.get(key):
                return f" of iteration {key}: {theirs.get(key)} was recorded, {ours.get(key)} decided"
        return None
    if isinstance(theirs, Sequence):
        for place, (one, other) in enumerate(zip(theirs, ours, strict=False)):
            if one != other:
                return f"[{place}]: {one} was recorded, {other} decided"
        return None if len(theirs) == len(ours) else f": {len(theirs)} were recorded, {len(ours)} decided"
    return None if theirs == ours else f": {theirs} was recorded, {ours} decided"


def _requests(record: Mapping[str, Any], arrival_times: Sequence[float]) -> list[Request]:
    """In order of arrival; each is called by its place in the record."""
    places = sorted(range(len(arrival_times)), key=lambda place: (arrival_times[place], place))
    return [
        Request(
            str(place),
            _prompt(record, place),
            _PARAMS,
            arrival_time=arrival_times[place],
            arrival_index=index,
            max_total_tokens=record["input_lens"][place] + record["output_lens"][place],
        )
        for index, place in enumerate(places)
    ]


def _prompt(record: Mapping[str, Any], place: int) -> Sequence[int]:
    """Token ids, which only matter where blocks are shared."""
    if "prompt_segments" not in record:
        return range(record["input_lens"][place])
    segments = record["prompt_segments"][place]
    return [_token(segment, k) for segment, length in segments for k in range(length)]


def _token(segment: int, k: int) -> int:
    """A token of one of the stretches that prompts and outputs are put together from."""
    return (1009 * segment + 9176 * k + 13 * segment * k) % 32000


def _take(
    record: Mapping[str, Any],
    scheduler: Scheduler,
    output: SchedulerOutput,
    iteration: int,
    finished: list[int],
) -> None:
    segments = record.get("output_segment")
    for request in output.sampled:
        tokens = request.output_token_ids
        tokens.append(0 if segments is None else _token(segments[int(request.request_id)], len(tokens)))
    for request in output.ending:
        finished[int(request.request_id)] = iteration
        scheduler.finish(request, "length")


def _replay_vllm025(record: Mapping[str, Any]) -> dict[str, Any]:
    config = SchedulerConfig(
        num_gpu_blocks=record["args"]["blocks"],
        block_size=_BLOCK_SIZE,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
    )
    scheduler = Scheduler(config, make_preset("vllm"))
    for request in _requests(record, [index * 1e-6 for index in range(len(record["input_lens"]))]):
        scheduler.add(request)
    kinds, batches, num_preemptions, num_prompt_tokens = "", [], 0, 0
    finished = [-1] * len(record["input_lens"])
    while scheduler.has_unfinished:
        output = scheduler.schedule(float(len(kinds)))
        kinds += "P" if output.prefill else "D"
        num_preemptions += len(output.preempted)
        num_prompt_tokens += output.num_prefill_tokens
        if output.decode:
            batches.append(len(output.decode))
        _take(record, scheduler, output, len(kinds) - 1, finished)
    return {
        "kinds": kinds,
        "finish_iteration": finished,
        "iterations": len(kinds),
        "prompt_iterations": kinds.count("P"),
        "decode_iterations": kinds.count("D"),
        "preemptions": num_preemptions,
        "prefill_tokens": num_prompt_tokens,
        "mean_decode_batch": sum(batches) / len(batches),
    }


def _replay_v1(record: Mapping[str, Any]) -> dict[str, Any]:
    args = record["args"]
    config = SchedulerConfig(
        num_gpu_blocks=args["blocks"] - 1,  # vLLM never hands out block 0
        block_size=args["block_size"],
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=args["max_num_seqs"],
        max_num_batched_tokens=args["max_num_batched_tokens"],
        enable_prefix_caching=args["prefix_caching"],
    )
    policy = make_preset("vllm_v1")
    assert isinstance(policy, SchedulerPolicy)
    watermark = WatermarkAdmission(args["watermark"], num_reserved=1)
    scheduler = Scheduler(config, dataclasses.replace(policy, admission=watermark))
    arrivals = record["arrival_iteration"]
    coming = _requests(record, arrivals)
    decided: dict[str, Any] = {
        "decode": [],
        "prefill": [],
        "free_blocks": [],
        "preempted": {},
        "admitted": {},
    }
    finished = [-1] * len(arrivals)
    cached, resumed = [0] * len(arrivals), [0] * len(arrivals)
    started: set[int] = set()
    num_coming = len(coming)
    iteration = num_preemptions = 0
    while num_coming or scheduler.has_unfinished:
        while num_coming and coming[-num_coming].arrival_time <= iteration:
            scheduler.add(coming[-num_coming])
            num_coming -= 1
        output = scheduler.schedule(float(iteration))
        decided["decode"].append(len(output.decode))
        decided["prefill"].append(output.num_prefill_tokens)
        decided["free_blocks"].append(scheduler.num_free_blocks)
        preempted = [int(request.request_id) for request in output.preempted]
        admitted = []
        for chunk in output.prefill:
            if chunk.is_first:
                index = int(chunk.request.request_id)
                admitted.append(index)
                (resumed if index in started else cached)[index] += chunk.start
                started.add(index)
        for name, indices in (("preempted", preempted), ("admitted", admitted)):
            if indices:
                decided[name][str(iteration)] = indices
        num_preemptions += len(preempted)
        _take(record, scheduler, output, iteration, finished)
        iteration += 1
    totals = {"iterations": iteration, "preemptions": num_preemptions}
    decided |= {"finish_iteration": finished, **totals, "prefill_tokens": sum(decided["prefill"])}
    if args["prefix_caching"]:
        hits = {"cached_tokens": cached, "cached_tokens_resumed": resumed}
        decided |= {**hits, "hit_tokens": sum(cached) + sum(resumed)}
    return decided
