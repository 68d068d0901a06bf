"""Chunks that another rank has yet to produce must not take the whole credit.

Ranks do not compute equally fast: processors are shared, batches differ. Where rank 0 is ahead,
what has just become ready there waits in flight until the slowest rank has it too. It is also what
priority picks first. So a few such chunks would take the whole credit, and the wire would idle
although there are older ones that every rank could send.

How far the slowest rank is behind, the *lag*, is seen from chunks that were started as soon as they
were ready: by how much they took longer than the wire needs for them, or do so already. A chunk
that is younger than the lag is *early*. It may be started, since the lag may have gone, but counts
against a credit of its own; the other is for chunks that are older, the most urgent of them first.
Where ranks are in step there is no lag, and nothing changes.

It needs an engine on which ranks may start chunks in different orders (``Transport.any_order``).

Considered instead: reports from the other ranks (a message and a woken thread for each chunk), a
larger credit (the wire is busy, but urgent chunks wait behind it, in step or not), a place in the
credit that is kept for old chunks (takes bandwidth from urgent ones where ranks are in step).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

from bytescheduler.core.plan import Chunk

__all__ = ["Lag"]

NOTICEABLE: Final = 0.5  # of what the wire needs: the pace is an average
SLACK: Final = 2e-3  # seconds: threads are not woken at once
LOOK: Final = 10e-3  # seconds between looks at what is in flight, at most


class _Flight(NamedTuple):
    """A chunk in flight.

    Attributes:
        ready: when it was.
        expected: seconds on the wire.
        late: when it has noticeably taken longer than that; never, if that tells nothing: it was
            not started when it had just become ready, or the pace of the wire was not known.
    """

    nbytes: int
    ready: float
    expected: float
    late: float


class Lag:
    """Learns how far the slowest rank is behind rank 0.

    Args:
        clock: seconds.

    Attributes:
        seconds: the lag.
        border: what became ready since then is early, as of the last ``look``; never without a lag.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds = 0.0
        self.border = inf
        self._flights: dict[int, _Flight] = {}
        self._next_late = inf  # at the earliest, of what is in flight

    def now(self) -> float:
        """The time, for a chunk that has become ready."""
        return self._clock()

    def started(self, chunk: Chunk, ready: float, expected: float) -> None:
        """A chunk is in flight.

        Args:
            ready: when it became so.
            expected: seconds on the wire, behind what moves there already; 0 while the pace of the
                wire is not known.
        """
        now = self._clock()
        late = inf
        if expected > 0.0 and now - ready <= max(self.seconds, expected):
            late = now + (1 + NOTICEABLE) * expected + SLACK
            self._next_late = min(self._next_late, late)
        self._flights[chunk.index] = _Flight(chunk.nbytes, ready, expected, late)

    def completed(self, chunk: Chunk) -> bool:
        """A chunk has arrived; return whether it waited for another rank."""
        now = self._clock()
        flight = self._flights.pop(chunk.index)
        behind = max(0.0, now - flight.ready - flight.expected)
        waited = now > flight.late
        self.seconds = behind if waited else min(self.seconds, behind)
        return waited

    def look(self) -> int:
        """Learn from what is late; return how many bytes in flight wait for another rank."""
        now = self._clock()
        if now > self._next_late:
            self._learn(now)
        if self.seconds == 0.0:
            self.border = inf
            return 0
        self.border = now - self.seconds
        return sum(flight.nbytes for flight in self._flights.values() if self._waits(flight, now))

    @property
    def next_look(self) -> float | None:
        """Seconds until ``look`` may find something new; None with nothing in flight."""
        if not self._flights:
            return None
        left = self._next_late - self._clock()
        return left if 0.0 < left < inf else LOOK

    def _learn(self, now: float) -> None:
        self._next_late = inf
        for flight in self._flights.values():
            if now > flight.late:
                self.seconds = max(self.seconds, now - flight.ready)
            else:
                self._next_late = min(self._next_late, flight.late)

    def _waits(self, flight: _Flight, now: float) -> bool:
        return flight.late < inf and (now > flight.late or flight.ready >= self.border)
