"""RequestQueue: the order of a visit against a plain sort, verdicts, errors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_helpers import make_request

from jaxllm.errors import KVCacheError
from jaxllm.sched.policies import FairPriority, FairTurns, FCFSPriority
from jaxllm.sched.queues import RequestQueue, Verdict, Waits


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
)
def test_a_visit_goes_by_score_then_arrival(priority, lengths, gaps, order, waits):
    requests = [
        make_request(index, length, arrival_time=sum(gaps[:index])) for index, length in enumerate(lengths)
    ]
    for request in requests[::2]:  # a turn that finds some
        request.program_arrival_time, request.num_findable_tokens = -1.0, request.num_tokens // 2
    added = list(requests)
    order.shuffle(added)
    queue = queue_of(added, priority)
    assert list(queue) == requests
    for now in waits:
        now += sum(gaps)
        expected = sorted(requests, key=lambda r: (-priority.score(r, now), r.arrival_index))
        assert queue.visit(now, lambda _: Verdict.TAKE) == expected
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


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_waits_are_compared_with_those_in_order_of_arrival(data):
    """Against a queue that is served in order, by as many prompt tokens as have started."""
    waits, queued, come, number, now = Waits(), [], [], 0, 0.0
    num_started, in_order = 0, []
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from([0.0, 0.5, 3.0]))
        if not queued or data.draw(st.booleans()):
            request = make_request(number, data.draw(st.integers(1, 9)), arrival_time=now)
            number += 1
            waits.begin(request)
            queued.append(request)
            come.append((request.num_prompt_tokens, now))
        else:
            request = queued.pop(data.draw(st.integers(0, len(queued) - 1)))
            waits.end(request, now)
            num_started += request.num_prompt_tokens
            while come and sum(count for count, _ in come[: len(in_order) + 1]) <= num_started:
                if len(in_order) == len(come):
                    break
                in_order.append(now - come[len(in_order)][1])
        lasting = [now - at for _, at in come[len(in_order) : len(in_order) + 1]]
        longest = max([*in_order[-64:], *lasting], default=0.0)
        found = waits.overdue(now, 0.25)
        late = [one for one in queued if now - one.arrival_time > 1.25 * longest]
        assert found is (late[0] if late else None)


def test_who_was_started_before_or_goes_on_with_a_conversation_is_never_overdue():
    waits = Waits()
    before, turn, new = (make_request(index, 4, arrival_time=1.0) for index in range(3))
    before.metrics.first_scheduled_time, turn.program_arrival_time = 2.0, 0.5
    for request in (before, turn):
        waits.begin(request)
    assert waits.overdue(100.0, 0.05) is None
    waits.begin(new)
    assert waits.overdue(100.0, 0.05) is None, "in order of arrival it had waited as long"
    for request in (before, turn, new):
        waits.end(request, 100.0)
    assert waits.overdue(200.0, 0.05) is None


def test_where_all_came_at_once_nobody_is_overdue():
    """Whoever goes first: in order of arrival somebody would wait until now, too."""
    waits, requests = Waits(), [make_request(index, 1 + index % 7, arrival_time=0.0) for index in range(50)]
    for request in requests:
        waits.begin(request)
    for now, request in enumerate(sorted(requests, key=lambda one: one.num_prompt_tokens)):
        assert waits.overdue(float(now), 0.05) is None
        waits.end(request, float(now))
