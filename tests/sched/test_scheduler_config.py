"""SchedulerConfig: its own limits, and those it sets to requests."""

import pytest
from scheduler_helpers import make_request, make_scheduler

from jaxllm.errors import ConfigError, RequestError, RequestTooLargeError
from jaxllm.sched.config import SchedulerConfig


@pytest.mark.parametrize(
    ("prompt", "new", "error", "message"),
    [
        (256, 1, RequestTooLargeError, r"256 prompt tokens; max_model_len=256 .* at most 255"),
        (250, 7, RequestTooLargeError, r"grow to 257 tokens, more than max_model_len=256"),
        (30, 12, RequestTooLargeError, r"grow to 42 tokens, which takes 11 blocks of 4 .* pool has 10"),
        (0, 4, RequestError, "prompt is empty"),
        (4, 0, RequestError, "nothing to generate"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt, new, error, message):
    scheduler = make_scheduler(num_gpu_blocks=10)
    with pytest.raises(error, match=message):
        scheduler.add(make_request(0, prompt, max_new_tokens=new))
    assert not scheduler.has_unfinished
    scheduler.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_gpu_blocks", 0),
        ("num_gpu_blocks", 2**31),
        ("block_size", 0),
        ("block_size", 1025),
        ("max_model_len", 1),
        ("max_model_len", 2**24 + 1),
        ("max_num_seqs", 0),
        ("max_num_seqs", 2**16 + 1),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 7),
        ("max_num_batched_tokens", 2**24 + 1),
        ("max_prefill_seqs", 0),
        ("max_prefill_seqs", 9),
        ("num_host_blocks", -1),
        ("num_host_blocks", 2**31),
        ("num_host_blocks", 1.0),
        ("block_size", 16.0),
        ("max_num_seqs", True),
        ("max_model_len", None),
    ],
)
def test_every_limit_is_checked(field, value):
    limits = {
        "num_gpu_blocks": 8,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    with pytest.raises(ConfigError, match=rf"{field}.* must"):
        SchedulerConfig(**(limits | {field: value}))
