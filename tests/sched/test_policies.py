"""Scheduling policies, one by one and plugged into a scheduler."""

import dataclasses
import math

import pytest
from scheduler_helpers import (
    V1,
    LinearCosts,
    describe,
    holder,
    make_request,
    make_scheduler,
    pools,
    step,
)

from jaxllm.errors import ConfigError, UserCodeError
from jaxllm.predictors.programs import ProgramCosts, ProgramSizes
from jaxllm.sched.plan import ask_action
from jaxllm.sched.policies import (
    AdaptiveAction,
    AlwaysRecompute,
    Decision,
    EarliestDeadline,
    FairPriority,
    FairTurns,
    FCFSPriority,
    IterationState,
    LatestArrivalVictim,
    LeastUrgentVictim,
    LeastWorkLeft,
    MixedIterations,
    MoreUrgentFirst,
    MultiLevelFeedback,
    OutrankedVictim,
    PacedIterations,
    PreemptionAction,
    PriorityClasses,
    ResumeAtOnce,
    ResumeFirst,
    SchedulerPolicy,
    SeparateIterations,
    ShortestJob,
    SwapIfItFits,
    WatermarkAdmission,
)
from jaxllm.sched.presets import make_preset

RECOMPUTE, SWAP = PreemptionAction.RECOMPUTE, PreemptionAction.SWAP


def test_defaults_are_those_of_todays_vllm_with_a_bound_on_waiting():
    assert SchedulerPolicy() == SchedulerPolicy(
        priority=FCFSPriority(),
        admission=WatermarkAdmission(0.0),
        iterations=MixedIterations(),
        victim=LatestArrivalVictim(),
        action=AlwaysRecompute(),
        resume=ResumeAtOnce(),
        restore=ResumeFirst(skips=False),
        length=None,
        patience=1024,
    )


def test_policies_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        WatermarkAdmission().watermark = 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerPolicy().victim = LatestArrivalVictim()


@pytest.mark.parametrize("patience", [0, -1, 1.5, True, "4"])
def test_patience_is_checked(patience):
    with pytest.raises(ConfigError, match="patience must be None or an integer of at least 1"):
        SchedulerPolicy(patience=patience)


@pytest.mark.parametrize("share", [0, -0.1, True, "0.1", float("nan"), float("inf")])
def test_extra_waits_are_checked(share):
    with pytest.raises(ConfigError, match="max_extra_wait must be None or a positive number"):
        SchedulerPolicy(max_extra_wait=share)


# Priorities


def test_fcfs_scores_all_the_same():
    requests = [make_request(0, 3), make_request(1, 2)]
    assert {FCFSPriority().score(request, 5.0) for request in requests} == {0.0}
    assert len({FCFSPriority().group(request) for request in requests}) == 1


def test_fair_priority_is_waiting_time_over_length():
    request = make_request(2, 4)  # arrived at 2.0
    assert FairPriority().score(request, 10.0) == 2.0
    request.num_tokens = 16
    assert FairPriority().score(request, 10.0) == 0.5


def test_fair_turns_is_waiting_time_over_the_mean_of_a_length_and_what_a_turn_does_not_find():
    request = make_request(2, 16)  # arrived at 2.0
    request.num_findable_tokens = 12
    assert FairTurns().score(request, 10.0) == FairPriority().score(request, 10.0) == 0.5
    assert FairTurns().group(request) == FairPriority().group(request) == 16
    request.program_arrival_time = 1.0
    assert FairTurns().score(request, 10.0) == 1.0
    assert FairTurns().group(request) == 8
    request.num_findable_tokens = 0
    assert FairTurns().group(request) == 16


def test_classes_and_deadlines_go_in_the_users_order():
    requests = [make_request(i, 2, priority=p, deadline=d) for i, (p, d) in enumerate([(3, None), (-1, 9.0)])]
    assert [PriorityClasses().score(one, 5.0) for one in requests] == [-3.0, 1.0]
    assert [EarliestDeadline().score(one, 5.0) for one in requests] == [-math.inf, -9.0]
    assert (PriorityClasses().reads, EarliestDeadline().reads) == (("priority",), ("deadline",))


