"""The test double: several ranks in one process, on a virtual clock or with seeded disorder.

``FakeNetwork(world_size)`` connects ``FakeTransport`` ends. It averages NumPy buffers when all
ranks have started the same chunk, and raises when they start chunks in different orders, as Gloo
would not. Two ways of completing:

* ``VirtualClock`` given: a chunk takes ``latency + nbytes / bandwidth`` seconds on one wire, and
  completes when the test advances the clock. Single-threaded and deterministic.
* no clock: chunks complete at once, in an order shuffled by ``seed`` when several are pending.
"""

from __future__ import annotations

import heapq
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bytescheduler.exceptions import PeerLostError, RankMismatchError, TransportClosedError
from bytescheduler.transports.base import Done, Transport

__all__ = ["FakeNetwork", "FakeTransport", "VirtualClock"]

_Array = npt.NDArray[Any]


class VirtualClock:
    """Time that passes only when told; runs what is due, in order of time, then of call."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        """Run ``action`` when the clock reaches ``when`` seconds."""
        heapq.heappush(self._due, (when, next(self._sequence), action))

    def advance(self) -> bool:
        """Go to the next action and run it; False when there is none."""
        if not self._due:
            return False
        self.now, _, action = heapq.heappop(self._due)
        action()
        return True

    def run(self) -> None:
        """Advance until nothing is due."""
        while self.advance():
            pass


class _Handle(NamedTuple):
    rank: int
    chunk: int
    buffer: _Array


class FakeNetwork:
    """The wire between the ranks of one process.

    Args:
        world_size: number of ranks.
        clock: completes chunks in virtual time; None completes them at once.
        latency: seconds per chunk.
        bandwidth: bytes per second.
        seed: shuffles completion among the chunks that are pending.
        reentrant: what the ends say of themselves; both are true of them.
        negotiates: what the ends say of themselves.
        ordered: whether chunks are matched by their position in each rank's order, or by their
            index, so that the order is free; as it is where the ends negotiate.
    """

    def __init__(
        self,
        world_size: int,
        *,
        clock: VirtualClock | None = None,
        latency: float = 0.0,
        bandwidth: float = float("inf"),
        seed: int | None = None,
        reentrant: bool = True,
        negotiates: bool = False,
        ordered: bool = True,
    ) -> None:
        self.world_size = world_size
        self.reentrant = reentrant
        self.negotiates = negotiates
        self.ordered = ordered and not negotiates
        self.started: list[list[int]] = [[] for _ in range(world_size)]  # chunks, by rank
        self._times = [Counter[int]() for _ in range(world_size)]  # how often each, by rank
        self._clock = clock
        self._latency = latency
        self._bandwidth = bandwidth
        self._random = random.Random(seed) if seed is not None else None
        self._wire_free = 0.0
        self._gone: BaseException | None = None
        self._lock = threading.Lock()
        self._meeting: dict[tuple[int, int], list[tuple[_Handle, Done]]] = {}
        self._complete: list[list[tuple[_Handle, Done]]] = []
        self._barrier = threading.Barrier(world_size)
        self._payloads: list[bytes] = [b""] * world_size
        self._broadcast: _Array | None = None
        self.inboxes: list[queue.SimpleQueue[Sequence[int] | None]] = [
            queue.SimpleQueue() for _ in range(world_size)
        ]

    def transports(self) -> list[FakeTransport]:
        """One end per rank."""
        return [FakeTransport(self, rank) for rank in range(self.world_size)]

    def start(self, rank: int, handle: _Handle, done: Done) -> None:
        """Join the collective that this rank's position in the order, or the chunk, selects."""
        with self._lock:
            if self._gone is not None:
                raise self._gone
            started = self.started[rank]
            times = self._times[rank]
            place = (-1, len(started)) if self.ordered else (handle.chunk, times[handle.chunk])
            times[handle.chunk] += 1
            started.append(handle.chunk)
            party = self._meeting.setdefault(place, [])
            party.append((handle, done))
            if len({member.chunk for member, _ in party}) > 1:
                raise RankMismatchError(f"position {place[1]}: ranks start different chunks")
            if len(party) < self.world_size:
                return
            del self._meeting[place]
            self._complete.append(party)
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Break the wire: every chunk that waits for a peer, now or later, fails with ``error``."""
        with self._lock:
            self._gone = error
            parties, self._meeting = list(self._meeting.values()), {}
        for party in parties:
            for _, done in party:
                done(error)

    def gather(self, rank: int, payload: bytes) -> list[bytes]:
        """All payloads, by rank."""
        self._payloads[rank] = payload
        self._barrier.wait()
        payloads = list(self._payloads)
        self._barrier.wait()
        return payloads

    def broadcast(self, rank: int, buffer: _Array) -> None:
        """Copy rank 0's buffer to all others."""
        if rank == 0:
            self._broadcast = buffer
        self._barrier.wait()
        if rank != 0 and self._broadcast is not None:
            np.copyto(buffer, self._broadcast)
        self._barrier.wait()

    def _finish(self) -> None:
        party = self._take()
        if party is None:
            return
        if self._clock is None:
            self._average(party)
            return
        nbytes = party[0][0].buffer.nbytes
        self._wire_free = max(self._wire_free, self._clock.now) + nbytes / self._bandwidth
        self._clock.call_at(self._wire_free + self._latency, lambda: self._average(party))

    def _take(self) -> list[tuple[_Handle, Done]] | None:
        with self._lock:
            if not self._complete:
                return None
            last = len(self._complete) - 1
            return self._complete.pop(self._random.randint(0, last) if self._random else 0)

    def _average(self, party: list[tuple[_Handle, Done]]) -> None:
        party.sort(key=lambda member: member[0].rank)  # the same sums whoever came first
        mean = np.mean([handle.buffer for handle, _ in party], axis=0)
        for handle, _ in party:
            handle.buffer[:] = mean
        for _, done in party:
            done(None)


class FakeTransport(Transport):
    """One rank's end of a ``FakeNetwork``."""

    def __init__(self, network: FakeNetwork, rank: int) -> None:
        self.rank = rank
        self.world_size = network.world_size
        self.reentrant = network.reentrant
        self.negotiates = network.negotiates
        self.ordered = network.ordered
        self.lockstep = network.reentrant and not network.negotiates
        self.network = network
        self.closed = False

    def prepare(self, index: int, buffer: _Array) -> _Handle:
        return _Handle(self.rank, index, buffer)

    def start(self, handle: _Handle, priority: int, done: Done) -> None:
        self.network.start(self.rank, handle, done)

    def announce(self, message: Sequence[int]) -> None:
        for inbox in self.network.inboxes[1:]:
            inbox.put(tuple(message))

    def receive(self) -> Sequence[int]:
        message = self.network.inboxes[self.rank].get()
        if message is None:
            raise TransportClosedError(f"rank {self.rank}: closed while waiting for rank 0")
        return message

    def exchange(self, payload: bytes) -> list[bytes]:
        return self.network.gather(self.rank, payload)

    def broadcast(self, buffer: _Array) -> None:
        self.network.broadcast(self.rank, buffer)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.network.fail(PeerLostError(f"rank {self.rank} left", ranks=(self.rank,)))
        self.network.inboxes[self.rank].put(None)
