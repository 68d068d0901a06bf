"""The exchange over the fake transport: several ranks as threads, disorder by seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescheduler.core import Exchange, Layout, ParameterSpec, Settings, TraceRecorder
from bytescheduler.core.trace import Observer
from bytescheduler.exceptions import (
    PeerLostError,
    RankMismatchError,
    TransportError,
    UsageError,
)
from bytescheduler.transports.fake import FakeNetwork, FakeTransport

ITEM = 4
PATIENCE = 20.0  # seconds until a test calls it a hang


class Rank:
    """One rank of a test: buffer, exchange, and the values that it contributes."""

    def __init__(
        self,
        transport: FakeTransport,
        layout: Layout,
        sizes: Settings,
        observer: Observer | None = None,
    ) -> None:
        self.layout = layout
        self.rank = transport.rank
        self.transport = transport
        self.flat = np.zeros(layout.sizes.get("flat", 0), np.float32)
        self.exchange = Exchange(layout, {"flat": self.flat}, transport, sizes, observer)

    def view(self, parameter: int) -> np.ndarray:
        offset = self.layout.offsets[parameter]
        return self.flat[offset : offset + self.layout.specs[parameter].numel]

    def value(self, parameter: int, iteration: int) -> float:
        return float((self.rank + 1) * (parameter + 1) + 100 * iteration)

    def iterate(self, iteration: int, rng: random.Random) -> None:
        """Post all in a random order; then wait for each in forward order and check it."""
        parameters = list(range(len(self.layout.specs)))
        for parameter in rng.sample(parameters, len(parameters)):
            self.view(parameter)[:] = self.value(parameter, iteration)
            self.exchange.post(parameter)
        self.exchange.step()
        for parameter in self.layout.order:
            self.exchange.wait([parameter])

    def expected(self, parameter: int, iteration: int, world_size: int) -> float:
        return (world_size + 1) / 2 * (parameter + 1) + 100 * iteration


def run_ranks(ranks: Sequence[Rank], work: Callable[[Rank], None]) -> list[BaseException]:
    """Run ``work`` for all ranks at once; close them; return what they raised."""
    errors: list[BaseException] = []

    def body(rank: Rank) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
        finally:
            rank.exchange.close()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "an exchange hangs"
    return errors


def assert_no_thread_is_left() -> None:
    """A follower's listener ends when its engine is closed, which nobody waits for."""
    for thread in threading.enumerate():
        if thread.name.startswith("bytescheduler"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} outlives its exchange"


def layout_of(numels: Sequence[int], *, signal: bool = False) -> Layout:
    return Layout(
        [ParameterSpec(name=f"p{i}", numel=n, itemsize=ITEM) for i, n in enumerate(numels)],
        signal=signal,
    )


ENGINES = {
    "reentrant": {"reentrant": True},
    "threaded": {"reentrant": False},
    "negotiating": {"reentrant": True, "negotiates": True},
    "unordered": {"reentrant": True, "ordered": False},
}
"""The ways of driving the exchange (``core/driver.py``) and of announcing (``core/order.py``)."""


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, bool]:
    return request.param


def make(
    numels: Sequence[int],
    sizes: Settings,
    world_size: int = 2,
    seed: int | None = None,
    *,
    signal: bool = False,
    **engine: bool,
) -> tuple[FakeNetwork, list[Rank]]:
    network = FakeNetwork(world_size, seed=seed, **engine)
    layout = layout_of(numels, signal=signal)
    return network, [Rank(end, layout, sizes) for end in network.transports()]


