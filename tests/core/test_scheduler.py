"""The scheduler: the most urgent first, inside the credit, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bytescheduler.core.plan import Chunk
from bytescheduler.core.scheduler import Scheduler


def chunk(index: int, nbytes: int) -> Chunk:
    return Chunk(index=index, buffer="flat", start=0, stop=nbytes, nbytes=nbytes, spans=())


chunks = st.lists(st.integers(1, 100), min_size=1, max_size=30).flatmap(
    lambda sizes: st.permutations([chunk(i, size) for i, size in enumerate(sizes)])
)


def drain(scheduler: Scheduler) -> list[Chunk]:
    """Everything, each chunk completed before the next is asked for."""
    order: list[Chunk] = []
    while (head := scheduler.pop()) is not None:
        order.append(head)
        scheduler.complete(head)
    return order


@given(chunks)
def test_priority_order_is_by_index_whatever_the_order_of_pushes(pushed):
    scheduler = Scheduler(credit_size=100)
    for item in pushed:
        scheduler.push(item)
    assert [item.index for item in drain(scheduler)] == sorted(item.index for item in pushed)


@given(chunks)
def test_fifo_order_is_the_order_of_pushes(pushed):
    scheduler = Scheduler(credit_size=100, fifo=True)
    for item in pushed:
        scheduler.push(item)
    assert drain(scheduler) == list(pushed)


def test_an_urgent_chunk_overtakes_what_waits_but_not_what_flies():
    scheduler = Scheduler(credit_size=10)
    for index in (7, 8):
        scheduler.push(chunk(index, 10))
    flying = scheduler.pop()
    scheduler.push(chunk(0, 10))
    assert scheduler.pop() is None
    assert flying is not None
    assert flying.index == 7
    scheduler.complete(flying)
    assert [item.index for item in drain(scheduler)] == [0, 8]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), unique=True))
def test_a_round_goes_before_the_next_whatever_is_more_urgent(pushed):
    scheduler = Scheduler(credit_size=100)
    for round_number, index in pushed:
        scheduler.push(chunk(index, 1), round_number)
    assert [item.index for item in drain(scheduler)] == [index for _, index in sorted(pushed)]


def test_a_small_chunk_does_not_slip_past_a_more_urgent_large_one():
    scheduler = Scheduler(credit_size=10)
    scheduler.push(chunk(0, 6))
    scheduler.pop()
    scheduler.push(chunk(1, 6))
    scheduler.push(chunk(2, 1))
    assert scheduler.pop() is None


@pytest.mark.parametrize("nbytes", [10, 11, 1000])
def test_a_chunk_at_or_above_the_credit_goes_alone(nbytes):
    scheduler = Scheduler(credit_size=10)
    scheduler.push(chunk(0, nbytes))
    scheduler.push(chunk(1, 1))
    assert scheduler.pop() is not None
    assert scheduler.pop() is None


def test_a_credit_changed_in_between_counts_from_the_next_pop():
    scheduler = Scheduler(credit_size=1)
    for index in range(3):
        scheduler.push(chunk(index, 1))
    assert scheduler.pop() is not None
    assert scheduler.pop() is None
    scheduler.credit_size = 2
    assert scheduler.pop() is not None
    assert scheduler.pop() is None


class Window(RuleBasedStateMachine):
    """Any interleaving of pushes, pops and completions keeps the window and loses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(credit_size=50)
        self.waiting: list[Chunk] = []
        self.flying: list[Chunk] = []

    @rule(index=st.integers(0, 40), nbytes=st.integers(1, 80))
    def push(self, index: int, nbytes: int) -> None:
        if any(item.index == index for item in (*self.waiting, *self.flying)):
            return
        item = chunk(index, nbytes)
        self.waiting.append(item)
        self.scheduler.push(item)

    @rule()
    def pop(self) -> None:
        item = self.scheduler.pop()
        if item is None:
            if self.waiting:
                head = min(self.waiting, key=lambda other: other.index)
                assert self.flying
                assert self._bytes() + head.nbytes > 50
            return
        assert item.index == min(other.index for other in self.waiting)
        self.waiting.remove(item)
        self.flying.append(item)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.flying))
        self.flying.remove(item)
        self.scheduler.complete(item)

    @invariant()
    def the_window_holds(self) -> None:
        assert self.scheduler.in_flight == self._bytes()
        assert len(self.scheduler) == len(self.waiting)
        assert self.scheduler.idle == (not self.waiting and not self.flying)
        assert len(self.flying) <= 1 or self._bytes() <= 50

    def _bytes(self) -> int:
        return sum(item.nbytes for item in self.flying)


TestWindow = Window.TestCase
