"""One order for all ranks: the leader announces, the others follow.

Collectives must start in the same order everywhere (on Gloo a mismatch silently mixes two tensors,
on NCCL it hangs), and local timing differs. So rank 0 alone runs the scheduler and holds the
credit. It announces what it starts, several chunks in one message; the others start announced
chunks in that order, each as soon as it is ready locally; where an engine takes chunks in any
order, what is not ready does not hold up what is. There is no round trip and no negotiation: the
credit window hides the latency.

Some engines negotiate themselves: nothing of a chunk moves before every rank has started it. There
rank 0's start alone decides what is sent when, and the others may start everything at once; an
announcement per chunk would only wait in the engine behind the chunks in flight. What is left to
announce is one word per round, that rank 0 will not cut the buffer anew before it (GO).

Where there is nothing to order none of this is needed: see ``lockstep.py``.

Considered instead: negotiation as in Horovod (a round trip and a cycle time per decision), a fixed
order (an unlucky first chunk blocks all), a credit on every rank (two full windows of different
chunks wait for each other for ever, also on engines that accept any order).

A message is a list of integers: chunk numbers (>= 0) and opcodes from below with their operands.

Every parameter is posted once per *round*; an iteration has one round, or more when the user runs
several backward passes without ``no_sync``. Ranks whose numbers of rounds differ would mix
iterations, so the leader announces its number at the end of each step, along with the chunks that
come next, and the others compare.

Readiness is counted by who posts, under a lock; a thread is woken, or an engine called, only when
that makes something due. Waking a thread for every gradient was the larger part of what scheduling
cost: it takes the interpreter's lock from the thread that trains.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from bytescheduler.core.plan import Chunk, Plan
from bytescheduler.core.scheduler import Scheduler

__all__ = ["Cut", "Follower", "Leader", "Readiness", "Step"]

STOP: Final = -1
CUT: Final = -2  # followed by partition size, credit size and mode number
STEP: Final = -3  # followed by the number of the step and of the rounds posted so far
GO: Final = -4  # where order is free: the chunks of one more round may start


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


class _Starter(Protocol):
    """What both sides need of the exchange that owns them."""

    def recut(self, cut: Cut) -> Plan: ...

    def start(self, chunk: Chunk) -> None: ...

    def compare(self, step: Step) -> None: ...

    @property
    def any_order(self) -> bool: ...


class Readiness:
    """Which chunks have all their parameters: counted up as parameters are posted.

    A parameter is posted again only when all its chunks have come back, so a chunk's count can
    start anew as soon as the chunk is ready.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._missing = [len(chunk.spans) for chunk in plan.chunks]
        self.partial = 0  # posted parts of chunks that are not ready yet

    def post(self, parameter: int) -> list[Chunk]:
        """Count ``parameter``; return the chunks that are ready now."""
        ready: list[Chunk] = []
        for index in self._plan.chunks_of[parameter]:
            self._missing[index] -= 1
            self.partial += 1
            if not self._missing[index]:
                chunk = self._plan.chunks[index]
                self._missing[index] = len(chunk.spans)
                self.partial -= len(chunk.spans)
                ready.append(chunk)
        return ready