def test_predicted_outputs_order_jobs_and_those_without_come_last():
    unknown, short, long = (make_request(i, 4) for i in range(3))
    short.predicted_tokens, long.predicted_tokens = 10.0, 30.0
    for policy in (ShortestJob(), LeastWorkLeft()):
        scores = [policy.score(request, 0.0) for request in (short, long, unknown)]
        assert scores == sorted(scores, reverse=True)
    long.num_tokens = 4 + 25
    assert (ShortestJob().score(long, 0.0), LeastWorkLeft().score(long, 0.0)) == (-30.0, -5.0)
    long.num_tokens = 4 + 40  # it has outlived its prediction
    assert LeastWorkLeft().score(long, 0.0) == -40.0


def test_the_feedback_queue_skips_levels_and_demotes_to_the_last():
    costs = LinearCosts(prefill=1.0, decode=2.0)  # a prompt token takes half an iteration
    policy = MultiLevelFeedback(costs, quantum=4, ratio=2, num_levels=3)  # quanta 4, 8, 16
    request = make_request(0, 4, max_new_tokens=100)  # its prefill counts as 2 iterations
    levels = []
    for generated in range(30):
        request.num_tokens = 4 + generated
        levels.append(policy.level(request))
    assert levels == [0] * 3 + [1] * 8 + [2] * 19
    assert policy.level(make_request(0, 12)) == 1  # 6 iterations: it skips the first queue
    assert policy.level(make_request(0, 100)) == 2
    assert policy.score(request, 0.0) == -2.0
    for bad in ({"quantum": 0}, {"ratio": 1}, {"num_levels": 0}):
        with pytest.raises(ConfigError, match="must lie in"):
            MultiLevelFeedback(costs, **bad)


# Victims


def test_the_latest_arrival_is_the_victim():
    assert len({LatestArrivalVictim().score(make_request(i, 3), 5.0) for i in range(3)}) == 1
    assert LatestArrivalVictim().outranks is None


def test_the_least_urgent_is_the_victim():
    policy = LeastUrgentVictim()
    assert policy.score(make_request(0, 40), 5.0) < policy.score(make_request(1, 2), 5.0)
    assert policy.outranks is None


def test_a_more_urgent_request_outranks_by_a_margin():
    urgent, other = make_request(0, 2, priority=1), make_request(1, 2, priority=3)
    assert OutrankedVictim(PriorityClasses()).outranks(urgent, other, 0.0)
    assert OutrankedVictim(PriorityClasses(), margin=1.5).outranks(urgent, other, 0.0)
    assert not OutrankedVictim(PriorityClasses(), margin=2.0).outranks(urgent, other, 0.0)
    assert not OutrankedVictim(PriorityClasses()).outranks(other, urgent, 0.0)


def test_an_outranked_request_gives_its_room_up_at_once():
    policy = SchedulerPolicy(
        priority=PriorityClasses(), victim=OutrankedVictim(PriorityClasses()), action=SwapIfItFits()
    )
    scheduler = make_scheduler(policy, num_gpu_blocks=4, num_host_blocks=4)
    for index, priority in enumerate((1, 2)):
        scheduler.add(make_request(index, 8, max_new_tokens=1 + index, priority=priority))
    assert step(scheduler) == "| r0[0:8]! r1[0:8]!"
    # r0's two blocks are free, of which r1 needs one next: r2's three are there once r1's two are.
    scheduler.add(make_request(2, 12, max_new_tokens=1, priority=1))
    assert step(scheduler) == "| r2[0:12]! <r1"
    assert step(scheduler) == "r1 >r1"


def test_who_went_past_a_long_request_gives_it_the_room_back():
    policy = dataclasses.replace(make_preset("flashgen"), patience=None)
    scheduler = make_scheduler(policy, num_gpu_blocks=7)
    requests = [make_request(0, 8, 2), make_request(1, 24, 2), make_request(2, 4, 9), make_request(3, 4, 9)]
    for request in requests:
        scheduler.add(request)
    assert step(scheduler) == "| r0[0:8]! r2[0:4]! r3[0:4]!"
    assert step(scheduler) == "r0 r2 r3"
    # Of seven blocks r1 needs six, and those who came after it have four.
    assert step(scheduler) == "| r1[0:24]! -r3 -r2"


