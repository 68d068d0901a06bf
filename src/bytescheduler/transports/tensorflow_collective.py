"""TensorFlow's own collectives, run eagerly from background threads.

``CollectiveReduceV2`` is matched between ranks by an *instance key*, not by order, so each chunk
gets a key when it is prepared and keeps it for good. Its ring passes a chunk on when the neighbour
has asked for it, so nothing gets past rank 0 before rank 0 has started that chunk: its starts are
the order (``negotiates``), and what the others have ready waits in TensorFlow. (Between two others,
a first segment may go ahead; it costs a little of the priority, nothing else.) Announcements, one
per iteration, are ``CollectiveBcastSendV2`` on rank 0 and ``CollectiveBcastRecvV2`` elsewhere, on a
small ring of keys: the followers post their receives in advance, so an announcement costs half a
round trip, and several can be under way.

An eager collective blocks its thread until it is done, so every chunk that is started occupies one;
they are made on demand and sleep in TensorFlow, without the interpreter's lock. There is no limit
to them: a rank at its limit could hold back the very chunk that all others wait for. One
``CancellationManager`` can cancel every call: ``close`` ends whatever still waits.
A peer that dies breaks the connection of its neighbours only; each rank therefore asks rank 0 and
the next rank every few seconds whether they live, and aborts its own collectives when one does
not, which the others see as broken connections in turn.

Considered instead: TensorFlow's asynchronous eager executor (errors arrive at unrelated calls), one
graph with all chunks (cannot be reordered at run time), ``CollectiveReduceV3`` with its
communicator resource (NCCL only).

Buffers are NumPy arrays in host memory. The ring reducer averages by itself (``final_op="Div"``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bytescheduler.exceptions import (
    ByteSchedulerError,
    PeerLostError,
    TransportClosedError,
    TransportError,
)
from bytescheduler.tensorflow import cluster as clusters
from bytescheduler.transports._tensorflow_calls import Calls, engine_error
from bytescheduler.transports.base import MESSAGE_LIMIT, Done, Transport

__all__ = ["TensorFlowTransport"]

_Array = npt.NDArray[Any]

JOIN_TIMEOUT: Final = 300.0  # seconds until all ranks must have come to the first collective
HEALTH_INTERVAL: Final = 2.0  # seconds between two questions to the neighbours
FLUSH_TIMEOUT: Final = 1.0  # seconds for the last announcements to be received
STOP_TIMEOUT: Final = 5.0  # seconds for cancelled threads to end
LANES: Final = 4  # announcements under way at once

GROUP_KEYS: Final = 0x62730000  # far from what a distribution strategy counts up from 1
SETUP_KEYS: Final = 1_000
CHUNK_KEYS: Final = 1_000_000

_groups = count(GROUP_KEYS)  # ranks open their transports in the same order


class _Chunk(NamedTuple):
    key: int
    buffer: _Array


class TensorFlowTransport(Transport):
    """Averages NumPy buffers with ``CollectiveReduceV2``.

    Args:
        cluster: who takes part; what ``TF_CONFIG`` or the launcher says by default.
        join_timeout: seconds until every rank must have opened its end.

    Raises:
        ConfigurationError: no cluster is described, or wrongly.
        UsageError: TensorFlow started before the cluster was declared.
        TransportError: not all ranks came in time.
    """

    ordered: bool = False
    negotiates: bool = True
    reentrant: bool = True
    tunable: ClassVar[bool] = False  # small chunks, once tried, leave many threads

    def __init__(
        self, cluster: clusters.Cluster | None = None, *, join_timeout: float = JOIN_TIMEOUT
    ) -> None:
        self._cluster = clusters.current() if cluster is None else cluster
        self.rank = self._cluster.rank
        self.world_size = self._cluster.world_size
        self._closed = threading.Event()
        self._lost: tuple[int, ...] = ()
        self._chunk_keys = count(CHUNK_KEYS)
        self._setup_keys = count(SETUP_KEYS)
        if self.world_size == 1:
            return
        self._calls = Calls(next(_groups), self.world_size)
        self._workers = _Workers(f"bytescheduler-{self.rank}-tf")
        self._join(join_timeout)
        send = self._calls.send if self.rank == 0 else None
        self._lanes = _Lanes(send, self._calls.receive, f"bytescheduler-{self.rank}-tf")
        self._watch = threading.Thread(
            target=self._watch_neighbours, name=f"bytescheduler-{self.rank}-tf-health", daemon=True
        )
        self._watch.start()

    def prepare(self, index: int, buffer: _Array) -> _Chunk:
        return _Chunk(next(self._chunk_keys), buffer)

    def start(self, handle: _Chunk, priority: int, done: Done) -> None:
        if self.world_size == 1 or not handle.buffer.size:
            done(None)
        elif self._closed.is_set():
            done(self._closed_error())
        else:
            self._workers.submit(lambda: self._average(handle, done))

    def announce(self, message: Sequence[int]) -> None:
        if self.world_size > 1:
            self._lanes.send(message)

    def receive(self) -> Sequence[int]:
        try:
            return self._lanes.receive()
        except engine_error() as error:
            if self._closed.is_set():
                raise self._closed_error() from error
            raise self.explain(error) from error

    def exchange(self, payload: bytes) -> list[bytes]:
        if self.world_size == 1:
            return [payload]
        lengths = np.zeros(self.world_size, np.int64)
        lengths[self.rank] = len(payload)
        lengths = self._sum(lengths)
        table = np.zeros((self.world_size, _words(int(lengths.max()))), np.int64)
        table[self.rank].view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
        table = self._sum(table.reshape(-1)).reshape(table.shape)
        return [row.tobytes()[:length] for row, length in zip(table, lengths, strict=True)]

    def broadcast(self, buffer: _Array) -> None:
        if self.world_size == 1 or not buffer.nbytes:
            return
        key = next(self._setup_keys)
        words = np.zeros(_words(buffer.nbytes), np.int64)
        octets = words.view(np.uint8)[: buffer.nbytes]
        if self.rank == 0:
            octets[:] = buffer.reshape(-1).view(np.uint8)
            self._guard(lambda: self._calls.send(key, words))
        else:
            octets = self._guard(lambda: self._calls.receive(key, len(words))).view(np.uint8)
            buffer.reshape(-1).view(np.uint8)[:] = octets[: buffer.nbytes]

    def explain(self, error: BaseException) -> ByteSchedulerError:
        if isinstance(error, ByteSchedulerError):
            return error
        gone = self._lost or self._dead([r for r in range(self.world_size) if r != self.rank])
        if not gone:
            return TransportError(f"rank {self.rank}: a TensorFlow collective failed: {error}")
        names = ", ".join(f"{rank} ({self._cluster.addresses[rank]})" for rank in gone)
        lost = PeerLostError(f"rank {self.rank}: lost contact with rank {names}", ranks=gone)
        lost.__cause__ = error
        return lost

    def close(self) -> None:
        if self._closed.is_set():
            return
        if self.world_size > 1:
            self._lanes.flush(0.0 if self._lost else FLUSH_TIMEOUT)
        self._closed.set()
        if self.world_size > 1:
            self._calls.cancel()
            self._lanes.stop()
            self._workers.stop()
            self._watch.join(STOP_TIMEOUT)

    # -- inside

    def _join(self, timeout: float) -> None:
        """Wait for all ranks; a missing one would otherwise be waited for without end."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._calls.cancel()

        timer = threading.Timer(timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            self._sum(np.zeros(1, np.int64))
        except TransportError as error:
            self._closed.set()
            if not late.is_set():
                raise
            raise TransportError(
                f"rank {self.rank}: not all of {list(self._cluster.addresses)} joined within "
                f"{timeout:g} s; start every worker, each with its own task index in TF_CONFIG, "
                "and see that the addresses can be reached"
            ) from error
        finally:
            timer.cancel()

    def _average(self, chunk: _Chunk, done: Done) -> None:
        try:
            averaged = self._calls.reduce(chunk.key, chunk.buffer, average=True)
        except engine_error() as error:
            done(self._closed_error() if self._closed.is_set() else error)
            return
        chunk.buffer[:] = averaged
        done(None)

    def _sum(self, array: _Array) -> _Array:
        key = next(self._setup_keys)
        return self._guard(lambda: self._calls.reduce(key, array, average=False))

    def _guard(self, call: Callable[[], _Array]) -> _Array:
        try:
            return call()
        except engine_error() as error:
            raise TransportError(
                f"rank {self.rank}: a TensorFlow collective failed: {error}"
            ) from error

    def _watch_neighbours(self) -> None:
        neighbours = sorted({0, (self.rank + 1) % self.world_size} - {self.rank})
        while not self._closed.wait(HEALTH_INTERVAL):
            gone = self._dead(neighbours)
            if gone and not self._closed.wait(HEALTH_INTERVAL):
                gone = self._dead(gone)  # a machine that was suspended deserves a second question
            if gone and not self._closed.is_set():
                self._lost = gone
                self._calls.abort(f"rank {self.rank} lost contact with rank {gone[0]}")
                return

    def _dead(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not self._calls.alive(self._cluster.task(rank)))

    def _closed_error(self) -> TransportClosedError:
        return TransportClosedError(f"rank {self.rank}: the TensorFlow transport was closed")


class _Workers:
    """Threads that run jobs in order of submission, as many as there are jobs under way.

    Daemons and not ``concurrent.futures``: the interpreter joins that pool's threads *before* it
    runs exit handlers, so one blocked collective would keep a process that wants to end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._unfinished += 1
            if self._unfinished > len(self._threads):
                thread = threading.Thread(
                    target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def stop(self) -> None:
        """Let what is queued run (cancelled calls fail at once) and end all threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(STOP_TIMEOUT)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._unfinished -= 1


class _Lanes:
    """Announcements: message ``n`` travels on key ``n % LANES``, one thread per key.

    Args:
        send: sends one array on a key, on rank 0; None elsewhere.
        receive: blocks for the next array on a key.
    """

    def __init__(
        self,
        send: Callable[[int, _Array], _Array] | None,
        receive: Callable[[int, int], _Array],
        name: str,
    ) -> None:
        self._call_send = send
        self._call_receive = receive
        self._outboxes: list[queue.SimpleQueue[_Array | None]] = [
            queue.SimpleQueue() for _ in range(LANES)
        ]
        self._inboxes: list[queue.SimpleQueue[_Array | BaseException]] = [
            queue.SimpleQueue() for _ in range(LANES)
        ]
        self._next = count()
        self._stopping = False
        self._threads = [
            threading.Thread(
                target=self._send_loop if send else self._receive_loop,
                args=(lane,),
                name=f"{name}-lane-{lane}",
                daemon=True,
            )
            for lane in range(LANES)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Sequence[int]) -> None:
        """Queue one message; its length travels in front."""
        array = np.zeros(MESSAGE_LIMIT + 1, np.int64)
        array[0] = len(message)
        array[1 : len(message) + 1] = message
        self._outboxes[next(self._next) % LANES].put(array)

    def receive(self) -> list[int]:
        """Block for the next message in order; raises what broke its lane."""
        array = self._inboxes[next(self._next) % LANES].get()
        if isinstance(array, BaseException):
            raise array
        return array[1 : array[0] + 1].tolist()

    def flush(self, timeout: float) -> None:
        """Rank 0: let queued messages be received, for ``timeout`` seconds at most."""
        if self._call_send is None:
            return
        for outbox in self._outboxes:
            outbox.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """End the threads; their calls have been cancelled."""
        self._stopping = True
        for thread in self._threads:
            thread.join(STOP_TIMEOUT)

    def _send_loop(self, lane: int) -> None:
        assert self._call_send is not None
        with suppress(engine_error()):  # the reductions report the same loss, with its reason
            while (array := self._outboxes[lane].get()) is not None:
                self._call_send(lane, array)

    def _receive_loop(self, lane: int) -> None:
        try:
            while not self._stopping:
                self._inboxes[lane].put(self._call_receive(lane, MESSAGE_LIMIT + 1))
        except engine_error() as error:
            self._inboxes[lane].put(error)


def _words(nbytes: int) -> int:
    return max(1, -(-nbytes // 8))
