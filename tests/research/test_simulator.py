"""The simulator: times computed by hand, sums, seeds, and every preset to its end."""

import dataclasses

import numpy as np
import pytest
from scheduler_helpers import V1, LinearCosts, make_request

from jaxllm.errors import ConfigError, RequestTooLargeError, UserCodeError
from jaxllm.research.simulator.executor import SimulatedExecutor
from jaxllm.research.simulator.files import SimulatedFiles
from jaxllm.research.simulator.run import simulate
from jaxllm.research.simulator.truth import ExpectedAction, HindsightAction, RegretMeter, Residuals, key_of
from jaxllm.research.workloads import Poisson, make_conversations
from jaxllm.research.workloads.result import TimeSpent
from jaxllm.research.workloads.trace import Trace
from jaxllm.sched.baselines import VLLM025
from jaxllm.sched.cache.names import names_of
from jaxllm.sched.config import SchedulerConfig
from jaxllm.sched.ledger import Ledger
from jaxllm.sched.policies import (
    AdaptiveAction,
    PreemptionAction,
    ResumeAction,
    ResumeDecision,
    SeparateIterations,
    SwapIfItFits,
)
from jaxllm.sched.presets import PRESETS, make_preset
from jaxllm.types import MAX_STAGED_BLOCKS, PrefillChunk, SchedulerOutput, Swap, host_blocks_of


class ConstantCosts:
    """Whatever the size of the work."""

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        return (1.0 if batch else 0.0) + (10.0 if prompt_tokens else 0.0)

    def swap_out_seconds(self, num_blocks):
        return 4.0

    def swap_in_seconds(self, num_blocks):
        return 3.0


def config(**changes):
    limits = {
        "num_gpu_blocks": 2,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_host_blocks": 2,
    }
    return SchedulerConfig(**(limits | changes))


def trace(prompt_lens, output_lens, arrival_times=None):
    arrivals = np.zeros(len(prompt_lens)) if arrival_times is None else arrival_times
    return Trace(
        name="test", seed=0, arrival_times=arrivals, prompt_lens=prompt_lens, output_lens=output_lens
    )


SEPARATE = dataclasses.replace(V1, iterations=SeparateIterations())
SWAP = dataclasses.replace(SEPARATE, action=SwapIfItFits())
TWO = trace([4, 4], [2, 2])  # P r0 r1, D r0 and r1 preempted, D r1 after a swap-in or a prefill


def test_serial_swaps_stop_the_device():
    result = simulate(TWO, config(), SWAP, ConstantCosts(), overlap_swaps=False)
    # 10 prefill, 4 out, 1 decode, 3 in, 1 decode
    assert result.finish_times.tolist() == [15.0, 19.0]
    assert result.seconds == 19.0
    assert result.spent == TimeSpent(prefill=10.0, decode=2.0, swap_stall=7.0)


def test_overlapped_swaps_wait_only_for_their_own_copies():
    result = simulate(TWO, config(), SWAP, ConstantCosts(), overlap_swaps=True)
    # 10 prefill; the copy out runs to 14 beside a decode to 11; r1 is back at 17; 1 decode
    assert result.finish_times.tolist() == [11.0, 18.0]
    assert result.spent == TimeSpent(prefill=10.0, decode=2.0, swap_stall=6.0)


def test_a_copy_in_hides_behind_the_step_before():
    # r1 is out from 10 to 14; r0 decodes six times, to 16; a copy in of 3 s then is ready at 18.
    result = simulate(
        trace([4, 4], [7, 2]), config(num_gpu_blocks=3), SWAP, ConstantCosts(), overlap_swaps=True
    )
    assert result.spent.swap_stall == pytest.approx(result.seconds - 10.0 - result.spent.decode)
    serial = simulate(
        trace([4, 4], [7, 2]), config(num_gpu_blocks=3), SWAP, ConstantCosts(), overlap_swaps=False
    )
    assert result.num_swaps == serial.num_swaps > 0
    assert result.spent.decode == serial.spent.decode
    assert result.spent.swap_stall < serial.spent.swap_stall


class InBackground:
    def choose(self, request, copied_out_at, state, now):
        return ResumeDecision(ResumeAction.IN_BACKGROUND)


