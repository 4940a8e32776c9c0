"""Several engines in one process, behind a router: answers, caches, pools and faults are those of one."""

import contextlib
import functools
import threading
import time

import pytest
from engine_helpers import make_llm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_helpers import serving
from test_forced_preemption import assert_same
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, EngineError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research.bench.throughput import Workload, measure_throughput
from jaxllm.sched.presets import vllm_v1

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SIZES = {
    "data_parallel_size": 2,
    "num_gpu_blocks_override": 28,
    "num_host_blocks": 16,
    "enable_prefix_caching": True,
    "warm_up": "background",
}


@pytest.fixture(scope="module", params=[1, 2])
def llm(request):
    with make_llm(
        demo_model_path(), tensor_parallel_size=request.param, skip_tokenizer_init=False, **SIZES
    ) as made:
        yield made


@pytest.fixture
def sampled(llm):
    """How many tokens each replica has sampled since the test began."""
    counts = [0] * len(llm.replicas)

    def count(place):
        def add(num_tokens):
            counts[place] += num_tokens

        return add

    for place, one in enumerate(llm.replicas):
        one.engine.on_tokens = count(place)
    return counts


def assert_idle(llm):
    """Nothing is held; the engines' threads may still be on their way there."""
    until = time.monotonic() + 300
    while any(one.engine.has_unfinished_requests for one in llm.replicas) and time.monotonic() < until:
        time.sleep(0.01)
    for one in llm.replicas:
        scheduler = one.engine.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_swapped == 0
        assert scheduler.num_free_blocks == scheduler.config.num_gpu_blocks
        scheduler.check()
    with llm._thread.idle():
        assert all(llm._thread._router._loads.load(name) == 0 for name in llm._thread._router.replicas)


def test_every_kind_of_request_is_answered_as_by_one(llm, asked, on_one, sampled):
    for output, expected in zip(llm.generate(*asked, use_tqdm=False), on_one, strict=True):
        assert_same(output, expected)
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
    assert min(sampled) > 20
    devices = [one.executor._placement.devices for one in llm.replicas]
    assert len({device for several in devices for device in several}) == 2 * len(devices[0])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_calls_in_any_order_are_answered_and_leave_nothing(llm, asked, on_one, data):
    places = data.draw(st.lists(st.integers(0, len(on_one) - 1), min_size=1, max_size=12))
    prompts, params = ([several[place] for place in places] for several in asked)
    if data.draw(st.booleans()):
        stream = llm.stream(prompts, params)
        for _ in range(data.draw(st.integers(0, 3))):
            next(stream, None)
        stream.close()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for place, output in zip(places, outputs, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in on_one[place].outputs]
    assert_idle(llm)


def test_what_is_cached_is_found_where_it_is(llm, sampled):
    llm.reset_prefix_cache()
    prompts = [[10 * place + 3] * 40 for place in range(1, 7)]
    answers = llm.generate(prompts[:1], SHORT, use_tqdm=False)
    assert answers[0].num_cached_tokens == 0
    for prompt in (prompts[0], [*prompts[0], 5, 6], [*prompts[0][:32], 7]):
        (output,) = llm.generate([prompt], SHORT, use_tqdm=False)
        assert output.num_cached_tokens >= 32
    assert sorted(sampled)[0] == 0
    llm.generate([{"prompt_token_ids": one, "cache_salt": "s"} for one in prompts], SHORT, use_tqdm=False)
    assert min(sampled) > 0


