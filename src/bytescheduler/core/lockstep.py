"""Rounds whose chunks need no announcement: each rank starts them in one fixed order.

Under ``barrier`` nothing is urgent, since the next forward waits for everything. Then the order in
which backward completes the buffer, from its end to its beginning, is as good as any that could be
announced. Where the whole model is one chunk, in any mode, there is nothing to order. In both cases
each rank can start its chunks by itself, in the thread that trains, as DistributedDataParallel
does. In iterations of some ten milliseconds on a fast network the threads that scheduling wakes are
what it costs; here none is woken.

Rank 0 alone decides which rounds run so, and says it one round ahead, in the round itself: behind
the first parameter's presence flag two more elements are averaged, the *signal* (``plan.py``). The
one is more than zero when the next round runs in lockstep. Every rank has it before it posts that
round, all of them the same, and no message has to overtake another. The other element holds the
number of the step: where ranks have run different numbers of backward passes they exchange rounds
of different steps, and the average is not what each of them wrote.

Considered instead: a fixed order for many chunks under priority too, some backwards, the others
forwards (no faster, and blind to what is late); announcing a number of rounds ahead (a change of
settings waits for their end).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from bytescheduler.core.config import Settings
from bytescheduler.core.order import Readiness
from bytescheduler.core.plan import Chunk, Plan
from bytescheduler.transports.base import Landed

__all__ = ["MOST_RANKS", "Direction", "Lockstep", "Signal"]

MOST_RANKS: Final = 64  # sums of so many small integers are exact in every dtype
STEPS: Final = 3  # neighbouring steps differ, whichever way a rank is off


class Signal:
    """The two elements of ``buffer`` from ``offset`` on."""

    def __init__(self, buffer: Any, offset: int, world_size: int) -> None:
        self._elements = _as_array(buffer[offset : offset + 2])
        self._tolerance = 0.5 / world_size
        self.step = 0  # of the present round

    def write(self, *, lockstep: bool, step: int) -> None:
        """Before a round of ``step``: whether the next one is in lockstep (only rank 0 says so)."""
        self.step = step
        self._elements[0] = float(lockstep)
        self._elements[1] = float(step % STEPS)

    @property
    def lockstep(self) -> bool:
        """After a round: whether the next one runs in lockstep."""
        return float(self._elements[0]) > 0.0

    @property
    def same_step(self) -> bool:
        """After a round: whether it belonged to the same step on all ranks."""
        return abs(float(self._elements[1]) - self.step % STEPS) < self._tolerance


class Direction:
    """Rank 0's part: which rounds run in lockstep, and when settings may change.

    A change is announced, and ranks hear of it at different times, but a round in lockstep has to
    be cut alike on all of them. So a change waits until all know that lockstep has ended.

    Args:
        settings: what is in force.
        announce: makes all ranks adopt settings before the next round that is announced.
        fits: whether rounds under these settings can run in lockstep.
    """

    def __init__(
        self,
        settings: Settings,
        announce: Callable[[Settings], None],
        fits: Callable[[Settings], bool],
    ) -> None:
        self._wanted = settings
        self._announce = announce
        self._fits = fits
        self._wanted_fit = fits(settings)
        self._held = False
        self._lockstep_follows = False

    def change(self, settings: Settings) -> None:
        """Between rounds: have other settings as soon as possible."""
        self._wanted = settings
        self._wanted_fit = self._fits(settings)
        self._held = self._lockstep_follows
        if not self._held:
            self._announce(settings)

    def round_begins(self, *, lockstep: bool) -> bool:
        """A round begins, in ``lockstep`` or announced; return whether the next is in lockstep."""
        if self._held and not lockstep:
            self._held = False
            self._announce(self._wanted)
        self._lockstep_follows = self._wanted_fit and not self._held
        return self._lockstep_follows


def _as_array(view: Any) -> Any:
    """A NumPy array of the same memory where there can be one: indexing it costs a tenth."""
    try:
        return view.numpy()
    except (AttributeError, TypeError):  # an array already; or bfloat16
        return view


class Lockstep:
    """One round: its chunks are started from the last of ``plan`` to the first.

    Args:
        start: begins one chunk; what it returns waits for it.
    """

    def __init__(self, plan: Plan, start: Callable[[Chunk], Landed]) -> None:
        self._start = start
        self._readiness = Readiness(plan)
        self._ready: set[int] = set()
        self._to_start = list(plan.chunks)
        self._in_flight: deque[tuple[Chunk, Landed]] = deque()

    def post(self, parameters: Iterable[int]) -> None:
        """This rank's gradients of ``parameters`` are there: start what comes next, if ready."""
        for parameter in parameters:
            self._ready.update(chunk.index for chunk in self._readiness.post(parameter))
        while self._to_start and self._to_start[-1].index in self._ready:
            chunk = self._to_start.pop()
            self._in_flight.append((chunk, self._start(chunk)))

    @property
    def in_flight(self) -> bool:
        """Something was started that has not landed."""
        return bool(self._in_flight)

    @property
    def over(self) -> bool:
        """All chunks have landed."""
        return not self._in_flight and not self._to_start

    def land(self, seconds: float) -> Chunk | None:
        """Wait for the chunk that was started first; None when it takes longer."""
        chunk, landed = self._in_flight[0]
        if not landed(seconds):
            return None
        self._in_flight.popleft()
        return chunk
