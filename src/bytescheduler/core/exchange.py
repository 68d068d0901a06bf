"""One rank's gradient exchange: plan, scheduler, order and transport put together.

Adapters see this class only. They ``post`` a parameter when its gradient lies in the flat buffer,
and ``wait`` for parameters before they are used; both happen in the thread that trains. What moves
bytes is the ``Leader`` on rank 0 and a ``Follower`` elsewhere.

Chunks are started in the background: by a thread that ``post`` wakes, and on a *reentrant* engine
also by its own threads, when a chunk completes (see ``driver.py``). No such thread touches weights,
all of ours end with ``close``, and whatever goes wrong in them is raised in the training thread by
the next call. Only rounds in *lockstep* are started by ``post`` itself (see ``lockstep.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, cast

from bytescheduler.core.config import MODES, Mode, Settings
from bytescheduler.core.driver import Driver
from bytescheduler.core.ledger import Ledger
from bytescheduler.core.lockstep import MOST_RANKS, Direction, Lockstep, Signal
from bytescheduler.core.order import Cut, Follower, Leader, Step
from bytescheduler.core.plan import Chunk, Layout, Plan
from bytescheduler.core.scheduler import Scheduler
from bytescheduler.core.trace import Observer
from bytescheduler.exceptions import (
    ByteSchedulerError,
    PeerLostError,
    RankMismatchError,
    TransportClosedError,
    TransportError,
    UsageError,
)
from bytescheduler.transports.base import MESSAGE_LIMIT, Landed, Transport

__all__ = ["Exchange", "Tuner"]

CLOSE_TIMEOUT: Final = 5.0  # seconds to let what is in flight arrive, and the thread end
PULSE: Final = 1.0  # seconds of waiting before it is asked whether a rank gave up


class Tuner(Protocol):
    """Chooses settings while the job runs; lives on rank 0."""

    def step(self, now: float) -> Settings | None:
        """An iteration ended at ``now`` (``perf_counter`` seconds): new settings, or None."""

    def close(self) -> None:
        """The job is over."""


class Exchange:
    """Averages posted parameters over all ranks, the most urgent first.

    Args:
        layout: where each parameter lies in its flat buffer; equal on all ranks. With a signal in
            it, rounds that need no order run in lockstep where the engine can: then only whole
            rounds may be waited for, and without call-backs.
        buffers: the flat buffers by name, one-dimensional; slicing must give views.
        transport: this rank's end of the engine; closed by ``close``.
        settings: sizes and mode; rank 0's count.
        observer: told what happens, for tracing.
        tuner: on rank 0, chooses settings from step to step.
        before_start: called in the background thread just before a chunk is started, to order the
            device's streams.

    Order of calls: in each round ``post`` every parameter once; ``wait`` for any of them at any
    time; ``step`` after the last round of an iteration; ``close`` at last. A parameter may be
    posted again when it has returned and its round is complete. ``post``, ``step`` and ``close``
    are not called from two threads at once.
    """

    def __init__(
        self,
        layout: Layout,
        buffers: Mapping[str, Any],
        transport: Transport,
        settings: Settings,
        observer: Observer | None = None,
        tuner: Tuner | None = None,
        before_start: Callable[[Chunk], None] | None = None,
    ) -> None:
        self.layout = layout
        self.settings = settings
        self._buffers = buffers
        self._transport = transport
        self._observer = observer
        self._ledger = Ledger(layout.slots)
        self._tuner = tuner
        self._before_start = before_start
        self._closing = False
        self._explanation: ByteSchedulerError | None = None
        self._steps = 0
        self._rounds = 0
        self._missing = dict.fromkeys(range(len(layout.specs)))  # of this round, in order
        self._lockstep: Lockstep | None = None  # the present round, if it runs so
        self._landing = threading.Lock()
        self._signal = self._make_signal()
        self._direction: Direction | None = None  # on rank 0
        self._unmatched: dict[int, int] = {}  # step: rounds, of whichever side came first
        self._matching = threading.Lock()
        plan = self._adopt(settings)
        self._driver = Driver(transport, self._fail, self._abandoned)
        self._side: Leader | Follower
        self._leader: Leader | None = None
        if transport.rank == 0:
            self._scheduler = _scheduler(settings)
            self._side = self._leader = leader = Leader(
                plan,
                self._scheduler,
                self,
                self._announce,
                MESSAGE_LIMIT,
                self._driver.wake,
                self._driver.advance,
                free=transport.negotiates,
            )
            self._direction = Direction(settings, partial(_cut, leader), self._needs_no_order)
            self._driver.lead(leader)
        else:
            self._side = follower = Follower(plan, self, self._driver.wake)
            self._driver.follow(follower)

    @property
    def error(self) -> BaseException | None:
        """Why the exchange failed, if it did."""
        return self._ledger.error

    def post(self, *parameters: int, on_returned: Callable[[], None] | None = None) -> None:
        """This rank's gradients of ``parameters`` lie in the buffer; send each when its turn comes.

        Args:
            on_returned: called once for each, from a background thread, when its average is there
                or the exchange failed (see ``error``); must be quick and must not raise.

        Raises:
            TransportError: the exchange failed or was closed.
        """
        if self._signal is not None and not self.round_open:
            self._begin_round(self._signal)
        try:
            self._ledger.post(parameters, on_returned)
        except ByteSchedulerError as error:
            raise self._explain(error) from error.__cause__
        for parameter in parameters:
            self._count(parameter)
            if self._observer is not None:
                self._observer.posted(parameter)
        if self._lockstep is None:
            self._side.post(parameters)
        else:
            self._try(self._lockstep.post, parameters)

    @property
    def round_open(self) -> bool:
        """Whether some parameters, but not all, have been posted in the present round."""
        return len(self._missing) < len(self.layout.specs)

    def posted(self, parameter: int) -> bool:
        """Whether ``parameter`` has been posted in the present round."""
        return parameter not in self._missing

    def missing(self) -> list[int]:
        """The parameters that have not been posted in the present round."""
        return list(self._missing)

    def returned(self, parameter: int) -> bool:
        """Whether the average of ``parameter`` is there (or it was never posted)."""
        return self._ledger.returned(parameter)

    def wait(self, parameters: Iterable[int]) -> None:
        """Block until the averages of all ``parameters`` that were posted are in the buffer.

        Raises:
            TransportError: the exchange failed or was closed.
        """
        names = [index for index in parameters if not self._ledger.returned(index)]
        if not names:
            return
        begin = time.perf_counter()
        if self._lockstep is not None:
            self._try(self._land, self._lockstep)
        try:
            while not self._ledger.wait_returned(names, PULSE):
                self._transport.check(self._steps)
        except ByteSchedulerError as error:
            raise self._explain(error) from error.__cause__
        if self._observer is not None:
            label = self.layout.specs[names[0]].name
            self._observer.span("wait", label, begin, time.perf_counter())

    def step(self) -> None:
        """An iteration ends, after one or several whole rounds.

        Raises:
            UsageError: the present round is not complete.
            RankMismatchError: by this or a later call, when rank 0 counts other rounds.
        """
        if self.round_open:
            names = [self.layout.specs[index].name for index in self._missing]
            raise UsageError(f"every parameter must be posted before step(); missing: {names}")
        self._steps += 1
        settings = self._tuner.step(time.perf_counter()) if self._tuner is not None else None
        if settings is not None:
            self.reconfigure(settings)
        if self._lockstep is not None:
            return  # the round itself compared
        step = Step(number=self._steps, rounds=self._rounds)
        if self._leader is not None:
            self._leader.step(step)
            return
        try:
            self.compare(step)
        except RankMismatchError as error:
            raise self._explain(error) from None

    def meet(self, what: str) -> None:
        """Say that this rank compares ``what`` with the others now; who passes by will fail."""
        self._transport.meet(what, self._steps)

    def reconfigure(self, settings: Settings) -> None:
        """Rank 0, between rounds: change sizes and mode on all ranks.

        Takes effect when what is posted has come back and before the next round's chunks (where
        the engine negotiates, or that round runs in lockstep, perhaps one round later); nothing is
        lost or sent twice.
        """
        if self._direction is None:
            raise UsageError("only rank 0 decides the settings; call reconfigure there")
        self._direction.change(settings)

    def stop(self) -> None:
        """Collective: end after what was posted has arrived; the transport stays open.

        Raises:
            TransportError: the exchange failed, here or before.
        """
        self.wait(range(len(self.layout.specs)))
        if self._leader is not None:
            self._leader.stop()
        self._driver.join()

    def close(self, *, drain: bool = True) -> None:
        """Stop, and close the transport.

        Args:
            drain: first let what was posted arrive, and the leader end (5 s at most each); False
                when this rank gives up in the middle of an iteration, so that the others learn of
                it at once.
        """
        if self._closing:
            return
        self._closing = True
        if self._tuner is not None:
            self._tuner.close()
            self._tuner = None
        if drain and self.error is None:
            self._settle()
        elif self.error is None:
            self._transport.report("it stopped in the middle of an iteration")
            self._ledger.close()
        if self._leader is not None:
            self._leader.stop()
        if drain and self.error is None:
            self._driver.join(CLOSE_TIMEOUT)
        self._ledger.close()
        self._side.stop()
        self._transport.close()
        self._driver.leave(CLOSE_TIMEOUT)

    # -- called by the order agreement, in the background thread

    def recut(self, cut: Cut) -> Plan:
        """Adopt announced settings and return the new plan."""
        settings = replace(
            self.settings,
            partition_size=cut.partition_size,
            credit_size=cut.credit_size,
            mode=cast("Mode", MODES[cut.mode]),
        )
        plan = self._adopt(settings)
        self.settings = settings
        if self._leader is not None:
            self._scheduler.credit_size = settings.credit_size
            self._scheduler.fifo = _is_fifo(settings)
        return plan

    def compare(self, step: Step) -> None:
        """Hold the leader's count of rounds against this rank's, whichever comes second."""
        with self._matching:
            other = self._unmatched.pop(step.number, None)
            if other is None:
                self._unmatched[step.number] = step.rounds
        if other is not None and other != step.rounds:
            counts = f"here and there {other} and {step.rounds} were exchanged"
            error = _mismatch(self._transport.rank, step.number, counts)
            self._ledger.fail(error)
            raise error

    @property
    def any_order(self) -> bool:
        """Whether the chunks of the present plan may start in different orders on each rank."""
        largest = max((chunk.nbytes for chunk in self.plan.chunks), default=0)
        return self._transport.any_order(largest)

    def start(self, chunk: Chunk) -> None:
        """Hand one chunk to the transport."""
        self._leaves(chunk)
        if self._before_start is not None:
            self._before_start(chunk)
        done = _Completion(self._landed, self._finished, chunk)
        self._transport.start(self._handles[chunk.index], chunk.index, done)

    # -- rounds in lockstep

    def _make_signal(self) -> Signal | None:
        place, world_size = self.layout.signal, self._transport.world_size
        if place is None or not self._transport.lockstep or world_size > MOST_RANKS:
            return None
        buffer, offset = place
        return Signal(self._buffers[buffer], offset, world_size)

    def _needs_no_order(self, settings: Settings) -> bool:
        if self._signal is None or self._observer is not None:
            return False  # a timeline has when chunks return
        if settings.mode == "barrier":
            return True
        return len(self.layout.cut(settings.partition_size, growing=settings.growing).chunks) == 1

    def _begin_round(self, signal: Signal) -> None:
        """What came back with the round before says how this one runs, on all ranks alike."""
        if self._rounds:
            self.wait(self.layout.order[:1])
        if self._rounds and signal.lockstep:
            self.wait(self.layout.order)
            self._lockstep = Lockstep(self.plan, partial(self._average, self._handles))
        else:
            self._lockstep = None
        follows = self._direction is not None and self._direction.round_begins(
            lockstep=self._lockstep is not None
        )
        signal.write(lockstep=follows, step=self._steps)

    def _average(self, handles: Sequence[Any], chunk: Chunk) -> Landed:
        self._leaves(chunk)
        return self._transport.average(handles[chunk.index], chunk.index)

    def _land(self, lockstep: Lockstep) -> None:
        """Wait for all that was started; compare at the end of the round."""
        with self._landing:
            while lockstep.in_flight:
                self._land_next(lockstep)
        if lockstep.over and self._signal is not None and not self._signal.same_step:
            raise _mismatch(self._transport.rank, self._signal.step + 1, "not all have")

    def _land_next(self, lockstep: Lockstep) -> None:
        chunk = lockstep.land(PULSE)
        if chunk is not None:
            self._landed(chunk)
        else:
            self._ledger.raise_if_failed()
            self._transport.check(self._steps)

    def _try(self, action: Callable[[Any], None], argument: Any) -> None:
        """Call the engine from the training thread; what fails is explained, as elsewhere."""
        try:
            action(argument)
        except Exception as error:
            self._fail(error)
            raise self._explain(cast("ByteSchedulerError", self.error)) from error

    # -- inside

    def _count(self, parameter: int) -> None:
        del self._missing[parameter]
        if not self._missing:
            self._missing = dict.fromkeys(range(len(self.layout.specs)))
            self._rounds += 1

    def _adopt(self, settings: Settings) -> Plan:
        self.plan = plan = self.layout.cut(settings.partition_size, growing=settings.growing)
        self._handles = [
            self._transport.prepare(
                chunk.index, self._buffers[chunk.buffer][chunk.start : chunk.stop]
            )
            for chunk in plan.chunks
        ]
        if self._observer is not None:
            self._observer.planned(self.layout, plan, negotiated=self._transport.negotiates)
        return plan

    def _announce(self, message: Sequence[int]) -> None:
        if self._transport.world_size > 1:
            self._transport.announce(message)

    def _leaves(self, chunk: Chunk) -> None:
        self._ledger.start()
        if self._observer is not None:
            self._observer.started(chunk)

    def _landed(self, chunk: Chunk) -> None:
        if self._observer is not None:
            self._observer.completed(chunk)
        self._ledger.complete(chunk.spans)

    def _finished(self, chunk: Chunk, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        elif self._leader is not None:
            self._leader.complete(chunk)

    def _abandoned(self) -> None:
        """Rank 0 has stopped, as it does at the end."""
        gone = f"rank {self._transport.rank}: rank 0 ended its gradient exchange"
        self._ledger.retire(PeerLostError(gone, ranks=(0,)))

    def _fail(self, error: BaseException) -> None:
        if self._closing or isinstance(error, TransportClosedError):
            self._ledger.close()
        else:
            self._ledger.fail(_Failure(error))
        self._side.stop()

    def _explain(self, error: ByteSchedulerError) -> ByteSchedulerError:
        """Ask the transport who is gone, once; then cut it off, so that the others notice too."""
        if self._explanation is None:
            failed = isinstance(error, _Failure)
            self._explanation = self._transport.explain(error.reason) if failed else error
            self._ledger.fail(self._explanation)
            if not isinstance(self._explanation, PeerLostError):
                self._transport.report(str(self._explanation))
            self._transport.close()
        return self._explanation

    def _settle(self) -> None:
        deadline = time.monotonic() + CLOSE_TIMEOUT
        lockstep = self._lockstep
        try:
            while lockstep is not None and lockstep.in_flight and time.monotonic() < deadline:
                self._land_next(lockstep)
            left = max(0.0, deadline - time.monotonic())
            self._ledger.wait_returned(range(len(self.layout.specs)), left)
        except Exception:  # whatever the engine raises: this is the end
            return


def _cut(leader: Leader, settings: Settings) -> None:
    leader.cut(
        Cut(
            partition_size=settings.partition_size,
            credit_size=settings.credit_size,
            mode=MODES.index(settings.mode),
        )
    )


def _mismatch(rank: int, step: int, counts: str) -> RankMismatchError:
    return RankMismatchError(
        f"rank {rank}: by step {step} every rank must have run as many backward passes as rank 0; "
        f"{counts}. Put all but the last backward of a step under optimizer.no_sync()"
    )


def _is_fifo(settings: Settings) -> bool:
    return settings.mode in ("fifo", "barrier")


def _scheduler(settings: Settings) -> Scheduler:
    return Scheduler(settings.credit_size, fifo=_is_fifo(settings))


class _Completion:
    """What a transport calls when a chunk is done.

    Engines that work on a device's stream call ``launched`` as soon as the buffer may be used by
    work behind it on that stream, and the completion itself when the device has finished.
    """

    __slots__ = ("_chunk", "_finished", "_landed", "_pending")

    def __init__(
        self,
        landed: Callable[[Chunk], None],
        finished: Callable[[Chunk, BaseException | None], None],
        chunk: Chunk,
    ) -> None:
        self._landed = landed
        self._finished = finished
        self._chunk = chunk
        self._pending = True

    def launched(self) -> None:
        self._pending = False
        self._landed(self._chunk)

    def __call__(self, error: BaseException | None) -> None:
        self._finished(self._chunk, error)
        if self._pending and error is None:
            self.launched()


class _Failure(TransportError):
    """A failure in the background thread, not yet explained."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.__cause__ = reason
