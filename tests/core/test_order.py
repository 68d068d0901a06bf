"""Leader and follower: one order, inside the credit, whatever the order of events."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytescheduler.core.order import CUT, GO, STEP, STOP, Cut, Follower, Leader, Step
from bytescheduler.core.plan import Chunk, Layout, ParameterSpec, Plan
from bytescheduler.core.scheduler import Scheduler
from bytescheduler.exceptions import TransportError

LIMIT = 8  # integers in one announcement


class LeaderBench:
    """A leader whose chunks complete in random order, and a diary of what it did.

    Everything happens in one thread, so a wake-up comes in the midst of another call's work, as it
    does on a reentrant engine.
    """

    any_order = False

    def __init__(
        self,
        layout: Layout,
        partition: int,
        credit: int,
        seed: int = 0,
        *,
        negotiated: bool = False,
    ) -> None:
        self.layout = layout
        self.negotiated = negotiated
        self.random = random.Random(seed)
        self.announced: list[list[int]] = []
        self.started: list[int] = []
        self.flying: list[Chunk] = []
        self.peak = 0  # bytes in flight
        self.landing = 0.7  # probability that a chunk lands while another is started
        self.scheduler = Scheduler(credit)
        self.leader = Leader(
            layout.cut(partition),
            self.scheduler,
            self,
            self.announce,
            LIMIT,
            self.wake,
            self.wake,
            free=negotiated,
        )

    def wake(self) -> None:
        self.leader.pump()

    def run(self, rounds: Sequence[Sequence[int]]) -> None:
        """Post each round, in its own order, when the one before is back; then stop."""
        for order in rounds:
            for parameter in order:
                self.leader.post([parameter])
            while self.flying:
                self.land()
        self.leader.stop()

    def announce(self, message: Sequence[int]) -> None:
        self.announced.append(list(message))

    def start(self, chunk: Chunk) -> None:
        told = GO if self.negotiated else chunk.index
        assert told in self.announced[-1], "started before it was announced"
        self.started.append(chunk.index)
        self.flying.append(chunk)
        self.peak = max(self.peak, sum(c.nbytes for c in self.flying))
        if self.random.random() < self.landing:
            self.land()

    def land(self) -> None:
        self.leader.complete(self.flying.pop(self.random.randrange(len(self.flying))))

    def compare(self, step: Step) -> None:
        raise AssertionError("the leader announces steps, it does not compare")

    def recut(self, cut: Cut) -> Plan:
        assert not self.flying, "the buffer was cut anew under a chunk in flight"
        return self.layout.cut(cut.partition_size)


class BurstBench(LeaderBench):
    """Nothing is done before ``burst`` ends, as when another thread is slow to wake."""

    asleep = False

    def wake(self) -> None:
        if not self.asleep:
            super().wake()

    def burst(self, parameters: Iterable[int]) -> None:
        self.asleep = True
        for parameter in parameters:
            self.leader.post([parameter])
        self.asleep = False
        self.leader.pump()


def layout_of(numels: Sequence[int]) -> Layout:
    return Layout([ParameterSpec(name=f"p{i}", numel=n, itemsize=4) for i, n in enumerate(numels)])


numels = st.lists(st.integers(0, 100), min_size=1, max_size=8)


@given(numels, st.integers(16, 500), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_every_chunk_of_every_round_is_announced_and_started_once(
    numels, partition, chunks_in_credit, rounds, rng
):
    layout = layout_of(numels)
    bench = LeaderBench(layout, partition, partition * chunks_in_credit, seed=rng.random())
    orders = [rng.sample(range(len(numels)), len(numels)) for _ in range(rounds)]
    bench.run(orders)
    count = len(layout.cut(partition).chunks)
    assert sorted(bench.started) == sorted(list(range(count)) * rounds)
    assert bench.announced[-1] == [STOP]
    assert all(len(message) <= LIMIT for message in bench.announced)
    assert [i for m in bench.announced[:-1] for i in m] == bench.started
    assert bench.leader.ended.is_set()


def test_a_burst_is_sent_in_forward_order_although_posted_backwards():
    bench = BurstBench(layout_of([15] * 6), 64, 64)
    bench.burst([5, 4, 3, 2, 1, 0])
    while bench.flying:
        bench.land()
    assert bench.started == [0, 1, 2, 3, 4, 5]


def test_what_is_urgent_overtakes_what_waits_for_credit():
    bench = LeaderBench(layout_of([15] * 6), 64, 64)
    bench.landing = 0.0
    bench.run([[5, 4, 3, 2, 1, 0]])
    assert bench.started == [5, 0, 1, 2, 3, 4]


def test_a_chunk_waits_for_every_parameter_that_it_overlaps():
    bench = LeaderBench(layout_of([15, 15]), 128, 128)
    bench.leader.post([1])
    assert bench.started == []
    bench.leader.post([0])
    assert bench.started == [0]


def test_nobody_is_woken_for_what_cannot_start():
    wakes: list[int] = []
    layout = layout_of([15] * 4)
    leader: Leader
    bench = LeaderBench(layout, 64, 64)
    bench.landing = 0.0

    def wake() -> None:
        wakes.append(1)

    leader = Leader(layout.cut(64), Scheduler(64), bench, bench.announce, LIMIT, wake, wake)
    leader.post([3])
    assert len(wakes) == 1
    leader.pump()
    for parameter in (2, 1, 0):  # the credit is taken
        leader.post([parameter])
    assert len(wakes) == 1


def test_the_credit_bounds_what_flies():
    bench = LeaderBench(layout_of([15] * 6), 64, 128)
    bench.landing = 0.0
    for parameter in range(6):
        bench.leader.post([parameter])
    assert bench.peak == 128
    assert bench.started == [0, 1]


def test_on_an_engine_that_negotiates_rounds_are_announced_instead_of_chunks():
    bench = LeaderBench(layout_of([15] * 4), 64, 64, negotiated=True)
    bench.landing = 0.0
    for parameter in (3, 2, 1, 0):
        bench.leader.post([parameter])
    assert bench.announced == [[GO]]
    while bench.flying:
        bench.land()
    bench.leader.step(Step(number=1, rounds=1))
    assert bench.announced == [[GO], [STEP, 1, 1, GO]]
    for _ in range(2):  # rounds, without a step between them
        for parameter in (3, 2, 1, 0):
            bench.leader.post([parameter])
        while bench.flying:
            bench.land()
    assert bench.announced == [[GO], [STEP, 1, 1, GO], [GO]]
    assert bench.started == [3, 0, 1, 2] * 3
    assert bench.peak == 64


def test_a_round_that_was_let_go_ends_before_a_cut():
    bench = LeaderBench(layout_of([15] * 2), 64, 64, negotiated=True)
    for parameter in (1, 0):
        bench.leader.post([parameter])
    bench.leader.step(Step(number=1, rounds=1))
    bench.leader.cut(Cut(partition_size=256, credit_size=256, mode=0))
    for parameter in (1, 0, 1, 0):
        bench.leader.post([parameter])
        while bench.flying:
            bench.land()
    bench.leader.stop()
    assert bench.announced == [[GO], [STEP, 1, 1, GO], [CUT, 256, 256, 0], [GO], [STOP]]
    assert bench.started == [1, 0, 1, 0, 0]


@given(numels, st.integers(16, 500), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_where_the_engine_negotiates_each_chunk_is_still_started_once(
    numels, partition, chunks_in_credit, rounds, rng
):
    layout = layout_of(numels)
    credit = partition * chunks_in_credit
    bench = LeaderBench(layout, partition, credit, seed=rng.random(), negotiated=True)
    bench.run([rng.sample(range(len(numels)), len(numels)) for _ in range(rounds)])
    expected = sorted(list(range(len(layout.cut(partition).chunks))) * rounds)
    assert sorted(bench.started) == expected
    assert bench.announced == [[GO]] * rounds + [[STOP]]


def test_messages_hold_at_most_the_limit():
    bench = BurstBench(layout_of([15] * 18), 64, 64 * 18)
    bench.burst(range(18))
    bench.leader.stop()
    assert [len(message) for message in bench.announced] == [LIMIT, LIMIT, 2, 1]


def test_a_step_is_announced_with_what_comes_next():
    bench = LeaderBench(layout_of([1]), 64, 64)
    bench.leader.step(Step(number=7, rounds=9))
    assert bench.announced == []
    bench.leader.post([0])
    bench.leader.step(Step(number=8, rounds=10))
    bench.leader.stop()
    assert bench.announced == [[STEP, 7, 9, 0], [STEP, 8, 10, STOP]]


def test_steps_that_nothing_follows_do_not_pile_up():
    bench = LeaderBench(layout_of([15] * 2), 64, 64)
    for number in range(40):
        bench.leader.step(Step(number=number, rounds=number))
    bench.leader.stop()
    assert all(len(message) <= LIMIT for message in bench.announced)
    assert [n for m in bench.announced for n in m].count(STEP) == 40


def test_a_cut_waits_until_all_is_back_and_holds_later_posts_back():
    bench = LeaderBench(layout_of([15] * 4), 64, 64)
    bench.landing = 0.0
    bench.leader.post([3])
    bench.leader.cut(Cut(partition_size=256, credit_size=256, mode=0))
    for parameter in range(4):
        bench.leader.post([parameter])
    assert bench.announced == [[3]]
    bench.land()
    bench.land()
    bench.leader.stop()
    assert bench.announced == [[3], [CUT, 256, 256, 0], [0], [STOP]]


def test_a_failed_start_ends_the_leader():
    class Broken(LeaderBench):
        def start(self, chunk: Chunk) -> None:
            raise TransportError("wire cut")

    bench = Broken(layout_of([15, 15]), 64, 64)
    with pytest.raises(TransportError, match="wire cut"):
        bench.leader.post([1])
    assert bench.leader.ended.is_set()
    bench.leader.post([0])
    bench.leader.stop()
    assert bench.announced == [[1]]


def test_many_threads_post_and_complete_and_each_chunk_starts_once():
    layout = layout_of([15] * 64)
    flying: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()

    class Threaded(LeaderBench):
        def start(self, chunk: Chunk) -> None:
            self.started.append(chunk.index)
            flying.put(chunk)

    def complete() -> None:
        while (chunk := flying.get()) is not None:
            bench.leader.complete(chunk)

    bench = Threaded(layout, 64, 256)
    engine = [threading.Thread(target=complete) for _ in range(3)]
    posters = [
        threading.Thread(target=lambda part=part: [bench.leader.post([p]) for p in part])
        for part in (range(0, 64, 2), range(1, 64, 2))
    ]
    for thread in [*engine, *posters]:
        thread.start()
    for thread in posters:
        thread.join(10)
    deadline = time.monotonic() + 10
    while not bench.scheduler.idle and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    for _ in engine:
        flying.put(None)
    for thread in engine:
        thread.join(10)
    assert sorted(bench.started) == list(range(64))
    assert [i for m in bench.announced for i in m] == bench.started


class FollowerBench:
    """A follower, and a diary."""

    def __init__(self, layout: Layout, partition: int, *, any_order: bool = False) -> None:
        self.layout = layout
        self.any_order = any_order
        self.started: list[int] = []
        self.steps: list[Step] = []
        self.follower = Follower(layout.cut(partition), self, self.wake)

    def wake(self) -> None:
        self.follower.pump()

    def hear(self, *messages: Sequence[int]) -> None:
        for message in messages:
            self.follower.take(message)
            self.follower.pump()

    def start(self, chunk: Chunk) -> None:
        self.started.append(chunk.index)

    def compare(self, step: Step) -> None:
        self.steps.append(step)

    def recut(self, cut: Cut) -> Plan:
        return self.layout.cut(cut.partition_size)


permuted = st.permutations(range(6))
interleavings = st.permutations(["hear", "post"] * 6)


def interleaved(
    bench: FollowerBench, announced: Sequence[int], posted: Sequence[int], order: Sequence[str]
) -> Iterator[tuple[Sequence[int], set[int]]]:
    """Let the follower hear and post; yield after each what it has heard, and what is ready."""
    heard = ready = 0
    for event in order:
        if event == "hear":
            bench.hear([announced[heard]])
            heard += 1
        else:
            bench.follower.post([posted[ready]])
            ready += 1
        yield announced[:heard], set(posted[:ready])


@given(permuted, permuted, interleavings)
def test_the_follower_starts_what_is_announced_in_that_order(announced, posted, order):
    bench = FollowerBench(layout_of([15] * 6), 64)
    for heard, ready in interleaved(bench, announced, posted, order):
        assert bench.started == list(itertools.takewhile(ready.__contains__, heard))
    assert not bench.follower.waiting


@given(permuted, permuted, interleavings)
def test_where_any_order_will_do_what_is_ready_passes_what_is_not(announced, posted, order):
    bench = FollowerBench(layout_of([15] * 6), 64, any_order=True)
    for heard, ready in interleaved(bench, announced, posted, order):
        assert sorted(bench.started) == sorted(ready.intersection(heard))
    assert not bench.follower.waiting


def test_steps_may_be_passed_and_pass_but_a_cut_may_not():
    bench = FollowerBench(layout_of([15] * 3), 64, any_order=True)
    bench.follower.post([1])
    bench.hear([2, STEP, 1, 1, 1, CUT, 128, 128, 0, 0])
    assert bench.steps == [Step(number=1, rounds=1)]
    assert bench.started == [1]
    bench.follower.post([0])
    assert bench.started == [1]
    bench.follower.post([2])
    assert bench.started == [1, 2]
    bench.follower.post([1])  # of the next round: 1 went before the cut
    assert bench.started == [1, 2, 0]


def test_the_nth_start_of_a_chunk_waits_for_the_nth_round():
    bench = FollowerBench(layout_of([15, 15]), 64)
    bench.hear([1, 0], [0, 1])
    for parameter in (0, 1):
        bench.follower.post([parameter])
    assert bench.started == [1, 0]
    bench.follower.post([1])
    assert bench.started == [1, 0]
    bench.follower.post([0])
    assert bench.started == [1, 0, 0, 1]


def test_what_is_posted_ahead_of_a_new_cut_counts_for_it():
    bench = FollowerBench(layout_of([15, 15]), 64)
    bench.follower.post([0])
    bench.follower.post([1])
    bench.hear([0, 1])
    bench.follower.post([1])  # the next round, before the cut is heard
    bench.hear([CUT, 128, 128, 0, 0])
    assert bench.started == [0, 1]
    bench.follower.post([0])
    assert bench.started == [0, 1, 0]


def test_a_cut_in_the_midst_of_a_round_counts_what_was_sent_before_it():
    bench = FollowerBench(layout_of([15, 15, 15, 15]), 64)
    bench.follower.post([3])
    bench.hear([3, CUT, 128, 128, 0])
    bench.follower.post([2])  # its chunk-mate 3 went before the cut, with this round
    bench.hear([1])
    assert bench.started == [3]
    bench.follower.post([3])
    assert bench.started == [3, 1]


def test_the_follower_starts_what_is_ready_of_the_rounds_that_were_let_go():
    bench = FollowerBench(layout_of([15, 15, 15]), 64)
    bench.follower.post([2])
    bench.follower.post([0])
    assert bench.started == []
    bench.hear([GO])
    assert bench.started == [0, 2]
    bench.follower.post([2])  # the next round
    bench.follower.post([1])
    assert bench.started == [0, 2, 1]
    bench.hear([STEP, 1, 1, GO])
    assert bench.started == [0, 2, 1, 2]


def test_what_is_posted_of_a_round_that_was_not_let_go_counts_for_the_new_cut():
    bench = FollowerBench(layout_of([15, 15]), 64)
    bench.hear([GO])
    for parameter in (1, 0, 1):
        bench.follower.post([parameter])
    bench.hear([CUT, 128, 128, 0], [GO])
    assert bench.started == [1, 0]
    bench.follower.post([0])
    assert bench.started == [1, 0, 0]


def test_the_follower_hands_steps_over_for_comparison():
    bench = FollowerBench(layout_of([1]), 64)
    bench.hear([STEP, 4, 5, 0])
    assert bench.steps == [Step(number=4, rounds=5)]
    bench.follower.post([0])
    assert bench.started == [0]


def test_the_follower_ends_with_the_leader():
    bench = FollowerBench(layout_of([15]), 64)
    assert bench.follower.take([0])
    assert not bench.follower.take([STEP, 1, 1, STOP])
    assert bench.follower.ended.is_set()
    bench.follower.post([0])
    assert bench.started == []


@given(numels, st.integers(16, 500), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_what_the_leader_announces_makes_the_follower_start_the_same(
    numels, partition, chunks_in_credit, rounds, rng
):
    layout = layout_of(numels)
    leader = LeaderBench(layout, partition, partition * chunks_in_credit)
    follower = FollowerBench(layout, partition)
    everybody = range(len(numels))
    heard = 0
    for _ in range(rounds):
        for parameter in rng.sample(everybody, len(numels)):
            leader.leader.post([parameter])
        while leader.flying:
            leader.land()
        for parameter in rng.sample(everybody, len(numels)):
            follower.follower.post([parameter])
        follower.hear(*leader.announced[heard:])
        heard = len(leader.announced)
    assert follower.started == leader.started