class _Side(ABC):
    """What leader and follower share: a state under a lock, and the work that it makes due.

    Any thread may change the state, the one that trains and the engine's own. What is due then is
    done by ``pump``, by one thread at a time, outside of the lock; a thread that finds another one
    at it leaves its work to that one, so nobody waits for an engine's call but who makes it.

    Args:
        wake: called, outside of the lock, when a post made something due, and at the end: it makes
            another thread call ``pump``, or does so itself.

    Attributes:
        ended: nothing is due any more, ever: the leader has stopped, or something failed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._wake = wake
        self._busy = False

    def pump(self) -> None:
        """Do everything that is due."""
        with self._lock:
            if self._busy:
                return
            self._busy = True
        while True:
            with self._lock:
                action = None if self.ended.is_set() else self._due()
                if action is None:
                    self._busy = False
                    return
            try:
                action()
            except BaseException:
                self._end()
                raise

    @property
    def next_look(self) -> float | None:
        """Seconds until something may be due though nothing has happened; None if never."""
        return None

    def _end(self) -> None:
        """Nothing is due any more; whoever waits to be woken should see it."""
        self.ended.set()
        self._wake()

    @abstractmethod
    def _due(self) -> Callable[[], None] | None:
        """Take the next action off the state; called under the lock."""


class Leader(_Side):
    """Rank 0's side: gathers what became ready, decides, announces, starts.

    What has become ready while one announcement was made goes with the next, so a burst costs few.

    Args:
        announce: sends one message to all followers.
        limit: integers in one message, at most.
        advance: as ``wake``, but called by whoever calls ``complete``.
        free: whether the engine negotiates, so that the other ranks may start chunks in any order;
            they are not announced then.
    """

    def __init__(
        self,
        plan: Plan,
        scheduler: Scheduler,
        exchange: _Starter,
        announce: Callable[[Sequence[int]], None],
        limit: int,
        wake: Callable[[], None],
        advance: Callable[[], None],
        *,
        free: bool = False,
    ) -> None:
        super().__init__(wake)
        self._advance = advance
        self._scheduler = scheduler
        self._scheduler.any_order = exchange.any_order
        self._exchange = exchange
        self._announce = announce
        self._limit = limit
        self._ready = Readiness(plan)
        self._free = free
        self._gone_to = 0  # rounds that the others may start, where order is free
        self._parameters = len(plan.chunks_of)
        self._posts = 0
        self._news: list[int] = []  # to be announced in front of the next chunks
        self._cut: Cut | None = None
        self._deferred: list[int] = []
        self._stopping = False

    def post(self, parameters: Iterable[int]) -> None:
        """This rank's gradients of ``parameters`` are there."""
        with self._lock:
            changed = sum(map(self._post, parameters)) > 0 and not self._busy
            due = changed and (self._scheduler.startable or self._news_are_due)
        if due:
            self._wake()

    def complete(self, chunk: Chunk) -> None:
        """The average of ``chunk`` is there."""
        with self._lock:
            self._scheduler.complete(chunk)
            due = (self._scheduler.startable or self._may_cut) and not self._busy
        if due:
            self._advance()

    def step(self, step: Step) -> None:
        """Announce the end of an iteration, along with what is announced next."""
        with self._lock:
            self._news += [STEP, step.number, step.rounds]
            if self._cut is None:
                self._go()
            due = self._news_are_due and not self._busy
        if due:
            self._wake()

    def cut(self, cut: Cut) -> None:
        """Change settings on all ranks as soon as nothing is in flight."""
        with self._lock:
            self._cut = cut
            due = self._may_cut and not self._busy
        if due:
            self._wake()

    @property
    def next_look(self) -> float | None:
        with self._lock:
            return self._scheduler.next_look

    def stop(self) -> None:
        """Start nothing more, tell the followers, set ``ended``."""
        with self._lock:
            self._stopping = True
        self._wake()

    def _post(self, parameter: int) -> bool:
        """Count ``parameter``; return whether that may have made something due."""
        if self._cut is not None and not self._going:
            self._deferred.append(parameter)
            return False
        round_number, posted = divmod(self._posts, self._parameters)
        if not posted:
            self._go()
            self._scheduler.foresight.round_begins()
        self._posts += 1
        ready = self._ready.post(parameter)
        for chunk in ready:
            self._scheduler.push(chunk, round_number)
            if chunk.index == 0:
                self._scheduler.foresight.urgent_is_ready()
        return not posted or bool(ready)

    def _go(self) -> None:
        """Where order is free, let the others start the present or the next round."""
        if self._free and self._parameters and not self._going:
            self._gone_to = self._posts // self._parameters + 1
            self._news.append(GO)

    @property
    def _going(self) -> bool:
        """The others may start chunks that rank 0 has yet to post."""
        return self._posts < self._gone_to * self._parameters

    @property
    def _may_cut(self) -> bool:
        """No chunk is partly ready, queued or in flight: the buffer may be cut anew."""
        if self._cut is None or self._ready.partial or self._going:
            return False
        return self._scheduler.idle

    @property
    def _news_are_due(self) -> bool:
        """No chunk will carry them, or they leave no room for a cut behind them."""
        return len(self._news) > (0 if self._free else self._limit - 4)

    def _due(self) -> Callable[[], None] | None:
        if self._stopping:
            return partial(self._say_goodbye, [*self._take_news(), STOP])
        if self._may_cut and self._cut is not None:
            return partial(self._apply, self._cut, self._take_news())
        if self._news_are_due:
            return partial(self._announce, self._take_news())
        batch: list[Chunk] = []
        room = self._limit - len(self._news)
        while len(batch) < room and (chunk := self._scheduler.pop()) is not None:
            batch.append(chunk)
        if not batch:
            return None
        told = [] if self._free else [chunk.index for chunk in batch]
        return partial(self._send, [*self._take_news(), *told], batch)

    def _take_news(self) -> list[int]:
        news, self._news = self._news, []
        return news

    def _send(self, message: list[int], batch: list[Chunk]) -> None:
        if message:
            self._announce(message)
        for chunk in batch:
            self._exchange.start(chunk)

    def _apply(self, cut: Cut, news: list[int]) -> None:
        self._announce([*news, CUT, cut.partition_size, cut.credit_size, cut.mode])
        plan = self._exchange.recut(cut)
        with self._lock:
            self._scheduler.any_order = self._exchange.any_order
            self._ready = Readiness(plan)
            if self._cut is cut:
                self._cut = None
            deferred, self._deferred = self._deferred, []
            for parameter in deferred:
                self._post(parameter)

    def _say_goodbye(self, message: list[int]) -> None:
        self._announce(message)
        self._end()


