"""What waits for a slower rank neither takes the credit of what could move, nor is held back."""

from __future__ import annotations

import pytest
from clocks import Clock
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bytescheduler.core.foresight import Foresight
from bytescheduler.core.lag import LOOK, Lag
from bytescheduler.core.plan import Chunk
from bytescheduler.core.scheduler import CREDITS, Scheduler

PACE = 0.01  # seconds that the wire takes for a byte
SIZE = 10  # bytes of a chunk: 0.1 s


@pytest.fixture
def lag(clock: Clock) -> Lag:
    return Lag(clock)


def chunk(index: int, nbytes: int = SIZE) -> Chunk:
    return Chunk(index=index, buffer="flat", start=0, stop=nbytes, nbytes=nbytes, spans=())


def fly(lag: Lag, *indices: int) -> None:
    for count, index in enumerate(indices, 1):
        lag.started(chunk(index), lag.now(), count * SIZE * PACE)


def scheduler(clock: Clock, credit: int = 2 * SIZE, *, fifo: bool = False) -> Scheduler:
    """One that knows the pace of its wire."""
    foresight = Foresight(clock)
    foresight.completed(1000, more=True)
    clock.now += 1000 * PACE
    foresight.completed(1000, more=False)
    made = Scheduler(credit, fifo=fifo, foresight=foresight, lag=Lag(clock))
    made.any_order = True
    return made


def drained(scheduler: Scheduler) -> list[int]:
    return [item.index for item in iter(scheduler.pop, None)]


def test_ranks_in_step_have_no_lag(clock: Clock, lag: Lag) -> None:
    fly(lag, 0, 1)
    for index in (0, 1):
        clock.now += SIZE * PACE
        assert lag.look() == 0
        assert not lag.completed(chunk(index))
    assert lag.seconds == 0.0


def test_a_fresh_chunk_that_comes_late_tells_the_lag(clock: Clock, lag: Lag) -> None:
    fly(lag, 0)
    clock.now += SIZE * PACE + 0.5
    assert lag.completed(chunk(0))
    assert lag.seconds == pytest.approx(0.5)
    lag.look()
    assert lag.border == pytest.approx(clock.now - 0.5)


def test_a_chunk_in_flight_that_is_late_waits_and_tells_as_well(clock: Clock, lag: Lag) -> None:
    fly(lag, 0)
    clock.now += 1.1 * SIZE * PACE
    assert lag.look() == 0
    assert lag.next_look == pytest.approx(0.4 * SIZE * PACE, abs=0.01)
    clock.now += lag.next_look + 1e-9
    assert lag.look() == SIZE
    assert lag.seconds > 0.0
    assert lag.next_look == LOOK


def test_an_old_chunk_that_comes_late_tells_nothing(clock: Clock, lag: Lag) -> None:
    ready = lag.now()
    clock.now += 1.0
    lag.started(chunk(0), ready, SIZE * PACE)
    clock.now += 5.0
    assert lag.look() == 0
    assert not lag.completed(chunk(0))
    assert lag.seconds == 0.0


def test_the_lag_has_gone_when_a_fresh_chunk_comes_in_time(clock: Clock, lag: Lag) -> None:
    lag.seconds = 3.0
    fly(lag, 0)
    clock.now += SIZE * PACE
    assert not lag.completed(chunk(0))
    assert lag.seconds == pytest.approx(0.0)


def test_before_the_pace_is_known_nothing_is_late(clock: Clock, lag: Lag) -> None:
    lag.started(chunk(0), lag.now(), 0.0)
    clock.now += 10.0
    assert lag.look() == 0
    assert not lag.completed(chunk(0))


def test_nothing_in_flight_is_not_looked_at(lag: Lag) -> None:
    assert lag.next_look is None


@pytest.mark.parametrize("kind", ["any order", "one order", "fifo"])
def test_older_chunks_pass_those_that_wait_for_a_slower_rank(clock: Clock, kind: str) -> None:
    made = scheduler(clock, fifo=kind == "fifo")
    made.any_order = kind != "one order"
    for index in range(10, 20):
        made.push(chunk(index))
    clock.now += 1.0
    for index in (0, 1, 2):
        made.push(chunk(index))
    expected = [10, 11] if kind == "fifo" else [0, 1]
    assert drained(made) == expected  # they fill the credit
    clock.now += 0.5
    if kind != "any order":
        assert drained(made) == []
        assert made.next_look is None
        return
    assert drained(made) == [10, 11]  # another credit, and all that is early waits
    assert made.next_look is not None
    made.complete(chunk(10))
    assert drained(made) == [12]
    made.complete(chunk(0))
    made.complete(chunk(1))
    made.complete(chunk(11))
    assert drained(made)[0] == 2


def test_an_early_chunk_is_started_at_once_for_the_lag_may_have_gone(clock: Clock) -> None:
    made = scheduler(clock)
    made.push(chunk(5))
    made.push(chunk(6))
    clock.now += 1.0
    assert drained(made) == [5, 6]  # old, so they move
    made.push(chunk(1))
    assert drained(made) == []
    made.lag.seconds = 10.0
    made.push(chunk(0))
    assert drained(made) == [0, 1]


class Skewed(RuleBasedStateMachine):
    """Any interleaving, at any pace: nothing is lost, and what flies is bounded."""

    CREDIT = 50
    LARGEST = 80

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.scheduler = scheduler(self.clock, self.CREDIT)
        self.waiting: dict[int, Chunk] = {}
        self.flying: dict[int, Chunk] = {}

    @rule(index=st.integers(0, 40), nbytes=st.integers(1, LARGEST))
    def push(self, index: int, nbytes: int) -> None:
        if index not in self.waiting and index not in self.flying:
            self.waiting[index] = chunk(index, nbytes)
            self.scheduler.push(self.waiting[index])

    @rule(seconds=st.floats(0, 2))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def pop(self) -> None:
        startable = self.scheduler.startable
        item = self.scheduler.pop()
        assert startable == (item is not None)
        if item is None:
            assert self.flying or not self.waiting
            return
        self.flying[item.index] = self.waiting.pop(item.index)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.flying)))
        self.scheduler.complete(self.flying.pop(index))

    @invariant()
    def what_flies_is_bounded_and_nothing_is_lost(self) -> None:
        flying = sum(item.nbytes for item in self.flying.values())
        assert self.scheduler.in_flight == flying
        assert len(self.scheduler) == len(self.waiting)
        assert flying < CREDITS * self.CREDIT + self.LARGEST
        assert 0 <= self.scheduler.lag.look() <= flying


TestSkewed = Skewed.TestCase
