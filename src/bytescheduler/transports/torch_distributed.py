"""Chunks over ``torch.distributed``: the Gloo, NCCL or MPI backend of the user's process group.

Two groups of the same ranks are opened, so that nothing of ours can interleave with the user's own
collectives: one of the user's backend for the chunks, and a Gloo group for announcements. These are
point-to-point messages of fixed size along a tree of fan-out 8 (rank 0 to 1..8, rank 1 to 9..16,
...), received into buffers that are posted in advance: a broadcast per announcement would occupy
one of Gloo's two worker threads on every follower.

On Gloo, few ranks send each other small chunks straight (``_direct.py``); many ranks, and large
chunks, use its ``all_reduce``. So do chunks whose average the caller waits for itself: Gloo's own
wait needs no Python in another thread.

On CUDA, collectives are issued on a stream of their own. ``done.launched`` tells that the chunk is
on that stream (whoever waits for the stream may use the buffer), ``done`` that the GPU has finished
it, which gives the credit back; a future of NCCL completes before its kernel does, so a thread
waits for CUDA events. No call of the training thread waits for the GPU.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.distributed as dist

from bytescheduler.exceptions import (
    ByteSchedulerError,
    PeerLostError,
    RankMismatchError,
    TransportClosedError,
    TransportError,
    UsageError,
)
from bytescheduler.transports._direct import MOST_BYTES, MOST_RANKS, DirectAverage
from bytescheduler.transports.base import MESSAGE_LIMIT, Done, Landed, Transport

__all__ = ["TorchDistributedTransport"]

FAN_OUT: Final = 8
FAREWELL: Final = timedelta(seconds=5)  # for the last announcement to be read
GAVE_UP: Final = "bytescheduler/gave-up"
FAILED: Final = "bytescheduler/failed"
MEETING: Final = "bytescheduler/meeting"
TAG: Final = 0x6273
WINDOW: Final = 64  # announcements under way to one child, at most
POSTED: Final = 4  # receives posted in advance
ANSWER_TIMEOUT: Final = 3.0  # seconds for all ranks to say that they are still there
PULSE: Final = timedelta(seconds=1)  # between looks whether a rank has given up
CONTROL_TIMEOUT: Final = timedelta(days=365)  # a pause between iterations is not a failure

_opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # per user's group


class TorchDistributedTransport(Transport):
    """Averages tensors over the ranks of a process group.

    Args:
        group: the user's process group; the default group if None.
        device: where the buffers lie: ``cpu``, or a CUDA device.
        timeout: seconds after which a collective whose peer is silent fails.

    Attributes:
        backend: what the group uses for ``device``: ``"gloo"``, ``"nccl"``, ``"mpi"``, ...

    Raises:
        UsageError: ``torch.distributed`` is not initialised, this rank is not in ``group``, or the
            group has no backend that chunks on ``device`` can be sent over.
    """

    ordered: bool = True
    interruptible: ClassVar[bool] = False  # nothing ends a wait in Gloo but its peer

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        timeout: float = 1800.0,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "the process group is not initialised; call "
                "torch.distributed.init_process_group() before wrapping the optimizer"
            )
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise UsageError("this rank is not a member of the process group that was passed in")
        device = torch.device(device)
        self.backend = _backend_for(group, device)
        self._data, self._control, self._store = _open_groups(group, self.backend, timeout)
        self._average = dist.AllreduceOptions()
        self._average.reduceOp = dist.ReduceOp.AVG  # pyright: ignore[reportAttributeAccessIssue]
        first = self.rank * FAN_OUT + 1
        self._children = range(first, min(first + FAN_OUT, self.world_size))
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        self._cuda = _CudaLane(device) if device.type == "cuda" else None
        self._direct = (
            DirectAverage(self._data, self.rank, self.world_size)
            if self.backend == "gloo" and 2 <= self.world_size <= MOST_RANKS
            else None
        )
        self.reentrant = self._cuda is None
        self.lockstep = self.backend == "gloo"
        self._closed = self._broken = self._witnessed = False
        self._in_flight = 0
        self._exchanges = 0
        self._counting = threading.Lock()

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that collectives are ordered on; None on the CPU."""
        return self._cuda.stream if self._cuda is not None else None

    def prepare(self, index: int, buffer: Any) -> tuple[torch.Tensor, int]:
        if index == 0 and self._direct is not None:
            self._direct.forget()
        tensor = buffer if isinstance(buffer, torch.Tensor) else torch.from_dlpack(buffer)
        return tensor, index

    def start(self, handle: tuple[torch.Tensor, int], priority: int, done: Done) -> None:
        tensor, index = handle

        def finished(error: BaseException | None) -> None:
            done(self._outcome(error))

        with self._counting:
            self._in_flight += 1
        if self._cuda is not None:
            launched = getattr(done, "launched", None)
            self._cuda.start(self._data, tensor, self._average, launched, finished)
        elif (direct := self._direct_for(tensor.nbytes)) is not None:
            direct.start(tensor, index, finished)
        else:
            work = self._data.allreduce([tensor], self._average)
            work.get_future().then(lambda future: finished(_error_of(future)))

    def average(self, handle: tuple[torch.Tensor, int], priority: int) -> Landed:
        tensor = handle[0]
        if self.any_order(tensor.nbytes) and not self._commutes(tensor):
            return super().average(handle, priority)
        with self._counting:
            self._in_flight += 1
        work = self._data.allreduce([tensor], self._average)

        def landed(seconds: float) -> bool:
            if not _ended(work, timedelta(seconds=seconds)):
                return False
            try:
                work.wait()
            except RuntimeError as error:
                self._outcome(error)
                raise
            self._outcome(None)
            return True

        return landed

    def any_order(self, nbytes: int) -> bool:
        return self._direct_for(nbytes) is not None

    def look(self) -> None:
        if self._direct is not None:
            self._direct.look()

    def _direct_for(self, nbytes: int) -> DirectAverage | None:
        return self._direct if nbytes <= MOST_BYTES else None

    def _commutes(self, tensor: torch.Tensor) -> bool:
        """Whether a ring gives the same sums as ``_direct.py``, to the last bit."""
        return self.world_size == 2 and tensor.dtype in (torch.float32, torch.float64)

    def announce(self, message: Sequence[int]) -> None:
        words = np.zeros(MESSAGE_LIMIT + 1, np.int64)
        words[0] = len(message)
        words[1 : len(message) + 1] = message
        self._forward(torch.from_numpy(words))

    def receive(self) -> Sequence[int]:
        while len(self._posted) < POSTED:
            buffer = torch.empty(MESSAGE_LIMIT + 1, dtype=torch.int64)
            parent = (self.rank - 1) // FAN_OUT
            self._posted.append((self._control.recv([buffer], parent, TAG), buffer))
        work, buffer = self._posted.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            if self._closed:
                raise TransportClosedError(f"rank {self.rank}: closed while waiting") from error
            self._witness()
            raise
        self._forward(buffer)
        words: list[int] = buffer.tolist()
        return words[1 : words[0] + 1]

    def exchange(self, payload: bytes) -> list[bytes]:
        size = torch.tensor([len(payload)])
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        self._complete(self._control.allgather([sizes], [size]))
        longest = max(1, int(max(sizes)))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
            : len(payload)
        ]
        all_ = [torch.zeros_like(mine) for _ in range(self.world_size)]
        self._complete(self._control.allgather([all_], [mine]))
        self._exchanges += 1
        return [bytes(data[: int(size)].numpy()) for data, size in zip(all_, sizes, strict=True)]

    def broadcast(self, buffer: Any) -> None:
        group = self._control if buffer.device.type == "cpu" else self._data
        _broadcast(group, buffer).wait()

    def broadcast_async(self, buffer: torch.Tensor) -> Callable[[], object]:
        """See ``Transport``. From a GPU it goes through the host, which waits for the GPU.

        NCCL wants collectives in one order on all ranks, whatever group they are of; this one's
        place among the chunks would be left to chance.
        """
        if buffer.device.type == "cpu":
            return _broadcast(self._control, buffer).wait
        return StagedBroadcast(self._control, buffer, self.rank).wait

    def explain(self, error: BaseException) -> ByteSchedulerError:
        if isinstance(error, ByteSchedulerError):
            return error
        known = self._who_gave_up()
        if known is not None:
            return known
        gone = self._silent_ranks()
        if gone is None:
            text = "the store that the ranks met in is gone too: the process that held it, rank 0 "
            return PeerLostError(
                f"rank {self.rank}: {text}unless a launcher keeps it, died. Engine: {error}", (0,)
            )
        if not gone:
            return TransportError(
                f"rank {self.rank}: the gradient exchange failed although every rank answers. "
                f"Engine: {error}"
            )
        names = ", ".join(map(str, gone))
        return PeerLostError(
            f"rank {self.rank}: rank {names} did not answer within "
            f"{ANSWER_TIMEOUT:.0f} s of a failure; it died or left. Engine: {error}",
            gone,
        )

    def report(self, reason: str) -> None:
        self._broken = True
        with suppress(RuntimeError, ConnectionError):
            self._store.set(GAVE_UP, f"{self.rank}\0{reason}")

    def check(self, steps: int = 0) -> None:
        """See ``Transport``; also raises where a rank has seen the engine fail, this one included.

        What is waited for may be a message of a rank that has stopped for that reason, and lives.
        """
        known = self._who_gave_up()
        if known is not None:
            raise known
        failed, meeting = self._read(FAILED), self._read(MEETING)
        if failed:
            raise self.explain(RuntimeError(f"rank {failed} has seen it fail"))
        if meeting:
            self._hold_against(meeting, steps)

    def meet(self, what: str, steps: int) -> None:
        with suppress(RuntimeError, ConnectionError):
            self._store.set(MEETING, f"{self.rank}\0{self._exchanges}\0{steps}\0{what}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._cuda is not None:
            self._cuda.close(0.0 if self._broken else FAREWELL.total_seconds())
        stuck = self._broken or self._in_flight > 0
        if self._direct is not None:
            self._direct.close(0.0 if stuck else FAREWELL.total_seconds())
        if stuck:
            return  # a group waits for its collectives: only the process's end frees this one
        for work, _ in self._sent:
            with suppress(RuntimeError):
                work.wait(FAREWELL)
        self._sent.clear()
        self._posted.clear()
        for group in (self._data, self._control):
            with suppress(AssertionError, RuntimeError, ValueError):
                dist.destroy_process_group(group)
        del self._data, self._control, self._direct

    def _complete(self, work: Any) -> None:
        """Wait for ``work``, unless a rank that it needs gives up.

        Raises:
            ByteSchedulerError: one has, or the engine failed.
        """
        while not _ended(work, PULSE):
            self.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise self.explain(error) from error

    def _read(self, key: str) -> str:
        """The word under ``key``; empty if there is none, or the store is gone."""
        with suppress(RuntimeError, ConnectionError):  # the engine itself will notice
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""

    def _who_gave_up(self) -> PeerLostError | None:
        rank, _, reason = self._read(GAVE_UP).partition("\0")
        if not rank or int(rank) == self.rank:
            return None
        return PeerLostError(f"rank {self.rank}: rank {rank} gave up: {reason}", (int(rank),))

    def _hold_against(self, meeting: str, steps: int) -> None:
        """Raise if a rank waits in a meeting that this one, ``steps`` done, has passed by.

        The word stays when a meeting is over: the number of exchanges before it tells.
        """
        rank, exchanges, before, what = meeting.split("\0")
        if int(exchanges) == self._exchanges and steps > int(before):
            raise RankMismatchError(
                f"rank {self.rank}: {what} must change on all ranks alike, before the same step; "
                f"rank {rank} waits to compare it in step {int(before) + 1}, this one has passed "
                "that step without a change"
            )

    def _forward(self, packed: torch.Tensor) -> None:
        for child in self._children:
            self._sent.append((self._control.send([packed], child, TAG), packed))
        while len(self._sent) > WINDOW * max(1, len(self._children)):
            self._sent.popleft()[0].wait()

    def _outcome(self, error: BaseException | None) -> BaseException | None:
        with self._counting:
            self._in_flight -= 1
        if error is not None:
            self._witness()
        return error

    def _witness(self) -> None:
        """Let the others know that this rank lives, at once, though its script may be busy."""
        self._broken = True
        if self._witnessed:
            return
        with suppress(RuntimeError, ConnectionError):
            self._store.set(f"bytescheduler/alive/{self.rank}", str(os.getpid()))
            self._store.set(FAILED, str(self.rank))
            self._witnessed = True

    def _silent_ranks(self) -> list[int] | None:
        """Ranks that do not answer; None if the store itself does not."""
        try:
            self._witness()
            deadline = time.monotonic() + ANSWER_TIMEOUT
            ranks = range(self.world_size)
            return [rank for rank in ranks if not _answers(self._store, rank, deadline)]
        except (RuntimeError, ConnectionError):
            return None


class StagedBroadcast:
    """Overwrites ``buffer`` with rank 0's by way of the host, in the Gloo group ``group``."""

    def __init__(self, group: Any, buffer: torch.Tensor, rank: int) -> None:
        self._target = None if rank == 0 else buffer
        self._host = buffer.cpu() if rank == 0 else torch.empty_like(buffer, device="cpu")
        self._work = _broadcast(group, self._host)

    def wait(self) -> None:
        """Until rank 0's values are in the buffer."""
        self._work.wait()
        if self._target is not None:
            self._target.copy_(self._host)


def _broadcast(group: Any, buffer: torch.Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([buffer], options)


class _CudaLane:
    """A stream for collectives, and a thread that waits for them on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._events: queue.SimpleQueue[tuple[torch.cuda.Event, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="bytescheduler-cuda", daemon=True)
        self._thread.start()

    def start(
        self,
        group: Any,
        tensor: torch.Tensor,
        options: dist.AllreduceOptions,
        launched: Callable[[], None] | None,
        done: Done,
    ) -> None:
        with torch.cuda.stream(self.stream):
            group.allreduce([tensor], options).wait()  # orders the stream, not the host
            event = torch.cuda.Event(blocking=True)
            event.record(self.stream)
        if launched is not None:
            launched()
        self._events.put((event, done))

    def close(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for what was started: to close its group would break it off."""
        self._events.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _watch(self) -> None:
        while (item := self._events.get()) is not None:
            event, done = item
            try:
                event.synchronize()
            except RuntimeError as error:
                done(error)
            else:
                done(None)


def _backend_for(group: Any, device: torch.device) -> str:
    """What ``group`` uses for tensors on ``device``; there may be another for other devices."""
    user: Any = group if group is not None else dist.group.WORLD
    try:
        name = user._get_backend(device).name().lower()
    except RuntimeError as error:
        raise UsageError(
            f"the process group must have a backend for gradients on {device}, got "
            f"{dist.get_backend(group)!r}; pass init_process_group 'gloo' for the CPU, 'nccl' for "
            "GPUs, or 'cpu:gloo,cuda:nccl'"
        ) from error
    if device.type != "cpu" and name != "nccl":
        raise UsageError(
            f"gradients on {device} are exchanged over NCCL only, got the backend {name!r}; pass "
            "init_process_group 'nccl', or 'cpu:gloo,cuda:nccl'"
        )
    return name


def _open_groups(group: Any, backend: str, timeout: float) -> tuple[Any, Any, dist.Store]:
    """Collective: a group for chunks, a Gloo group for control, and a store of their own.

    Groups of some ranks only are built by hand on Gloo: ``new_group`` wants all ranks, or, with
    ``use_local_synchronization``, that its members have opened equally many groups before.

    Each group has a device, so a listening thread, of its own. With one for both, a rank was seen
    to crash in it while groups were closed and opened again.
    """
    user: Any = group if group is not None else dist.group.WORLD
    count = _opened.get(user, 0)
    _opened[user] = count + 1
    store = dist.PrefixStore(f"bytescheduler/{count}", user.get_group_store())
    deadlines = (timedelta(seconds=timeout), CONTROL_TIMEOUT)
    if group is not None and backend == "gloo":
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        data, control = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout=deadline)
            for name, deadline in zip(("data", "control"), deadlines, strict=True)
        )
        return data, control, store
    ranks = dist.get_process_group_ranks(group) if group is not None else None
    data, control = (
        dist.new_group(
            ranks, timeout=deadline, backend=name, use_local_synchronization=ranks is not None
        )
        for name, deadline in zip((backend, "gloo"), deadlines, strict=True)
    )
    return data, control, store


def _ended(work: Any, patience: timedelta) -> bool:
    """Wait for ``work``, so long at most; whether it has ended, well or not."""
    with suppress(RuntimeError):
        work.wait(patience)  # raises when the time is over, too
    return work.is_completed()


def _error_of(future: Any) -> BaseException | None:
    try:
        future.value()
    except RuntimeError as error:
        return error
    return None


def _answers(store: dist.Store, rank: int, deadline: float) -> bool:
    key = f"bytescheduler/alive/{rank}"
    left = deadline - time.monotonic()
    if left <= 0:
        return store.check([key])
    try:
        store.wait([key], timedelta(seconds=left))
    except (RuntimeError, dist.DistStoreError):
        return False
    return True