def sizes(partition: int = 64, credit: int = 256, mode: str = "priority") -> Settings:
    return Settings(partition_size=partition, credit_size=credit, mode=mode)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(
    numels=st.lists(st.integers(0, 200), min_size=1, max_size=12),
    partition=st.integers(1, 600),
    chunks_in_credit=st.integers(1, 5),
    mode=st.sampled_from(["priority", "fifo", "barrier"]),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    engine=st.sampled_from(list(ENGINES.values())),
    signal=st.booleans(),
)
def test_every_rank_gets_the_average_and_starts_the_same_chunks(
    numels, partition, chunks_in_credit, mode, world_size, seed, engine, signal
):
    config = sizes(partition, partition * chunks_in_credit, mode)
    network, ranks = make(numels, config, world_size, seed, signal=signal, **engine)

    def work(rank: Rank) -> None:
        rng = random.Random(seed + rank.rank)
        for iteration in range(3):
            rank.iterate(iteration, rng)
            for parameter in range(len(numels)):
                expected = rank.expected(parameter, iteration, world_size)
                np.testing.assert_allclose(rank.view(parameter), expected, rtol=1e-6)

    errors = run_ranks(ranks, work)
    assert errors == []
    if not network.ordered:
        assert all(sorted(order) == sorted(network.started[0]) for order in network.started)
    else:
        assert all(order == network.started[0] for order in network.started)
    assert len(network.started[0]) == 3 * len(
        ranks[0].layout.cut(partition, growing=mode == "priority").chunks
    )


@pytest.mark.parametrize("seed", range(10))
def test_cutting_anew_between_iterations_loses_nothing(seed, engine):
    numels = [100, 7, 0, 300, 1]
    _, ranks = make(numels, sizes(), 3, seed, **engine)

    def work(rank: Rank) -> None:
        rng = random.Random(seed * 10 + rank.rank)
        for iteration in range(8):
            rank.iterate(iteration, rng)
            for parameter in range(len(numels)):
                expected = rank.expected(parameter, iteration, 3)
                np.testing.assert_allclose(rank.view(parameter), expected, rtol=1e-6)
            if rank.rank == 0:
                partition = 16 << (3 * iteration % 10)  # many chunks, or one for all
                rank.exchange.reconfigure(sizes(partition, 4 * partition, "fifo"))

    assert run_ranks(ranks, work) == []
    assert all(rank.exchange.settings.mode == "fifo" for rank in ranks)


def test_only_the_leader_decides_settings():
    _, ranks = make([10], sizes())
    with pytest.raises(UsageError, match="only rank 0"):
        ranks[1].exchange.reconfigure(sizes())
    assert run_ranks(ranks, lambda rank: None) == []


def test_a_broken_wire_fails_every_rank_and_hangs_none(engine):
    network, ranks = make([100, 100], sizes(), **engine)

    def work(rank: Rank) -> None:
        if rank.rank == 1:
            network.fail(ConnectionError("wire cut"))
            raise KeyboardInterrupt
        rank.exchange.post(0)
        rank.exchange.post(1)
        network.fail(ConnectionError("wire cut"))
        rank.exchange.wait([0, 1])

    errors = run_ranks(ranks, work)
    assert any(isinstance(error, TransportError) and "wire cut" in str(error) for error in errors)


def test_a_leader_that_ends_early_is_named_by_its_followers(engine):
    _, ranks = make([100], sizes(), **engine)

    def work(rank: Rank) -> None:
        if rank.rank == 1:
            rank.exchange.post(0)
            rank.exchange.wait([0])

    (error,) = run_ranks(ranks, work)
    assert isinstance(error, PeerLostError)
    assert error.ranks == (0,)


def test_ranks_that_count_backward_passes_differently_are_told(engine):
    _, ranks = make([10], sizes(), **engine)

    def work(rank: Rank) -> None:
        if rank.rank == 1:
            rank.exchange.step()
        for _ in range(3):
            rank.exchange.post(0)
            rank.exchange.wait([0])
            rank.exchange.step()

    errors = run_ranks(ranks, work)
    assert any(isinstance(error, RankMismatchError) for error in errors)


