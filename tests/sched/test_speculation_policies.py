"""How many drafts are verified: policies, what they measure, and how likely drafts are right."""

import itertools

import numpy as np
import pytest
from scheduler_helpers import make_request, make_scheduler, take

from jaxllm.engine.scheduling import UnknownCosts
from jaxllm.sched.acceptance import Acceptance, Chance
from jaxllm.sched.policies.regimes import Regime
from jaxllm.sched.policies.speculation import AsProposed, BelowBatch, ByCost, IterationRows, VerifyingWork
from jaxllm.sched.proposers.ngram import PromptLookup
from jaxllm.sched.speculation import Speculation
from jaxllm.types import PrefillChunk, RequestStatus, SchedulerOutput

MOST = 8


def learning(policy=None):
    return Speculation(PromptLookup(1, 2), policy or AsProposed(), MOST, 32)


def test_none_from_a_batch_size_on():
    policy = BelowBatch(4, AsProposed())
    assert policy.is_worth_asking(3)
    assert not policy.is_worth_asking(4)


MEASURED = {1: 1.0, 2: 1.09, 4: 1.21, 8: 1.30, 16: 1.54, 32: 1.89, 64: 3.24, 128: 6.0, 640: 30.0}
"""What steps of so many rows take, relative, of a small model on two cores of a processor."""


FLAT = {1: 1.0, 64: 1.05, 256: 1.3, 512: 2.0, 640: 2.4}
"""Where more rows cost little, as on GPUs."""
MOST_ROWS = 512


def tokens_a_second(policy, batch, rate, table, num_steps=1600, seed=5):
    """Of requests whose drafts are right with a probability each, in steps that take what a table says."""
    random, tokens, seconds, places = np.random.default_rng(seed), 0, 0.0, np.arange(MOST)
    for step in range(num_steps):
        counts = np.zeros(batch, int)
        if policy.is_worth_asking(batch):
            rows = IterationRows(batch, batch * 100, 0, MOST_ROWS)
            counts = np.array(policy.num_drafts([MOST] * batch, [Chance(rate, rate)] * batch, rows))
        took = float(np.interp(batch + counts.sum(), list(table), list(table.values())))
        took *= random.uniform(0.9, 1.1)
        is_right = (random.random((batch, MOST)) < rate) & (places < counts[:, None])
        kept = batch + int(np.cumprod(is_right, axis=1).sum())
        policy.observe(VerifyingWork(batch, int((counts > 0).sum()), int(counts.sum())), 1, kept, took)
        if step >= num_steps // 2:
            seconds += took
            tokens += kept
    return tokens / seconds


class Fixed(AsProposed):
    def __init__(self, count):
        self.count = count

    def num_drafts(self, proposed, acceptance, iteration):
        return [self.count] * len(proposed)


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("table", [MEASURED, FLAT], ids=["processor", "flat"])
def test_by_cost_is_as_good_as_the_best_fixed_number(batch, rate, table):
    """Though nothing tells it what steps take but the steps themselves."""
    best = max(tokens_a_second(Fixed(count), batch, rate, table) for count in (0, 3, 5, 8))
    assert tokens_a_second(ByCost(UnknownCosts()), batch, rate, table) > 0.97 * best


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("table", [MEASURED, FLAT], ids=["processor", "flat"])
def test_by_cost_follows_loads_that_change(seed, table):
    """Of all that came before nothing holds it in a way that pays no more, be it in debt or not."""
    random, policy = np.random.default_rng(seed), ByCost(UnknownCosts())
    for _ in range(6):
        batch, rate = int(random.choice([1, 8, 64])), float(random.choice([0.05, 0.3, 0.6, 0.95]))
        policy.begun(float(random.choice([0.0, 30.0])))
        best = max(tokens_a_second(Fixed(count), batch, rate, table) for count in (0, 3, 5, 8))
        assert tokens_a_second(policy, batch, rate, table, seed=seed) > 0.93 * best, (batch, rate)


