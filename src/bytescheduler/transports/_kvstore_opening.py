"""When a key exists on its server, seen from every worker, without a barrier.

The first push of a key creates it; a second worker's early push would be taken for the creation,
and rank 0's then for a gradient. So rank 0 alone creates keys, and everybody holds back the use of
a key until rank 0's push of it was answered. Keys are numbered in the order of allocation, which is
the same everywhere: rank 0 tells how many exist, and that is all the others need to know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bytescheduler.transports._kvstore_engine import Store
from bytescheduler.transports._kvstore_keys import Key

__all__ = ["Opening"]


class Opening:
    """Creates keys (rank 0) and holds actions back until their keys exist.

    Args:
        opened: how many keys exist already.
        tell: rank 0: sends the number of existing keys to the others.
    """

    def __init__(self, store: Store, opened: int, tell: Callable[[int], None]) -> None:
        self._store = store
        self._tell = tell
        self._opened = opened
        self._creating = 0
        self._allocated = opened
        self._settled = threading.Event()
        self._settled.set()
        self._held: list[tuple[int, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def create(self, key: Key, content: Any) -> None:
        """Make ``key`` exist with rank 0's ``content``; elsewhere nothing happens."""
        if self._store.rank != 0:
            return
        with self._lock:
            self._creating += 1
            self._settled.clear()
            self._allocated = max(self._allocated, key.ordinal)
        self._store.push(key.number, content)
        self._store.engine.when_ready(self._created, written=(content,))

    def when_open(self, ordinal: int, action: Callable[[], None]) -> None:
        """Run ``action`` now, or as soon as ``ordinal`` keys exist."""
        with self._lock:
            if ordinal > self._opened:
                self._held.append((ordinal, action))
                return
        action()

    def open(self, ordinal: int) -> None:
        """``ordinal`` keys exist: run what was held back for them, in its order."""
        with self._lock:
            self._opened = max(self._opened, ordinal)
            due = [action for needed, action in self._held if needed <= self._opened]
            self._held = [item for item in self._held if item[0] > self._opened]
        for action in due:
            action()

    def _created(self) -> None:
        with self._lock:
            self._creating -= 1
            if self._creating:
                return
            ordinal = self._allocated
        self._tell(ordinal)
        self.open(ordinal)
        self._settled.set()

    def settle(self, timeout: float | None) -> None:
        """Wait, ``timeout`` seconds at most, until every key exists and everybody was told."""
        self._settled.wait(timeout)