def test_a_copy_in_the_background_delays_nobody_but_its_request():
    policy = dataclasses.replace(SWAP, resume=InBackground())
    three = trace([4, 4, 1], [9, 2, 3])
    result = simulate(three, config(num_gpu_blocks=4), policy, ConstantCosts(), overlap_swaps=True)
    assert result.num_swaps > 0
    assert result.spent.swap_stall == 0.0
    serial = simulate(three, config(num_gpu_blocks=4), policy, ConstantCosts(), overlap_swaps=False)
    assert serial.spent.swap_stall == 7.0 * serial.num_swaps


def test_several_decode_steps_take_as_long_as_one_after_another():
    costs = LinearCosts(decode=2.0)
    executor = SimulatedExecutor(costs, num_gpu_blocks=8, block_size=4, overlap_swaps=True)
    request = make_request(0, 3)
    request.num_tokens = 8
    step = executor.execute(SchedulerOutput(0, decode=(request,), num_decode_steps=4, num_context_tokens=5))
    assert executor.now == executor.spent.decode == 4 * 2.0
    assert step.fetch().token_ids == [0] * 4


def copy(handle, num_blocks):
    request = make_request(handle, 4 * num_blocks - 1)
    return Swap(request, handle, tuple(range(num_blocks)), tuple(host_blocks_of(handle, num_blocks)))


@pytest.mark.parametrize("num_blocks", [31, 32, 33, 40, 47, 48, 50, 79])
def test_a_long_copy_out_waits_only_for_the_blocks_that_have_no_room(num_blocks):
    executor = SimulatedExecutor(LinearCosts(), num_gpu_blocks=80, block_size=4, overlap_swaps=True)
    long = copy(0, num_blocks)
    executor.execute(SchedulerOutput(0, swap_out=(long,)))
    assert executor.now == pytest.approx(max(0, num_blocks - MAX_STAGED_BLOCKS))
    assert executor.copies().num_leaving == min(num_blocks, MAX_STAGED_BLOCKS)


def test_copies_out_wait_for_staging_memory():
    def device():
        return SimulatedExecutor(LinearCosts(), num_gpu_blocks=80, block_size=4, overlap_swaps=True)

    executor = device()
    swaps = [copy(handle, 4) for handle in range(10)]
    executor.execute(SchedulerOutput(0, swap_out=tuple(swaps[:8])))  # 32 blocks, until 32.0
    assert (executor.now, executor.copies().num_leaving) == (0.0, 32)
    executor.execute(SchedulerOutput(1, swap_out=tuple(swaps[8:])))
    assert (executor.now, executor.copies().num_leaving) == (8.0, 32)  # the first two have left
    executor.execute(SchedulerOutput(2, swap_in=(swaps[9],)))
    assert executor.now == 40.0 + 4.0

    executor = device()
    long = copy(0, 48)
    executor.execute(SchedulerOutput(0, swap_out=(long,)))
    assert (executor.now, executor.copies().num_leaving) == (16.0, 32)  # one of three pieces


def step_with_copies(tokens, *swaps, decoding=False, waited=100.0):
    """Seconds that a step of a chunk of `tokens` takes after copies out of `swaps` and an idle time."""
    executor = SimulatedExecutor(LinearCosts(decode=8.0), num_gpu_blocks=80, block_size=4, overlap_swaps=True)
    executor.execute(SchedulerOutput(0, swap_out=swaps))
    if decoding:
        executor.wait_until(waited - 8.0)
        executor.execute(SchedulerOutput(1, decode=(make_request(9, 3),), num_context_tokens=3))
    executor.wait_until(waited)
    chunk = PrefillChunk(make_request(8, tokens), 0, tokens, is_last=True)
    executor.execute(SchedulerOutput(2, prefill=(chunk,), swap_in=swaps))
    spent = executor.spent
    assert (spent.prefill, executor.now - waited) == (tokens, pytest.approx(tokens + spent.swap_stall))
    return executor.now - waited


def test_a_step_waits_for_the_copies_of_its_requests():
    assert step_with_copies(4, copy(0, 12)) == pytest.approx(12 + 4)
    assert step_with_copies(4, copy(0, 8), copy(1, 4)) == pytest.approx(12 + 4)


def test_copies_hide_behind_the_step_before():
    assert step_with_copies(4, copy(0, 12), decoding=True) == pytest.approx(4 + 4)


