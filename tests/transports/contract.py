"""What every transport must do, as checks that run on all ranks at once.

A check is a function of one rank's ``Bench``; it opens transports, uses them, closes them and
raises where the contract is broken. All ranks run the same checks in the same order, in threads or
in processes (see ``worker.py``), so the file knows no launcher and no engine.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bytescheduler.core import Exchange, Layout, ParameterSpec, Settings
from bytescheduler.exceptions import TransportClosedError, TransportError
from bytescheduler.transports.base import MESSAGE_LIMIT, Transport

PATIENCE = 30.0  # seconds until a check calls something a hang
ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-6, "float64": 1e-12}
SEEDS = 9
RUN_AHEAD = 50  # announcements that nobody has received yet


@dataclass(kw_only=True)
class Bench:
    """One rank's tools.

    Attributes:
        open_group: ``open_group(n)`` opens a transport; equal ``n`` on all ranks, collective.
        make: makes a buffer of a number of elements and a dtype, in the engine's own kind.
        view: a NumPy array that shows (not copies) the content, or None where there is none.
        testament: keeps a text although the process is killed right after.
        idle_share: CPU time that an idle process may use, as a share of one core.
        engine_spins: the engine's own threads are never idle, so only Python's are looked at.
    """

    rank: int
    world_size: int
    open_group: Callable[[int], Transport]
    make: Callable[[int, str], Any]
    write: Callable[[Any, Any], None]
    read: Callable[[Any], np.ndarray]
    dtypes: Sequence[str] = tuple(ITEM)
    many: int = 3000
    seeds: int = SEEDS
    idle_share: float | None = 0.15
    engine_spins: bool = False
    testament: Callable[[str], None] = print
    groups: int = field(default=0, init=False)

    def fresh(self) -> Transport:
        self.groups += 1
        return self.open_group(self.groups)

    @contextmanager
    def transport(self) -> Iterator[Transport]:
        transport = self.fresh()
        try:
            yield transport
        finally:
            transport.close()

    def filled(self, values: Any, dtype: str = "float32") -> Any:
        array = np.asarray(values, np.float64)
        buffer = self.make(array.size, dtype)
        self.write(buffer, array)
        return buffer

    def mean(self, of_rank: Callable[[int], Any]) -> np.ndarray:
        return np.mean([np.asarray(of_rank(r), np.float64) for r in range(self.world_size)], axis=0)


class Flight:
    """Starts chunks, and waits until all of them are done, each once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._landed = threading.Condition(self._lock)
        self._counts: list[int] = []
        self._errors: list[BaseException] = []

    def start(self, handle: Any, priority: int = 0) -> None:
        with self._lock:
            number = len(self._counts)
            self._counts.append(0)

        def done(error: BaseException | None) -> None:
            with self._lock:
                self._counts[number] += 1
                if error is not None:
                    self._errors.append(error)
                self._landed.notify_all()

        self._transport.start(handle, priority, done)

    def land(self) -> None:
        with self._lock:
            landed = self._landed.wait_for(lambda: all(self._counts), PATIENCE)
            assert landed, f"{self._counts.count(0)} of {len(self._counts)} chunks are not done"
            assert set(self._counts) <= {1}, "done was called more than once"
            if self._errors:
                raise self._errors[0]


def pattern(size: int, rank: int) -> np.ndarray:
    """Small integers that every dtype and every sum of a few ranks holds exactly."""
    return (np.arange(size) % 7 + 2 * rank).astype(np.float64)


def reduce_all(transport: Transport, buffers: Sequence[Any]) -> None:
    handles = [transport.prepare(index, buffer) for index, buffer in enumerate(buffers)]
    flight = Flight(transport)
    for index, handle in enumerate(handles):
        flight.start(handle, index)
    flight.land()


def ranks_and_sizes(bench: Bench) -> None:
    with bench.transport() as transport:
        assert (transport.rank, transport.world_size) == (bench.rank, bench.world_size)
        assert isinstance(transport.ordered, bool)
        if transport.negotiates:
            assert transport.reentrant
            assert not transport.ordered