def test_each_replica_preempts_for_itself(llm):
    prompts = [[9 + place] * 20 for place in range(6)]
    outputs = llm.generate(prompts, LONG, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    alone = [llm.generate([prompt], LONG, use_tqdm=False)[0] for prompt in prompts]
    assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    assert_idle(llm)


def test_weights_and_pools_of_all_come_and_go_together(llm, asked, on_one):
    with contextlib.closing(llm.stream([[5] * 9], LONG)) as stream:
        next(stream)
        for change in (llm.sleep, llm.wake_up):
            with pytest.raises(EngineError, match="1 requests are under way"):
                change()
    assert not llm.is_sleeping
    llm.sleep(level=2)
    assert not any(one.executor.has_pool or one.executor.has_weights for one in llm.replicas)
    with pytest.raises(EngineError, match="sleeps"):
        llm.generate([[5, 6]], SHORT, use_tqdm=False)
    llm.wake_up()
    prompts, params = ([several[0]] * 4 for several in asked)
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert_same(output, on_one[0])


def test_rows_as_they_are_needed_keep_all_of_them_busy(llm, sampled):
    outputs = list(llm.generate_iter([[3 + place] * 12 for place in range(20)], SHORT))
    assert [output.request_id for output in outputs] == [str(place) for place in range(20)]
    assert min(sampled) > 0


def test_who_names_no_seed_gets_what_one_engine_gives():
    random = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    answers = []
    for count in (1, 2):
        with make_llm(
            golden_checkpoint("llama_gqa"),
            tensor_parallel_size=1,
            data_parallel_size=count,
            warm_up="background",
        ) as llm:
            outputs = llm.generate([[5 + place] * 9 for place in range(8)], random, use_tqdm=False)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


def test_if_one_fails_the_requests_of_others_end_as_they_would():
    has_failed = threading.Event()

    def breaking(execute):
        def call(scheduled):
            if any(chunk.request.num_prompt_tokens == 40 for chunk in scheduled.prefill):
                has_failed.set()
                raise RuntimeError("a fault")
            assert has_failed.wait(60)
            return execute(scheduled)

        return call

    with make_llm(golden_checkpoint("llama_gqa"), **SIZES) as llm:
        expected = llm.generate([[5] * 9], LONG, use_tqdm=False)[0].token_ids
        for one in llm.replicas:
            one.executor.execute = breaking(one.executor.execute)
        streams = [llm.stream([[5] * 9], LONG), llm.stream([[7] * 40], LONG)]
        with pytest.raises(EngineError, match="RuntimeError: a fault"):
            list(streams[1])
        assert list(streams[0])[-1].token_ids == expected
        with pytest.raises(EngineError, match="RuntimeError: a fault"):
            llm.generate([[5] * 9], SHORT, use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data_parallel_size": 3},
            "data_parallel_size=3 times tensor_parallel_size=2 is more than",
        ),
        ({"data_parallel_size": 0}, "must be an integer from 1"),
        ({"ledger": "decisions.jsonl"}, "is of one engine's decisions, and data_parallel_size=2"),
        ({"scheduler_policy": vllm_v1()}, "would be asked by 2 engines at once"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(golden_checkpoint("llama_gqa"), **{"data_parallel_size": 2, **changes})


def test_the_benchmark_runs_all_of_them(llm, sampled):
    workload = Workload(num_prompts=6, input_len=(8, 20), output_len=(4, 8), seed=0)
    result = measure_throughput(llm, workload, repetitions=1, warm_up_repetitions=0)
    assert min(sampled) > 0
    assert sum(sampled) == result["workload"]["num_output_tokens"]
    assert result["engine"]["data_parallel_size"] == 2
    assert result["engine_overhead"] is None


def test_a_server_sums_up_what_they_do():
    engine = {"tensor_parallel_size": 1, "data_parallel_size": 2, "num_gpu_blocks_override": 64}
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with serving(engine) as running:
        counts = [[] for _ in running.service.replicas]
        for one, found in zip(running.service.replicas, counts, strict=True):
            scheduler = one.engine.scheduler
            scheduler.add = functools.partial(_noting, scheduler.add, found)
        prompts = [[place + 2] * 20 for place in range(8)]
        status, _, answer = running.post("/v1/completions", {"prompt": prompts, **body})
        assert (status, len(answer["choices"])) == (200, 8)
        alone = [running.post("/v1/completions", {"prompt": one, **body})[2] for one in prompts]
        assert [one["choices"][0]["text"] for one in alone] == [one["text"] for one in answer["choices"]]
        assert min(map(len, counts)) > 0
        assert sum(map(len, counts)) == 16
        shown = running.request("GET", "/live")[2]
        assert shown["totals"]["output_tokens"] == 16 * 8
        assert shown["pool"]["device"]["total"] == shown["limits"]["num_gpu_blocks"] == 2 * 64
        metrics = running.request("GET", "/metrics")[2].decode()
        assert f'generation_tokens_total{{model_name="{shown["model"]}"}} 128.0' in metrics
        running.service.replicas[1].engine.close()
        assert running.request("GET", "/health")[0] == 503


def _noting(add, found, request):
    found.append(request)
    add(request)
