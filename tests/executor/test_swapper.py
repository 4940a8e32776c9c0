"""Swapping: blocks come back bit for bit, and tokens do not notice."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import make_engine, make_llm, run
from variants import golden_checkpoint, golden_data

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError, EngineError
from jaxllm.executor import compile_stats
from jaxllm.executor.kv.swapper import MAX_STAGED_BLOCKS, BlockSwapper
from jaxllm.executor.placement import Placement
from jaxllm.research.slow_link import SlowLink, slow_down
from jaxllm.sched.policies import (
    FairPriority,
    LeastUrgentVictim,
    MoreUrgentFirst,
    ResumeAction,
    ResumeDecision,
    SchedulerPolicy,
    SwapIfItFits,
)
from jaxllm.system.dtypes import KV_DTYPES
from jaxllm.types import HostPiece, host_blocks_of, piece_sizes


class InBackground:
    def choose(self, request, copied_out_at, state, now):
        return ResumeDecision(ResumeAction.IN_BACKGROUND)


NAME = "llama_gqa"
SHAPE = (2, 2, 2, 4, 8)  # of a block: layers, K and V, heads, tokens, head_dim
SWAPPING = {
    "fcfs": SchedulerPolicy(action=SwapIfItFits()),
    "fair": SchedulerPolicy(
        priority=FairPriority(),
        victim=LeastUrgentVictim(),
        action=SwapIfItFits(),
        restore=MoreUrgentFirst(),
    ),
    "background": SchedulerPolicy(
        priority=FairPriority(),
        victim=LeastUrgentVictim(),
        action=SwapIfItFits(),
        resume=InBackground(),
    ),
}


@pytest.fixture(scope="module")
def swapper():
    return BlockSwapper(Placement((jax.devices()[0],)), max_blocks=48)


def random_pool(num_blocks, dtype):
    if jnp.dtype(dtype).itemsize == 1:
        codes = np.random.default_rng(0).integers(0, 256, (num_blocks, *SHAPE), np.uint8)
        if dtype == "float8_e5m2":
            codes[np.isnan(codes.view(jnp.dtype(dtype)))] = 0x7C  # infinite; NaNs become others on CPUs
        return jnp.asarray(codes).view(dtype)
    bits = np.random.default_rng(0).integers(0, 2**16, (num_blocks, *SHAPE), np.uint16)
    if dtype == "float32":
        return jnp.asarray(bits.astype(np.float32) / 7)
    bits &= 0xBFFF  # numbers only: XLA's 16-bit floats on CPUs quiet NaNs
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(dtype))


def bits_of(array):
    array = np.asarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


@pytest.mark.parametrize("dtype", KV_DTYPES.values())
def test_blocks_come_back_bit_for_bit(swapper, dtype):
    pool = random_pool(MAX_STAGED_BLOCKS + 16, dtype)
    before = bits_of(pool)
    rng = np.random.default_rng(1)
    for handle, count in enumerate((1, 2, 3, 7, 16, 21, MAX_STAGED_BLOCKS + 5)):
        old = tuple(rng.permutation(len(pool))[:count].tolist())
        new = tuple(rng.permutation(len(pool))[:count].tolist())
        swapper.swap_out(pool, handle, old)
        expected = before.copy()
        expected[list(new)] = before[list(old)]
        pool = swapper.swap_in(pool, new, host_blocks_of(handle, count))
        before = bits_of(pool)
        np.testing.assert_array_equal(before, expected)
        swapper.drop_all(handle)
    assert not swapper.pieces


@pytest.mark.parametrize("dtype", KV_DTYPES.values())
def test_no_program_copies_the_pool(dtype):
    pool = jax.ShapeDtypeStruct((4096, *SHAPE), dtype)
    for name, jitted, arguments in BlockSwapper.programs(pool, 4):
        analysis = jitted.lower(*arguments).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < pool.size * pool.dtype.itemsize / 50, name


def at_once(swapper, pool, handle, block_ids, host_blocks):
    return swapper.swap_in(pool, block_ids, host_blocks)


def at_once_after_a_load(swapper, pool, handle, block_ids, host_blocks):
    swapper.load(handle, block_ids, host_blocks)
    return swapper.join(pool, handle)


def in_background(swapper, pool, handle, block_ids, host_blocks):
    swapper.load(handle, block_ids, host_blocks)
    while handle not in swapper.arrived():
        pool = jax.block_until_ready(swapper.advance(pool))
    return swapper.join(pool, handle)


@pytest.mark.parametrize("bring_back", [at_once, at_once_after_a_load, in_background])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_blocks_of_several_copies_come_back_bit_for_bit(swapper, dtype, bring_back):
    num_blocks = 2 * MAX_STAGED_BLOCKS
    pool, rng, kept = random_pool(num_blocks, dtype), np.random.default_rng(2), {}
    for handle, count in enumerate((1, 6, 21, MAX_STAGED_BLOCKS + 7)):
        old = rng.permutation(num_blocks)[:count].tolist()
        swapper.swap_out(pool, handle, old)
        kept.update(zip(host_blocks_of(handle, count), bits_of(pool)[old], strict=True))
    pieces, places = swapper.pieces, list(kept)
    for handle, count in enumerate((1, 2, 17, 30, num_blocks)):  # what was read before is still there
        wanted = [places[number] for number in rng.permutation(len(places))[:count]]
        new = rng.permutation(num_blocks)[:count].tolist()
        expected = bits_of(pool).copy()
        expected[new] = [kept[place] for place in wanted]
        pool = bring_back(swapper, pool, handle, new, wanted)
        np.testing.assert_array_equal(bits_of(pool), expected)
    assert (swapper.pieces, swapper.loads) == (pieces, frozenset())
    for handle in range(4):
        swapper.drop_all(handle)


def test_one_block_may_be_read_into_several():
    """By one copy after another, and by two that are under way together."""
    swapper, pool = BlockSwapper(Placement((jax.devices()[0],)), max_blocks=8), random_pool(8, "float32")
    before = bits_of(pool)
    swapper.swap_out(pool, 0, (0, 1, 2))
    swapper.load(0, (3, 4), host_blocks_of(0, 3)[1:])
    swapper.load(1, (5, 6), host_blocks_of(0, 3)[:2])
    pool = swapper.swap_in(pool, (7,), host_blocks_of(0, 3)[1:2])
    for handle in (1, 0):
        pool = swapper.join(pool, handle)
    np.testing.assert_array_equal(bits_of(pool), before[[0, 1, 2, 1, 2, 0, 1, 1]])


def test_a_copy_is_dropped_piece_by_piece(swapper):
    pool = random_pool(8, "float32")
    kept = bits_of(pool)
    swapper.swap_out(pool, 30, range(7))
    swapper.swap_out(pool, 31, (7,))
    assert swapper.pieces == {*(HostPiece(30, number) for number in range(3)), HostPiece(31, 0)}
    swapper.drop(HostPiece(30, 1))
    assert swapper.pieces == {HostPiece(30, 0), HostPiece(30, 2), HostPiece(31, 0)}
    places = host_blocks_of(30, 7)
    pool = swapper.swap_in(pool, (1, 0), [places[6], places[0]])
    np.testing.assert_array_equal(bits_of(pool)[:3], kept[[0, 6, 2]])
    swapper.drop_all(30)
    assert swapper.pieces == {HostPiece(31, 0)}
    swapper.drop(HostPiece(31, 0))
    assert not swapper.pieces


def test_what_is_dropped_while_it_is_read_arrives(swapper):
    num_blocks = MAX_STAGED_BLOCKS + 9
    pool = random_pool(num_blocks, "float32")
    before = bits_of(pool)
    swapper.swap_out(pool, 32, range(num_blocks))
    swapper.load(33, tuple(reversed(range(num_blocks))), host_blocks_of(32, num_blocks))
    swapper.drop_all(32)
    assert (swapper.pieces, swapper.loads) == (frozenset(), {33})
    np.testing.assert_array_equal(bits_of(swapper.join(pool, 33)), before[::-1])


def test_copies_are_pinned_and_survive_later_writes(swapper):
    pool = random_pool(4, "float32")
    kept = bits_of(pool)[1]
    swapper.swap_out(pool, 7, (1,))
    assert {piece.sharding.memory_kind for piece in swapper._pieces[7].values()} == {"pinned_host"}
    pool = jax.jit(jnp.zeros_like, donate_argnums=0)(pool)
    pool = swapper.swap_in(pool, (3,), host_blocks_of(7, 1))
    np.testing.assert_array_equal(bits_of(pool)[3], kept)
    swapper.drop_all(7)
    assert not swapper.pieces


def test_the_last_and_smallest_piece_leaves_first(swapper, monkeypatch):
    """So that a copy that is too long for the staging memory waits for no more than it must."""
    pool, gather, sizes = random_pool(40, "float32"), swapper._gather, []
    monkeypatch.setattr(swapper, "_gather", lambda pool, ids: sizes.append(len(ids)) or gather(pool, ids))
    swapper.swap_out(pool, 35, tuple(range(37)))
    assert sizes == [1, 4, 16, 16]
    assert piece_sizes(37) == [16, 16, 4, 1]
    assert {number: piece.shape[0] for number, piece in swapper._pieces[35].items()} == dict(
        enumerate(piece_sizes(37))
    )
    swapper.drop_all(35)


def test_copies_out_are_let_go_when_they_have_left(swapper):
    pool = random_pool(40, "float32")
    for handle in range(40, 44):
        swapper.swap_out(pool, handle, tuple(range(MAX_STAGED_BLOCKS)))
        assert swapper._num_staged <= MAX_STAGED_BLOCKS
        assert swapper._num_staged == sum(piece.shape[0] for piece in swapper._staged)
    for handle in range(40, 44):
        swapper.wait(handle)
        swapper.drop_all(handle)
    assert not swapper._staged


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def limited_to_a_block_a_second(clock, pool):
    return SlowLink(
        BlockSwapper(Placement((jax.devices()[0],)), max_blocks=8), pool[0].nbytes, clock.perf_counter
    )


def test_a_limited_link_delays_the_copy_back_and_changes_no_bit(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("jaxllm.research.slow_link.time", clock)
    pool = random_pool(8, "float32")
    before = bits_of(pool)
    limited = limited_to_a_block_a_second(clock, pool)
    limited.swap_out(pool, 0, (0, 1, 2, 3))
    limited.swap_out(pool, 1, (4, 5, 6, 7))
    pool = limited.swap_in(pool, (0, 1, 2, 3), host_blocks_of(1, 4))
    assert clock.now == pytest.approx(112.0)  # 8 blocks out, one after another, and 4 back
    np.testing.assert_array_equal(bits_of(pool)[:4], before[4:])
    limited.swap_out(pool, 2, (1,))
    limited.wait(2)
    assert clock.now == pytest.approx(113.0)
    for handle in range(3):
        limited.drop_all(handle)
    assert not limited._left_at


def test_a_load_writes_only_its_own_blocks_and_ends_bit_for_bit(swapper):
    num_blocks = MAX_STAGED_BLOCKS + 9
    pool = random_pool(2 * num_blocks, "float32")
    before = bits_of(pool)
    swapper.swap_out(pool, 50, tuple(range(num_blocks)))
    swapper.swap_out(pool, 51, (3, 4))
    pool = jax.jit(jnp.zeros_like, donate_argnums=0)(pool)
    swapper.load(0, tuple(range(num_blocks, 2 * num_blocks)), host_blocks_of(50, num_blocks))
    swapper.load(1, (0, 1), host_blocks_of(51, 2))
    assert swapper.loads == {0, 1}
    assert sum(load.num_staged for load in swapper._loads.values()) <= MAX_STAGED_BLOCKS
    while 0 not in swapper.arrived():
        pool = jax.block_until_ready(swapper.advance(pool))
        assert not bits_of(pool)[2:num_blocks].any()
    pool = swapper.join(pool, 0)
    np.testing.assert_array_equal(bits_of(pool)[num_blocks:], before[:num_blocks])
    assert swapper.loads == {1}
    swapper.discard(1)
    assert not swapper.loads
    for handle in (50, 51):
        swapper.drop_all(handle)
    assert not swapper.pieces


def test_a_load_may_be_joined_before_it_has_arrived(swapper):
    num_blocks = MAX_STAGED_BLOCKS + 9
    pool = random_pool(num_blocks, "float32")
    before = bits_of(pool)
    swapper.swap_out(pool, 52, tuple(range(num_blocks)))
    swapper.load(2, tuple(reversed(range(num_blocks))), host_blocks_of(52, num_blocks))
    pool = swapper.join(pool, 2)
    np.testing.assert_array_equal(bits_of(pool), before[::-1])
    swapper.drop_all(52)


def test_a_limited_link_delays_a_load(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("jaxllm.research.slow_link.time", clock)
    pool = random_pool(8, "float32")
    limited = limited_to_a_block_a_second(clock, pool)
    for handle in range(2):
        limited.swap_out(pool, handle, (0, 1))
        limited.load(handle, (2, 3), host_blocks_of(handle, 2))
    jax.block_until_ready([piece for load in limited._loads.values() for _, piece in load.staged])
    assert limited.arrived() == []
    clock.now = 104.0  # 2 blocks out, 2 back
    assert limited.arrived() == [0]
    limited.join(pool, 1)
    assert clock.now == pytest.approx(106.0)


def test_warm_up_keeps_the_pool(swapper):
    pool = random_pool(5, "float32")
    before = bits_of(pool)
    np.testing.assert_array_equal(bits_of(swapper.warm_up(pool)), before)


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint(NAME), num_host_blocks=64)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", sorted(SWAPPING))
def test_swapped_requests_get_the_same_tokens(llm, policy, async_scheduling):
    prompts = golden_data(NAME)["prompts"]
    expected = golden_data(NAME)["greedy"]
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)] * len(prompts)
    sampled = [
        SamplingParams(
            temperature=0.9, top_p=0.95, seed=i, max_tokens=40, ignore_eos=True, repetition_penalty=1.1
        )
        for i in range(len(prompts))
    ]
    calm = run(make_engine(llm), [*prompts, *prompts], [*params, *sampled])
    compiled, num_programs = compile_stats.total()[0], len(llm.executor.programs)
    engine = make_engine(
        llm,
        num_gpu_blocks=30,
        num_host_blocks=64,
        policy=SWAPPING[policy],
        async_scheduling=async_scheduling,
    )
    outputs = run(engine, [*prompts, *prompts], [*params, *sampled])
    new_programs = len(llm.executor.programs) - num_programs  # requests that had not met before
    assert compile_stats.total()[0] == compiled + new_programs
    assert sum(output.metrics.num_swaps for output in outputs) >= 5
    for output, other in zip(outputs, calm, strict=True):
        assert output.token_ids == other.token_ids
    for output, other, tokens in zip(outputs, calm, expected, strict=False):
        assert output.token_ids == tokens[:40]
        for scores, reference in zip(output.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert all(scores[i].logprob == pytest.approx(reference[i].logprob, abs=1e-4) for i in scores)
    assert_no_copy_is_left(engine, llm, prompts[0])


def assert_no_copy_is_left(engine, llm, prompt):
    """Executors are told of it with the next step that runs."""
    engine.add_request("last", prompt, SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests:
        engine.step()
    assert not llm.executor.swapper.pieces
    assert not llm.executor.swapper.loads


def test_an_abort_drops_the_copy(llm):
    prompts = golden_data(NAME)["prompts"]
    engine = make_engine(llm, num_gpu_blocks=30, num_host_blocks=64, policy=SWAPPING["fcfs"])
    for place, prompt in enumerate([*prompts, *prompts]):
        engine.add_request(str(place), prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while not engine.scheduler.num_swapped:
        engine.step()
    for place in range(2 * len(prompts)):
        if engine.is_live(str(place)) and place % 2:
            engine.abort(str(place))
            engine.scheduler.check()
    while engine.has_unfinished_requests:
        engine.step()
    engine.scheduler.check()
    assert engine.scheduler.num_free_host_blocks == 64
    assert_no_copy_is_left(engine, llm, prompts[0])


def test_a_scheduler_that_swaps_needs_an_executor_with_host_blocks():
    llm = make_llm(golden_checkpoint(NAME))
    engine = make_engine(
        llm,
        num_gpu_blocks=40,
        num_host_blocks=24,
        policy=SchedulerPolicy(action=SwapIfItFits()),
    )
    with pytest.raises(EngineError, match="built with num_host_blocks=0"):
        run(
            engine,
            golden_data(NAME)["prompts"],
            SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        )


def test_what_is_no_slow_link_is_refused():
    llm = make_llm(golden_checkpoint("llama_gqa"), num_host_blocks=8, warm_up="background")
    for rate in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=f"bytes_per_second={rate} must be a positive number or None"):
            slow_down(llm.executor, rate)
    llm.close()
    with pytest.raises(ConfigError, match="num_host_blocks=0 turns swaps off"):
        slow_down(make_llm(golden_checkpoint("llama_gqa"), warm_up="background").executor, 1.0)
