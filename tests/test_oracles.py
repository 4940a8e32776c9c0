"""The preset `vllm` against decisions recorded from vLLM 0.2.5's own scheduler.

All requests are there at the start; a token is known when its iteration ends. `kinds` has one letter per
iteration: P prefill, D decode.
"""

import json
import pathlib

import pytest
from scheduler_helpers import make_request, sampled_requests

from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.presets import make_preset
from jaxllm.sched.scheduler import Scheduler

RECORDS = sorted((pathlib.Path(__file__).parent / "data" / "oracles").glob("vllm025-*.json"))


def replay(record):
    """The fields of `record` that are decisions, made by the preset."""
    config = SchedulerConfig(
        num_gpu_blocks=record["args"]["blocks"],
        block_size=16,
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
    )
    scheduler = Scheduler(config, make_preset("vllm"))
    for index, (prompt, new) in enumerate(zip(record["input_lens"], record["output_lens"], strict=True)):
        scheduler.add(make_request(index, prompt, new, arrival_time=index * 1e-6))
    kinds, batches, preemptions, prefill_tokens = "", [], 0, 0
    finished = [None] * len(record["input_lens"])
    while scheduler.has_unfinished:
        output = scheduler.schedule(float(len(kinds)))
        assert not output.is_empty
        kinds += "P" if output.prefill else "D"
        preemptions += len(output.preempted)
        prefill_tokens += output.num_prefill_tokens
        if output.decode:
            batches.append(len(output.decode))
        for request in sampled_requests(output):
            request.output_token_ids.append(0)
        for request in output.ending:
            finished[request.arrival_index] = len(kinds) - 1
            scheduler.finish(request, "length")
    return {
        "iterations": len(kinds),
        "kinds": kinds,
        "prompt_iterations": kinds.count("P"),
        "decode_iterations": kinds.count("D"),
        "preemptions": preemptions,
        "prefill_tokens": prefill_tokens,
        "mean_decode_batch": pytest.approx(sum(batches) / len(batches), abs=0.01),
        "finish_iteration": finished,
    }


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_preset_decides_as_vllm_did(path):
    record = json.loads(path.read_text())
    decided = replay(record)
    assert {name: record[name] for name in decided} == decided


def test_the_records_are_there():
    assert len(RECORDS) == 3
