"""How many requests are under way: by what they will come to hold."""

import dataclasses

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.predictors.lengths import TrueLength
from jaxllm.predictors.published_shapes import model_shape
from jaxllm.predictors.silicon import SiliconCostModel
from jaxllm.research.simulator.run import simulate
from jaxllm.research.workloads import Trace
from jaxllm.research.workloads.lengths import LognormalLengths
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.policies import (
    CostAwareVictim,
    ExpectedGrowth,
    FeedbackLimit,
    FewestComputedVictim,
    FullLengthAdmission,
    LeastLostVictim,
    NewTokenRatio,
    PastFuture,
    PoolState,
    Progress,
    SchedulerPolicy,
)
from jaxllm.sched.policies.growth import peak
from jaxllm.sched.presets import make_preset
from jaxllm.sched.scheduler import Scheduler
from jaxllm.types import Request

BLOCK_SIZE = 16


def request(prompt, output=0, *, limit=1000, number=0):
    made = Request(
        f"r{number}",
        [1] * prompt,
        SamplingParams(max_tokens=None),
        arrival_time=0.0,
        arrival_index=number,
        max_total_tokens=limit,
    )
    made.output_token_ids.extend([1] * output)
    made.num_tokens = prompt + output
    if output:
        made.metrics.first_scheduled_time = 0.0
    return made


