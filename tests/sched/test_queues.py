"""RequestQueue: the order of a visit against a plain sort, verdicts, errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_request

from jaxllm.errors import KVCacheError
from jaxllm.sched.policies import FairPriority, FairTurns, FCFSPriority
from jaxllm.sched.queues import RequestQueue, Verdict


class Scrambled:
    """A priority that no group but the request itself explains."""

    def score(self, request, now):
        return (request.arrival_index * 7919 + int(now)) % 5

    def group(self, request):
        return request.arrival_index


def queue_of(requests, priority=None):
    queue = RequestQueue(priority or FCFSPriority())
    for request in requests:
        queue.add(request)
    return queue


def visited(queue, now=0.0, **verdicts):
    """The ids of the requests asked about, given the verdicts of some; the others are taken."""
    ids = []

    def judge(request):
        ids.append(request.request_id)
        return verdicts.get(request.request_id, Verdict.TAKE)

    taken = queue.visit(now, judge)
    assert [r.request_id for r in taken] == [i for i in ids if verdicts.get(i) in (None, Verdict.TAKE)]
    return ids


@pytest.mark.parametrize(
    "priority", [FCFSPriority(), FairPriority(), FairTurns(), Scrambled()], ids=lambda p: type(p).__name__
)
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 6), max_size=12),
    gaps=st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
    waits=st.lists(st.sampled_from([0.0, 0.5, 3.0, 1000.0]), min_size=1, max_size=3),
    latest=st.sampled_from([-1.0, 0.0, 0.2, 2.0]),
    has_turns=st.booleans(),
)
def test_a_visit_goes_by_score_then_arrival(priority, lengths, gaps, order, waits, latest, has_turns):
    requests = [
        make_request(index, length, arrival_time=sum(gaps[:index])) for index, length in enumerate(lengths)
    ]
    for request in requests[::2] * has_turns:  # a turn that finds some
        request.program_arrival_time, request.num_findable_tokens = -1.0, request.num_tokens // 2
    added = list(requests)
    order.shuffle(added)
    queue = queue_of(added, priority)
    assert list(queue) == requests
    for now in waits:
        now += sum(gaps)
        expected = sorted(requests, key=lambda r: (-priority.score(r, now), r.arrival_index))
        assert queue.visit(now, lambda _: Verdict.TAKE) == expected
        in_time = [one for one in expected if one.goes_on or one.arrival_time <= latest]
        assert queue.visit(now, lambda _: Verdict.TAKE, latest=latest) == in_time
    for request in added:
        assert (len(queue), queue.min_num_tokens) == (len(requests), min(r.num_tokens for r in requests))
        queue.remove(request)
        requests.remove(request)
        assert list(queue) == requests
    assert (len(queue), queue.min_num_tokens) == (0, 0)


def lengths(*num_tokens):
    return [make_request(index, length) for index, length in enumerate(num_tokens)]


@pytest.mark.parametrize("priority", [FCFSPriority(), Scrambled(), FairPriority()])
def test_a_visit_takes_nothing_out(priority):
    queue = queue_of(lengths(3, 2, 3), priority)
    assert len(visited(queue)) == len(queue) == 3


def test_skip_leaves_out_all_that_are_at_least_as_long():
    queue = queue_of(lengths(4, 6, 4, 9, 5, 3))
    assert visited(queue, r1=Verdict.SKIP) == ["r0", "r1", "r2", "r4", "r5"]
    assert visited(queue, r0=Verdict.SKIP) == ["r0", "r5"]


def test_skip_of_the_shortest_ends_the_visit():
    assert visited(queue_of(lengths(4, 3, 3, 5)), r1=Verdict.SKIP) == ["r0", "r1"]


def test_skip_one_goes_on_with_the_same_length():
    assert visited(queue_of(lengths(4, 4, 5)), r0=Verdict.SKIP_ONE) == ["r0", "r1", "r2"]


def test_stop_ends_the_visit():
    assert visited(queue_of(lengths(4, 1, 1)), r1=Verdict.STOP) == ["r0", "r1"]


def test_verdicts_hold_across_groups():
    # At 12.0 the fair scores are 2.4, 5.5, 2.0, 9.0.
    queue = queue_of(lengths(5, 2, 5, 1), FairPriority())
    assert visited(queue, now=12.0) == ["r3", "r1", "r0", "r2"]
    assert visited(queue, now=12.0, r1=Verdict.SKIP) == ["r3", "r1"]
    assert visited(queue, now=12.0, r0=Verdict.SKIP_ONE) == ["r3", "r1", "r0", "r2"]
    assert visited(queue, now=12.0, r3=Verdict.STOP) == ["r3"]


def test_removing_a_stranger_is_an_error():
    request, other = lengths(3, 3)
    queue = queue_of([request])
    for stranger in (other, make_request(0, 3)):  # the same arrival is not the same request
        with pytest.raises(KVCacheError, match="is not in the queue"):
            queue.remove(stranger)
    queue.remove(request)
    with pytest.raises(KVCacheError, match="is not in the queue"):
        queue.remove(request)
    assert len(queue) == 0


def test_who_came_too_late_is_not_looked_past():
    """However many there are, and however urgent."""
    old = [make_request(index, 50, arrival_time=0.0) for index in range(3)]
    late = [make_request(index, 1 + index % 7, arrival_time=9.0) for index in range(3, 1000)]
    queue, asked = queue_of([*old, *late], FairPriority()), []
    assert queue.visit(1e4, lambda one: asked.append(one) or Verdict.SKIP_ONE, latest=8.0) == []
    assert asked == old
