"""Several decode iterations in one device program: the same tokens, and decisions when they are due."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, make_llm, run
from scheduler_helpers import make_request, make_scheduler
from variants import golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.engine.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.executor.decode_steps import run_decode_steps
from jaxllm.executor.programs import ProgramKey
from jaxllm.executor.slot_params import Sampling, SlotParams
from jaxllm.executor.step import DeviceState, run_step
from jaxllm.executor.step_rows import DecodeInputs, PrefillInputs
from jaxllm.sched.policies import SchedulerPolicy, SwapIfItFits
from jaxllm.sched.presets import make_preset
from jaxllm.sched.scheduler import Scheduler

NAME = "llama_gqa"


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint(NAME), num_scheduler_steps=8, block_size=8, num_host_blocks=12)


@pytest.fixture(scope="module")
def prompts():
    return golden_data(NAME)["prompts"]


def mixed_params():
    greedy = golden_data(NAME)["greedy"]
    return [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[greedy[1][30]], ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=9, seed=5, max_tokens=10, frequency_penalty=0.4),
        SamplingParams(temperature=0, max_tokens=14, min_tokens=12, stop_token_ids=[greedy[3][2]]),
    ]


class Recording(Scheduler):
    """Keeps what the engine allowed and what was scheduled."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.allowed, self.scheduled = [], []

    def schedule(self, now, copies, max_decode_steps):
        output = super().schedule(now, copies, max_decode_steps)
        self.allowed.append(max_decode_steps)
        self.scheduled.append(output)
        return output


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_same_tokens_in_fewer_programs(llm, prompts, async_scheduling):
    outputs, decodes = [], []
    for num_steps in (1, 8):
        engine = make_engine(
            llm,
            scheduler_class=Recording,
            async_scheduling=async_scheduling,
            num_scheduler_steps=num_steps,
        )
        outputs.append(run(engine, prompts, mixed_params()))
        decodes.append([one.num_decode_steps for one in engine.scheduler.scheduled if one.decode])
    single, several = outputs
    assert [o.token_ids for o in several] == [o.token_ids for o in single]
    assert [o.outputs[0].finish_reason for o in several] == [o.outputs[0].finish_reason for o in single]
    assert [o.outputs[0].stop_reason for o in several] == [o.outputs[0].stop_reason for o in single]
    for one, other in zip(single[0].outputs[0].logprobs, several[0].outputs[0].logprobs, strict=True):
        assert one.keys() == other.keys()
        for token_id, scored in one.items():
            assert scored.logprob == pytest.approx(other[token_id].logprob, abs=1e-5)
            assert scored.rank == other[token_id].rank
    assert set(decodes[0]) == {1}
    assert max(decodes[1]) == 8  # when those who are sampled apart have ended
    assert len(decodes[1]) < len(decodes[0])


def test_who_is_sampled_apart_takes_one_iteration_at_a_time(llm, prompts):
    engine = make_engine(llm, scheduler_class=Recording, num_scheduler_steps=8)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    run(engine, prompts, [params, dataclasses.replace(params, logprobs=1), params, params])
    assert {one.num_decode_steps for one in engine.scheduler.scheduled if one.decode} == {1}


def test_who_only_filters_goes_on_for_several_iterations_once_there_is_a_program(llm, prompts):
    filtered = SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=80, ignore_eos=True)
    others = [dataclasses.replace(filtered, top_p=1.0, top_k=7), dataclasses.replace(filtered, temperature=0)]
    params = [filtered, *others, dataclasses.replace(filtered, top_p=1.0)]

    def all_of(params):
        engine = make_engine(llm, scheduler_class=Recording, num_scheduler_steps=8)
        outputs = run(engine, prompts, params)
        decodes = [one.num_decode_steps for one in engine.scheduler.scheduled if one.decode]
        return [output.token_ids for output in outputs], decodes

    apart, ones = all_of(params)
    assert set(ones) == {1}
    llm.executor._programs.wait()
    assert ProgramKey(4, 0, 8, Sampling.RANDOM | Sampling.FILTERED) in llm.executor.programs
    together, several = all_of(params)
    assert together == apart
    assert max(several) == 8
    scored, ones = all_of([dataclasses.replace(filtered, logprobs=1), *params[1:]])
    assert scored == apart
    assert set(ones) == {1}


def test_preempted_requests_get_the_same_tokens(llm, prompts):
    params = SamplingParams(temperature=1.1, seed=3, max_tokens=40, ignore_eos=True)
    calm = run(make_engine(llm), prompts, params)
    policy = SchedulerPolicy(action=SwapIfItFits())
    engine = make_engine(
        llm,
        num_gpu_blocks=20,
        num_host_blocks=12,
        policy=policy,
        scheduler_class=Recording,
        num_scheduler_steps=8,
    )
    tight = run(engine, prompts, params)
    assert [o.token_ids for o in tight] == [o.token_ids for o in calm]
    assert sum(o.metrics.num_preemptions for o in tight) > 0
    assert max(one.num_decode_steps for one in engine.scheduler.scheduled) > 1