def test_copies_begin_when_the_copies_out_have_ended():
    # Out until 12 and until 16; in from 12 to 28.
    assert step_with_copies(8, copy(0, 12), copy(1, 4), waited=3.0) == pytest.approx(25 + 8)


def test_who_comes_to_an_idle_device_has_copied_nothing_before():
    assert step_with_copies(4, copy(0, 12), waited=50.0) == pytest.approx(12 + 4)


def test_the_ledger_learns_what_was_waited_for():
    ledger = Ledger()
    result = simulate(TWO, config(), SWAP, ConstantCosts(), overlap_swaps=True, ledger=ledger)
    (record,) = ledger.preemptions
    # Out from 10 to 14 and in to 17 beside decodes of 1 s each: one until 11, and r1's own.
    assert record.measured_seconds == result.spent.swap_stall
    assert result.spent.swap_stall == pytest.approx(6.0)


def test_recomputed_tokens_are_accounted_apart():
    result = simulate(TWO, config(), SEPARATE, ConstantCosts(), overlap_swaps=False)
    # 10 prefill, 1 decode, 10 for 4 tokens again and the one that r1 did not decode, which ends it
    assert result.finish_times.tolist() == [11.0, 21.0]
    assert result.spent == TimeSpent(prefill=12.0, recompute=8.0, decode=1.0)
    assert (result.num_steps, result.num_prefill_steps, result.num_prefill_tokens) == (3, 2, 13)
    assert (result.num_preemptions, result.num_swaps, result.mean_decode_batch) == (1, 0, 1.0)


def test_a_prefill_of_several_is_shared_by_tokens():
    # r1 (5 tokens, again) and r2 (5 tokens, new) share the second prefill.
    result = simulate(
        trace([4, 4, 5], [2, 2, 1], [0.0, 0.0, 10.5]),
        config(num_gpu_blocks=4, max_num_seqs=2),
        SEPARATE,
        LinearCosts(),
        overlap_swaps=False,
    )
    spent = result.spent
    assert spent.prefill + spent.recompute == result.num_prefill_tokens


def test_prompt_tokens_cost_what_they_add_to_the_decodes_they_ride_beside():

    class MaxCosts(LinearCosts):
        def step_seconds(self, batch, context, prompt_tokens=0, num_prompts=0, prompt_context=0):
            return max(1.0 * (batch > 0), prompt_tokens / 2.0)

    asked = []

    class Recording(MaxCosts):
        def step_seconds(self, *counts):
            asked.append(counts)
            return super().step_seconds(*counts)

    ledger = Ledger()
    result = simulate(
        trace([4, 3, 2], [6, 3, 2], [0.0, 0.0, 2.6]),
        config(num_gpu_blocks=4, max_num_batched_tokens=8),
        V1,
        Recording(),
        overlap_swaps=False,
        ledger=ledger,
    )
    # Until 3.5 the prompts of r0 and r1. They decode, and r2's prompt adds nothing; it is dropped, and comes
    # back when r1 has ended: two tokens again, and the third.
    seen = [(0, 0, 7, 2, 0), (2, 9), (2, 9, 2, 1, 0), (2, 11), (1, 7), (1, 7, 3, 1, 0), (1, 8), (1, 9)]
    assert asked[-len(seen) :] == seen  # after what it is asked when it is given
    (record,) = ledger.preemptions
    assert record.request_id == "2"
    assert record.measured_seconds == result.spent.recompute == pytest.approx(0.5 * 2 / 3)
    assert result.spent.prefill == pytest.approx(3.5 + 0.5 / 3)
    assert result.spent.decode == 5.0
    assert result.seconds == 9.0


def test_the_clock_waits_for_arrivals_and_starts_with_the_first():
    result = simulate(
        trace([4, 4], [1, 1], [100.0, 130.0]), config(), SWAP, ConstantCosts(), overlap_swaps=True
    )
    assert result.first_scheduled_times.tolist() == [100.0, 130.0]
    assert result.finish_times.tolist() == [110.0, 140.0]
    assert (result.seconds, result.spent) == (40.0, TimeSpent(prefill=20.0, idle=20.0))


