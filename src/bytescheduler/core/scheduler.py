"""Which chunk is sent next, and how many bytes may be in flight.

Ready chunks wait in a heap. While the most urgent one fits in what is left of the *credit* it is
popped, its bytes are taken from the credit, and it goes to the transport; they come back when it
has completed. The credit is a window: large enough to keep the wire busy, small enough that an
urgent chunk that becomes ready later waits behind few bytes. A chunk larger than the credit goes
alone. Just before the most urgent chunk is expected the window is narrower (see ``foresight.py``).
This class knows no thread and no transport; the leader alone runs one (see ``order.py``).

Source: ByteScheduler (SOSP 2019), algorithm 1. There the credit is per scheduler; here it is held
by rank 0 only, since two ranks with full windows of different chunks would wait for each other.
"""

from __future__ import annotations

import heapq
from itertools import count

from bytescheduler.core.foresight import Foresight
from bytescheduler.core.plan import Chunk

__all__ = ["Scheduler"]


class Scheduler:
    """A priority queue with a window of ``credit_size`` bytes.

    Args:
        credit_size: bytes in flight at most.
        fifo: send in the order of ``push`` instead of by priority.
        foresight: told of completions, and asked before bytes are added; not if ``fifo``.
    """

    def __init__(
        self, credit_size: int, *, fifo: bool = False, foresight: Foresight | None = None
    ) -> None:
        self.credit_size = credit_size
        self.fifo = fifo
        self.foresight = Foresight() if foresight is None else foresight
        self.in_flight = 0  # bytes
        self._heap: list[tuple[int, int, Chunk]] = []
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is in flight."""
        return not self._heap and not self.in_flight

    def push(self, chunk: Chunk) -> None:
        """Queue a chunk that is ready."""
        priority = 0 if self.fifo else chunk.index
        heapq.heappush(self._heap, (priority, next(self._sequence), chunk))

    @property
    def startable(self) -> bool:
        """Whether ``pop`` would return a chunk."""
        if not self._heap:
            return False
        if not self.in_flight:
            return True
        wanted = self.in_flight + self._heap[0][2].nbytes
        return wanted <= self.credit_size and (self.fifo or self.foresight.allows(wanted))

    def pop(self) -> Chunk | None:
        """Return the chunk to start now, its bytes taken from the credit, or None."""
        if not self.startable:
            return None
        chunk = heapq.heappop(self._heap)[2]
        self.in_flight += chunk.nbytes
        return chunk

    def complete(self, chunk: Chunk) -> None:
        """Give the bytes of a completed chunk back to the credit."""
        self.in_flight -= chunk.nbytes
        self.foresight.completed(chunk.nbytes, more=self.in_flight > 0)
