"""Posts parameters when MXNet's engine says that their gradients are there.

Python runs ahead of MXNet's engine, by whole iterations if nothing stops it. A parameter whose
gradient needs no computation can come up again before others have come up at all; it then waits
here, busy as the engine sees it, for the next round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bytescheduler.core import Exchange
from bytescheduler.exceptions import ByteSchedulerError

__all__ = ["Rounds"]


class Rounds:
    """Feeds one exchange from the engine's threads, round by round.

    Args:
        begin: called with the number of each round, from 1, before its first post.
    """

    def __init__(self, exchange: Exchange, begin: Callable[[int], None]) -> None:
        self._exchange = exchange
        self._begin = begin
        self._number = 0
        self._lock = threading.Lock()
        self._posted: set[int] = set()
        self._early: list[tuple[int, Callable[[], None]]] = []

    def post(self, parameter: int, release: Callable[[], None]) -> None:
        """The gradient lies in the buffer; call ``release`` when the result does, or at a failure.

        Failures are kept in the exchange and raised in the training thread.
        """
        with self._lock:
            if parameter in self._posted:
                self._early.append((parameter, release))
                return
            self._send(parameter, release)
            while len(self._posted) == len(self._exchange.layout.specs):
                self._next_round()

    def _next_round(self) -> None:
        self._posted.clear()
        if self._exchange.error is None:
            self._exchange.step()
        early, self._early = self._early, []
        for parameter, release in early:
            if parameter in self._posted:
                self._early.append((parameter, release))
            else:
                self._send(parameter, release)

    def _send(self, parameter: int, release: Callable[[], None]) -> None:
        if not self._posted:
            self._number += 1
            self._begin(self._number)
        self._posted.add(parameter)
        try:
            self._exchange.post(parameter, on_returned=release)
        except ByteSchedulerError:
            release()
