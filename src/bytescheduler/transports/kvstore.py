"""Parameter servers: MXNet's distributed KVStore, which is ps-lite over TCP.

A chunk is one or several keys (see ``_kvstore_keys``). Starting it pushes and pulls them in one
request each: the server answers when every worker has pushed, with the sum, so that the push of one
chunk overlaps the pull of another, in both directions of the link. Buffers are used where they are;
MXNet's engine runs a callback when the answer lies in them (see ``_kvstore_engine``).

``dist_sync`` servers wait for all workers, so two workers with full windows of different chunks
would wait for each other for ever. As everywhere, rank 0 alone applies the credit, and the others
follow its announcements; these, and set-up messages, travel through the servers as well
(``_kvstore_channel``, ``_kvstore_sharing``). Who dies is noticed by asking (``_kvstore_watch``).

``dist_async`` servers apply every push on its own, with an optimizer, and average nothing; there is
no ``Transport`` over them. ``bytescheduler.mxnet`` schedules that mode, where the servers update
the weights.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final

import numpy as np

from bytescheduler.core.order import STEP
from bytescheduler.exceptions import ConfigurationError, TransportClosedError, TransportError
from bytescheduler.transports._kvstore_buffers import as_bytes, as_floats
from bytescheduler.transports._kvstore_channel import AWAKE, DATA, OPENED, Channel
from bytescheduler.transports._kvstore_engine import Array, zeros
from bytescheduler.transports._kvstore_keys import Key, piece_lengths
from bytescheduler.transports._kvstore_membership import membership
from bytescheduler.transports._kvstore_opening import Opening
from bytescheduler.transports._kvstore_sharing import Sharing
from bytescheduler.transports.base import Done, Transport

__all__ = ["KVStoreTransport"]

CLOSE_TIMEOUT: Final = 1.0  # seconds that close() waits for rank 0 to close as well


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Handle:
    view: Array
    keys: tuple[int, ...]
    arrays: tuple[Any, ...]
    ordinal: int  # keys that must exist


class KVStoreTransport(Transport):
    """One worker's end of MXNet parameter servers.

    Args:
        kvstore: an ``mxnet.kv.KVStore`` of type ``dist_sync``; made from ``DMLC_*`` by default.
        average: divide the servers' sums by the number of workers; MXNet's own trainers do not.
        rests: leave no operation open in MXNet's engine between iterations, so that
            ``mxnet.nd.waitall`` returns; ``wake`` must then be called before each. Not needed where
            MXNet is only the engine.
        peer_timeout: seconds of silence after which a server or worker counts as lost; default
            from ``BYTESCHEDULER_PEER_TIMEOUT``, or 8.

    Raises:
        MissingDependencyError: MXNet is not installed.
        ConfigurationError: a ``DMLC_*`` variable is missing or wrong, or the store is of a kind
            that does not average.
        SystemExit: this process is a server or scheduler of the job, and the job has ended.
    """

    ordered: bool = False
    least_chunks: ClassVar[int] = 4  # two per stage

    def __init__(
        self,
        kvstore: Any = None,
        *,
        average: bool = True,
        rests: bool = False,
        peer_timeout: float | None = None,
    ) -> None:
        self._membership = membership(kvstore, peer_timeout)
        self._require(self._membership.kind)
        self._store = self._membership.store
        self.rank, self.world_size = self._store.rank, self._store.workers
        self._average = average
        self._rests = rests
        self._returned = 0  # chunks since the last rest
        self._stepped = False  # the end of an iteration was announced since then
        self._cut: set[int] = set()
        self._blank: dict[tuple[int, str], Any] = {}
        self._inbox: queue.SimpleQueue[Sequence[int] | None] = queue.SimpleQueue()
        self._tokens = count()
        self._in_flight: dict[int, tuple[Done, float]] = {}
        self._waiting: set[threading.Event] = set()
        self._error: TransportError | None = None
        self._closing = False
        self._lock = threading.Lock()
        self.stripe = self._membership.open(self)
        self._connect()

    def prepare(self, index: int, buffer: Any) -> _Handle:
        """See ``Transport``; float16, float32 and float64 in CPU memory."""
        view = as_floats(buffer)
        if index in self._cut:
            self._cut.clear()
            self.stripe.keys.begin_cut()
        self._cut.add(index)
        return self._handle(view, self._pieces(view))

    def start(self, handle: _Handle, priority: int, done: Done) -> None:
        """See ``Transport``."""
        with self._lock:
            error = self._error
            token = next(self._tokens)
            if error is None:
                self._in_flight[token] = done, time.monotonic()
        if error is not None:
            done(error)
            return
        self._opening.when_open(handle.ordinal, lambda: self._send(handle, priority, token))

    def announce(self, message: Sequence[int]) -> None:
        """See ``Transport``."""
        self._raise_if_over()
        self._channel.send(DATA, message)
        if message[0] == STEP:
            with self._lock:
                self._stepped = True
            self._rest_if_quiet()

    def wake(self, iteration: int) -> None:
        """With ``rests``: the gradients of an iteration, counted from 1, begin to come."""
        self._channel.wake(iteration)

    def receive(self) -> Sequence[int]:
        """See ``Transport``."""
        message = self._inbox.get()
        if message is None:
            self._inbox.put(None)
            self._raise_if_over()
            raise TransportClosedError(f"rank {self.rank}: closed while waiting for worker 0")
        return message

    def exchange(self, payload: bytes) -> list[bytes]:
        """See ``Transport``."""
        self._raise_if_over()
        return self._sharing.gather(payload)

    def broadcast(self, buffer: Any) -> None:
        """See ``Transport``; any dtype, bit for bit."""
        self._raise_if_over()
        self._sharing.broadcast(as_bytes(buffer))

    def close(self) -> None:
        """See ``Transport``. MXNet itself leaves the job when the interpreter exits."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            unanswered = bool(self._in_flight)
        self._membership.close(self)
        self._inbox.put(None)
        if unanswered or self._error is not None:
            error = TransportClosedError(f"rank {self.rank}: closed with chunks in flight")
            self._membership.fail(error)
            self.fail(error)
            return
        self._close_channel()
        self.stripe.drained.wait(CLOSE_TIMEOUT)

    def waiting_since(self) -> float | None:
        """When the oldest chunk in flight was started (``time.monotonic``), or None."""
        with self._lock:
            return min((since for _, since in self._in_flight.values()), default=None)

    def fail(self, error: TransportError) -> None:
        """The job is lost: fail what is in flight and whatever waits."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            callbacks = [done for done, _ in self._in_flight.values()]
            self._in_flight.clear()
        for done in callbacks:
            done(error)
        self._inbox.put(None)
        for event in list(self._waiting):
            event.set()

    # -- inside

    def _close_channel(self) -> None:
        if self.rank == 0:
            self._opening.settle(CLOSE_TIMEOUT)
        self._channel.close()

    def _rest_if_quiet(self) -> None:
        """Rank 0: all chunks of an iteration are back, and its end was announced."""
        if not self._rests or self.rank != 0:
            return
        with self._lock:
            quiet = self._stepped and self._returned >= len(self._cut)
            if quiet:
                self._stepped, self._returned = False, 0
        if quiet:
            self._channel.rest()

    def _require(self, kind: str) -> None:
        if "dist" not in kind or "async" in kind:
            raise ConfigurationError(
                f"the kvstore transport needs a store of type dist_sync, got {kind!r}: only its "
                "servers wait for all workers and add; with dist_async use bytescheduler.mxnet, "
                "where the servers update the weights"
            )

    def _connect(self) -> None:
        stripe = self.stripe
        self._channel = Channel(self._store, stripe.ring, self._take, stripe.drained.set)
        self._opening = Opening(
            self._store,
            stripe.keys.allocated,
            lambda opened: self._channel.send(OPENED, (opened,)),
        )
        self._sharing = Sharing(self._store, stripe.small, stripe.blocks, self._wait)
        if not self._rests:
            self._channel.wake(AWAKE)

    def _pieces(self, view: Array) -> Iterator[tuple[Array, Any]]:
        """The parts of a chunk that get a key each, and what the servers hold at first."""
        start = 0
        for length in piece_lengths(view.size, view.itemsize):
            yield view[start : start + length], self._blank_array(length, view.dtype)
            start += length

    def _handle(self, view: Array, pieces: Iterable[tuple[Array, Any]]) -> _Handle:
        keys: list[Key] = []
        arrays: list[Any] = []
        for part, content in pieces:
            key = self.stripe.keys.take(part.size, str(part.dtype), part.nbytes)
            if key.fresh:
                self._opening.create(key, content)
            keys.append(key)
            arrays.append(self._store.engine.array(part))
        return _Handle(
            view=view,
            keys=tuple(key.number for key in keys),
            arrays=tuple(arrays),
            ordinal=max((key.ordinal for key in keys), default=0),
        )

    def _blank_array(self, length: int, dtype: np.dtype[Any]) -> Any:
        shape = (length, str(dtype))
        if shape not in self._blank:
            self._blank[shape] = self._store.engine.array(zeros(length, dtype))
        return self._blank[shape]

    def _send(self, handle: _Handle, priority: int, token: int) -> None:
        if handle.keys:
            self._store.push_pull(handle.keys, handle.arrays, -priority)
        self._store.engine.when_ready(partial(self._arrived, handle, token), read=handle.arrays)

    def _arrived(self, handle: _Handle, token: int) -> None:
        if self._average and self.world_size > 1:
            np.divide(handle.view, handle.view.dtype.type(self.world_size), out=handle.view)
        self._membership.watch.chunk_completed()
        with self._lock:
            done, _ = self._in_flight.pop(token, (None, 0.0))
            self._returned += 1
        self._rest_if_quiet()
        if done is not None:
            done(None)

    def _take(self, kind: int, message: list[int]) -> None:
        if kind == OPENED:
            self._opening.open(message[0])
        else:
            self._inbox.put(message)

    def _wait(self, event: threading.Event) -> None:
        self._waiting.add(event)
        if self._error is None:
            event.wait()
        self._waiting.discard(event)
        self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise self._error
