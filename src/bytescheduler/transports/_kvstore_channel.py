"""Rank 0's messages to the other workers, through the parameter servers.

A ``dist_sync`` server answers a push when every worker has pushed. So the followers push zeros in
advance, to a ring of keys, and rank 0's push of a message completes the round: the servers add the
message to zeros and send it to everybody. One message costs one way to a server and one way back,
and no follower asks for it. When more messages wait than the ring has keys, they wait at rank 0.

Servers add floating-point numbers only. A 64-bit integer travels as four 16-bit digits in float32,
where they and their sums with zeros are exact.

The last round of every key carries ``CLOSE``: followers do not push again, so that nothing is left
unanswered when the job ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from bytescheduler.transports._kvstore_engine import Array, Store, zeros
from bytescheduler.transports.base import MESSAGE_LIMIT

__all__ = ["DATA", "OPENED", "RING", "Channel", "decode", "encode"]

RING: Final = 16
DATA: Final = 1  # an announcement
OPENED: Final = 2  # so many keys exist on the servers
CLOSE: Final = 3
DIGITS: Final = 4  # of 16 bits, per integer
LENGTH: Final = (1 + MESSAGE_LIMIT) * DIGITS
_URGENT: Final = 1 << 30
_KIND_SHIFT: Final = 32


def encode(kind: int, message: Sequence[int], out: Array) -> None:
    """Write a message into a buffer of ``LENGTH`` float32."""
    words = np.zeros(1 + MESSAGE_LIMIT, np.int64)
    words[0] = kind << _KIND_SHIFT | len(message)
    words[1 : 1 + len(message)] = message
    out[:] = words.view(np.uint16)


def decode(buffer: Array) -> tuple[int, list[int]]:
    """Return kind and integers of what ``encode`` wrote."""
    words = buffer.astype(np.uint16).view(np.int64)
    kind, length = divmod(int(words[0]), 1 << _KIND_SHIFT)
    return kind, words[1 : 1 + length].tolist()


class _Slot:
    """One key of the ring, its buffer, and what runs when its round is complete."""

    def __init__(self, store: Store, key: int) -> None:
        self._store = store
        self._key = key
        self.buffer = zeros(LENGTH)
        self.array = store.engine.array(self.buffer)

    def begin(self, then: Callable[[], None]) -> None:
        self._store.push_pull((self._key,), (self.array,), _URGENT)
        self._store.engine.when_ready(then, read=(self.array,))


class Channel:
    """One end of the ring; rank 0 sends, the others listen.

    Args:
        keys: ``RING`` keys that exist on the servers.
        deliver: followers: called with kind and integers, in order, from engine threads.
        drained: called once when every slot has seen its last round.
    """

    def __init__(
        self,
        store: Store,
        keys: Sequence[int],
        deliver: Callable[[int, list[int]], None],
        drained: Callable[[], None],
    ) -> None:
        self._drained = drained
        self._slots = [_Slot(store, key) for key in keys]
        self._deliver = deliver
        self._lock = threading.Lock()
        self._next = 0  # number of the message to send, or to deliver
        self._waiting: deque[tuple[int, tuple[int, ...]]] = deque()
        self._open = set(range(len(keys)))  # followers: slots that will see another round
        self._busy: set[int] = set()  # rank 0: slots whose round is open
        self._arrived: dict[int, tuple[int, list[int]]] = {}  # by number of the message

    def listen(self) -> None:
        """Followers: open the first round of every slot."""
        for number in range(len(self._slots)):
            self._listen(number)

    def send(self, kind: int, message: Sequence[int]) -> None:
        """Rank 0: send when the ring has room; returns at once. From any thread."""
        with self._lock:
            self._waiting.append((kind, tuple(message)))
            self._pump()

    def close(self) -> None:
        """Rank 0: begin the last round of every slot."""
        for _ in self._slots:
            self.send(CLOSE, ())

    def _pump(self) -> None:
        while self._waiting and (index := self._next % len(self._slots)) not in self._busy:
            kind, message = self._waiting.popleft()
            self._next += 1
            self._busy.add(index)
            encode(kind, message, self._slots[index].buffer)
            self._slots[index].begin(partial(self._sent, index, kind))

    def _sent(self, index: int, kind: int) -> None:
        with self._lock:
            self._busy.discard(index)
            self._pump()
            if kind == CLOSE and not self._busy and not self._waiting:
                self._drained()

    def _listen(self, number: int) -> None:
        slot = self._slots[number % len(self._slots)]
        slot.buffer.fill(0)
        slot.begin(partial(self._received, number))

    def _received(self, number: int) -> None:
        index = number % len(self._slots)
        kind, message = decode(self._slots[index].buffer)
        if kind == CLOSE:
            self._open.discard(index)
            if not self._open:
                self._drained()
            return
        self._listen(number + len(self._slots))
        with self._lock:
            self._arrived[number] = kind, message
            while self._next in self._arrived:
                self._deliver(*self._arrived.pop(self._next))
                self._next += 1
