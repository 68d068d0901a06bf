"""Which thread does what leader and follower have to do.

On a *reentrant* engine it is whoever makes something due: the thread that trains when it posts the
last gradient of a chunk, the engine's thread when a completed chunk gives its credit back. No
thread is woken for it, which would cost more than the work itself. Only a follower needs a thread,
to listen to rank 0.

On other engines, which want to be called from one thread, that thread does everything.
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
        self._thread: threading.Thread | None = None
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def lead(self, leader: Leader) -> None:
        """Begin to serve rank 0's side."""
        self._side = leader
        if not self._transport.reentrant:
            self._launch(lambda: self._serve(leader))

    def follow(self, follower: Follower) -> None:
        """Begin to listen to rank 0."""
        self._side = follower
        self._launch(lambda: self._listen(follower))

    def wake(self) -> None:
        """Something is due on the side that is driven."""
        if self._transport.reentrant:
            if self._side is not None:
                self._guard(self._side.pump)
        else:
            self._wakes.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the side has ended, ``timeout`` seconds at most."""
        if self._thread is not None:
            self._thread.join(timeout)
        elif self._side is not None:
            self._side.ended.wait(timeout)

    def _launch(self, loop: Callable[[], None]) -> None:
        name = f"bytescheduler-{self._transport.rank}"
        self._thread = threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
        self._thread.start()

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, it belongs into the training thread
            self._fail(error)

    def _serve(self, leader: Leader) -> None:
        while not leader.ended.is_set():
            self._wakes.get()
            leader.pump()

    def _listen(self, follower: Follower) -> None:
        while follower.take(self._transport.receive()):
            follower.pump()
            while not self._transport.reentrant and follower.waiting:
                self._wakes.get()
                follower.pump()
        self._ended()