@pytest.mark.parametrize("seconds", list(itertools.permutations([1.0, 1.05, 2.0])))
def test_the_fastest_way_is_taken_nearly_always(seconds):
    """And the others are tried, ever more rarely."""
    regime, random = Regime(3), np.random.default_rng(3)

    def taken(seconds):
        ways = []
        for _ in range(4000):
            ways.append(regime.way)
            regime.observe(8, seconds[regime.way] * random.uniform(0.99, 1.01))
        return ways

    ways = taken(seconds)
    assert np.mean(np.array(ways[1000:]) == np.argmin(seconds)) > 0.95
    assert set(ways[1000:]) == {0, 1, 2}
    ways = taken(seconds[::-1])  # and now another one is
    assert np.mean(np.array(ways[-2000:]) == np.argmin(seconds[::-1])) > 0.95


def test_a_way_that_has_become_the_slowest_is_left_though_all_are_faster():
    """What is known of the others is of another load."""
    regime = Regime(3)
    for _ in range(400):
        regime.observe(8, (1.0, 2.0, 2.0)[regime.way])
    assert regime.way == 0
    ways = []
    for number in range(1600):
        if number == 4:  # so it is predicted
            regime.decline()
            assert regime.way == 2
        ways.append(regime.way)
        regime.observe(8, (0.8, 0.4, 0.4)[regime.way])
    assert np.mean(np.array(ways[4:]) == 0) < 0.02


@pytest.mark.parametrize("usual", range(3))
def test_of_ways_that_are_alike_the_usual_one_is_taken(usual):
    regime, random, ways = Regime(3, usual=usual), np.random.default_rng(3), []
    for _ in range(4000):
        ways.append(regime.way)
        regime.observe(8, random.uniform(0.9, 1.1))
    assert np.mean(np.array(ways[400:]) == usual) > 0.85


def test_that_another_way_has_become_the_fastest_is_noticed_soon():
    regime, ways = Regime(3), []
    for seconds in (3.0, 0.6):
        for _ in range(20_000):
            ways.append(regime.way)
            regime.observe(8, (seconds, 1.0, 1.0)[regime.way])
    assert 0 < ways[20_000:].index(0) < 4 * 66, "windows of four"
    assert np.mean(np.array(ways[20_600:]) == 0) > 0.9


def test_of_one_request_alone_all_drafts_are_the_usual_way():
    """There is no other one whose drafts are likelier."""
    policy = ByCost(UnknownCosts())
    assert [policy._regime(count)._usual for count in (1, 2, 8)] == [0, 2, 2]


def test_a_slow_way_is_not_tried_for_long():
    """As long as the best takes for a trial and another, not until it has done as much."""
    regime, wasted = Regime(3), []
    for _ in range(2000):
        wasted.append(regime.way == 1)
        regime.observe(1, 50.0 if regime.way == 1 else 1.0)
    of_trials = [len(list(trial)) for is_slow, trial in itertools.groupby(wasted) if is_slow]
    assert len(of_trials) > 1
    assert set(of_trials[1:]) == {2}  # the first one after a change is not counted


def test_where_much_is_known_other_ways_are_tried_later():
    regime, ways = Regime(3, begins_with_last=True), []
    for _ in range(40):
        ways.append(regime.way)
        regime.observe(8, 1.0, barred=(0,))
    assert set(ways) == {1, 2}
    for _ in range(40):
        ways.append(regime.way)
        regime.observe(8, 1.0)
    assert set(ways) == {0, 1, 2}


def test_a_way_that_is_declined_waits_for_a_while():
    regime, num_tried = Regime(2), 0
    for _ in range(2000):
        if regime.way == 0:
            num_tried += 1
            regime.decline()
        assert regime.way == 1
        regime.observe(8, 1.0)
    assert 20 < num_tried < 40


def test_all_drafts_are_not_tried_where_they_are_said_to_lose_much():
    """By `UnknownCosts` 64 rows more make a step of 8 take 2.6 times as long."""
    for rate, is_tried in ((0.9, True), (0.05, False)):
        policy = ByCost(UnknownCosts())
        counts = policy.num_drafts([8] * 8, [Chance(rate, rate)] * 8, IterationRows(8, 800, 0, 200))
        assert (counts == [8] * 8) == is_tried
        assert (policy._regime(8).way == 0) == is_tried
        assert policy._regime(32).way != 0, "of other sizes predictions are good enough to begin with"