def test_without_parameters_there_is_nothing_to_do(engine):
    _, ranks = make([], sizes(), **engine)

    def work(rank: Rank) -> None:
        for iteration in range(3):
            rank.iterate(iteration, random.Random(0))

    assert run_ranks(ranks, work) == []


def test_a_round_knows_what_is_missing():
    _, ranks = make([10, 20, 30], sizes())

    def work(rank: Rank) -> None:
        assert not rank.exchange.round_open
        rank.exchange.post(1)
        assert rank.exchange.round_open
        assert rank.exchange.missing() == [0, 2]
        with pytest.raises(UsageError, match="p0"):
            rank.exchange.step()
        rank.exchange.post(0)
        rank.exchange.post(2)
        assert not rank.exchange.round_open
        rank.exchange.step()
        rank.exchange.wait(range(3))

    assert run_ranks(ranks, work) == []


def test_no_thread_outlives_close(engine):
    _, ranks = make([10, 20], sizes(), **engine)
    assert run_ranks(ranks, lambda rank: rank.iterate(0, random.Random(0))) == []
    assert_no_thread_is_left()


def test_no_thread_outlives_an_engine_that_fails(engine):
    network, ranks = make([10] * 8, sizes(64, 64), **engine)

    def work(rank: Rank) -> None:
        if rank.rank == 0:
            network.fail(OSError("the cable"))
        while True:
            rank.iterate(0, random.Random(0))

    errors = run_ranks(ranks, work)
    assert len(errors) == 2
    assert all(isinstance(error, TransportError) for error in errors)
    assert_no_thread_is_left()


def test_the_engine_is_never_called_from_where_gradients_are_posted(engine):
    """What it does inside of ``start`` would come out of the hooks of backward."""
    network = FakeNetwork(2, seed=1, **engine)
    transports = network.transports()
    callers: set[threading.Thread] = set()
    for transport in transports:
        _note_callers(transport, callers)
    ranks = [Rank(transport, layout_of([40] * 10), sizes(64, 128)) for transport in transports]
    posting: set[threading.Thread] = set()

    def work(rank: Rank) -> None:
        posting.add(threading.current_thread())
        for iteration in range(3):
            rank.iterate(iteration, random.Random(iteration))

    assert run_ranks(ranks, work) == []
    assert callers
    assert not callers & posting


def _note_callers(transport: FakeTransport, callers: set[threading.Thread]) -> None:
    start = transport.start

    def noted(*args: Any) -> None:
        callers.add(threading.current_thread())
        start(*args)

    transport.start = noted  # type: ignore[method-assign]


def test_returned_callbacks_run_once_per_post_and_on_failure(engine):
    _, ranks = make([50, 50], sizes(64, 64), **engine)
    calls: list[tuple[int, int]] = []

    def work(rank: Rank) -> None:
        for parameter in (1, 0):
            rank.exchange.post(
                parameter,
                on_returned=lambda parameter=parameter: calls.append((rank.rank, parameter)),
            )
        rank.exchange.wait([0, 1])

    assert run_ranks(ranks, work) == []
    assert sorted(calls) == [(0, 0), (0, 1), (1, 0), (1, 1)]


# -- rounds in lockstep


def make_lockstep(world_size: int = 2, **options: Any) -> tuple[FakeNetwork, list[Rank]]:
    return make([40, 3, 90], sizes(64, 64, "barrier"), world_size, signal=True, **options)


def test_rounds_in_lockstep_start_where_gradients_are_posted_and_are_not_announced():
    network, ranks = make_lockstep()
    starts: dict[int, list[bool]] = {rank.rank: [] for rank in ranks}  # by the training thread
    said: list[Sequence[int]] = []
    for rank in ranks:
        _note_starts(rank, starts[rank.rank], said)
    count = len(ranks[0].exchange.plan.chunks)

    def work(rank: Rank) -> None:
        threading.current_thread().name = "trains"
        for iteration in range(4):
            rank.iterate(iteration, random.Random(rank.rank))

    assert run_ranks(ranks, work) == []
    for rank in ranks:
        assert starts[rank.rank] == [False] * count + [True] * 3 * count
        assert network.started[rank.rank][count:] == [*reversed(range(count))] * 3
    assert len(said) <= count + 1  # the first round's chunks, and the farewell


