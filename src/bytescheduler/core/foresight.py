"""A clear wire for the chunk that the next forward waits for.

Backward produces last what the next forward needs first. Until that most urgent chunk is ready,
others use the wire, and those that are in flight at that moment delay the next forward in spite of
all priorities. When the moment comes is known from the rounds before, and so is how fast bytes
arrive. So nothing is started that would still be in flight then, unless the wire is idle: the
credit narrows to one chunk just before the urgent one, and is whole again after it.

Considered instead: a smaller credit at all times (the wire idles between chunks), smaller chunks
at all times (each costs processor time), halting the wire (it would idle if the estimate is wrong).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Foresight"]

WEIGHT: Final = 0.3  # of the last round in the expectation
KEPT: Final = 0.9  # of what was known of the rate, at each further chunk


class Foresight:
    """Learns when the most urgent chunk of a round is ready, and what is done on the wire by then.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin: float | None = None  # of the present round, until the urgent chunk is ready
        self._expected: float | None = None  # seconds from there until it is
        self._last: float | None = None  # completion, if the wire has been busy since
        self._seconds = 0.0
        self._bytes = 0.0

    def round_begins(self) -> None:
        """The first gradient of a round is there."""
        self._begin = self._clock()

    def urgent_is_ready(self) -> None:
        """The most urgent chunk is ready."""
        if self._begin is None:
            return
        seconds, self._begin = self._clock() - self._begin, None
        known = seconds if self._expected is None else self._expected
        self._expected = known + WEIGHT * (seconds - known)

    @property
    def seconds_per_byte(self) -> float:
        """What a byte takes on the wire; 0 while that is not known."""
        return self._seconds / self._bytes if self._bytes else 0.0

    def completed(self, nbytes: int, *, more: bool, waited: bool = False) -> None:
        """A chunk has arrived.

        Args:
            more: others are in flight.
            waited: it waited for another rank, which tells nothing of the wire.
        """
        now = self._clock()
        if self._last is not None and not waited:
            self._seconds = KEPT * self._seconds + now - self._last
            self._bytes = KEPT * self._bytes + nbytes
        self._last = now if more else None

    def allows(self, nbytes: int, lag: float = 0.0) -> bool:
        """Whether so many bytes in flight will have arrived when the urgent chunk is ready.

        Args:
            lag: by how many seconds that is later on the slowest rank.
        """
        if self._begin is None or self._expected is None or not self._bytes:
            return True
        left = self._begin + self._expected + lag - self._clock()
        return nbytes * self._seconds <= left * self._bytes