def averages_in_place_again_and_again(bench: Bench) -> None:
    with bench.transport() as transport:
        buffer = bench.make(1000, "float32")
        handle = transport.prepare(0, buffer)
        for iteration in range(5):
            bench.write(buffer, pattern(1000, bench.rank) + iteration)
            flight = Flight(transport)
            flight.start(handle)
            flight.land()
            expected = bench.mean(lambda r: pattern(1000, r)) + iteration
            np.testing.assert_allclose(bench.read(buffer), expected, rtol=1e-6)


def every_dtype(bench: Bench) -> None:
    with bench.transport() as transport:
        buffers = [bench.filled(pattern(999, bench.rank), dtype) for dtype in bench.dtypes]
        reduce_all(transport, buffers)
        for dtype, buffer in zip(bench.dtypes, buffers, strict=True):
            expected = bench.mean(lambda r: pattern(999, r))
            np.testing.assert_allclose(
                bench.read(buffer), expected, rtol=TOLERANCE[dtype], err_msg=dtype
            )


def infinities_and_nan(bench: Bench) -> None:
    special = [np.inf, -np.inf, np.nan, 1.0]
    with bench.transport() as transport:
        mine = special if bench.rank == 0 else [1.0] * 4
        buffers = [bench.filled(mine, dtype) for dtype in bench.dtypes]
        reduce_all(transport, buffers)
        for dtype, buffer in zip(bench.dtypes, buffers, strict=True):
            np.testing.assert_array_equal(bench.read(buffer), special, err_msg=dtype)


def empty_and_odd_sizes(bench: Bench) -> None:
    sizes = [0, 1, 2, 3, 7, 63, 64, 65, 1025, 100_003, 0]
    with bench.transport() as transport:
        buffers = [bench.filled(pattern(size, bench.rank)) for size in sizes]
        reduce_all(transport, buffers)
        for size, buffer in zip(sizes, buffers, strict=True):
            expected = bench.mean(lambda r, size=size: pattern(size, r))
            np.testing.assert_allclose(bench.read(buffer), expected, rtol=1e-6)


def slices_of_one_buffer_do_not_touch_their_neighbours(bench: Bench) -> None:
    with bench.transport() as transport:
        flat = bench.filled(pattern(300, bench.rank))
        handles = [transport.prepare(0, flat[10:110]), transport.prepare(1, flat[120:299])]
        flight = Flight(transport)
        for handle in handles:
            flight.start(handle)
        flight.land()
        expected = pattern(300, bench.rank)
        mean = bench.mean(lambda r: pattern(300, r))
        for start, stop in ((10, 110), (120, 299)):
            expected[start:stop] = mean[start:stop]
        np.testing.assert_allclose(bench.read(flat), expected, rtol=1e-6)


def thousands_in_flight(bench: Bench) -> None:
    with bench.transport() as transport:
        flat = bench.make(bench.many * 64, "float32")
        bench.write(flat, pattern(bench.many * 64, bench.rank))
        reduce_all(transport, [flat[i * 64 : i * 64 + 64] for i in range(bench.many)])
        expected = bench.mean(lambda r: pattern(bench.many * 64, r))
        np.testing.assert_allclose(bench.read(flat), expected, rtol=1e-6)


def start_returns_before_the_others_have_started(bench: Bench) -> None:
    """Rank 0 announces after its start; if that blocked, nobody would ever start."""
    with bench.transport() as transport:
        buffer = bench.filled(pattern(5000, bench.rank))
        handle = transport.prepare(0, buffer)
        flight = Flight(transport)
        if bench.rank == 0:
            flight.start(handle)
            transport.announce([1])
        else:
            assert list(transport.receive()) == [1]
            flight.start(handle)
        flight.land()
        expected = bench.mean(lambda r: pattern(5000, r))
        np.testing.assert_allclose(bench.read(buffer), expected, rtol=1e-6)


