"""Completion for engines that only answer when they are asked.

MPI, Horovod and BytePS have no completion callback: a handle can be polled, or waited for by a
call that polls inside (Horovod's and BytePS's once per millisecond, Open MPI's without a pause).
One thread per transport asks here instead, and it paces itself by what it sees: the pause between
two looks is a fixed fraction of the time since something last happened. So a completion is seen
late by at most that fraction of the time that it took, the number of looks grows with the
logarithm of that time, and with nothing in flight the thread sleeps until something is added.

Considered instead: a blocking wait for the oldest handle (one engine's millisecond of delay per
chunk is as long as the chunk itself, and younger handles wait behind it), one waiting thread per
handle (hundreds), a fixed interval (too long for small chunks or too busy for large ones).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from bytescheduler.exceptions import TransportClosedError
from bytescheduler.transports.base import Done

__all__ = ["Poll", "Poller"]

FRACTION: Final = 1 / 16  # of the quiet time, until the next look
SHORTEST: Final = 100e-6  # seconds
LONGEST: Final = 5e-3  # seconds
JOIN_TIMEOUT: Final = 5.0  # seconds

Poll = Callable[[], bool]


class Poller:
    """Asks for pending operations from one thread and reports each once.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._pending: list[tuple[Poll, Done]] = []
        self._added: list[tuple[Poll, Done]] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, poll: Poll, done: Done) -> None:
        """Call ``poll`` until it returns True or raises, then ``done`` with None or the error.

        Raises:
            TransportClosedError: ``close`` was called before.
        """
        with self._lock:
            if self._closed:
                raise TransportClosedError("the transport was closed")
            self._added.append((poll, done))
        self._wake.set()

    def close(self) -> None:
        """End the thread; what is still pending is done with TransportClosedError."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT)

    def _run(self) -> None:
        moved = time.perf_counter()
        while self._gather(moved):
            if self._look():
                moved = time.perf_counter()
        for _, done in self._pending:
            done(TransportClosedError("closed with this in flight"))

    def _gather(self, moved: float) -> bool:
        """Sleep until the next look is due; False when closed."""
        pause = None
        if self._pending:
            quiet = time.perf_counter() - moved
            pause = min(max(quiet * FRACTION, SHORTEST), LONGEST)
        self._wake.wait(pause)
        self._wake.clear()
        with self._lock:
            added, self._added = self._added, []
            closed = self._closed
        self._pending += added
        return not closed

    def _look(self) -> bool:
        """Ask for everything that is pending; report what ended; True if anything did."""
        answers = [(item, _ask(item[0])) for item in self._pending]
        self._pending = [item for item, answer in answers if answer is False]
        ended = [(done, answer) for (_, done), answer in answers if answer is not False]
        for done, answer in ended:
            done(answer if isinstance(answer, BaseException) else None)
        return bool(ended)


def _ask(poll: Poll) -> bool | BaseException:
    try:
        return bool(poll())
    except Exception as error:  # belongs to who waits for this operation
        return error
