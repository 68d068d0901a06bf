"""One order for all ranks: the leader announces, the others follow.

Collectives must start in the same order everywhere (on Gloo a mismatch silently mixes two tensors,
on NCCL it hangs), and local timing differs. So rank 0 alone runs the scheduler and holds the
credit. It announces what it starts, several chunks in one message; the others start announced
chunks in that order, each as soon as it is ready locally. There is no round trip and no
negotiation: the credit window hides the latency.

Considered instead: negotiation as in Horovod (a round trip and a cycle time per decision), a fixed
order (an unlucky first chunk blocks all), a credit on every rank (two full windows of different
chunks wait for each other for ever, also on engines that accept any order).

A message is a list of integers: chunk numbers (>= 0), or an opcode from below with its operands.

Every parameter is posted once per *round*; an iteration has one round, or more when the user runs
several backward passes without ``no_sync``. Ranks whose numbers of rounds differ would mix
iterations, so the leader announces its number at the end of each step and the others compare.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from bytescheduler.core.plan import Chunk, Plan
from bytescheduler.core.scheduler import Scheduler

__all__ = ["Cut", "Follower", "Leader", "Step"]

STOP: Final = -1
CUT: Final = -2  # followed by partition size, credit size and mode number
STEP: Final = -3  # followed by the number of the step and of the rounds posted so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A change of settings between iterations, as announced to all ranks."""

    partition_size: int
    credit_size: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The end of an iteration: ranks compare how often each has posted by then."""

    number: int
    rounds: int


_Event = int | Chunk | Cut | Step | BaseException | None


class _Starter(Protocol):
    """What both sides need of the exchange that owns them."""

    def recut(self, cut: Cut) -> Plan: ...

    def start(self, chunk: Chunk) -> None: ...

    def compare(self, step: Step) -> None: ...


class Leader:
    """Rank 0's loop: gathers what became ready, decides, announces, starts.

    ``events`` is its only input, a queue of: a parameter that was posted (int), a chunk that
    completed, the end of a step, a cut to make, a failure, or None to stop. Everything that is in
    the queue when it wakes is taken before it decides, so a burst costs one announcement.

    Args:
        announce: sends one message to all followers.
        limit: integers in one message, at most.
    """

    def __init__(
        self,
        plan: Plan,
        scheduler: Scheduler,
        exchange: _Starter,
        announce: Callable[[Sequence[int]], None],
        limit: int,
    ) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._scheduler = scheduler
        self._exchange = exchange
        self._announce = announce
        self._limit = limit
        self._cut: Cut | None = None
        self._deferred: list[int] = []
        self._running = True
        self._arm(plan)

    def run(self) -> None:
        """Serve events until stopped; on the way out tell the followers."""
        while self._running:
            for event in self._drain():
                self._take(event)
            if self._cut is not None and self._quiet:
                self._apply_cut(self._cut)
            self._send()
        self._announce([STOP])

    def _drain(self) -> list[_Event]:
        events = [self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        return events

    def _take(self, event: _Event) -> None:
        if isinstance(event, int):
            self._posted(event)
        elif isinstance(event, Chunk):
            self._scheduler.complete(event)
        elif isinstance(event, Cut):
            self._cut = event
        elif isinstance(event, Step):
            self._announce([STEP, event.number, event.rounds])
        elif event is None:
            self._running = False
        else:
            raise event

    def _posted(self, parameter: int) -> None:
        if self._cut is not None:
            self._deferred.append(parameter)
            return
        for index in self._plan.chunks_of[parameter]:
            self._missing[index] -= 1
            self._waiting += 1
            if not self._missing[index]:
                chunk = self._plan.chunks[index]
                self._missing[index] = len(chunk.spans)
                self._waiting -= len(chunk.spans)
                self._scheduler.push(chunk)

    @property
    def _quiet(self) -> bool:
        """No chunk is partly ready, queued or in flight: the buffer may be cut anew."""
        return not self._waiting and self._scheduler.idle

    def _apply_cut(self, cut: Cut) -> None:
        self._announce([CUT, cut.partition_size, cut.credit_size, cut.mode])
        self._arm(self._exchange.recut(cut))
        self._cut = None
        deferred, self._deferred = self._deferred, []
        for parameter in deferred:
            self._posted(parameter)

    def _arm(self, plan: Plan) -> None:
        self._plan = plan
        self._missing = [len(chunk.spans) for chunk in plan.chunks]
        self._waiting = 0  # posted spans of chunks that are not ready yet

    def _send(self) -> None:
        while batch := self._startable():
            self._announce([chunk.index for chunk in batch])
            for chunk in batch:
                self._exchange.start(chunk)

    def _startable(self) -> list[Chunk]:
        batch: list[Chunk] = []
        while len(batch) < self._limit and (chunk := self._scheduler.pop()) is not None:
            batch.append(chunk)
        return batch


class Follower:
    """The other ranks' loop: start what is announced, in that order, when it is ready here.

    Args:
        receive: blocks for the leader's next message.
        wait_posted: ``wait_posted(parameter, round)`` blocks until this rank has posted it.
    """

    def __init__(
        self,
        plan: Plan,
        exchange: _Starter,
        receive: Callable[[], Sequence[int]],
        wait_posted: Callable[[int, int], None],
    ) -> None:
        self._exchange = exchange
        self._receive = receive
        self._wait_posted = wait_posted
        self._base = [0] * len(plan.chunks_of)  # rounds of each parameter before this cut
        self._arm(plan)

    def run(self) -> None:
        """Follow until the leader stops."""
        while (message := self._receive())[0] != STOP:
            if message[0] == CUT:
                self._recut(message)
            elif message[0] == STEP:
                self._exchange.compare(Step(number=message[1], rounds=message[2]))
            else:
                for index in message:
                    self._start(self._plan.chunks[index])

    def _start(self, chunk: Chunk) -> None:
        self._started[chunk.index] += 1
        for parameter, _ in chunk.spans:
            self._wait_posted(parameter, self._base[parameter] + self._started[chunk.index])
        self._exchange.start(chunk)

    def _recut(self, message: Sequence[int]) -> None:
        for parameter, indices in enumerate(self._plan.chunks_of):
            self._base[parameter] += self._started[indices[0]]
        _, partition_size, credit_size, mode = message[:4]
        cut = Cut(partition_size=partition_size, credit_size=credit_size, mode=mode)
        self._arm(self._exchange.recut(cut))

    def _arm(self, plan: Plan) -> None:
        self._plan = plan
        self._started = [0] * len(plan.chunks)
