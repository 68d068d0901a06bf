"""Leader and follower: one order, inside the credit, whatever the order of events."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescheduler.core.order import CUT, STEP, STOP, Cut, Follower, Leader, Step
from bytescheduler.core.plan import Chunk, Layout, ParameterSpec, Plan
from bytescheduler.core.scheduler import Scheduler
from bytescheduler.exceptions import TransportError

LIMIT = 5  # integers in one announcement


class LeaderBench:
    """A leader whose chunks complete in random order, and a diary of what it did."""

    def __init__(self, layout: Layout, partition: int, credit: int, seed: int = 0) -> None:
        self.layout = layout
        self.random = random.Random(seed)
        self.announced: list[list[int]] = []
        self.started: list[int] = []
        self.flying: list[Chunk] = []
        self.peak = 0  # bytes in flight
        self.rounds_left: list[list[int]] = []
        self.scheduler = Scheduler(credit)
        self.leader = Leader(
            layout.cut(partition), self.scheduler, self, self.announced_one, limit=LIMIT
        )

    def run(self, rounds: Sequence[Sequence[int]]) -> None:
        """Post each round, in its own order, when the one before is back; then stop."""
        self.rounds_left = [list(order) for order in rounds]
        self.next_round()
        self.leader.run()

    def next_round(self) -> None:
        order: list[int | None] = [*self.rounds_left.pop(0)] if self.rounds_left else [None]
        for event in order:
            self.leader.events.put(event)

    def announced_one(self, message: Sequence[int]) -> None:
        self.announced.append(list(message))
        if message[0] != STOP and not self.flying and not self.scheduler.in_flight:
            self.next_round()

    def start(self, chunk: Chunk) -> None:
        announced = [index for message in self.announced for index in message if message[0] >= 0]
        assert announced[len(self.started)] == chunk.index, "started before it was announced"
        self.started.append(chunk.index)
        self.flying.append(chunk)
        self.peak = max(self.peak, sum(c.nbytes for c in self.flying))
        if self.random.random() < 0.7:
            self.land()

    def land(self) -> None:
        self.leader.events.put(self.flying.pop(self.random.randrange(len(self.flying))))

    def compare(self, step: Step) -> None:
        raise AssertionError("the leader announces steps, it does not compare")

    def recut(self, cut: Cut) -> Plan:
        assert not self.flying, "the buffer was cut anew under a chunk in flight"
        return self.layout.cut(cut.partition_size)


class EagerBench(LeaderBench):
    """Chunks complete at once; so rounds follow each other by events alone."""

    def run(self, rounds: Sequence[Sequence[int]]) -> None:
        for order in rounds:
            for parameter in order:
                self.leader.events.put(parameter)
        self.left = sum(len(self.leader._plan.chunks) for _ in rounds)
        self.leader.run()

    def announced_one(self, message: Sequence[int]) -> None:
        self.announced.append(list(message))

    def start(self, chunk: Chunk) -> None:
        super().start(chunk)
        while self.flying:
            self.land()
        self.left -= 1
        if not self.left:
            self.leader.events.put(None)


def layout_of(numels: Sequence[int]) -> Layout:
    return Layout([ParameterSpec(name=f"p{i}", numel=n, itemsize=4) for i, n in enumerate(numels)])


numels = st.lists(st.integers(0, 100), min_size=1, max_size=8)


@given(numels, st.integers(1, 500), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_every_chunk_of_every_round_is_announced_and_started_once(
    numels, partition, chunks_in_credit, rounds, rng
):
    layout = layout_of(numels)
    bench = EagerBench(layout, partition, partition * chunks_in_credit)
    orders = [rng.sample(range(len(numels)), len(numels)) for _ in range(rounds)]
    bench.run(orders)
    count = len(layout.cut(partition).chunks)
    assert sorted(bench.started) == sorted(list(range(count)) * rounds)
    assert bench.announced[-1] == [STOP]
    assert all(len(message) <= LIMIT for message in bench.announced)
    assert [i for m in bench.announced[:-1] for i in m] == bench.started


def test_a_burst_is_sent_in_forward_order_although_posted_backwards():
    bench = EagerBench(layout_of([15] * 6), 64, 64)
    bench.run([[5, 4, 3, 2, 1, 0]])
    assert bench.started == [0, 1, 2, 3, 4, 5]


def test_a_chunk_waits_for_every_parameter_that_it_overlaps():
    layout = layout_of([15, 15])
    bench = EagerBench(layout, 128, 128)
    bench.leader.events.put(1)
    bench.leader.events.put(None)
    bench.leader.run()
    assert bench.started == []


def test_the_credit_bounds_what_flies():
    bench = LeaderBench(layout_of([15] * 6), 64, 128, seed=3)
    bench.random = random.Random(1)

    class Never(random.Random):
        def random(self) -> float:
            return 1.0

    bench.random = Never()
    for parameter in range(6):
        bench.leader.events.put(parameter)
    bench.leader.events.put(None)
    bench.leader.run()
    assert bench.peak == 128
    assert bench.started == [0, 1]


def test_messages_hold_at_most_the_limit():
    bench = EagerBench(layout_of([15] * 12), 64, 64 * 12)
    bench.run([range(12)])
    assert [len(message) for message in bench.announced] == [LIMIT, LIMIT, 2, 1]


def test_a_step_is_announced_with_its_rounds():
    bench = EagerBench(layout_of([1]), 64, 64)
    bench.leader.events.put(Step(number=7, rounds=9))
    bench.leader.events.put(None)
    bench.leader.run()
    assert bench.announced == [[STEP, 7, 9], [STOP]]


def test_a_cut_waits_until_all_is_back_and_holds_later_posts_back():
    layout = layout_of([15] * 4)
    bench = EagerBench(layout, 64, 64)
    bench.leader.events.put(3)
    bench.leader.events.put(Cut(partition_size=256, credit_size=256, mode=0))
    for parameter in range(4):
        bench.leader.events.put(parameter)
    bench.left = 2
    bench.leader.run()
    assert bench.announced == [[3], [CUT, 256, 256, 0], [0], [STOP]]


def test_a_failure_among_the_events_ends_the_leader():
    bench = EagerBench(layout_of([1]), 64, 64)
    bench.leader.events.put(TransportError("wire cut"))
    with pytest.raises(TransportError, match="wire cut"):
        bench.leader.run()


class FollowerBench:
    """A follower fed from a list, and a diary."""

    def __init__(self, layout: Layout, partition: int, messages: Sequence[Sequence[int]]) -> None:
        self.layout = layout
        self.messages = list(messages)
        self.started: list[int] = []
        self.waited: list[tuple[int, int]] = []
        self.steps: list[Step] = []
        self.follower = Follower(
            layout.cut(partition), self, lambda: self.messages.pop(0), self.wait_posted
        )

    def wait_posted(self, parameter: int, round_: int) -> None:
        self.waited.append((parameter, round_))

    def start(self, chunk: Chunk) -> None:
        self.started.append(chunk.index)

    def compare(self, step: Step) -> None:
        self.steps.append(step)

    def recut(self, cut: Cut) -> Plan:
        return self.layout.cut(cut.partition_size)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=LIMIT), max_size=10))
def test_the_follower_starts_what_is_announced_in_that_order(messages):
    bench = FollowerBench(layout_of([15] * 6), 64, [*messages, [STOP]])
    bench.follower.run()
    assert bench.started == [index for message in messages for index in message]
    assert bench.messages == []


def test_the_nth_start_of_a_chunk_waits_for_the_nth_round():
    bench = FollowerBench(layout_of([15, 15]), 64, [[1, 0], [0, 1], [STOP]])
    bench.follower.run()
    assert bench.waited == [(1, 1), (0, 1), (0, 2), (1, 2)]


def test_rounds_go_on_counting_over_a_new_cut():
    bench = FollowerBench(layout_of([15, 15]), 64, [[0, 1], [CUT, 128, 128, 0], [0], [0], [STOP]])
    bench.follower.run()
    assert bench.started == [0, 1, 0, 0]
    assert bench.waited == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_the_follower_hands_steps_over_for_comparison():
    bench = FollowerBench(layout_of([1]), 64, [[STEP, 4, 5], [STOP]])
    bench.follower.run()
    assert bench.steps == [Step(number=4, rounds=5)]


@given(numels, st.integers(1, 500), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_what_the_leader_announces_makes_the_follower_start_the_same(
    numels, partition, chunks_in_credit, rounds, rng
):
    layout = layout_of(numels)
    leader = EagerBench(layout, partition, partition * chunks_in_credit)
    leader.run([rng.sample(range(len(numels)), len(numels)) for _ in range(rounds)])
    follower = FollowerBench(layout, partition, leader.announced)
    follower.follower.run()
    assert follower.started == leader.started