# Iterations


@dataclasses.dataclass(frozen=True)
class RidingCosts(LinearCosts):
    """Prompt tokens cost 1 s each up to `shadow` times what the decodes take, and 10 s beyond."""

    shadow: float = 0.0

    def step_seconds(self, batch, context_tokens, prompt_tokens=0, num_prompts=0, prompt_context=0):
        """See the class."""
        alone = self.decode * batch
        riding = min(prompt_tokens, self.shadow * alone)
        return alone + riding + 10 * (prompt_tokens - riding)


def iteration(decodes=0, context=0, backlog=0, budget=64):
    return IterationState(decodes, context, backlog, budget)


def test_mixed_iterations_leave_prompts_what_decodes_do_not_need():
    assert MixedIterations().num_prompt_tokens(iteration(decodes=10, backlog=5)) == 54
    assert SeparateIterations().num_prompt_tokens(iteration(decodes=10, backlog=5)) == 64
    assert (MixedIterations().mixes, SeparateIterations().mixes) == (True, False)


@pytest.mark.parametrize(
    ("decodes", "backlog", "tokens"),
    [
        (0, 1000, 64),  # nobody is slowed down
        (10, 54, 20),  # a decode takes 2 s, a prompt token 1 s: as long again
        (10, 16 * 25, 25),  # a sixteenth of the backlog
        (10, 10000, 54),  # the budget
        (30, 30, 34),
    ],
)
def test_paced_iterations_bound_the_slowdown_until_the_backlog_is_too_long(decodes, backlog, tokens):
    """A decode takes 2 s, a prompt token 1 s in the shadow of the decodes, and 10 s beyond it."""
    policy = PacedIterations(RidingCosts(decode=2.0, shadow=1.6), slowdown=2.0, horizon=16)
    assert policy.num_prompt_tokens(iteration(decodes, 0, backlog)) == tokens


def test_pacing_finds_the_largest_number_of_tokens_within_the_bound():
    for slowdown in (1.5, 3.0):
        policy = PacedIterations(RidingCosts(decode=10.0, shadow=2 * (slowdown - 1)), slowdown=slowdown)
        asked = iteration(decodes=7, backlog=400, budget=1000)
        assert policy.num_prompt_tokens(asked) == int((slowdown - 1) * 70)
    for bad in ({"slowdown": 1.0}, {"slowdown": math.inf}, {"horizon": 0}):
        with pytest.raises(ConfigError, match="must be above 1 and finite"):
            PacedIterations(LinearCosts(), **bad)


def test_where_nothing_rides_for_less_all_rides():
    """Pacing is for devices whose memory is busy and whose arithmetic is not."""
    linear = PacedIterations(LinearCosts(prefill=1.0, decode=2.0), slowdown=2.0)
    assert linear.num_prompt_tokens(iteration(10, 0, 30)) == 30
    assert linear.num_prompt_tokens(iteration(10, 0, 300)) == 54
    # Programs of 16 and 64 rows: whatever does not fit the smaller is as dear as all.
    programs = ProgramCosts(LinearCosts(prefill=1.0, decode=1.0), ProgramSizes([16], [16, 64], [2, 8]))
    paced = PacedIterations(programs, slowdown=1.5)
    assert paced.num_prompt_tokens(iteration(16, 0, 40)) == 40
    assert paced.num_prompt_tokens(iteration(10, 0, 40)) <= 6  # they ride where padding would be


class Backlog:
    """Notes what it is told of the backlog."""

    mixes = True

    def __init__(self):
        self.seen = []

    def num_prompt_tokens(self, state):
        self.seen.append(state.num_backlog_tokens)
        return 10


def test_only_prompts_that_there_are_blocks_for_press():
    backlog = Backlog()
    policy = SchedulerPolicy(iterations=backlog, restore=ResumeFirst())
    scheduler = make_scheduler(policy, num_gpu_blocks=8)  # of 4 tokens
    for index, num_tokens in enumerate((12, 6, 26)):
        scheduler.add(make_request(index, num_tokens, max_new_tokens=3))
        trace = step(scheduler)
    # 12 of 32; 2 under way and 6 for which there is room; 26 that wait, with 3 blocks left
    assert backlog.seen == [12, 2 + 6, 3 * 4]
    assert trace == "r0 r1"