class Follower(_Side):
    """The other ranks' side: start what is announced, in that order, when it is ready here.

    Where the engine takes chunks in any order, what is not ready here is passed by what is. Where
    it negotiates, the chunks of a round that rank 0 has let go start when they are ready.
    """

    def __init__(self, plan: Plan, exchange: _Starter, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._exchange = exchange
        self._free: deque[int] = deque()  # chunks that are ready, of rounds that were let go
        self._announced: deque[int | Cut | Step] = deque()
        self._posted = [0] * len(plan.chunks_of)  # rounds of each parameter
        self._sent = [0] * len(plan.chunks_of)  # rounds of each parameter before this cut
        self._arm(plan)

    def post(self, parameters: Iterable[int]) -> None:
        """This rank's gradients of ``parameters`` are there."""
        with self._lock:
            changed = sum(map(self._mark, parameters)) > 0 and not self._busy
            due = changed and (bool(self._free) or self._next() is not None)
        if due:
            self._wake()

    def take(self, message: Sequence[int]) -> bool:
        """Note what the leader announced; ``pump`` follows. False when the leader has stopped."""
        going_on = message[-1] != STOP
        with self._lock:
            self._announced += _parsed(message if going_on else message[:-1])
        if not going_on:
            self.pump()
            self._end()
        return going_on

    def stop(self) -> None:
        """Start nothing more, set ``ended``."""
        self._end()

    @property
    def waiting(self) -> bool:
        """Something is announced that is not ready here."""
        return bool(self._announced) and not self.ended.is_set()

    def _next(self) -> int | None:
        """Position of the first announced item that can be acted on."""
        for position, item in enumerate(self._announced):
            if isinstance(item, Step) or item in self._complete:
                return position
            if isinstance(item, Cut) or item == GO:
                return None if position else 0
            if not self._any_order:
                return None
        return None

    def _due(self) -> Callable[[], None] | None:
        if self._free:
            return self._start(self._free.popleft())
        position = self._next()
        if position is None:
            return None
        item = self._announced[position]
        del self._announced[position]
        if isinstance(item, Cut):
            return partial(self._recut, item)
        if isinstance(item, Step):
            return partial(self._exchange.compare, item)
        if item == GO:
            return self._let_go
        self._complete.discard(item)
        return self._start(item)

    def _start(self, index: int) -> Callable[[], None]:
        self._started[index] += 1
        return partial(self._exchange.start, self._plan.chunks[index])

    def _let_go(self) -> None:
        with self._lock:
            self._rounds_to_go += 1
            self._release()

    def _release(self) -> None:
        free = {i for i in self._complete if self._started[i] < self._rounds_to_go}
        self._complete -= free
        self._free.extend(sorted(free))

    def _recut(self, cut: Cut) -> None:
        plan = self._exchange.recut(cut)
        with self._lock:
            for parameter, indices in enumerate(self._plan.chunks_of):
                self._sent[parameter] += self._started[indices[0]]
            self._arm(plan)

    def _arm(self, plan: Plan) -> None:
        """Start on a plan; what was posted and not yet sent counts for it."""
        self._plan = plan
        self._any_order = self._exchange.any_order
        self._ready = Readiness(plan)
        self._complete: set[int] = set()  # chunks that are ready and not started
        self._started = [0] * len(plan.chunks)
        self._rounds_to_go = 0  # of this plan
        for parameter, rounds in enumerate(self._posted):
            if rounds > self._sent[parameter]:
                self._count(parameter)

    def _mark(self, parameter: int) -> bool:
        """Note a round of ``parameter``; return whether chunks are ready that were not."""
        self._posted[parameter] += 1
        return self._count(parameter)

    def _count(self, parameter: int) -> bool:
        ready = self._ready.post(parameter)
        if not ready:
            return False
        self._complete.update(chunk.index for chunk in ready)
        if self._rounds_to_go:
            self._release()
        return True


def _parsed(message: Sequence[int]) -> Iterator[int | Cut | Step]:
    words = iter(message)
    for word in words:
        if word == CUT:
            size, credit, mode = next(words), next(words), next(words)
            yield Cut(partition_size=size, credit_size=credit, mode=mode)
        elif word == STEP:
            yield Step(number=next(words), rounds=next(words))
        else:
            yield word