def test_figures_by_hand():
    result = simulate(
        trace([4, 4], [1, 1], [0.0, 5.0]), config(), SWAP, ConstantCosts(), overlap_swaps=False
    )  # r1 waits from 5 to 10
    assert result.weighted_turnaround.tolist() == [1.0, 1.5]
    summary = result.summary()
    assert summary["seconds"] == 20.0
    assert summary["output_tokens_per_second"] == summary["requests_per_second"] == 0.1
    assert summary["mean_weighted_turnaround"] == 1.25
    assert summary["mean_latency_seconds"] == 12.5
    assert summary["seconds_spent"]["prefill"] == 20.0


@pytest.mark.parametrize(
    ("policy", "overlap", "measured"),
    [
        (SWAP, False, 7.0),
        (SWAP, True, 6.0),  # out and in, less the step beside them
        (SEPARATE, False, 8.0),
        (SEPARATE, True, 8.0),
    ],
)
def test_the_ledger_learns_what_a_restore_took(policy, overlap, measured):
    ledger = Ledger()
    simulate(TWO, config(), policy, ConstantCosts(), overlap_swaps=overlap, ledger=ledger)
    (record,) = ledger.preemptions
    assert (record.request_id, record.measured_seconds) == ("1", measured)
    assert record.resumed_step_id == 2


def random_trace(seed):
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(5.0, 60.0, 40))
    return trace(rng.integers(1, 30, 40), rng.integers(1, 20, 40), arrivals)


def noisy(seed):
    ratios = {kind: [0.5, 0.9, 1.2, 2.0] for kind in ("prefill", "decode", "swap_out", "swap_in")}
    return Residuals(ratios, seed=seed)


COSTS = LinearCosts(0.01, 0.1, 0.02)


def play(preset, residuals, seed=0, overlap=False):
    policy = make_preset(preset, COSTS) if isinstance(preset, str) else preset
    limits = config(num_gpu_blocks=16, num_host_blocks=20)
    return simulate(random_trace(seed), limits, policy, COSTS, overlap_swaps=overlap, residuals=residuals)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_finishes_every_request_and_accounts_for_every_second(preset, overlap):
    requests = random_trace(0)
    result = play(preset, noisy(0), overlap=overlap)
    assert result.num_output_tokens == requests.output_lens.sum()
    assert np.all(result.arrival_times <= result.first_scheduled_times)
    assert np.all(result.first_scheduled_times < result.finish_times)
    assert result.finish_times.max() == pytest.approx(result.arrival_times[0] + result.seconds)
    assert sum(dataclasses.astuple(result.spent)) == pytest.approx(result.seconds)
    assert result.num_preemptions > 0
    if preset == "vllm":
        assert result.num_swaps == 0
    if preset == "vllm_swap":
        assert result.num_swaps == result.num_preemptions


