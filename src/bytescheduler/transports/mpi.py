"""MPI by mpi4py: any framework's CPU buffers, non-blocking collectives.

For who launches with ``mpirun`` and wants the MPI that is installed on the cluster, with the
network that it was built for (UCX or libfabric, so RDMA where the hardware is).

Chunks are ``Iallreduce`` on a duplicate of the user's communicator; rank 0's order is followed, as
MPI demands. Announcements run down a binary tree of point-to-point messages on a second duplicate:
unlike a posted ``Ibcast``, a posted receive can be cancelled, so ``close`` is local. MPI makes
progress only inside its calls; see ``_polling`` for how that is done without a spinning thread.

MPI cannot tell that a peer has ended its work: a rank that closes therefore says up to which chunk
it took part, and whatever lies beyond fails on the others at once, with that rank's number. A rank
that is killed is the launcher's matter: ``mpirun`` ends the job and names it. Duplicates are
never freed: MPI would give their number to the next one, which a late farewell would then reach.

MPI has no 16-bit floats. Both kinds are summed by operators of our own, in single precision and
rounded to the nearest even: NumPy on the CPU, no slower than the wire up to some 10 Gbit/s.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bytescheduler._imports import require
from bytescheduler.exceptions import (
    ConfigurationError,
    PeerLostError,
    TransportClosedError,
    TransportError,
)
from bytescheduler.transports._buffers import SIXTEEN_BIT, as_array, dtype_name, narrow, widen
from bytescheduler.transports._polling import Poller
from bytescheduler.transports.base import MESSAGE_LIMIT, Done, Transport

__all__ = ["MpiTransport"]

_TAG_DOWN: Final = 1  # announcements and farewells, from the root of the tree
_TAG_UP: Final = 2  # farewells, to rank 0
_ANNOUNCEMENT: Final = 0
_FAREWELL: Final = 1  # followed by the rank and the number of chunks that it completed

_Array = npt.NDArray[Any]
_Message = Sequence[int] | BaseException


class _Handle(NamedTuple):
    array: _Array  # 16-bit floats as their bits
    dtype: str
    spec: list[Any]  # as mpi4py wants it: buffer, count, datatype
    operator: Any

    def divide(self, world_size: int) -> None:
        """Turn the sum into the average."""
        if self.dtype in SIXTEEN_BIT:
            mean = widen(self.array, self.dtype) / np.float32(world_size)
            self.array[:] = narrow(mean, self.dtype)
        else:
            np.divide(self.array, world_size, out=self.array, casting="unsafe")


class MpiTransport(Transport):
    """One rank's end of an MPI communicator.

    Args:
        comm: the communicator of all ranks; ``MPI.COMM_WORLD`` by default. It is duplicated.

    Raises:
        MissingDependencyError: mpi4py is not installed.
        ConfigurationError: MPI was initialised without support for threads.
    """

    ordered: bool = True

    def __init__(self, comm: Any = None) -> None:
        self._mpi: Any = require("mpi4py.MPI", extra="mpi")
        if self._mpi.Query_thread() < self._mpi.THREAD_MULTIPLE:
            raise ConfigurationError(
                "the mpi transport needs MPI_THREAD_MULTIPLE; set mpi4py.rc.thread_level = "
                "'multiple' before mpi4py.MPI is imported, or use an MPI that was built with it"
            )
        base = self._mpi.COMM_WORLD if comm is None else comm
        self._chunks, self._control, self._state = base.Dup(), base.Dup(), base.Dup()
        for duplicate in (self._chunks, self._control, self._state):
            duplicate.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.rank = self._chunks.Get_rank()
        self.world_size = self._chunks.Get_size()
        self._lock = threading.Lock()  # around MPI calls and the state below
        self._closed = False
        self._started = 0
        self._in_flight: dict[int, Done] = {}  # by number of start
        self._left: tuple[int, int] | None = None  # a rank, and the chunks that it completed
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._sends: list[tuple[Any, _Array]] = []
        self._receives: dict[int, Any] = {}  # by tag
        self._poller = Poller(f"bytescheduler-mpi-{self.rank}")
        self._listen()

    def prepare(self, index: int, buffer: Any) -> _Handle:
        array, dtype = as_array(buffer, engine="mpi"), dtype_name(buffer)
        datatype, operator = _arithmetic(self._mpi, dtype)
        return _Handle(array, dtype, [array, array.size, datatype], operator)

    def start(self, handle: _Handle, priority: int, done: Done) -> None:
        with self._lock:
            number = self._started
            self._started += 1
            self._check_open(number)
            request = self._chunks.Iallreduce(self._mpi.IN_PLACE, handle.spec, handle.operator)
            self._in_flight[number] = done

        def poll() -> bool:
            return number not in self._in_flight or self._test(request, handle)

        self._poller.add(poll, lambda error: self._finish(number, error))

    def announce(self, message: Sequence[int]) -> None:
        self._relay([_ANNOUNCEMENT, *message])

    def receive(self) -> Sequence[int]:
        message = self._inbox.get()
        if isinstance(message, BaseException):
            self._inbox.put(message)  # for whoever asks again
            raise message
        return message

    def exchange(self, payload: bytes) -> list[bytes]:
        return self._state.allgather(payload)

    def broadcast(self, buffer: Any) -> None:
        array = as_array(buffer, engine="mpi")
        self._state.Bcast([array.view(np.uint8), self._mpi.BYTE], root=0)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            completed = min(self._in_flight, default=self._started)
        self._say_farewell(self.rank, completed)
        self._poller.close()
        self._inbox.put(TransportClosedError(f"rank {self.rank}: the transport was closed"))
        self._cancel_receives()

    # -- chunks

    def _test(self, request: Any, handle: _Handle) -> bool:
        with self._lock:
            if not request.Test():
                return False
        handle.divide(self.world_size)
        return True

    def _finish(self, number: int, error: BaseException | None) -> None:
        with self._lock:
            done = self._in_flight.pop(number, None)
        if done is not None:
            done(error)

    def _check_open(self, number: int) -> None:
        if self._closed:
            raise TransportClosedError(f"rank {self.rank}: the transport was closed")
        if self._left is not None and number >= self._left[1]:
            raise self._lost(self._left[0])

    # -- control messages

    def _listen(self) -> None:
        if self.rank != 0:
            self._expect(_TAG_DOWN, self._heard)
        elif self.world_size > 1:
            self._expect(_TAG_UP, self._heard)

    def _expect(self, tag: int, heard: Callable[[list[int]], None]) -> None:
        """Post a receive for ``tag``; call ``heard`` for each message until closed."""
        buffer = np.zeros(MESSAGE_LIMIT + 1, np.int64)
        status = self._mpi.Status()
        with self._lock:
            if self._closed:
                return
            request = self._control.Irecv([buffer, self._mpi.INT64_T], tag=tag)
            self._receives[tag] = request

        def poll() -> bool:
            with self._lock:
                return request.Test(status)

        def done(error: BaseException | None) -> None:
            if error is not None:
                self._inbox.put(error)
                return
            message = buffer[: status.Get_count(self._mpi.INT64_T)].tolist()
            self._expect(tag, heard)
            heard(message)

        self._poller.add(poll, done)

    def _heard(self, message: list[int]) -> None:
        kind, *body = message
        if kind == _ANNOUNCEMENT:
            self._relay(message)
            self._inbox.put(body)
            return
        rank, completed = body
        if self.rank == 0:
            self._send(message, range(1, self.world_size), but=rank)
        self._peer_left(rank, completed)

    def _peer_left(self, rank: int, completed: int) -> None:
        """Fail what ``rank`` will never take part in."""
        with self._lock:
            if self._left is None or completed < self._left[1]:
                self._left = (rank, completed)
            doomed = [number for number in self._in_flight if number >= completed]
            dones = [self._in_flight.pop(number) for number in doomed]
        if rank == 0:
            self._inbox.put(self._lost(rank))
        for done in dones:
            done(self._lost(rank))

    def _lost(self, rank: int) -> PeerLostError:
        return PeerLostError(f"rank {self.rank}: rank {rank} has left", ranks=(rank,))

    def _say_farewell(self, rank: int, completed: int) -> None:
        message = [_FAREWELL, rank, completed]
        if self.rank == 0:
            self._send(message, range(1, self.world_size))
        else:
            self._send(message, [0], tag=_TAG_UP)

    def _relay(self, message: Sequence[int]) -> None:
        first = 2 * self.rank + 1
        self._send(message, range(first, min(first + 2, self.world_size)))

    def _send(
        self, message: Sequence[int], ranks: Iterable[int], *, tag: int = _TAG_DOWN, but: int = -1
    ) -> None:
        buffer = np.array(message, np.int64)
        with self._lock:
            self._sends = [item for item in self._sends if not item[0].Test()]
            for rank in ranks:
                if rank != but:
                    spec = [buffer, self._mpi.INT64_T]
                    self._sends.append((self._control.Isend(spec, dest=rank, tag=tag), buffer))

    def _cancel_receives(self) -> None:
        with self._lock:
            for request in self._receives.values():
                if not request.Test():
                    request.Cancel()
                    request.Wait()
            undelivered = [item for item in self._sends if not item[0].Test()]
        _undelivered.extend(undelivered)


_undelivered: list[tuple[Any, _Array]] = []
"""Farewells that MPI still reads after ``close``; delivered at the latest by its finalisation."""


def _arithmetic(mpi: Any, dtype: str) -> tuple[Any, Any]:
    """MPI's datatype and operator to sum ``dtype``."""
    native = {"float32": mpi.FLOAT, "float64": mpi.DOUBLE, "int64": mpi.INT64_T}
    if dtype in native:
        return native[dtype], mpi.SUM
    if dtype in SIXTEEN_BIT:
        return mpi.UINT16_T, _operator(dtype)
    raise TransportError(
        f"the mpi transport averages float16, bfloat16, float32 and float64, got {dtype}; "
        "convert the parameters"
    )


@cache
def _operator(dtype: str) -> Any:
    def add(source: Any, target: Any, datatype: Any) -> None:
        left, right = np.frombuffer(source, np.uint16), np.frombuffer(target, np.uint16)
        right[:] = narrow(widen(left, dtype) + widen(right, dtype), dtype)

    return require("mpi4py.MPI", extra="mpi").Op.Create(add, commute=True)
