"""Announcements over collectives that the receivers post in advance: Horovod and BytePS.

Both engines complete an operation only when every rank has submitted its part under the same
name. So the receivers submit theirs first and rank 0 last: the operation completes at once, and
its content is rank 0's. A few fixed names, the *slots*, are used in turn; each operation carries
all messages that have gathered since the one before, so a burst costs one.

Considered instead: a name per message (their number would grow without bound, and engines keep
something for each), and point-to-point messages of another engine (a second rendezvous).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from bytescheduler.exceptions import TransportClosedError
from bytescheduler.transports._polling import Poll, Poller
from bytescheduler.transports.base import MESSAGE_LIMIT

__all__ = ["SLOTS", "SLOT_SIZE", "Channel", "Post", "Posted", "Receiver", "Sender"]

SLOTS: Final = 2
SLOT_SIZE: Final = 8 * (MESSAGE_LIMIT + 1)  # integers
_LAST: Final = -1  # in place of a length: rank 0 will not use this operation's successor
FLUSH_TIMEOUT: Final = 5.0  # seconds


class Posted(NamedTuple):
    """An operation of one slot: whether it is finished, and what it brought then."""

    poll: Poll
    content: Callable[[], Sequence[int]]


Post = Callable[[int, Sequence[int]], Posted]
"""Submit this rank's part of the operation of a slot: at most SLOT_SIZE integers."""


class Sender:
    """Rank 0's side: gathers messages and sends them slot by slot.

    Args:
        window: operations in flight at most; SLOTS, or fewer.
        heartbeat: seconds of silence after which an empty message is sent; None for never.
    """

    def __init__(
        self, post: Post, poller: Poller, *, window: int, heartbeat: float | None = None
    ) -> None:
        self._post = post
        self._poller = poller
        self._window = window
        self._condition = threading.Condition()
        self._backlog: deque[Sequence[int]] = deque()
        self._next = 0  # slot
        self._busy = 0  # operations
        self._error: BaseException | None = None
        self._closing = False
        self._heart = threading.Thread(
            target=self._keep_beating,
            args=(heartbeat,),
            name="bytescheduler-0-heartbeat",
            daemon=True,
        )
        self._heart.start()

    def send(self, message: Sequence[int]) -> None:
        """Queue ``message``; returns at once."""
        with self._condition:
            if self._error is not None:
                raise self._error
            self._backlog.append(tuple(message))
            self._pump()
            self._condition.notify_all()

    def close(self) -> None:
        """Send what is left, and a last word for each operation that the others have posted."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            self._flush()
            for _ in range(self._window):
                self._submit([_LAST])
            self._flush()
        self._heart.join()

    def _flush(self) -> None:
        def flushed() -> bool:
            return self._error is not None or not (self._backlog or self._busy)

        self._condition.wait_for(flushed, FLUSH_TIMEOUT)

    def _pump(self) -> None:
        while self._backlog and self._busy < self._window and self._error is None:
            self._submit(_pack(self._backlog))

    def _submit(self, content: Sequence[int]) -> None:
        slot, self._next = self._next, (self._next + 1) % SLOTS
        self._busy += 1
        try:
            self._poller.add(self._post(slot, content).poll, self._sent)
        except Exception as error:  # the engine has shut down: nothing is sent any more
            self._error = error

    def _sent(self, error: BaseException | None) -> None:
        with self._condition:
            self._busy -= 1
            self._error = self._error or error
            self._pump()
            self._condition.notify_all()

    def _keep_beating(self, period: float | None) -> None:
        with self._condition:
            while not self._closing:
                spoken = self._condition.wait(period)
                if not spoken and not self._busy and self._error is None:
                    for _ in range(self._window):
                        self._submit([])


class Receiver:
    """The others' side: as many operations are posted ahead as rank 0 may have in flight."""

    def __init__(self, post: Post, poller: Poller, *, window: int) -> None:
        self._post = post
        self._poller = poller
        self._inbox: queue.SimpleQueue[Sequence[int] | BaseException] = queue.SimpleQueue()
        self._ahead = deque(post(slot, ()) for slot in range(window))
        self._next = window % SLOTS  # slot
        self._listen()

    def receive(self) -> Sequence[int]:
        """Block until the next message.

        Raises:
            TransportClosedError: ``close`` was called.
        """
        message = self._inbox.get()
        if isinstance(message, BaseException):
            self._inbox.put(message)  # for whoever asks again
            raise message
        return message

    def close(self) -> None:
        """Wake ``receive``; what is posted stays, so that rank 0's last messages find it."""
        self._inbox.put(TransportClosedError("the transport was closed"))

    def _listen(self) -> None:
        posted = self._ahead.popleft()

        def done(error: BaseException | None) -> None:
            if error is not None:
                self._inbox.put(error)
                return
            content = posted.content()
            if content[0] == _LAST:
                return
            self._ahead.append(self._post(self._next, ()))
            self._next = (self._next + 1) % SLOTS
            for message in _unpack(content):
                self._inbox.put(message)
            self._listen()

        self._poller.add(posted.poll, done)


Channel = Sender | Receiver


def _pack(backlog: deque[Sequence[int]]) -> list[int]:
    """Take as many messages from ``backlog`` as a slot holds: each its length, then itself."""
    packed: list[int] = []
    while backlog and len(packed) + 1 + len(backlog[0]) <= SLOT_SIZE:
        message = backlog.popleft()
        packed += [len(message), *message]
    return packed


def _unpack(content: Sequence[int]) -> list[Sequence[int]]:
    messages: list[Sequence[int]] = []
    position = 0
    while position < len(content) and (size := content[position]):
        messages.append(content[position + 1 : position + 1 + size])
        position += 1 + size
    return messages