def test_the_same_seed_gives_the_same_run():
    first, again, other = (play("paper", noisy(seed)).summary() for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_residuals_are_drawn_from_the_ratios_and_stay_with_their_work():
    residuals = Residuals({"swap_in": [0.5, 2.0]}, seed=1)
    drawn = [residuals.ratio("swap_in", key) for key in range(5000)]
    assert set(drawn) == {0.5, 2.0}
    assert 0.45 < drawn.count(0.5) / 5000 < 0.55
    assert [residuals.ratio("swap_in", key) for key in range(5000)] == drawn
    assert [Residuals({"swap_in": [0.5, 2.0]}, seed=2).ratio("swap_in", k) for k in range(5000)] != drawn
    assert residuals.ratio("decode", 3) == 1.0  # no noise


def test_hindsight_knows_the_noise_and_has_no_regret():
    residuals = noisy(5)
    blind = make_preset("paper", COSTS)
    oracle = HindsightAction(AdaptiveAction, COSTS, residuals)

    def regret(action):
        meter = RegretMeter(action, oracle)
        play(dataclasses.replace(blind, action=meter), residuals)
        assert meter.num_decisions > 5
        return meter

    perfect, fallible = regret(oracle), regret(blind.action)
    assert (perfect.num_wrong, perfect.regret_seconds) == (0, 0.0)
    assert perfect.best_seconds > 0
    assert fallible.num_wrong > 0
    assert fallible.regret_seconds > 0


def test_expected_costs_are_between_predictions_and_hindsight():
    """By the distribution of skewed noise less is lost than by predictions that ignore it."""
    residuals = Residuals({"swap_out": [0.2] * 9 + [40.0], "swap_in": [0.2] * 9 + [40.0]}, seed=3)
    blind = make_preset("paper", COSTS)
    oracle = HindsightAction(AdaptiveAction, COSTS, residuals)
    lost = {}
    for name, action in (
        ("expected", ExpectedAction(AdaptiveAction, COSTS, residuals)),
        ("predicted", blind.action),
    ):
        meter = RegretMeter(action, oracle)
        play(dataclasses.replace(blind, action=meter), residuals)
        lost[name] = meter.regret_seconds / meter.num_decisions
    assert 0 < lost["expected"] < lost["predicted"]


class Pools:
    block_size, num_host_free, num_shared, num_on_host = 4, 8, 0, 0


def test_expected_costs_are_the_means_of_all_ratios():
    """Of 3 blocks, 1 s each either way, and a prefill of 11 tokens, 1 s each."""
    ratios = {"swap_out": [1.0] * 9 + [11.0], "swap_in": [0.5, 1.5], "prefill": [2.0], "decode": [9.0]}
    victim = make_request(0, 10)
    victim.num_computed_tokens = 10
    every = ExpectedAction(AdaptiveAction, LinearCosts(), Residuals(ratios))
    decision = every.choose(victim, Pools, 0.0)
    assert decision[1:] == pytest.approx((3 * 2.0 + 3 * 1.0, 11 * 2.0, 3 * 2.0))
    assert decision.action is PreemptionAction.SWAP
    second = ExpectedAction(AdaptiveAction, LinearCosts(), Residuals(ratios), max_draws=5)  # of the ten
    assert second.choose(victim, Pools, 0.0)[1:] == pytest.approx((3 * 1.0 + 3 * 0.5, 11 * 2.0, 3 * 1.0))
    assert Residuals(ratios).ratios("swap_in") == (0.5, 1.5)
    assert Residuals(ratios).ratios("mixed") == (1.0,)


def test_without_noise_expected_costs_are_hindsight():
    residuals = Residuals({})
    expected = ExpectedAction(AdaptiveAction, COSTS, residuals)
    meter = RegretMeter(expected, HindsightAction(AdaptiveAction, COSTS, residuals))
    play(dataclasses.replace(make_preset("paper", COSTS), action=meter), residuals)
    assert meter.num_decisions > 5
    assert (meter.num_wrong, meter.regret_seconds) == (0, 0.0)


def test_hindsight_names_the_residuals_that_are_charged():
    """A swapped victim's copies take what the oracle said they would."""
    residuals = noisy(7)
    ledger, seen = Ledger(), {}

    class Spy:
        def choose(self, victim, state, now):
            decision = SWAP.action.choose(victim, state, now)
            hindsight = HindsightAction(AdaptiveAction, ConstantCosts(), residuals)
            seen[key_of(victim, 1)] = hindsight.choose(victim, state, now).swap_seconds
            return decision

    simulate(
        TWO,
        config(),
        dataclasses.replace(SWAP, action=Spy()),
        ConstantCosts(),
        overlap_swaps=False,
        residuals=residuals,
        ledger=ledger,
    )
    assert [record.measured_seconds for record in ledger.preemptions] == list(seen.values())


@pytest.mark.parametrize("ratios", [[], [0.0], [-1.0], [float("nan")], [float("inf")], [[1.0]]])
def test_ratios_are_checked(ratios):
    with pytest.raises(ConfigError, match="ratios of 'decode' must be positive"):
        Residuals({"decode": ratios})


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(RequestTooLargeError):
        simulate(trace([9], [9]), config(), SWAP, ConstantCosts(), overlap_swaps=False)


def test_files_are_read_and_written_one_after_another():
    one, two, three = names_of(range(12), 4, b"")
    files = SimulatedFiles(2, 10.0, 5.0)
    files.write([one, two], 1.0)
    assert files.read([one], 0.0) == (5.0, [True])  # written at 3, read in 2
    assert files.read([three, two], 5.0) == (7.0, [False, True])
    files.write([three], 5.0)  # of `one`, which was read first, nothing is left
    assert (one in files, two in files, three in files, len(files)) == (False, True, True, 2)
    with pytest.raises(ConfigError, match="must be positive"):
        SimulatedFiles(0, 1.0, 1.0)


@pytest.mark.parametrize("preset", ["cached_attention", "adaptive"])
def test_what_host_memory_has_no_room_for_is_found_in_files(preset):
    turns = make_conversations(8, mean_think=50.0, max_len=600, arrivals=Poisson(0.2), seed=2)
    costs = LinearCosts(prefill=1e-2, decode=1e-2, swap=1e-4)
    limits = config(num_gpu_blocks=160, num_host_blocks=160, enable_prefix_caching=True, max_model_len=601)
    results = [
        simulate(turns, limits, make_preset(preset, costs), costs, overlap_swaps=True, files=files)
        for files in (None, SimulatedFiles(10**6, 1.0, 1e4))
    ]
    without, with_files = results
    assert without.num_disk_cached_tokens == 0 < with_files.num_disk_cached_tokens
    assert with_files.num_cached_tokens > without.num_cached_tokens
    assert with_files.num_prefill_tokens < without.num_prefill_tokens


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("inf"), None, "1"])
@pytest.mark.parametrize("method", ["step_seconds", "swap_out_seconds", "swap_in_seconds"])
def test_costs_that_are_no_seconds_are_refused_by_name(method, seconds):
    class Broken(ConstantCosts):
        pass

    setattr(Broken, method, lambda self, *work: seconds)
    with pytest.raises(ConfigError, match=rf"Broken.{method}\(.*\) is {seconds!r}: it must be seconds"):
        simulate(TWO, config(), SWAP, Broken(), overlap_swaps=False)


