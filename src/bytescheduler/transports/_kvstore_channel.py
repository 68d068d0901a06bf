"""Rank 0's messages to the other workers, through the parameter servers.

A ``dist_sync`` server answers a push when every worker has pushed. So the followers push zeros in
advance, to a ring of keys, and rank 0's push of a message completes the round: the servers add the
message to zeros and send it to everybody. One message costs one way to a server and one way back,
and no follower asks for it. When more messages wait than the ring has keys, they wait at rank 0.

Servers add floating-point numbers only. A 64-bit integer travels as four 16-bit digits in float32,
where they and their sums with zeros are exact.

The last round of every key carries ``CLOSE``: followers do not push again, so that nothing is left
unanswered when the job ends. ``REST`` does the same for a while: ``mxnet.nd.waitall`` waits for
every operation of the engine, so an MXNet program must not have a follower's ear open between its
iterations. Rests are counted; ``wake(n)`` opens what the first ``n - 1`` rests have closed.
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

__all__ = ["AWAKE", "DATA", "OPENED", "RING", "Channel", "decode", "encode"]

RING: Final = 8
DATA: Final = 1  # an announcement
OPENED: Final = 2  # so many keys exist on the servers
CLOSE: Final = 3
REST: Final = 4
AWAKE: Final = 1 << 62  # more rests than there ever are
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
        self._open = set(range(len(keys)))  # followers: slots that have not seen CLOSE
        self._busy: set[int] = set()  # rank 0: slots whose round is open
        self._arrived: dict[int, tuple[int, list[int]]] = {}  # by number of the message
        self._leads = store.rank == 0
        self._wakes = 0
        self._rests = [0] * len(keys)  # by slot; rank 0: all alike
        self._numbers = list(range(len(keys)))  # followers: the next message of each slot

    def wake(self, count: int) -> None:
        """Send, or listen, until the ``count``-th rest."""
        with self._lock:
            before, self._wakes = self._wakes, max(self._wakes, count)
            if self._leads:
                self._pump()
                return
            due = [slot for slot, rests in enumerate(self._rests) if before <= rests < self._wakes]
            for slot in due:
                self._listen(slot)

    def send(self, kind: int, message: Sequence[int]) -> None:
        """Rank 0: send when the ring has room; returns at once. From any thread."""
        with self._lock:
            self._waiting.append((kind, tuple(message)))
            self._pump()

    def rest(self) -> None:
        """Rank 0: leave nothing open until the next ``wake``."""
        with self._lock:
            self._waiting.extend([(REST, ())] * len(self._slots))
            self._pump()

    def close(self) -> None:
        """Begin the last round of every slot; both sides must call it, or ``wake(AWAKE)``."""
        self.wake(AWAKE)
        if self._leads:
            for _ in self._slots:
                self.send(CLOSE, ())

    def _pump(self) -> None:
        while self._waiting and (index := self._next % len(self._slots)) not in self._busy:
            if self._rests[index] >= self._wakes:
                return
            kind, message = self._waiting.popleft()
            self._rests[index] += kind == REST
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

    def _listen(self, slot: int) -> None:
        self._slots[slot].buffer.fill(0)
        self._slots[slot].begin(partial(self._received, slot))

    def _received(self, slot: int) -> None:
        kind, message = decode(self._slots[slot].buffer)
        with self._lock:
            self._rests[slot] += kind == REST
            self._arrived[self._numbers[slot]] = kind, message
            self._numbers[slot] += len(self._slots)
            if kind == CLOSE:
                self._open.discard(slot)
            elif self._rests[slot] < self._wakes:
                self._listen(slot)
            self._deliver_in_order()
            if not self._open:
                self._drained()

    def _deliver_in_order(self) -> None:
        while self._next in self._arrived:
            kind, message = self._arrived.pop(self._next)
            self._next += 1
            if kind not in (CLOSE, REST):
                self._deliver(kind, message)
