"""Rounds in lockstep, without a wire: what they start, what ranks tell each other, who decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescheduler.core import Layout, ParameterSpec, Settings
from bytescheduler.core.lockstep import Direction, Lockstep, Signal


def is_barrier(settings: Settings) -> bool:
    return settings.mode == "barrier"


PRIORITY = Settings(partition_size=64, credit_size=64)
BARRIER = Settings(partition_size=64, credit_size=64, mode="barrier")
SMALLER = Settings(partition_size=16, credit_size=16, mode="barrier")


@given(
    numels=st.lists(st.integers(0, 100), min_size=1, max_size=10),
    partition=st.integers(4, 500),
    data=st.data(),
)
def test_chunks_start_from_the_last_to_the_first_whatever_is_posted_when(numels, partition, data):
    specs = [ParameterSpec(name=f"p{i}", numel=n, itemsize=4) for i, n in enumerate(numels)]
    plan = Layout(specs, signal=True).cut(partition)
    started: list[int] = []
    posted: set[int] = set()

    def start(chunk):
        assert {span.parameter for span in chunk.spans} <= posted
        started.append(chunk.index)
        return lambda seconds: True

    lockstep = Lockstep(plan, start)
    for parameter in data.draw(st.permutations(range(len(numels)))):
        posted.add(parameter)
        lockstep.post([parameter])
        last = [chunk.index for chunk in plan.chunks[::-1]]
        assert started == last[: len(started)]
    assert len(started) == len(plan.chunks)
    assert not lockstep.over
    landed = []
    while lockstep.in_flight:
        landed.append(lockstep.land(0.0).index)
    assert landed == started
    assert lockstep.over


def test_a_chunk_that_is_not_there_in_time_stays_in_flight():
    plan = Layout([ParameterSpec(name="p", numel=4, itemsize=4)]).cut(1 << 20)
    answers = iter([False, True])
    lockstep = Lockstep(plan, lambda chunk: lambda seconds: next(answers))
    lockstep.post([0])
    assert lockstep.land(0.1) is None
    assert lockstep.in_flight
    assert lockstep.land(0.1) is plan.chunks[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 64])
@pytest.mark.parametrize("off", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_average_of_signals_says_what_follows_and_who_is_off(world_size, off, dtype):
    """Rank 0 alone says lockstep; ``off`` of the ranks are one step ahead."""
    off = min(off, world_size - 1)
    buffers = np.zeros((world_size, 5), dtype)
    signals = [Signal(buffer, 2, world_size) for buffer in buffers]
    for step in range(4):
        for follows in (True, False):
            for rank, signal in enumerate(signals):
                signal.write(lockstep=follows and rank == 0, step=step + (rank < off))
            total = buffers[0].copy()
            for buffer in buffers[1:]:
                total += buffer
            buffers[:] = total / world_size
            assert {signal.lockstep for signal in signals} == {follows}
            agree = [signal.same_step for signal in signals]
            assert all(agree) if not off else not any(agree)
    assert not buffers[:, [0, 1, 4]].any()


def test_changes_wait_for_a_round_that_is_announced():
    announced: list[Settings] = []
    direction = Direction(PRIORITY, announced.append, is_barrier)
    assert not direction.round_begins(lockstep=False)
    direction.change(BARRIER)
    assert announced == [BARRIER]
    assert direction.round_begins(lockstep=False)  # under barrier, still announced
    direction.change(PRIORITY)  # the next round is in lockstep already
    direction.change(SMALLER)
    assert not direction.round_begins(lockstep=True)
    assert announced == [BARRIER]
    assert direction.round_begins(lockstep=False)
    assert announced == [BARRIER, SMALLER]
    assert direction.round_begins(lockstep=True)
    assert announced == [BARRIER, SMALLER]


def test_a_second_change_is_announced_at_once_where_lockstep_ends_and_only_once():
    announced: list[Settings] = []
    direction = Direction(BARRIER, announced.append, is_barrier)
    assert direction.round_begins(lockstep=False)
    direction.change(PRIORITY)
    assert not direction.round_begins(lockstep=True)
    direction.change(SMALLER)
    assert announced == [SMALLER]
    assert direction.round_begins(lockstep=False)
    assert announced == [SMALLER]


def test_where_nothing_fits_nothing_waits():
    announced: list[Settings] = []
    direction = Direction(BARRIER, announced.append, lambda settings: False)
    assert not direction.round_begins(lockstep=False)
    direction.change(SMALLER)
    assert announced == [SMALLER]
