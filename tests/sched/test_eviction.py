"""Orders in which pieces of host memory go: as a naive model has them, and by little work."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from jaxllm.sched.cache.eviction import RecencyOrder, ValueOrder
from jaxllm.types import HostBlock, HostPiece


@dataclasses.dataclass(eq=False)
class Piece:
    key: HostPiece
    blocks: set
    num_held: int = 0
    idle_since: float = 0.0


def make_piece(number, size=1):
    key = HostPiece(number, 0)
    return Piece(key, {HostBlock(number, 0, row) for row in range(size)})


class Model:
    """Idle blocks, those let go of longest ago first."""

    def __init__(self):
        self.idle, self.awaited = [], set()

    def next(self):
        whole = [piece for _, piece in self.idle if not piece.num_held]
        return next((piece for piece in whole if piece.key not in self.awaited), whole[0])


@given(st.data())
def test_what_was_let_go_of_longest_ago_goes_first_unless_somebody_waits_for_it(data):
    model, counted = Model(), [0]

    def is_awaited(piece):
        counted[0] += 1
        return piece.key in model.awaited

    order = RecencyOrder(is_awaited)
    pieces = [make_piece(number, data.draw(st.integers(1, 3))) for number in range(6)]

    def let_go(place, piece):
        model.idle.append((place, piece))
        order.add(place, piece)

    def hold(place, piece):
        model.idle.remove((place, piece))
        order.remove(place)

    for piece in pieces:
        for place in sorted(piece.blocks):
            let_go(place, piece)
    for _ in range(data.draw(st.integers(1, 30))):
        piece = data.draw(st.sampled_from(pieces))
        action = data.draw(st.sampled_from(["hold", "let go", "find", "wait", "leave", "evict"]))
        idle = [place for place, of in model.idle if of is piece]
        if action == "hold" and idle:
            hold(idle[0], piece)
            piece.num_held += 1
        elif action == "let go" and piece.num_held:
            place = next(place for place in sorted(piece.blocks) if place not in idle)
            piece.num_held -= 1
            if not piece.num_held:
                order.free(piece)
            let_go(place, piece)
        elif action == "find" and idle:
            model.idle.remove((idle[0], piece))
            let_go(idle[0], piece)
        elif action == "wait":
            model.awaited.add(piece.key)
        elif action == "leave" and piece.key in model.awaited:
            model.awaited.remove(piece.key)
            order.stop_waiting([piece])
        elif action == "evict" and any(not of.num_held for _, of in model.idle):
            gone = order.next(0.0)
            assert gone is model.next()
            for place in sorted(gone.blocks):
                hold(place, gone)
            gone.blocks.clear()
    if any(not of.num_held for _, of in model.idle):
        assert order.next(0.0) is model.next()


def test_those_that_somebody_waits_for_are_passed_over_once():
    num_asked = 0

    def is_awaited(piece):
        nonlocal num_asked
        num_asked += 1
        return piece.key.handle < 1000

    order = RecencyOrder(is_awaited)
    for number in range(1100):
        piece = make_piece(number)
        order.add(next(iter(piece.blocks)), piece)
    for number in range(1000, 1100):
        gone = order.next(0.0)
        assert gone.key.handle == number
        order.remove(next(iter(gone.blocks)))
    assert num_asked <= 1200
    assert order.next(0.0).key.handle == 0  # all that are left are awaited: the oldest


def test_values_are_looked_at_a_few_at_a_time():
    values, asked = {number: float(number * 37 % 500) for number in range(500)}, []

    def values_of(pieces):
        asked.append(len(pieces))
        return [values[piece.key.handle] for piece in pieces]

    order = ValueOrder(values_of)
    pieces = [make_piece(number) for number in range(500)]
    for piece in pieces:
        order.free(piece)
    gone = []
    for now in range(20):
        piece = order.next(float(now))
        gone.append(values[piece.key.handle])
        piece.blocks.clear()
    assert gone == [float(value) for value in range(20)]
    assert asked[0] == 500
    assert max(asked[1:]) <= 64
    assert sum(asked[6:]) > 300  # what was ranked longest ago is ranked again
    values[pieces[3].key.handle] = -1.0
    for now in range(100, 110):
        least = order.next(float(now))
    assert least is pieces[3]


def test_who_is_held_meanwhile_does_not_go():
    order = ValueOrder(lambda pieces: [float(piece.key.handle) for piece in pieces])
    pieces = [make_piece(number) for number in range(3)]
    for piece in pieces:
        order.free(piece)
    assert order.next(0.0) is pieces[0]
    pieces[0].num_held = 1
    assert order.next(0.0) is pieces[1]
    pieces[0].num_held = 0
    order.free(pieces[0])
    assert order.next(0.0) is pieces[0]
