"""Waiting requests are looked up again only if what they did not find may have come."""

import random

import pytest
from scheduler_helpers import LinearCosts, describe, make_request, make_scheduler, take

from jaxllm.sched.cache.names import names_of, root
from jaxllm.sched.cache.preview import PoolPreview
from jaxllm.sched.policies import CostOverIdleTime, ResumeFirst, SchedulerPolicy
from jaxllm.sched.presets import make_preset


def request_of(index, tokens, max_new_tokens=8):
    total = len(tokens) + max_new_tokens
    return make_request(index, 0, prompt_token_ids=tokens, max_total_tokens=total)


def skipping(**changes):
    retention = CostOverIdleTime(LinearCosts())
    policy = SchedulerPolicy(patience=None, restore=ResumeFirst(skips=True), retention=retention)
    return make_scheduler(policy, enable_prefix_caching=True, **changes)


def test_a_step_looks_up_nobody_who_lacks_room_as_before(monkeypatch):
    scheduler = skipping(num_gpu_blocks=30, max_num_seqs=64)
    prefix = list(range(40))
    scheduler.add(request_of(0, [*prefix, *[90] * 40], 30))
    take(scheduler, scheduler.schedule(0.0))
    for index in range(1, 41):
        scheduler.add(request_of(index, [*prefix, *[100 + index] * 60]))
    take(scheduler, scheduler.schedule(0.0))
    found = []
    find = PoolPreview.find

    def counting(self, *args, **options):
        found.append(args)
        return find(self, *args, **options)

    monkeypatch.setattr(PoolPreview, "find", counting)
    for _ in range(20):
        take(scheduler, scheduler.schedule(0.0))
    assert scheduler.num_waiting == 40
    assert not found


def test_what_comes_meanwhile_is_found():
    """The second one waits for room that it does not need once the first has computed its prompt."""
    scheduler = skipping(num_gpu_blocks=12, max_num_batched_tokens=16)
    scheduler.add(request_of(0, [7] * 36, 8))
    scheduler.add(request_of(1, [7] * 36, 4))
    said = []
    for _ in range(4):
        output = scheduler.schedule(0.0)
        said.append(describe(output))
        take(scheduler, output)
    assert said == ["| r0[0:16]", "| r0[16:32]", "| r0[32:36]! r1[32:36]!", "r0 r1"]


def _outcomes(preset, seed, *, forgets):
    """Iterations of random requests that have much in common, in a pool that is too small for them."""
    rng = random.Random(seed)
    policy = make_preset(preset, LinearCosts())
    scheduler = make_scheduler(
        policy, enable_prefix_caching=True, num_gpu_blocks=24, num_host_blocks=12, max_num_batched_tokens=40
    )
    stems = [[number] * 24 for number in range(3)]
    said, live = [], []
    for index in range(150):
        if index < 100 and rng.random() < 0.5:
            stem = rng.choice(stems)[: rng.randrange(1, 25)]
            tokens = [*stem, *[rng.randrange(2)] * rng.randrange(0, 30)]
            live.append(request_of(index, tokens, rng.randrange(1, 12)))
            scheduler.add(live[-1])
        if rng.random() < 0.05 and (going := [one for one in live if not one.is_finished]):
            scheduler.finish(rng.choice(going), "abort")
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache()
        if forgets:
            scheduler._state.absences.clear()
        output = scheduler.schedule(float(index))
        scheduler.check()
        said.append(describe(output))
        take(scheduler, output)
    return said


@pytest.mark.parametrize("preset", ["adaptive", "flashgen", "pensieve", "paper", "adaptive_throughput"])
def test_decisions_are_those_of_lookups_in_each_iteration(preset):
    for seed in range(12):
        assert _outcomes(preset, seed, forgets=False) == _outcomes(preset, seed, forgets=True)


def test_an_index_tells_what_has_come_as_long_as_it_remembers():
    pool = make_scheduler()._state.pool
    names = names_of(range(400), 4, root())
    index = pool.names
    index.add(names[0], 0)
    before = index.num_added
    assert index.added_since(before) == []
    index.add(names[0], 1)  # was there
    index.add(names[1], 2)
    index.add(names[2], 3)
    assert index.added_since(before) == names[1:3]
    assert index.added_since(before + 1) == names[2:3]
    for number, name in enumerate(names[3:90], 4):
        index.add(name, number)
    assert index.added_since(before) is None
    assert index.absence(names) == (90, 100, 90)