def test_where_drafts_stop_paying_all_of_them_are_left_at_once():
    """Though that was the fastest by far, and whatever is owed."""
    policy, iteration = ByCost(Cheap()), IterationRows(8, 800, 0, 200)

    def run(chance, count):
        taken = []
        for _ in range(count):
            (num_drafts, *_) = policy.num_drafts([8] * 8, [chance] * 8, iteration)
            if policy._regime(8).way == 1:
                num_drafts = 0
            taken.append(num_drafts)
            work = VerifyingWork(8, 8 * (num_drafts > 0), 8 * num_drafts, num_drafts)
            num_tokens = 8 * (1 + chance.expected(num_drafts))
            policy.observe(work, 1, num_tokens, 0.01 * (1 + 0.4 * num_drafts))
        return taken

    assert np.mean(run(Chance(0.99, 0.99), 400)) > 4
    assert np.mean(run(Chance(0.1, 0.1), 400)) < 0.5


def test_drafts_that_no_row_is_left_for_are_not_held_against_the_others():
    policy = ByCost(UnknownCosts())
    counts = policy.num_drafts([8] * 8, [Chance(0.3, 0.3)] * 8, IterationRows(8, 800, 0, 8))
    assert counts == [8] * 8, "which are cut to one each"
    assert policy._promised > -1.0


def test_what_is_known_of_a_way_that_is_barred_for_long_is_kept():
    regime = Regime(2, begins_with_last=True)
    for number in range(30_000):
        regime.observe(32, (64.0, 51.2)[regime.way], barred=(0,) if number > 40 else ())
    assert regime.way == 1
    done, seconds = regime._totals[0]
    assert done / seconds == pytest.approx(0.5, rel=0.01)


def test_chances_that_alternate_do_not_lose_the_fastest_way():
    """All drafts are right for a while, and nearly none: one moment's prediction is not what was measured."""
    policy, iteration, ways = ByCost(UnknownCosts()), IterationRows(8, 800, 0, 200), []
    for number in range(3000):
        chance = Chance(1.0, 1.0) if number // 5 % 2 else Chance(0.05, 0.05)
        count = policy.num_drafts([MOST] * 8, [chance] * 8, iteration)[0] if policy.is_worth_asking(8) else 0
        ways.append(policy._regime(8).way)
        rows = 8 + 8 * count
        seconds = float(np.interp(rows, list(MEASURED), list(MEASURED.values()))) + 0.5 * (count > 0)
        work = VerifyingWork(8, 8 * (count > 0), 8 * count, count)
        policy.observe(work, 1, int(8 * (1 + chance.expected(count))), seconds)
    assert np.mean(np.array(ways[500:]) == 1) < 0.05, "without drafts it is two thirds as fast"


def test_in_debt_nobody_begins_and_nothing_is_tried():
    """What reading prompts took, and drafts that lost; 2 % of the time without drafts, or gains, pay it."""
    policy = ByCost(UnknownCosts())

    def plain(count):
        for _ in range(count):
            policy.observe(VerifyingWork(8), 1, 8, 0.01)

    plain(100)
    policy.begun(0.5)
    assert not policy.may_begin()
    ways = []
    for _ in range(1500):  # of 10 ms: 0.3 s are paid
        plain(1)
        ways.append(policy._regime(8).way)
    assert 0 not in ways[500:], "all drafts cost, and nothing is known of them"
    assert not policy.may_begin()
    plain(1200)
    assert policy.may_begin()
    policy.begun(0.05)
    drafts = VerifyingWork(8, 8, 8, 1)
    policy.observe(drafts, 1, 16, 0.012)
    assert not policy.may_begin()
    for _ in range(10):  # 16 tokens in 12 ms instead of 20
        policy.observe(drafts, 1, 16, 0.012)
    assert policy.may_begin()
    for _ in range(100):
        policy.observe(drafts, 1, 8, 0.012)
    assert not policy.may_begin()
    assert BelowBatch(4, policy).may_begin() is False
    assert AsProposed().may_begin()