# Actions


def test_always_recompute():
    assert AlwaysRecompute().choose(holder(0, 8, 2), pools(num_host_free=9), 0.0) == Decision(RECOMPUTE)


@pytest.mark.parametrize(("num_host_free", "action"), [(1, RECOMPUTE), (2, SWAP), (3, SWAP)])
def test_swap_if_it_fits(num_host_free, action):
    state = pools(num_host_free=num_host_free)
    assert SwapIfItFits().choose(holder(0, 8, 2), state, 0.0) == Decision(action)
    decision = SwapIfItFits(LinearCosts(swap=3.0)).choose(holder(0, 8, 2), state, 0.0)
    assert decision == Decision(action, copy_seconds=6.0)


@pytest.mark.parametrize(
    ("swap", "num_host_free", "action"),
    [
        (1.9, 2, SWAP),  # 2 blocks x 2 directions x 1.9 s < 8 tokens x 1 s
        (1.9, 1, RECOMPUTE),
        (2.0, 2, RECOMPUTE),  # a tie
        (2.1, 2, RECOMPUTE),
    ],
)
def test_adaptive_takes_the_cheaper_action_that_fits(swap, num_host_free, action):
    policy = AdaptiveAction(LinearCosts(prefill=1.0, swap=swap))
    decision = policy.choose(holder(0, 8, 2), pools(num_host_free=num_host_free), 0.0)
    assert decision == Decision(action, 4 * swap, 8.0, 2 * swap)


def test_adaptive_drops_what_holds_no_kv():
    victim = holder(0, 8, 2)
    victim.num_computed_tokens = 0
    found = AdaptiveAction(LinearCosts(swap=0.1)).choose(victim, pools(num_host_free=9), 0.0)
    assert found == Decision(RECOMPUTE, 0.0, 0.0)


# Order of returns and starts


def test_the_more_urgent_set_goes_first():
    urgent, middling, patient = make_request(0, 1), make_request(0, 2), make_request(0, 3)
    swaps_in = MoreUrgentFirst().swaps_in
    assert swaps_in([patient], [urgent], 6.0)
    assert not swaps_in([urgent], [patient], 6.0)
    assert swaps_in([middling], [middling], 6.0)  # a tie
    assert swaps_in([middling], [patient, urgent], 6.0)  # their mean is 4, its score 3


def test_resume_first():
    assert ResumeFirst().swaps_in([make_request(0, 3)], [make_request(1, 3)], 0.0)


# Admission


@pytest.mark.parametrize(
    ("watermark", "needed", "free", "total", "admitted"),
    [
        (0.01, 3, 4, 128, True),  # int(1.28) = 1 block left
        (0.01, 4, 4, 128, False),
        (0.01, 4, 4, 99, True),  # int(0.99) = 0
        (0.0, 4, 4, 128, True),
        (0.5, 14, 20, 12, True),
        (0.5, 15, 20, 12, False),
    ],
)
def test_watermark(watermark, needed, free, total, admitted):
    policy = WatermarkAdmission(watermark)
    assert policy.admits(make_request(0, 3), needed, pools(free, total)) is admitted


@pytest.mark.parametrize("watermark", [-0.01, 1.0, float("nan")])
def test_watermark_is_checked_on_both_sides(watermark):
    with pytest.raises(ConfigError, match=r"watermark must lie in \[0, 1\)"):
        WatermarkAdmission(watermark)


class ShortestFirst:
    def score(self, request, now):
        return -request.num_tokens

    def group(self, request):
        return request.num_tokens


class OldestVictim:
    def score(self, request, now):
        return request.arrival_index

    def outranks(self, queued, holder, now):
        return False


class Answer:
    def __init__(self, answer):
        self.answer = answer

    def choose(self, *question):
        return self.answer