def test_costs_and_policies_that_raise_are_named_by_what_they_were_asked():
    class Breaks(ConstantCosts):
        num_asked = 0

        def swap_out_seconds(self, num_blocks):
            self.num_asked += 1
            if self.num_asked > 3:  # which probe it
                raise LookupError("no such size")
            return 1.0

    said = r"Breaks.swap_out_seconds\(\d+\) raised LookupError: no such size"
    with pytest.raises(
        UserCodeError, match=rf"{said} .*, asked by AdaptiveAction.choose, about request '1'; mend it"
    ):
        simulate(TWO, config(), "paper_strategy", Breaks(), overlap_swaps=False)

    class Gives:
        def choose(self, victim, state, now):
            raise LookupError("no choice")

    for policy in (dataclasses.replace(SWAP, action=Gives()), VLLM025(action=Gives())):
        with pytest.raises(UserCodeError, match=r"Gives.choose raised LookupError: no .*about request '1'$"):
            simulate(TWO, config(), policy, ConstantCosts(), overlap_swaps=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "simulate: missing a required argument: 'trace'; pass a Trace, a SchedulerConfig, a policy and"),
        ({"trace": TWO}, "missing a required argument: 'config'"),
        ({"trace": TWO, "policies": "vllm"}, "jaxllm.research.simulate makes these of a model"),
        ({"policy": 3}, "3 is no policy's name: pass one of adaptive"),
        ({"costs": "roofline"}, "has no step_seconds"),
        ({"overlap_swaps": 1}, "must be True or False, got 1"),
        ({"async_scheduling": "no"}, "must be True or False, got 'no'"),
        (
            {"residuals": {}},
            "residuals={} must be None, or a value of jaxllm.research.simulator.truth.Residuals",
        ),
        ({"ledger": "l.jsonl"}, "ledger='l.jsonl' must be None, or a value of jaxllm.sched.ledger.Ledger"),
        (
            {"drafts": {"acceptance": 1}},
            "must be None, or a value of jaxllm.research.simulator.drafting.SimulatedDrafts",
        ),
        (
            {"calibration": ConstantCosts()},
            "must be None, or a value of jaxllm.predictors.online.OnlineCalibration",
        ),
        ({"files": "folder"}, "must be None, or a value of jaxllm.research.simulator.files.SimulatedFiles"),
        ({"scheduler": "adaptive"}, "must be None, or a value of jaxllm.sched.scheduler.Scheduler"),
        ({"priorities": [1]}, "priorities=[1] must have a number for each of the 2 requests"),
        ({"deadlines": ["a", 1.0]}, "one of deadlines must be a number, got 'a'"),
        ({"ingress_seconds": "a"}, "ingress_seconds must be a number"),
    ],
)
def test_arguments_that_are_missing_or_of_another_kind_are_named(given, message):
    full = {"trace": TWO, "config": config(), "policy": SWAP, "costs": ConstantCosts(), "overlap_swaps": True}
    arguments = given if "trace" in given or not given else full | given
    with pytest.raises(ConfigError) as caught:
        simulate(**arguments)
    assert message in str(caught.value)