def test_a_pause_is_not_paid_for_long():
    """Whoever calls `step` may take a break, and a machine may."""
    policy = ByCost(UnknownCosts())
    for work in (VerifyingWork(8), VerifyingWork(8, 8, 16, 2)):
        for _ in range(100):
            policy.observe(work, 1, 8 + work.num_drafts, 0.001)
    policy.observe(VerifyingWork(8, 8, 16, 2), 1, 24, 5.0)
    assert policy.may_begin(), "it has gained before"
    policy.begun(5.0)
    count = 0
    while not policy.may_begin():
        policy.observe(VerifyingWork(8), 1, 8, 0.001)
        count += 1
    assert count < 4000


def test_what_no_model_knows_is_no_gain():
    policy = ByCost(UnknownCosts())
    policy.observe(VerifyingWork(8, 8, 16, 2), 1, 24, 0.001)
    policy.begun(0.001)
    assert not policy.may_begin()


class Computing:
    """Drafts that take their time, all right."""

    def __init__(self):
        self.asked = []

    def propose(self, asked):
        self.asked.append([request.request_id for request, _ in asked])
        return [[0] * num_tokens * (request.request_id != "r6") for request, num_tokens in asked]

    def seconds(self, num_requests, num_tokens):
        return 0.001

    def forget(self, request):
        pass


class Noting(AsProposed):
    """Notes what it is told, and may forbid to begin."""

    def __init__(self):
        self.told, self.allows = [], True

    def may_begin(self):
        return self.allows

    def observe(self, work, num_steps, num_tokens, seconds):
        self.told.append(seconds)

    def begun(self, seconds):
        self.told.append(f"begun {seconds:.1f}")

    def predicted(self, work):
        return 1.0


def test_reading_what_came_while_nothing_was_drafted_is_not_part_of_an_iteration():
    policy, proposer = Noting(), Computing()
    scheduler = make_scheduler(speculation=Speculation(proposer, policy, 2, 8))
    speculation, clock = scheduler.speculation, itertools.count(1)
    scheduler.add(make_request(4, 20, 100))

    def step():
        scheduled, now = scheduler.schedule(0.0), float(next(clock))
        take(scheduler, scheduled)
        for chunk in scheduled.prefill:
            if chunk.drafts:
                chunk.request.output_token_ids += [0] * len(chunk.drafts)
                scheduler.accept(chunk.request, [(2, 2)])
        speculation.observe(scheduled, now)

    for _ in range(4):
        step()
    assert policy.told == ["begun 0.0", 1.0, 1.0]
    policy.is_worth_asking = lambda num_running: False
    for _ in range(3):
        step()
    policy.is_worth_asking = lambda num_running: True
    for _ in range(2):
        step()
    assert policy.told[3:] == [1.0] * 3 + ["begun 0.0", 1.0]
    policy.allows = False
    scheduler.add(make_request(5, 20, 100))
    for _ in range(3):
        step()
    assert proposer.asked[-3:] == [["r4"]] * 3
    policy.allows = True
    step()
    assert proposer.asked[-1] == ["r4", "r5"]
    scheduler.add(make_request(6, 20, 100))  # for whom it has nothing
    for _ in range(3):
        step()
    assert proposer.asked[-1] == ["r4", "r5", "r6"]
    assert policy.told[-2:] == [1.0, 1.0]


def test_who_was_preempted_is_read_again():
    """What a draft model has of a request goes with its blocks."""
    policy, proposer = Noting(), Computing()
    speculation = Speculation(proposer, policy, 2, 8)
    request = make_request(4, 20, 100)
    assert speculation._is_new(request)
    speculation.verified(request, [(2, 2)])
    assert not speculation._is_new(request)
    request.metrics.num_preemptions += 1
    assert speculation._is_new(request)
    policy.allows = False
    assert speculation._begun([request]) == []
    speculation.verified(request, [(2, 0)])
    assert speculation._begun([request]) == [request]
    assert not speculation._is_new(request)


def test_what_was_read_and_not_verified_is_read():
    """A grammar may allow none of the drafts that a model computed."""
    speculation, request = Speculation(Computing(), Noting(), 2, 8), make_request(4, 20, 100)
    request.metrics.num_preemptions = 1
    speculation._proposals([(request, 2)])
    assert not speculation._is_new(request)