@pytest.mark.parametrize("mode", ["priority", "fifo", "barrier"])
def test_one_chunk_needs_no_order_in_any_mode(mode):
    _, ranks = make([40, 3], sizes(1 << 20, 1 << 20, mode), signal=True)
    starts: list[bool] = []
    _note_starts(ranks[1], starts, [])

    def work(rank: Rank) -> None:
        threading.current_thread().name = "trains"
        for iteration in range(4):
            rank.iterate(iteration, random.Random(rank.rank))

    assert run_ranks(ranks, work) == []
    assert starts == [False, True, True, True]


def _note_starts(rank: Rank, starts: list[bool], said: list[Sequence[int]]) -> None:
    transport: Any = rank.exchange._transport
    start, announce = transport.start, transport.announce

    def noted(*args: Any) -> None:
        starts.append(threading.current_thread().name == "trains")
        start(*args)

    def told(message: Sequence[int]) -> None:
        said.append(message)
        announce(message)

    transport.start, transport.announce = noted, told


@pytest.mark.parametrize("seed", range(20))
def test_modes_change_at_random_and_nothing_is_lost(seed):
    network, ranks = make_lockstep(3, seed=seed)

    def work(rank: Rank) -> None:
        rng = random.Random(seed * 10 + rank.rank)
        for iteration in range(20):
            rank.iterate(iteration, rng)
            for parameter in range(3):
                expected = rank.expected(parameter, iteration, 3)
                np.testing.assert_allclose(rank.view(parameter), expected, rtol=1e-6)
            if rank.rank == 0 and rng.random() < 0.5:
                mode = rng.choice(["barrier", "barrier", "priority", "fifo"])
                partition = 16 << rng.randrange(7)
                rank.exchange.reconfigure(sizes(partition, 2 * partition, mode))
        if rank.rank == 0:
            rank.exchange.reconfigure(sizes(128, 256, "fifo"))
        for iteration in range(20, 23):
            rank.iterate(iteration, rng)

    assert run_ranks(ranks, work) == []
    assert all(order == network.started[0] for order in network.started)
    assert {rank.exchange.settings for rank in ranks} == {sizes(128, 256, "fifo")}


def test_a_change_of_settings_leaves_lockstep_for_one_round():
    network, ranks = make_lockstep()

    def work(rank: Rank) -> None:
        for iteration in range(8):
            rank.iterate(iteration, random.Random(rank.rank))
            if rank.rank == 0 and iteration == 2:
                rank.exchange.reconfigure(sizes(1 << 20, 1 << 20, "barrier"))

    before = len(ranks[0].exchange.plan.chunks)
    assert run_ranks(ranks, work) == []
    # Rounds 0 to 3 as they were: the change was made known in the fourth.
    assert network.started[0][4 * before :] == [0] * 4


def test_a_timeline_has_no_rounds_in_lockstep(tmp_path):
    network = FakeNetwork(2)
    layout = layout_of([40, 40], signal=True)
    ranks = [
        Rank(end, layout, sizes(64, 64, "barrier"), TraceRecorder(str(tmp_path / "t"), end.rank, 2))
        for end in network.transports()
    ]
    starts: list[bool] = []
    _note_starts(ranks[0], starts, [])

    def work(rank: Rank) -> None:
        threading.current_thread().name = "trains"
        for iteration in range(3):
            rank.iterate(iteration, random.Random(0))

    assert run_ranks(ranks, work) == []
    assert not any(starts)


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_lockstep_too_ranks_that_count_backward_passes_differently_are_told(world_size):
    """The rank that is off, or those that are not, before anybody has used the average."""
    _, ranks = make_lockstep(world_size)

    def work(rank: Rank) -> None:
        for iteration in range(4):
            rank.iterate(iteration, random.Random(0))
        if rank.rank == 1:
            rank.iterate(4, random.Random(0))
        for parameter in range(3):
            rank.exchange.post(parameter)
        rank.exchange.wait(range(3))
        if rank.rank != 1:  # a second backward pass of the same step
            for parameter in range(3):
                rank.exchange.post(parameter)
            rank.exchange.wait(range(3))
        rank.exchange.step()

    errors = run_ranks(ranks, work)
    assert any(isinstance(error, RankMismatchError) for error in errors)
    assert "no_sync" in str(errors[0])