def each_chunk_is_started_by_the_one_before(bench: Bench) -> None:
    """Reentrant engines: completions start chunks and announce, in whichever thread they are."""
    with bench.transport() as transport:
        if not transport.reentrant:
            return
        count = 50
        flat = bench.filled(pattern(count * 64, bench.rank))
        handles = [transport.prepare(i, flat[i * 64 : i * 64 + 64]) for i in range(count)]
        over = threading.Event()
        errors: list[BaseException] = []

        def start(index: int) -> None:
            if bench.rank == 0:
                transport.announce([index])
            transport.start(handles[index], index, lambda error: go_on(index + 1, error))

        def go_on(index: int, error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            if error is None and index < count:
                start(index)
            else:
                over.set()

        start(0)
        if bench.rank != 0:
            heard = [list(transport.receive()) for _ in range(count)]
            assert heard == [[index] for index in range(count)]
        assert over.wait(PATIENCE), "the chain of chunks broke off"
        assert errors == []
        expected = bench.mean(lambda r: pattern(count * 64, r))
        np.testing.assert_allclose(bench.read(flat), expected, rtol=1e-6)


def averages_that_the_caller_waits_for(bench: Bench) -> None:
    """Engines with lockstep: as ``start`` to the last bit, and the caller's patience counts."""
    with bench.transport() as transport:
        if not transport.lockstep:
            return
        assert transport.reentrant
        assert not transport.negotiates
        rng = np.random.default_rng(bench.rank)
        for dtype in bench.dtypes:
            for size in (0, 1, 1000, 600_000):
                values = rng.standard_normal(size)
                started, awaited = bench.filled(values, dtype), bench.filled(values, dtype)
                reduce_all(transport, [started])
                handle = transport.prepare(0, awaited)
                if bench.rank != 0:
                    transport.receive()
                landed = transport.average(handle, 0)
                if bench.rank == 0:
                    if bench.world_size > 1 and size:
                        assert not landed(0.01), "it is there before the others have started"
                    if bench.world_size > 1:
                        transport.announce([size])
                assert landed(PATIENCE)
                np.testing.assert_array_equal(bench.read(awaited), bench.read(started))


def prepared_anew_for_another_cut(bench: Bench) -> None:
    with bench.transport() as transport:
        flat = bench.make(960, "float32")
        for pieces in (4, 15, 1, 960 // 64):
            bench.write(flat, pattern(960, bench.rank))
            step = 960 // pieces
            reduce_all(transport, [flat[i : i + step] for i in range(0, 960, step)])
            expected = bench.mean(lambda r: pattern(960, r))
            np.testing.assert_allclose(bench.read(flat), expected, rtol=1e-6)


def messages() -> list[list[int]]:
    rng = random.Random(5)
    fixed = [[-1], [2**63 - 1, -(2**63)], list(range(MESSAGE_LIMIT))]
    return fixed + [
        [rng.randint(-(2**40), 2**40) for _ in range(rng.randint(1, MESSAGE_LIMIT))]
        for _ in range(150)
    ]


def announcements_arrive_in_order(bench: Bench) -> None:
    with bench.transport() as transport:
        if bench.rank == 0:
            for message in messages():
                transport.announce(message)
        else:
            received = [list(transport.receive()) for _ in messages()]
            assert received == messages()
        transport.exchange(b"heard")


def announce_does_not_wait_for_the_receivers(bench: Bench) -> None:
    """Rank 0 announces much while the others wait for a chunk that it starts afterwards."""
    with bench.transport() as transport:
        buffer = bench.filled(pattern(10, bench.rank))
        flight = Flight(transport)
        handle = transport.prepare(0, buffer)
        if bench.rank == 0:
            for message in messages()[:RUN_AHEAD]:
                transport.announce(message)
        flight.start(handle)
        flight.land()
        if bench.rank != 0:
            assert [list(transport.receive()) for _ in messages()[:RUN_AHEAD]] == messages()[
                :RUN_AHEAD
            ]
        transport.exchange(b"heard")


def close_wakes_a_blocked_receive(bench: Bench) -> None:
    with bench.transport() as barrier:
        transport = bench.fresh()
        if bench.rank != 0 and transport.interruptible:
            caught: list[BaseException] = []

            def receive() -> None:
                try:
                    transport.receive()
                except TransportError as error:
                    caught.append(error)

            thread = threading.Thread(target=receive, daemon=True)
            thread.start()
            thread.join(0.2)
            assert thread.is_alive(), caught
            transport.close()
            thread.join(5.0)
            assert not thread.is_alive(), "receive() still blocks after close()"
            assert isinstance(caught[0], TransportClosedError)
        barrier.exchange(b"closed")
        transport.close()


def close_may_be_called_twice_and_ends_the_threads(bench: Bench) -> None:
    with bench.transport() as barrier:
        before = set(threading.enumerate())
        transport = bench.fresh()
        reduce_all(transport, [bench.filled(pattern(10, bench.rank))])
        barrier.exchange(b"done")
        transport.close()
        transport.close()
        ours = [
            t.name
            for t in set(threading.enumerate()) - before
            if t.name.startswith(f"bytescheduler-{transport.rank}")
        ]
        assert ours == []


def close_and_open_again(bench: Bench) -> None:
    for round_ in range(3):
        with bench.transport() as transport:
            buffer = bench.filled(pattern(100, bench.rank) + round_)
            reduce_all(transport, [buffer])
            expected = bench.mean(lambda r: pattern(100, r)) + round_
            np.testing.assert_allclose(bench.read(buffer), expected, rtol=1e-6)
            transport.exchange(b"done")


def two_groups_side_by_side(bench: Bench) -> None:
    """Each rank serves the groups in another order; they must not mix or block each other."""
    with bench.transport() as first, bench.transport() as second:
        groups = [first, second]
        buffers = [
            [bench.filled(pattern(50, bench.rank) + 10 * g + i) for i in range(20)]
            for g in range(2)
        ]
        flights = [Flight(transport) for transport in groups]
        handles = [
            [groups[g].prepare(i, buffer) for i, buffer in enumerate(buffers[g])] for g in range(2)
        ]
        for g in (0, 1) if bench.rank % 2 == 0 else (1, 0):
            for i, handle in enumerate(handles[g]):
                flights[g].start(handle, i)
        for flight in flights:
            flight.land()
        for g in range(2):
            for i, buffer in enumerate(buffers[g]):
                expected = bench.mean(lambda r: pattern(50, r)) + 10 * g + i
                np.testing.assert_allclose(bench.read(buffer), expected, rtol=1e-6)
        first.exchange(b"done")


def payloads_are_exchanged_by_rank(bench: Bench) -> None:
    def payload(rank: int, size: int) -> bytes:
        return bytes((rank + i) % 251 for i in range(size * (rank + 1)))

    with bench.transport() as transport:
        for size in (0, 1, 5, 10_000):
            gathered = transport.exchange(payload(bench.rank, size))
            assert gathered == [payload(r, size) for r in range(bench.world_size)]
        only_last = b"x" if bench.rank == bench.world_size - 1 else b""
        assert transport.exchange(only_last) == [b""] * (bench.world_size - 1) + [b"x"]


def broadcast_overwrites_with_the_content_of_rank_0(bench: Bench) -> None:
    with bench.transport() as transport:
        for dtype in bench.dtypes:
            for size in (0, 1, 1000):
                buffer = bench.filled(pattern(size, bench.rank) + 3, dtype)
                transport.broadcast(buffer)
                np.testing.assert_array_equal(bench.read(buffer), pattern(size, 0) + 3)


def broadcast_async_has_another_place_among_the_chunks_on_each_rank(bench: Bench) -> None:
    with bench.transport() as transport:
        buffers = [
            bench.filled(pattern(500, bench.rank) + index) for index in range(bench.world_size + 1)
        ]
        shared = bench.filled(pattern(1000, bench.rank) + 3)
        handles = [transport.prepare(index, buffer) for index, buffer in enumerate(buffers)]
        flight = Flight(transport)
        waits: list[Callable[[], object]] = []
        for index, handle in enumerate(handles):
            flight.start(handle, index)
            if index == bench.rank:
                waits.append(transport.broadcast_async(shared))
        for wait in waits:
            wait()
        np.testing.assert_array_equal(bench.read(shared), pattern(1000, 0) + 3)
        flight.land()
        for index, buffer in enumerate(buffers):
            expected = bench.mean(lambda rank: pattern(500, rank)) + index
            np.testing.assert_allclose(bench.read(buffer), expected, rtol=1e-6)


class Recorder:
    """Notes the order in which one rank starts its chunks."""

    def __init__(self, transport: Transport) -> None:
        self.order: list[int] = []
        self._start = transport.start
        transport.start = self._note  # type: ignore[method-assign]

    def _note(self, handle: Any, priority: int, done: Any) -> None:
        self.order.append(priority)
        self._start(handle, priority, done)


def layout() -> Layout:
    numels = [5000, 30, 0, 12_000, 1, 700]
    return Layout(
        [ParameterSpec(name=f"p{i}", numel=n, itemsize=4) for i, n in enumerate(numels)],
        signal=True,
    )


class Training:
    """Posts gradients in random order with random delays, and checks every average."""

    def __init__(self, bench: Bench, transport: Transport, settings: Settings) -> None:
        self.bench = bench
        self.layout = layout()
        self.flat = bench.make(self.layout.sizes["flat"], "float32")
        self.exchange = Exchange(self.layout, {"flat": self.flat}, transport, settings)

    def slice(self, parameter: int) -> Any:
        offset = self.layout.offsets[parameter]
        return self.flat[offset : offset + self.layout.specs[parameter].numel]

    def iterate(self, iteration: int, rng: random.Random) -> None:
        count = len(self.layout.specs)
        for parameter in rng.sample(range(count), count):
            threading.Event().wait(rng.choice([0, 0, 0.001, 0.003]))  # emulated compute
            numel = self.layout.specs[parameter].numel
            values = pattern(numel, self.bench.rank) + iteration
            self.bench.write(self.slice(parameter), values)
            self.exchange.post(parameter)
        self.exchange.step()
        for parameter in self.layout.order:
            self.exchange.wait([parameter])
            numel = self.layout.specs[parameter].numel
            expected = self.bench.mean(lambda r, numel=numel: pattern(numel, r)) + iteration
            np.testing.assert_allclose(self.bench.read(self.slice(parameter)), expected, rtol=1e-6)


def leader_order_under_random_delays(bench: Bench) -> None:
    """The same chunks under random delays, and in one order unless the engine takes any."""
    orders = []
    for seed in range(bench.seeds):
        partition = [2048, 8192, 65536, 1 << 20][seed % 4]  # the last: one chunk for all
        transport = bench.fresh()
        recorder = Recorder(transport)
        settings = Settings(partition_size=partition, credit_size=partition * (1 + seed // 2 % 4))
        training = Training(bench, transport, settings)
        rng = random.Random(1000 * seed + bench.rank)
        for iteration in range(3):
            training.iterate(iteration, rng)
        free = transport.negotiates or transport.any_order(partition)
        training.exchange.close()
        orders.append(sorted(recorder.order) if free else recorder.order)
    with bench.transport() as transport:
        everyone = transport.exchange(repr(orders).encode())
    assert set(everyone) == {repr(orders).encode()}


def modes_change_while_training(bench: Bench) -> None:
    """Into lockstep and out of it again, where the engine can, at random and twice in a row."""
    for seed in range(bench.seeds):
        transport = bench.fresh()
        first = Settings(partition_size=2048, credit_size=8192, mode="barrier")
        training = Training(bench, transport, first)
        rng = random.Random(1000 * seed + bench.rank)
        for iteration in range(8):
            training.iterate(iteration, rng)
            if bench.rank == 0 and rng.random() < 0.7:
                size = rng.choice([1024, 8192, 1 << 20])
                mode = rng.choice(["barrier", "barrier", "priority", "fifo"])
                training.exchange.reconfigure(
                    Settings(partition_size=size, credit_size=2 * size, mode=mode)
                )
        training.exchange.close()


def settings_change_while_training(bench: Bench) -> None:
    transport = bench.fresh()
    training = Training(bench, transport, Settings(partition_size=1024, credit_size=4096))
    rng = random.Random(bench.rank)
    for iteration, partition in enumerate([2048, 8192, 1 << 20, 4096, 1 << 20, 2048]):
        training.iterate(iteration, rng)
        if bench.rank == 0:
            training.exchange.reconfigure(
                Settings(partition_size=partition, credit_size=2 * partition)
            )
    training.exchange.close()
    assert training.exchange.settings.partition_size > 1024


def _python_seconds() -> float:
    """Processor time of the threads that Python knows: ours, and the test's."""
    clocks = [time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident]
    return sum(time.clock_gettime(clock) for clock in clocks)


def nothing_spins_at_idle(bench: Bench) -> None:
    if bench.idle_share is None:
        return
    with bench.transport() as barrier:
        transport = bench.fresh()
        training = Training(bench, transport, Settings())
        training.iterate(0, random.Random(bench.rank))
        used = _python_seconds if bench.engine_spins else time.process_time
        threading.Event().wait(0.3)
        cpu, wall = used(), time.perf_counter()
        threading.Event().wait(1.0)
        share = (used() - cpu) / (time.perf_counter() - wall)
        barrier.exchange(b"measured")
        training.exchange.close()
    assert share < bench.idle_share, f"an idle rank uses {share:.0%} of a core"


CHECKS: tuple[Callable[[Bench], None], ...] = (
    ranks_and_sizes,
    averages_in_place_again_and_again,
    every_dtype,
    infinities_and_nan,
    empty_and_odd_sizes,
    slices_of_one_buffer_do_not_touch_their_neighbours,
    thousands_in_flight,
    start_returns_before_the_others_have_started,
    each_chunk_is_started_by_the_one_before,
    averages_that_the_caller_waits_for,
    prepared_anew_for_another_cut,
    announcements_arrive_in_order,
    announce_does_not_wait_for_the_receivers,
    close_wakes_a_blocked_receive,
    close_may_be_called_twice_and_ends_the_threads,
    close_and_open_again,
    two_groups_side_by_side,
    payloads_are_exchanged_by_rank,
    broadcast_overwrites_with_the_content_of_rank_0,
    broadcast_async_has_another_place_among_the_chunks_on_each_rank,
    leader_order_under_random_delays,
    modes_change_while_training,
    settings_change_while_training,
    nothing_spins_at_idle,
)


def peer_is_killed(bench: Bench, victim: int) -> str:
    """The victim kills itself in mid-iteration; return what the survivor was told, and when."""
    transport = bench.fresh()
    training = Training(bench, transport, _settings_of_the_lost(victim))
    rng = random.Random(bench.rank)
    for iteration in range(3):
        training.iterate(iteration, rng)
    if bench.rank == victim:
        training.exchange.post(0)
        bench.testament(f"killed at {time.time()}")
        os.kill(os.getpid(), signal.SIGKILL)
    return _survive(training, rng)


def peer_leaves(bench: Bench, victim: int) -> str:
    """The victim's own code fails and its exchange is closed; the others must not wait for it."""
    transport = bench.fresh()
    training = Training(bench, transport, _settings_of_the_lost(victim))
    rng = random.Random(bench.rank)
    for iteration in range(3):
        training.iterate(iteration, rng)
    if bench.rank == victim:
        training.exchange.close()
        return "left"
    return _survive(training, rng)


def _settings_of_the_lost(victim: int) -> Settings:
    """One victim in announced rounds, another in lockstep."""
    mode = "barrier" if victim else "priority"
    return Settings(partition_size=4096, credit_size=16384, mode=mode)


def _survive(training: Training, rng: random.Random) -> str:
    begin = time.perf_counter()
    try:
        for iteration in range(3, 1000):
            training.iterate(iteration, rng)
    except TransportError as error:
        said = f"{type(error).__name__}: {error}"
        return f"{time.perf_counter() - begin:.1f} s, {said}"
    finally:
        training.exchange.close()
    raise AssertionError("training went on without the other rank")