def test_an_iteration_beside_compiling_is_not_learned_from():
    policy, request = Noting(), make_request(4, 20)
    speculation = Speculation(Computing(), policy, 2, 8)
    scheduled = SchedulerOutput(1, decode=(request,))
    for now, is_undisturbed in ((1.0, True), (2.0, True), (9.0, False), (10.0, True)):
        speculation.observe(scheduled, now, is_undisturbed=is_undisturbed)
    assert policy.told == [1.0, 1.0]


class Cheap(UnknownCosts):
    def step_seconds(self, num_decodes, num_context, *prompts):
        return 0.01 + 1e-6 * sum(prompts[:1])


def test_drafts_beside_prompts_pay_by_what_they_add():
    """Though no step without prompts has been measured yet."""
    beside = IterationRows(8, 800, 64, 200)
    policy = ByCost(Cheap())
    assert policy.is_worth_asking(8)
    assert policy.num_drafts([4] * 8, [Chance(0.95, 0.95)] * 8, beside) == [4] * 8
    assert ByCost(UnknownCosts()).num_drafts([4] * 8, [Chance(0.05, 0.05)] * 8, beside) == [0] * 8


def test_what_sampled_nothing_is_not_measured():
    """Its logits were not finite, and its request ends."""
    speculation = learning(ByCost(UnknownCosts()))
    request = make_request(4, 20)
    start = request.num_known_tokens - 1
    chunk = PrefillChunk(request, start, 3, is_last=True, is_first=False, drafts=(1, 2))
    for now in (1.0, 2.0):
        speculation.observe(SchedulerOutput(1, prefill=(chunk,), num_drafts=2), now)
    assert speculation.policy.predicted(VerifyingWork(1)) is None
    speculation.policy.observe(VerifyingWork(1), 1, 1, 1.0)
    speculation._has_read = True
    speculation.observe(SchedulerOutput(1, prefill=(chunk,), num_drafts=2), 4.0)
    assert speculation.policy.may_begin()


def test_what_ends_a_request_is_learned_from_as_what_it_follows():
    speculation, request = learning(), make_request(4, 20)
    speculation.verified(request, [(4, 4)])
    request.status = RequestStatus.FINISHED
    speculation.ended(request, is_whole=True)
    speculation.verified(request, [(4, 4)])
    of_all = speculation._all
    assert of_all.after_wrong.num_tried == of_all.after_wrong.num_right == 1, "the first of all"
    assert of_all.after_right.num_tried == of_all.after_right.num_right == pytest.approx(7, rel=0.05)


def test_asking_in_vain_takes_little_time():
    policy = ByCost(UnknownCosts(), share=0.01)
    num_asked = 0
    for _ in range(1000):
        policy.observe(VerifyingWork(8), 1, 8, 0.01)
        if policy.is_worth_asking(8):
            num_asked += 1
            policy.asked(0.001, 0)
    assert 50 < num_asked < 200
    policy.asked(0.001, 1)
    assert policy.is_worth_asking(8)


def test_who_copies_is_expected_to_go_on():
    speculation, request = learning(), make_request(4, 20)
    for _ in range(10):
        speculation.verified(request, [(4, 4), (4, 4), (4, 4), (4, 4), (4, 0), (4, 0), (4, 0), (4, 0)])
    assert speculation._chance(request).first < 0.6
    speculation.verified(request, [(1, 1)])
    assert speculation._chance(request).first > 0.7
    other = make_request(4, 20)  # as all are
    speculation.verified(other, [(1, 1)])
    assert speculation._chance(other).first > 0.7


@pytest.mark.parametrize("chance", [Chance(0.5, 0.9), Chance(0.0, 1.0), Chance(1.0, 1.0), Chance(0.3, 0.0)])
def test_the_first_draft_has_a_chance_of_its_own(chance):
    found = [chance.of(number) for number in range(1, 9)]
    assert found[0] == chance.first
    assert found[3] == pytest.approx(chance.first * chance.later**3)
    for count in range(9):
        assert chance.expected(count) == pytest.approx(sum(found[:count]))


def test_acceptance_follows_what_happens():
    history = Acceptance()
    assert history.rate(0.5) == 0.5
    for _ in range(30):
        history.add(4, 4)
    assert history.rate(0.5) > 0.95
    for _ in range(90):
        history.add(1, 0)
    assert history.rate(0.5) < 0.15
