"""How many of our functions one short request enters: what is to be read before anything is changed."""

import collections
import gc
import os
import pathlib
import sys
import threading

import jaxllm
from jaxllm import LLM, SamplingParams

ROOT = os.path.realpath(pathlib.Path(jaxllm.__file__).parent.parent) + os.sep
ROOMS = tuple(ROOT + room + os.sep for room in ("jaxllm", "pallas_kernels", "sched", "predictors"))
MOST_FUNCTIONS, MOST_FILES = 260, 47
"""Comprehensions are none; several decode steps in one program are four more. Fewer are better: lower these
when there are."""


def entered(call, until):
    """Our functions that a call enters, in all threads, with their files."""
    found, real = collections.Counter(), {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<"):
            path = real.setdefault(code.co_filename, os.path.realpath(code.co_filename))
            if path.startswith(ROOMS):
                found[path[len(ROOT) :], code.co_firstlineno, code.co_qualname] += 1

    gc.collect()
    gc.disable()  # what other tests left behind says goodbye in whichever call the collector runs
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
        until()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return found


def test_a_short_request_enters_few_functions():
    sizes = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 8,
        "num_scheduler_steps": 1,  # else it depends on how fast the machine happens to be
    }
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(warm_up="all", decode_buckets=[2], prefill_buckets=[32], **sizes) as llm:

        def run():
            llm.generate(["Hello there"], params, use_tqdm=False)

        def until_idle():
            while (thread := llm._thread._thread) is not None:
                thread.join(0.01)

        for _ in range(3):
            run()
            until_idle()
        found = entered(run, until_idle)
    files = {path for path, _, _ in found}
    assert 100 < len(found) <= MOST_FUNCTIONS, sorted(found)
    assert len(files) <= MOST_FILES, sorted(files)
