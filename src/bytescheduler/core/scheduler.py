"""Which chunk is sent next, and how many bytes may be in flight.

Ready chunks wait in a heap. While the most urgent one fits in what is left of the *credit* it is
popped, its bytes are taken from the credit, and it goes to the transport; they come back when it
has completed. The credit is a window: large enough to keep the wire busy, small enough that an
urgent chunk that becomes ready later waits behind few bytes. A chunk larger than the credit goes
alone. Just before the most urgent chunk is expected the window is narrower (see ``foresight.py``).
What waits in flight for a slower rank has a window of its own (see ``lag.py``).

All of a round goes before any of the next: what this rank did without, another may need before it
can produce its part of the next round.

This class knows no thread and no transport; the leader alone runs one (see ``order.py``).

Source: ByteScheduler (SOSP 2019), algorithm 1. There the credit is per scheduler; here it is held
by rank 0 only, since two ranks with full windows of different chunks would wait for each other.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from math import inf
from typing import Final, NamedTuple

from bytescheduler.core.foresight import Foresight
from bytescheduler.core.lag import Lag
from bytescheduler.core.plan import Chunk

__all__ = ["Scheduler"]

CREDITS: Final = 2  # one for what moves, one for what waits for another rank


class _Entry(NamedTuple):
    """A chunk that waits; the smallest goes first.

    Attributes:
        ready: when it became so, where somebody asks.
    """

    round_number: int
    priority: int
    sequence: int
    chunk: Chunk
    ready: float


class Scheduler:
    """A priority queue with a window of ``credit_size`` bytes.

    Args:
        credit_size: bytes in flight at most; about as many more may wait for a slower rank.
        fifo: send in the order of ``push`` instead of by priority.
        foresight: told of completions, and asked before bytes are added; not if ``fifo``.
        lag: tells what waits for a slower rank; asked if ``any_order``, and not ``fifo``.

    Attributes:
        any_order: whether a chunk that waits for another rank lets others pass. This and ``fifo``
            change only while nothing is queued or in flight.
    """

    def __init__(
        self,
        credit_size: int,
        *,
        fifo: bool = False,
        foresight: Foresight | None = None,
        lag: Lag | None = None,
    ) -> None:
        self.credit_size = credit_size
        self.fifo = fifo
        self.any_order = False
        self.foresight = Foresight() if foresight is None else foresight
        self.lag = Lag() if lag is None else lag
        self.in_flight = 0  # bytes
        self._heap: list[_Entry] = []
        self._early: deque[_Entry] = deque()  # the others, in order of ``push``
        self._border = inf  # of age, between the two
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._heap) + len(self._early)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is in flight."""
        return not len(self) and not self.in_flight

    def push(self, chunk: Chunk, round_number: int = 0) -> None:
        """Queue a chunk of the given round that is ready."""
        priority = 0 if self.fifo else chunk.index
        ready = self.lag.now() if self._asks_lag else 0.0
        entry = _Entry(round_number, priority, next(self._sequence), chunk, ready)
        if ready < self._border:
            heapq.heappush(self._heap, entry)
        else:
            self._early.append(entry)

    @property
    def startable(self) -> bool:
        """Whether ``pop`` would return a chunk."""
        return self._next(self._look()) is not None

    @property
    def next_look(self) -> float | None:
        """Seconds until ``pop`` may return a chunk though nothing has happened, if ever."""
        return self.lag.next_look if self._asks_lag else None

    def pop(self) -> Chunk | None:
        """Return the chunk to start now, its bytes taken from the credit, or None."""
        waiting = self._look()
        entry = self._next(waiting)
        if entry is None:
            return None
        if self._heap and entry is self._heap[0]:
            heapq.heappop(self._heap)
        else:
            self._early.remove(entry)
        chunk = entry.chunk
        if self._asks_lag:
            moving = self.in_flight - waiting + chunk.nbytes
            self.lag.started(chunk, entry.ready, self.foresight.seconds_per_byte * moving)
        self.in_flight += chunk.nbytes
        return chunk

    def complete(self, chunk: Chunk) -> None:
        """Give the bytes of a completed chunk back to the credit."""
        self.in_flight -= chunk.nbytes
        waited = self._asks_lag and self.lag.completed(chunk)
        self.foresight.completed(chunk.nbytes, more=self.in_flight > 0, waited=waited)

    @property
    def _asks_lag(self) -> bool:
        return self.any_order and not self.fifo

    def _look(self) -> int:
        """Bytes in flight that wait for another rank."""
        if not self._asks_lag:
            return 0
        waiting = self.lag.look()
        self._tell_apart(self.lag.border)
        return waiting

    def _next(self, waiting: int) -> _Entry | None:
        old = self._heap[0] if self._heap else None
        early = min(self._early, default=None)
        if self.in_flight >= CREDITS * self.credit_size:
            return None
        if early and (old is None or early < old) and self._may_wait(early.chunk, waiting):
            return early
        return old if old and self._fits(old.chunk, self.in_flight - waiting) else None

    def _may_wait(self, chunk: Chunk, waiting: int) -> bool:
        return not waiting or waiting + chunk.nbytes <= self.credit_size

    def _fits(self, chunk: Chunk, moving: int) -> bool:
        if not moving:
            return True
        wanted = moving + chunk.nbytes
        if wanted > self.credit_size:
            return False
        return self.fifo or self.foresight.allows(wanted, self.lag.seconds)

    def _tell_apart(self, border: float) -> None:
        """Chunks that became ready before ``border`` are in the heap, the others are early."""
        if border < self._border:
            found = [entry for entry in self._heap if entry.ready >= border]
            if found:
                self._heap = [entry for entry in self._heap if entry.ready < border]
                heapq.heapify(self._heap)
                self._early = deque(sorted([*found, *self._early], key=lambda e: e.sequence))
        self._border = border
        while self._early and self._early[0].ready < border:
            heapq.heappush(self._heap, self._early.popleft())