def pools(num_blocks, under_way=(), *, num_free=None, host=0, running=0, ended=0, **progress):
    if num_free is None:
        num_free = max(0, num_blocks - sum(-(-one.num_tokens // BLOCK_SIZE) for one in under_way))
    state = PoolState(
        num_free=num_free,
        num_blocks=num_blocks,
        num_host_free=host,
        num_host_blocks=host,
        block_size=BLOCK_SIZE,
        num_running=running,
        num_context_tokens=sum(one.num_tokens for one in under_way),
    )
    return state._replace(under_way=under_way, progress=Progress(num_ended=ended, **progress))


def learned(admission, outputs):
    for number, length in enumerate(outputs):
        admission.ended(request(10, length, number=number), is_whole=True)
    return admission


def num_admitted(admission, num_blocks, prompt=10, limit=1000, most=200):
    """Requests that start one after another, before any of them has computed."""
    under_way = []
    while len(under_way) < most:
        new = request(prompt, limit=limit, number=len(under_way))
        if not admission.admits(new, 1, pools(num_blocks, under_way)):
            break
        under_way.append(new)
    return len(under_way)


def test_full_lengths_are_those_of_limits():
    # 99 tokens take 7 blocks.
    assert num_admitted(FullLengthAdmission(), 70, limit=100) == 10


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_that_of_requests_that_grow_alike(seed):
    rng = np.random.default_rng(seed)
    held, left = rng.integers(1, 50, 8).astype(float), rng.integers(1, 30, 8).astype(float)
    steps = [
        sum(h + t for h, n in zip(held, left, strict=True) if t <= n) for t in range(1, int(left.max()) + 1)
    ]
    assert peak(held, left) == max(steps)


def test_past_outputs_say_how_many_fit():
    shy, bold = PastFuture(reserve=0.0), learned(PastFuture(reserve=0.0), [6] * 50)
    assert num_admitted(shy, 100) == 1  # 1000 tokens each, for all that is known
    assert num_admitted(bold, 100) == 100  # 16 each
    assert num_admitted(learned(PastFuture(reserve=0.5), [6] * 50), 100) == 50
    with pytest.raises(ConfigError, match="reserve must lie in"):
        PastFuture(reserve=1.0)


def test_hindsight_knows_lengths():
    admission = PastFuture(reserve=0.0, lengths=TrueLength())
    assert admission.admits(request(10, limit=16), 1, pools(1))
    assert not admission.admits(request(10, limit=17), 1, pools(1))


def test_the_share_of_new_tokens_falls_and_jumps_when_somebody_lost_its_blocks():
    admission = NewTokenRatio(first=0.7, least=0.1, num_iterations=100)
    running = [request(10, 100, number=number) for number in range(4)]  # 890 each to go
    needed = 16 + 990 + 0.7 * 4 * 890

    def admits(tokens, **progress):
        state = pools(10_000, running, num_free=-(-int(tokens) // BLOCK_SIZE), **progress)
        return admission.admits(request(10, number=9), 1, state)

    assert admits(needed + 16)
    assert not admits(needed - 16)
    assert admits(16 + 990 + 0.1 * 4 * 890, num_iterations=101)
    assert not admits(16 + 990 + 0.11 * 4 * 890, num_iterations=101, num_preempted=1)  # (100 + 20) / 990
    assert admits(16 + 990 + 0.13 * 4 * 890, num_iterations=102, num_preempted=1)


def test_a_limit_climbs_to_where_most_tokens_are_generated():
    admission, now, generated = FeedbackLimit(num_iterations=1), 0.0, 0.0
    running = [request(10, 1, number=number) for number in range(200)]
    limits = []
    assert not admission.admits(request(10), 1, pools(1000, running[:150], num_preempted=1))
    for iteration in range(1, 400):
        for limit in range(201):
            progress = {"num_iterations": iteration, "num_generated": int(generated), "num_preempted": 1}
            state = pools(1000, running[:limit], **progress)._replace(now=now)
            if limit == 200 or not admission.admits(request(10, number=999), 1, state):
                break
        limits.append(limit)
        now += 1.0
        generated += 1e4 - (limit - 60) ** 2  # most at 60
    assert 45 <= np.mean(limits[200:]) <= 75


def test_expected_growth_learns_how_long_outputs_get():
    unknown, short = ExpectedGrowth(), learned(ExpectedGrowth(), [6] * 200)
    assert num_admitted(unknown, 1000) == 14400 // (10 + 512)  # twice the first guess
    assert num_admitted(short, 1000, most=2000) > 600  # 16 each
    assert num_admitted(learned(ExpectedGrowth(), [900] * 200), 1000) < 25
    assert num_admitted(ExpectedGrowth(), 1000, limit=26, most=2000) > 500  # their limit bounds them


def test_the_host_counts_and_those_there_are_under_way():
    there = [request(10, 500, number=number) for number in range(20)]
    new = request(10, number=99)
    assert not learned(ExpectedGrowth(), [900] * 99).admits(new, 1, pools(660, there))
    assert learned(ExpectedGrowth(), [900] * 99).admits(new, 1, pools(660, there, host=1200))


def test_who_was_refused_stays_so_until_somebody_ends():
    admission = learned(ExpectedGrowth(), [900] * 99)
    there = [request(10, 500, number=number) for number in range(20)]
    assert not admission.admits(request(10, number=99), 1, pools(660, there))
    assert not admission.admits(request(10, number=99), 1, pools(660, []))
    assert admission.admits(request(10, number=99), 1, pools(660, [], ended=1))


def test_nobody_comes_back_to_lose_its_blocks_at_once():
    admission = ExpectedGrowth(num_ahead=8)
    size = 1000  # blocks: a 64th are 250 tokens
    back = request(10, 20)
    assert admission.readmits(back, 2, pools(size, num_free=12, running=20))  # 160 tokens: 8 for each
    assert not admission.readmits(back, 3, pools(size, num_free=12, running=20))
    assert not admission.admits(back, 3, pools(size, num_free=12, running=20))


def test_what_is_kept_for_those_who_run_is_a_small_share_of_the_pool():
    """Else a small pool of short outputs stands a fifth empty."""
    admission, back = ExpectedGrowth(), request(10, 20)
    assert admission.readmits(back, 2, pools(128, num_free=4, running=33))  # 2 blocks, not 25
    assert not admission.readmits(back, 3, pools(128, num_free=4, running=33))


def test_less_is_promised_while_too_much_is_lost_and_more_while_nothing_is():
    grown, shrunk = (ExpectedGrowth() for _ in range(2))
    for ended in range(8, 200, 8):
        for admission, lost in ((grown, 0), (shrunk, ended * 100)):
            admission.has_room(
                [request(10)], 1, pools(1000, ended=ended, num_generated=ended * 100, num_lost=lost)
            )
    assert grown._share == grown.most
    assert shrunk._share == pytest.approx(0.1)
    at_once = ExpectedGrowth()
    at_once.has_room([request(10)], 1, pools(1000, ended=64, num_generated=6400, num_lost=6400))
    assert at_once._share == pytest.approx(0.9 * 0.78)  # many that end together show no more than a few
    shrunk.has_room([request(10)], 1, pools(1000))  # of another scheduler
    shrunk.has_room([request(10)], 1, pools(1000, ended=8))
    assert shrunk._share > 0.1


@pytest.mark.parametrize(
    "arguments", [{"budget": -1.0}, {"most": 0.0}, {"num_ahead": -1}, {"most": float("inf")}]
)
def test_numbers_of_expected_growth_are_checked(arguments):
    with pytest.raises(ConfigError, match="must be at least 0, and most="):
        ExpectedGrowth(**arguments)


class Costs:
    """A copy takes a second a block, an iteration three."""

    def step_seconds(self, *_):
        return 3.0

    def swap_out_seconds(self, num_blocks):
        return float(num_blocks)

    swap_in_seconds = swap_out_seconds


def holder(number, tokens):
    made = request(tokens, number=number)
    made.block_ids, made.num_computed_tokens = list(range(-(-tokens // BLOCK_SIZE))), tokens
    return made


def order(policy, holders, state):
    return sorted(range(len(holders)), key=lambda i: (policy.scorer(state, 0.0)(holders[i]), -i))


def test_who_occupies_most_goes_whose_copy_is_cheap_and_fits_and_else_who_computed_least():
    policy = LeastLostVictim(Costs(), num_iterations=2.0)  # nobody has ended: the longest occupies most
    holders = [holder(number, tokens) for number, tokens in enumerate((20, 84, 82, 200, 50))]
    # 6 blocks are cheap; 84 and 82 tokens are alike; 200 tokens are 13 blocks.
    assert order(policy, holders, pools(100, host=50, running=5)) == [2, 1, 4, 0, 3]
    assert order(policy, holders, pools(100, host=4, running=5)) == [4, 0, 2, 1, 3]
    assert order(policy, holders, pools(100, host=0, running=5)) == [0, 4, 2, 1, 3]
    assert policy.outranks is None


def test_of_outputs_that_all_end_alike_those_half_done_occupy_most():
    policy = learned(LeastLostVictim(Costs(), num_iterations=9.0), [64] * 200)
    holders = [request(16, output, number=number) for number, output in enumerate((1, 24, 62))]
    for one in holders:
        one.block_ids = list(range(-(-one.num_tokens // BLOCK_SIZE)))
    assert order(policy, holders, pools(100, holders, host=50, running=3)) == [1, 0, 2]
    holders[1].max_total_tokens = 16 + 25  # it has one token left
    assert order(policy, holders, pools(100, holders, host=50, running=3)) == [0, 2, 1]


def test_published_scores_of_victims():
    few, many = holder(0, 20), holder(1, 90)
    assert FewestComputedVictim().score(few, 0.0) < FewestComputedVictim().score(many, 0.0)
    fresh, done = request(10, 10, limit=110), request(10, 90, limit=110)
    for one in (fresh, done):
        one.block_ids = [0] * -(-one.num_tokens // BLOCK_SIZE)
    assert CostAwareVictim().score(fresh, 0.0) == pytest.approx(-2 / 20 * 0.9)
    assert CostAwareVictim().score(done, 0.0) == pytest.approx(-7 / 100 * 0.1)


class Spy:
    """Admits everything, and notes what it is asked and told."""

    def __init__(self):
        self.under_way, self.told = [], []

    def admits(self, request, num_needed, state):
        self.under_way.append([one.request_id for one in state.under_way])
        return True

    def ended(self, request, *, is_whole):
        self.told.append((request.request_id, is_whole))


def test_policies_see_who_is_under_way_and_how_requests_end():
    spy = Spy()
    config = SchedulerConfig(
        num_gpu_blocks=8, block_size=4, max_model_len=32, max_num_seqs=8, max_num_batched_tokens=32
    )
    scheduler = Scheduler(config, SchedulerPolicy(admission=spy))
    for number in range(3):
        scheduler.add(request(4, limit=32, number=number))
    scheduler.schedule(0.0)
    assert spy.under_way == [["r0"], ["r0", "r1"]]  # the first has the pool to itself
    live = dict(scheduler._state.live)
    assert list(scheduler._state.under_way) == ["r0", "r1", "r2"]
    scheduler.finish(live["r1"], "abort")
    scheduler.finish(live["r2"], "stop")
    assert spy.told == [("r1", False), ("r2", True)]
    assert list(scheduler._state.under_way) == ["r0"]
    assert scheduler._state.progress.num_ended == 2


def reasoning(num_requests, seed=0):
    rng = np.random.default_rng(seed)
    prompts = LognormalLengths(mean=30, sigma=0.6, shortest=4, longest=200).sample(num_requests, rng)
    outputs = LognormalLengths(mean=400, sigma=0.6, shortest=20, longest=1300).sample(num_requests, rng)
    zeros = np.zeros(num_requests)
    return Trace(name="reasoning", seed=seed, arrival_times=zeros, prompt_lens=prompts, output_lens=outputs)


def test_the_default_does_not_thrash_on_long_outputs():
    """As it did when whoever lost its blocks gave its place to a new request."""
    costs = SiliconCostModel(model_shape("llama-3-8b", "bfloat16"), "h100")
    config = SchedulerConfig(
        num_gpu_blocks=450, block_size=16, max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=2048
    )
    found = {}
    for name, num_host_blocks in (("adaptive", 450), ("vllm_v1", 0)):
        limits = dataclasses.replace(config, num_host_blocks=num_host_blocks)
        policy = make_preset(name, costs)
        scheduler = Scheduler(limits, policy)
        result = simulate(reasoning(128), limits, policy, costs, overlap_swaps=True, scheduler=scheduler)
        found[name] = result, scheduler._state.progress
    (ours, progress), (theirs, _) = found["adaptive"], found["vllm_v1"]
    assert progress.num_lost < 0.1 * progress.num_generated
    assert ours.num_swaps < 3 * 128
    assert ours.seconds < theirs.seconds
    latencies = [np.mean(one.finish_times - one.arrival_times) for one in (ours, theirs)]
    assert latencies[0] < latencies[1]