def test_a_priority_policy_orders_starts_and_a_victim_policy_picks_any_holder():
    policy = dataclasses.replace(V1, priority=ShortestFirst(), victim=OldestVictim())
    scheduler = make_scheduler(policy, num_gpu_blocks=3, max_num_batched_tokens=8)
    for index, length in enumerate([6, 4, 3]):
        scheduler.add(make_request(index, length, max_new_tokens=5))
    trace = []
    for _ in range(3):
        trace.append(describe(scheduler.schedule(0.0)))
        scheduler.check()
    assert trace == [
        "| r2[0:3]! r1[0:4]!",
        "r1 r2",  # r1 takes the last block; decodes go by arrival
        "r2 -r1",  # r2 needs a second block, and r1 is the older one
    ]


def full(policy, **limits):
    """A scheduler in which the next iteration must preempt."""
    scheduler = make_scheduler(policy, num_gpu_blocks=3, **limits)
    scheduler.add(make_request(0, 4))
    scheduler.add(make_request(1, 8, max_new_tokens=2))
    scheduler.schedule(0.0)
    return scheduler


class Scored(OldestVictim):
    def __init__(self, answer):
        self.answer = answer

    def score(self, request, now):
        return self.answer


@pytest.mark.parametrize("answer", [None, math.nan, "1"])
def test_a_victim_score_must_be_a_number(answer):
    scheduler = full(dataclasses.replace(V1, victim=Scored(answer)))
    with pytest.raises(ConfigError, match="which is not a number"):
        scheduler.schedule(0.0)


@pytest.mark.parametrize("answer", ["swap", SWAP, Decision("swap"), None])
def test_an_unknown_action_is_refused(answer):
    scheduler = full(dataclasses.replace(V1, action=Answer(answer)))
    with pytest.raises(ConfigError, match="is not a Decision"):
        scheduler.schedule(0.0)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, "1"])
def test_predictions_must_be_seconds(seconds):
    scheduler = full(dataclasses.replace(V1, action=Answer(Decision(RECOMPUTE, swap_seconds=seconds))))
    with pytest.raises(ConfigError, match=r"predicted .* predict seconds of at least 0, or None"):
        scheduler.schedule(0.0)


def test_a_swap_beyond_the_host_pool_becomes_a_recompute():
    scheduler = full(dataclasses.replace(V1, action=Answer(Decision(SWAP))), num_host_blocks=1)
    output = scheduler.schedule(0.0)
    assert (describe(output), output.num_swapped) == ("r0 -r1", 0)


def test_who_has_computed_nothing_is_not_swapped():
    nobody = holder(0, 1, 1)
    for policy in (SwapIfItFits(), Answer(Decision(SWAP))):
        assert ask_action(policy, nobody, pools(num_host_free=3), 3, 0.0).action is RECOMPUTE


def test_nor_is_who_has_no_room_left_by_earlier_victims():
    victim = holder(0, 4, 1)
    state = pools(num_on_host=1)
    assert SwapIfItFits().choose(victim, state, 0.0).action is SWAP  # there is nothing to copy
    assert ask_action(SwapIfItFits(), victim, state, -3, 0.0).action is RECOMPUTE


class WrongTokens(MixedIterations):
    def num_prompt_tokens(self, state):
        return -1


def test_an_iteration_policy_must_answer_a_number_of_tokens():
    scheduler = make_scheduler(dataclasses.replace(V1, iterations=WrongTokens()))
    scheduler.add(make_request(0, 4))
    with pytest.raises(ConfigError, match="lets -1 prompt tokens ride"):
        scheduler.schedule(0.0)


class FailsSecond:
    def __init__(self):
        self.calls = 0

    def choose(self, victim, state, now):
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError
        return Decision(SWAP)


def test_whatever_a_policy_raises_changes_nothing():
    policy = dataclasses.replace(V1, action=FailsSecond())
    scheduler = make_scheduler(policy, num_gpu_blocks=3, num_host_blocks=3)
    requests = [make_request(index, 4) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    assert step(scheduler) == "| r0[0:4]! r1[0:4]! r2[0:4]!"
    with pytest.raises(
        UserCodeError, match=r"FailsSecond.choose raised ZeroDivisionError: .* about request 'r1'"
    ):
        scheduler.schedule(0.0)  # r1 would be the second victim
    scheduler.check()
    assert [(r.num_tokens, r.num_computed_tokens, len(r.block_ids)) for r in requests] == [(5, 4, 1)] * 3
    assert scheduler.num_scheduled == 1
    assert step(scheduler) == "r0 <r2 <r1"