def test_a_wire_that_breaks_in_lockstep_fails_every_rank():
    network, ranks = make_lockstep()

    def work(rank: Rank) -> None:
        for iteration in range(3):
            rank.iterate(iteration, random.Random(0))
        if rank.rank == 1:
            network.fail(ConnectionError("wire cut"))
            raise KeyboardInterrupt
        while True:
            rank.iterate(3, random.Random(0))

    errors = run_ranks(ranks, work)
    assert any(isinstance(error, TransportError) and "wire cut" in str(error) for error in errors)
    assert_no_thread_is_left()


def test_a_leader_that_ends_early_in_lockstep_is_named_by_its_followers():
    _, ranks = make_lockstep()

    def work(rank: Rank) -> None:
        for iteration in range(3 + rank.rank):
            rank.iterate(iteration, random.Random(0))

    (error,) = run_ranks(ranks, work)
    assert isinstance(error, PeerLostError)
    assert error.ranks == (0,)


def test_close_in_the_midst_of_lockstep_lets_nobody_wait_for_ever():
    _, ranks = make_lockstep()

    def work(rank: Rank) -> None:
        for iteration in range(3):
            rank.iterate(iteration, random.Random(0))
        for parameter in (2, 1, 0):
            rank.exchange.post(parameter)
        rank.exchange.close(drain=rank.rank == 0)

    errors = run_ranks(ranks, work)  # of rank 0, if rank 1 has closed before it has posted
    assert all(isinstance(error, PeerLostError) for error in errors)
    assert_no_thread_is_left()


@pytest.mark.parametrize("mode", ["priority", "fifo"])
def test_what_one_rank_does_not_wait_for_is_still_sent_before_the_next_round(engine, mode):
    """As with experts: what rank 0 goes on without, rank 1 needs before it can go on.

    The first parameter of the next round is more urgent than what is left of this one; were it
    sent first, it would wait for rank 1 and fill the credit that rank 1 waits for.
    """
    _, ranks = make([10, 40], sizes(64, 64, mode), **engine)
    first, second = ranks[0].exchange.plan.chunks_of
    assert set(first).isdisjoint(second)
    next_round_is_posted = threading.Event()

    def work(rank: Rank) -> None:
        exchange = rank.exchange
        exchange.post(0)
        if rank.rank == 0:
            exchange.post(1)
            exchange.wait([0])
            exchange.post(0)
            next_round_is_posted.set()
        else:
            exchange.wait([0])
            assert next_round_is_posted.wait(PATIENCE)
            exchange.post(1)
            exchange.wait([1])
            exchange.post(0)
        exchange.wait([1])
        exchange.post(1)
        exchange.wait([0, 1])

    assert run_ranks(ranks, work) == []


def test_rank_0_looks_after_what_is_late():
    _, ranks = make([10], sizes(64, 64), reentrant=True, ordered=False)
    looked = threading.Event()
    ranks[0].transport.look = looked.set

    def work(rank: Rank) -> None:
        if rank.rank == 1:
            assert looked.wait(PATIENCE)
        rank.exchange.post(0)
        rank.exchange.wait([0])

    assert run_ranks(ranks, work) == []
