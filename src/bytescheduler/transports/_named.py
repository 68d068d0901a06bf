"""What transports over named, polled operations share: Horovod and BytePS.

Both engines match operations between ranks by name, answer only when they are asked, carry
announcements that the receivers have posted ahead, and do not know bfloat16.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bytescheduler.exceptions import TransportClosedError, TransportError
from bytescheduler.transports._announcements import Channel, Posted, Receiver, Sender
from bytescheduler.transports._buffers import dtype_name
from bytescheduler.transports._polling import Poll, Poller
from bytescheduler.transports.base import Done, Transport

__all__ = ["Handle", "NamedTransport"]


class Handle(NamedTuple):
    """A chunk: the name that it has on all ranks, and where it lies."""

    name: str
    buffer: Any
    stage: Any  # float32 copy of a bfloat16 buffer, else None


class NamedTransport(Transport):
    """Subclasses set ``rank`` and ``world_size``, call ``_open`` and implement ``_post``."""

    _channel: Channel | None = None

    def announce(self, message: Sequence[int]) -> None:
        if isinstance(self._channel, Sender):
            self._channel.send(message)

    def receive(self) -> Sequence[int]:
        if not isinstance(self._channel, Receiver):
            raise TransportError("rank 0 announces; the others receive")
        return self._channel.receive()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._channel is not None:
            self._channel.close()
        self._poller.close()

    # -- for subclasses

    def _open(self, engine: str, *, window: int, heartbeat: float | None = None) -> None:
        """Start to poll, and open the channel for announcements; see ``_announcements``."""
        self._closed = False
        self._lock = threading.Lock()
        self._poller = Poller(f"bytescheduler-{self.rank}-{engine}")
        if self.world_size == 1:
            return
        if self.rank == 0:
            self._channel = Sender(self._post, self._poller, window=window, heartbeat=heartbeat)
        else:
            self._channel = Receiver(self._post, self._poller, window=window)

    @abstractmethod
    def _post(self, slot: int, message: Sequence[int]) -> Posted:
        """Submit this rank's part of an announcement."""

    def _handle(self, name: str, buffer: Any) -> Handle:
        stage = buffer.float() if dtype_name(buffer) == "bfloat16" else None
        return Handle(name, buffer, stage)

    def _begin(self, handle: Handle, submit: Callable[[Any], Poll], done: Done) -> None:
        """Submit a chunk, by way of its single-precision copy if it has one."""
        if self._closed:
            raise TransportClosedError(f"rank {self.rank}: the transport was closed")
        if handle.stage is None:
            self._poller.add(submit(handle.buffer), done)
            return
        finished = submit(handle.stage.copy_(handle.buffer))

        def poll() -> bool:
            if not finished():
                return False
            handle.buffer.copy_(handle.stage)
            return True

        self._poller.add(poll, done)
