"""The contract of a transport: an engine that moves chunks.

A transport starts one chunk and says when it is done. Beside that it carries the leader's
announcements, and at set-up time small byte strings, through the same engine, so that no socket of
our own is needed. Frameworks and transports combine freely: buffers are taken as they are (torch
tensor, NumPy array, anything with DLPack), without copies where the engine allows.

A new transport is one file with a subclass of ``Transport``, named in the entry-point group
``bytescheduler.transports`` and in the contract suite ``tests/transports``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from bytescheduler.exceptions import ByteSchedulerError, TransportError

__all__ = ["MESSAGE_LIMIT", "Done", "Landed", "Transport"]

MESSAGE_LIMIT: Final = 63  # integers in one announcement, at most

Done = Callable[[BaseException | None], None]
Landed = Callable[[float], bool]
"""Waits for an average: False when that takes longer than so many seconds; raises if it fails."""


class Transport(ABC):
    """One rank's end of an engine.

    Order of calls: the constructor (collective); any number of ``exchange`` and ``broadcast``;
    ``prepare`` for every chunk; then ``start`` from one thread, while rank 0 calls ``announce``
    from that same thread and the others call ``receive`` from theirs; ``close`` at last, from any
    thread. ``prepare`` may come again for a new cut, from the thread that calls ``start``, when
    nothing is in flight on rank 0. On a reentrant engine ``start``, ``announce`` and ``prepare``
    come from changing threads, ``done`` among them, one call at a time.

    Attributes:
        rank, world_size: this rank and how many there are.
        ordered: whether all ranks must start the same chunks in the same order; see ``any_order``.
        negotiates: whether nothing of a chunk moves before every rank has started it, and any
            number of them may wait. Then chunks are not announced: rank 0's starts are the order,
            and the other ranks start what is ready. Needs ``reentrant``, and not ``ordered``.
        interruptible: whether ``close`` wakes a ``receive`` that is blocked in the engine. Where an
            engine's own wait cannot be ended, it ends when rank 0 stops or its process ends.
        reentrant: whether the engine may be called from several threads, and from inside ``done``.
            That saves the hand-over to another thread, which costs more than ``start`` itself.
        lockstep: whether the thread that trains may start chunks itself (``average``), where their
            order is fixed. Needs ``reentrant``, and not ``negotiates``.
        least_chunks: into how many a model is cut by default, however short its exchange; more than
            one where a chunk passes stages (push, pull) that others can use meanwhile.
        tunable: whether ``auto`` is the default mode; False where sizes, once tried, leave memory
            or threads behind.
    """

    ordered: bool
    negotiates: bool = False
    interruptible: ClassVar[bool] = True
    least_chunks: ClassVar[int] = 1
    tunable: ClassVar[bool] = True
    reentrant: bool = False
    lockstep: bool = False
    rank: int
    world_size: int

    @abstractmethod
    def prepare(self, index: int, buffer: Any) -> Any:
        """Return the engine's handle for a chunk: a one-dimensional contiguous ``buffer``.

        All ranks call it in the same order, with the same ``index``, length and dtype. The memory
        stays valid and in place until ``close``. It must not block on other ranks' progress.
        """

    @abstractmethod
    def start(self, handle: Any, priority: int, done: Done) -> None:
        """Begin to average the buffer of ``handle`` over all ranks, in place.

        Returns at once. ``done(None)`` is called exactly once when the average is in the buffer,
        ``done(error)`` if it will never be; from any thread, perhaps before ``start`` returns.
        ``priority``: smaller is needed sooner; an engine may ignore it.
        """

    def average(self, handle: Any, priority: int) -> Landed:
        """As ``start``, for a caller that will wait itself; from the thread that trains.

        An engine whose own wait spares it the call-back's thread overrides this.
        """
        over = threading.Event()
        errors: list[BaseException] = []

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            over.set()

        def landed(seconds: float) -> bool:
            if not over.wait(seconds):
                return False
            if errors:
                raise errors[0]
            return True

        self.start(handle, priority, done)
        return landed

    def any_order(self, nbytes: int) -> bool:
        """Whether ranks may start chunks of at most so many bytes in different orders.

        Then one that waits for a slower rank is passed by others, instead of halting the wire.
        """
        return self.reentrant and not self.ordered

    def look(self) -> None:  # noqa: B027
        """On rank 0, where ``any_order``: called now and then while chunks are in flight.

        One that is late should not keep those behind it from being ``done``.
        """

    @abstractmethod
    def announce(self, message: Sequence[int]) -> None:
        """Rank 0: send at most MESSAGE_LIMIT 64-bit integers to all other ranks, in order.

        Does not wait until they have received it.
        """

    @abstractmethod
    def receive(self) -> Sequence[int]:
        """Other ranks: block until rank 0's next message, without spinning.

        Raises:
            TransportClosedError: ``close`` was called, here, while waiting.
            PeerLostError: rank 0, or a rank that relays its messages, is gone.
        """

    @abstractmethod
    def exchange(self, payload: bytes) -> list[bytes]:
        """Collective, set-up time only: return the payloads of all ranks, by rank."""

    @abstractmethod
    def broadcast(self, buffer: Any) -> None:
        """Collective, blocking, set-up time only: overwrite ``buffer`` with rank 0's content.

        ``buffer`` is contiguous.
        """

    def broadcast_async(self, buffer: Any) -> Callable[[], object]:
        """As ``broadcast``, from the thread that trains, while chunks are in flight.

        Each rank calls it at another place among the chunks. ``buffer`` has rank 0's content when
        what is returned has been called; an engine that can wait there, not here, overrides this.
        """
        self.broadcast(buffer)
        return lambda: None

    def explain(self, error: BaseException) -> ByteSchedulerError:
        """Turn a failure of the engine into ours, naming the ranks that are gone if it can.

        Called once, in the training thread, after a failure and before ``close``; may take a few
        seconds to ask who is still there.
        """
        if isinstance(error, ByteSchedulerError):
            return error
        return TransportError(f"rank {self.rank}: the gradient exchange failed: {error}")

    def report(self, reason: str) -> None:  # noqa: B027 (an engine without means says nothing)
        """Leave word for the other ranks that this one gives up though its process lives."""

    def meet(self, what: str, steps: int) -> None:  # noqa: B027
        """Leave word that this rank comes to an ``exchange`` to compare ``what``, after ``steps``.

        Ranks that compare in the same step count the same steps before it.
        """

    def check(self, steps: int = 0) -> None:  # noqa: B027
        """Look whether a rank has left such word; called about once a second while waiting.

        Args:
            steps: that this rank has ended.

        Raises:
            PeerLostError: one has given up.
            RankMismatchError: one waits in an ``exchange`` that this rank has passed by.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the engine; wake a blocked ``receive`` if ``interruptible``.

        May be called twice, never raises.
        """
