"""The credit narrows before the most urgent chunk is ready, and only then."""

from __future__ import annotations

import pytest
from clocks import Clock

from bytescheduler.core.foresight import Foresight
from bytescheduler.core.plan import Layout, ParameterSpec
from bytescheduler.core.scheduler import Scheduler


def learnt(clock: Clock) -> Foresight:
    """After a round of 10 s, with a wire that brings 100 bytes per second."""
    foresight = Foresight(clock)
    foresight.round_begins()
    foresight.completed(100, more=True)
    clock.now += 1.0
    foresight.completed(100, more=False)
    clock.now += 9.0
    foresight.urgent_is_ready()
    foresight.round_begins()
    return foresight


def test_nothing_is_forbidden_before_anything_is_known(clock: Clock) -> None:
    foresight = Foresight(clock)
    assert foresight.allows(1 << 40)
    foresight.round_begins()
    assert foresight.allows(1 << 40)


def test_what_arrives_in_time_is_allowed(clock: Clock) -> None:
    foresight = learnt(clock)
    assert foresight.allows(1000)
    assert not foresight.allows(1001)
    clock.now += 9.0
    assert foresight.allows(100)
    assert not foresight.allows(101)


def test_an_urgent_chunk_that_is_late_keeps_the_wire_clear(clock: Clock) -> None:
    foresight = learnt(clock)
    clock.now += 11.0
    assert not foresight.allows(1)
    foresight.urgent_is_ready()
    assert foresight.allows(1 << 40)


def test_the_expectation_follows_the_rounds(clock: Clock) -> None:
    foresight = learnt(clock)
    for _ in range(20):
        clock.now += 20.0
        foresight.urgent_is_ready()
        foresight.round_begins()
    assert foresight.allows(1990)
    assert not foresight.allows(2010)


def test_a_wire_that_was_idle_tells_nothing_of_its_rate(clock: Clock) -> None:
    foresight = learnt(clock)
    clock.now += 5.0
    foresight.completed(1, more=False)
    assert foresight.allows(500)
    assert not foresight.allows(501)


@pytest.mark.parametrize("fifo", [False, True])
def test_the_scheduler_asks_unless_it_goes_in_order(clock: Clock, fifo: bool) -> None:
    layout = Layout([ParameterSpec(name=f"p{i}", numel=15, itemsize=4) for i in range(3)])
    chunks = layout.cut(64).chunks
    scheduler = Scheduler(1000, fifo=fifo, foresight=learnt(clock))
    clock.now += 9.0
    for chunk in reversed(chunks):
        scheduler.push(chunk)
    assert scheduler.pop() is not None  # the wire was idle
    assert scheduler.startable is fifo  # 128 bytes would take longer than the second that is left
    clock.now -= 9.0
    assert scheduler.startable
