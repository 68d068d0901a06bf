"""Which thread does what leader and follower have to do.

Each rank has a thread that starts chunks. The thread that trains wakes it when it has posted the
last gradient of one, and goes on: what an engine does inside ``start`` (Gloo writes to a socket)
would otherwise come out of the hooks of backward.

On a *reentrant* engine the engine's own thread does it too, when a completed chunk gives its credit
back: it is awake, and waking another would cost more than the work itself. There a follower has one
more thread, which listens to rank 0. On other engines, which want to be called from one thread,
one does everything.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from bytescheduler.core.order import Follower, Leader
from bytescheduler.transports.base import Transport

__all__ = ["Driver"]


class Driver:
    """Runs one side of the order agreement.

    Args:
        fail: called with what went wrong, from whichever thread.
        ended: called when the leader has stopped, on a follower.
    """

    def __init__(
        self,
        transport: Transport,
        fail: Callable[[BaseException], None],
        ended: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._fail = fail
        self._ended = ended
        self._side: Leader | Follower | None = None
        self._starting: threading.Thread | None = None
        self._listening: threading.Thread | None = None
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def lead(self, leader: Leader) -> None:
        """Begin to serve rank 0's side."""
        self._side = leader
        self._starting = self._launch("", lambda: self._serve(leader))

    def follow(self, follower: Follower) -> None:
        """Begin to listen to rank 0."""
        self._side = follower
        if self._transport.reentrant:
            self._starting = self._launch("", lambda: self._serve(follower))
        self._listening = self._launch("-listener", lambda: self._listen(follower))

    def wake(self) -> None:
        """Something is due on the side that is driven; return at once."""
        self._wakes.put(None)

    def advance(self) -> None:
        """As ``wake``, from a thread of the engine."""
        if self._transport.reentrant and self._side is not None:
            self._guard(self._side.pump)
        else:
            self.wake()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the side has ended, ``timeout`` seconds at most."""
        _join(self._listening, timeout)
        _join(self._starting, timeout)

    def leave(self, timeout: float) -> None:
        """As ``join``, without the listener, which may be blocked in its engine."""
        _join(self._starting, timeout)

    def _launch(self, suffix: str, loop: Callable[[], None]) -> threading.Thread:
        name = f"bytescheduler-{self._transport.rank}{suffix}"
        thread = threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
        thread.start()
        return thread

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, it belongs into the training thread
            self._fail(error)

    def _serve(self, side: Leader | Follower) -> None:
        while not side.ended.is_set():
            try:
                self._wakes.get(timeout=side.next_look)
            except queue.Empty:
                self._transport.look()
            side.pump()

    def _listen(self, follower: Follower) -> None:
        while follower.take(self._transport.receive()):
            follower.pump()
            while not self._transport.reentrant and follower.waiting:
                self._wakes.get()
                follower.pump()
        self._ended()


def _join(thread: threading.Thread | None, timeout: float | None) -> None:
    if thread is not None and thread is not threading.current_thread():
        thread.join(timeout)