def test_streams_advance_by_whole_programs(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    counts = [len(output.token_ids) for output in llm.stream([prompts[1]], params)]
    assert counts == [1, 9, 17, 20]


@pytest.mark.parametrize(("tick", "allowed"), [(0.001, 8), (0.0125, 4), (0.2, 1)])
def test_as_many_steps_as_50_ms_hold(llm, prompts, tick, allowed):
    now = 0.0

    def clock():
        nonlocal now
        now += tick / 4  # it is read about four times a step
        return now

    engine = make_engine(llm, scheduler_class=Recording, async_scheduling=False, num_scheduler_steps=None)
    engine.loop._clock = clock
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    engine.add_request("0", prompts[1][:4], params)
    engine.step()
    while engine.has_unfinished_requests:
        engine.step()
        # The clock counts a program as one tick however many iterations it has.
        engine.loop._decode_seconds = max(engine.loop._decode_seconds, tick)
    assert engine.scheduler.allowed[0] == 1
    assert engine.scheduler.allowed[-2] == allowed


def test_what_few_steps_take_is_believed(llm, prompts):
    """The first as much as any: nothing is known before."""
    engine = make_engine(llm, scheduler_class=Recording, async_scheduling=False, num_scheduler_steps=None)
    engine.loop._clock = itertools.count(0.0, 0.0005).__next__
    engine.add_request("0", prompts[1][:4], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    assert engine.scheduler.allowed[:4] == [1, 1, 8, 8]


def test_a_clock_that_stands_still_stops_nobody(llm, prompts):
    engine = make_engine(llm, async_scheduling=False, num_scheduler_steps=None)
    engine.loop._clock = lambda: 0.0
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert len(run(engine, prompts[:1], params)[0].token_ids) == 12


@pytest.mark.parametrize("wrong", [0, -3, True, 2.5, "8", 9])
def test_engines_refuse_steps_that_the_executor_does_not_take(llm, wrong):
    with pytest.raises(ConfigError, match="None or an integer from 1 to 8"):
        make_engine(llm, num_scheduler_steps=wrong)


def test_at_most_a_block_of_steps():
    with pytest.raises(ConfigError, match="num_scheduler_steps=17 must be an integer from 1 to 16"):
        EngineConfig(model="x", num_scheduler_steps=17)


def test_steps_stop_where_a_decision_is_due():
    eager = SchedulerPolicy()

    def decode_steps(
        *, limit=8, count=1, waiting=0, max_num_seqs=32, num_gpu_blocks=64, total=40, policy=eager
    ):
        scheduler = make_scheduler(
            policy,
            num_gpu_blocks=num_gpu_blocks,
            block_size=4,
            max_model_len=64,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
        )
        for index in range(count):
            scheduler.add(make_request(index, 3, max_total_tokens=total))
        assert scheduler.schedule(0.0).prefill
        for index in range(count, count + waiting):
            scheduler.add(make_request(index, 3, max_total_tokens=total))
        for request in list(scheduler._state.running):
            request.output_token_ids.append(0)
        output = scheduler.schedule(1.0, max_decode_steps=limit)
        scheduler.check()
        return output.num_decode_steps if output.decode else 0

    assert decode_steps() == 4  # a block at most each, and blocks of 4 tokens
    assert decode_steps(limit=3) == 3
    assert decode_steps(limit=1) == 1
    assert decode_steps(total=6) == 2  # somebody's last token
    assert decode_steps(policy=make_preset("vllm")) == 1  # vLLM 0.2.5 decides at every step
    assert decode_steps(count=16) == 4
    assert decode_steps(count=17) == 1  # many requests
    assert decode_steps(count=2, num_gpu_blocks=3, total=8) == 1  # one free block, for two requests
    assert decode_steps(waiting=1, max_num_seqs=1) == 1  # whoever waits might start at any time


def test_rows_that_end_are_padding(llm, prompts):
    config, params = llm.model_config, llm.executor._params
    block_size, num_blocks, length = 4, 16, 6
    tables = np.arange(num_blocks, dtype=np.int32).reshape(2, 8)
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
    tokens = np.concatenate([np.asarray(prompts[i][:length], np.int32) for i in (1, 2)])
    prefill = PrefillInputs(
        tokens=tokens,
        targets=tokens,
        query_starts=np.asarray([0, length, 2 * length], np.int32),
        lengths=np.full(2, length, np.int32),
        slots=np.arange(2, dtype=np.int32),
        num_seqs=np.full(1, 2, np.int32),
        sampled=np.asarray([[length - 1, 2 * length - 1], [0, 1], [length, length]], np.int32),
        block_tables=tables,
    )

    def start(*ends):
        host = SlotParams.host_zeros(2)
        host.end_ids[: len(ends), 0] = ends
        state = DeviceState(jnp.zeros(shape), jnp.zeros((3, 33), jnp.int32))
        slot_params = SlotParams(*map(jnp.asarray, host))
        inputs = jax.tree.map(jnp.asarray, prefill)
        state, _ = run_step(config, params, state, slot_params, None, inputs, sampling=Sampling.GREEDY)
        return state, slot_params

    def go_on(state, slot_params, lengths, num_steps):
        inputs = DecodeInputs(jnp.arange(2), jnp.asarray(lengths), jnp.asarray(tables))
        return run_decode_steps(
            config,
            params,
            state,
            slot_params,
            inputs,
            jnp.int32(num_steps),
            max_steps=6,
            sampling=Sampling.GREEDY,
        )

    free, outputs = go_on(*start(-1, -1), [length + 1] * 2, 5)
    expected = np.asarray(free.history)[:2, length : length + 6]
    assert outputs.sampled.tokens.shape == (12,)
    np.testing.assert_array_equal(np.asarray(outputs.sampled.tokens).reshape(6, 2)[:5].T, expected[:, 1:])
    assert not np.asarray(free.history)[:2, length + 6 :].any()

    end = int(expected[0, 2])
    num_kept = expected[0].tolist().index(end, 1) + 1
    assert end not in expected[1]
    ended, slot_params = start(end, -1)
    ended, outputs = go_on(ended, slot_params, [length + 1] * 2, 5)
    sampled = np.asarray(outputs.sampled.tokens).reshape(6, 2)[:5].T
    np.testing.assert_array_equal(sampled[1], expected[1, 1:], "the other one goes on")
    np.testing.assert_array_equal(sampled[0, : num_kept - 1], expected[0, 1:num_kept])
    first_unused = (length + num_kept - 2) // block_size + 1
    assert not np.asarray(ended.pool)[tables[0, first_unused:]].any(), "KV of an ended row"

    # The program after it was sent before the host knew: the ended row stays padding.
    pool = np.asarray(ended.pool)[tables[0]]
    after, _ = go_on(ended, slot_params, [length + 6] * 2, 2)
    np.testing.assert_array_equal(np.asarray(after.pool)[tables[0]], pool)
    longer, _ = go_on(free, start(-1, -1)[1], [length + 6] * 2, 2)
    np.testing.assert_array_equal(np.asarray(after.history)[1], np.asarray(longer.history)[1])

    # Where all rows have ended nothing is computed at all.
    both, slot_params = start(end, int(expected[1, 1]))
    both, _ = go_on(both, slot_params, [length + 1] * 2, 5)
    after, _ = go_on(both, slot_params, [length + 6] * 2, 3)
    np.testing.assert_array_equal(np.asarray(after.pool), np.asarray(both.pool))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_whoever_waits_starts_after_the_program_in_which_one_ended(llm, prompts, async_scheduling):
    greedy = golden_data(NAME)["greedy"]
    end = greedy[1][4]
    num_tokens = greedy[1].index(end) + 1
    engine = make_engine(
        llm,
        scheduler_class=Recording,
        async_scheduling=async_scheduling,
        num_scheduler_steps=8,
        max_num_seqs=2,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[end], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    outputs = run(engine, [prompts[i] for i in (1, 2, 3)], params)
    assert [len(output.token_ids) for output in outputs] == [num_tokens, 30, 30]
    for output, i in zip(outputs, (1, 2, 3), strict=True):
        expected = greedy[i][: len(output.token_ids)]
        assert output.token_ids[: len(expected)] == expected
    steps = [one.num_decode_steps for one in engine.scheduler.scheduled if one.decode]
    assert max(steps) == 8
    assert min(steps) == 1, "while somebody waits every iteration is decided on its own"


def test_the_rest_goes_on_with_run_ahead(llm, prompts):
    """No token is lost or computed twice, whoever ends within a program."""
    greedy = golden_data(NAME)["greedy"]
    params = [
        SamplingParams(temperature=0, max_tokens=25, stop_token_ids=[greedy[i][3 + i]], ignore_eos=True)
        for i in range(4)
    ]
    outputs = {}
    for num_steps in (1, 8):
        engine = make_engine(llm, num_scheduler_steps=num_steps)
        outputs[num_steps] = [output.token_ids for output in run(engine, prompts[:4], params)]
    assert outputs[1] == outputs[8]
    assert len({len(token_ids) for token_ids in outputs[8]}) > 1


@pytest.mark.parametrize("num_steps", [1, 8])
def test_a_request_does_not_end_before_its_time(llm, num_steps):
    """However much speaks for its stop token: before min_tokens neither host nor device takes it."""
    stop = 5
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        min_tokens=15,
        ignore_eos=True,
        repetition_penalty=1e-31,
        stop_token_ids=[stop],
        logit_bias={token: -100 for token in range(128) if token != stop},
    )
    beside = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine = make_engine(llm, num_scheduler_steps=num_steps)
    output, other = run(engine, [[stop], [7, 8, 9]], [params, beside])
    assert stop not in output.token_ids[:15]
    assert output.token_ids[15:] == [stop]
    assert output.outputs[0].finish_reason == "stop"
    assert len(other.token_ids) == 12
