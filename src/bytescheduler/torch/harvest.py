"""Gathers the gradients of one chunk while backward produces them.

A hook runs between two operations of backward, which leave nothing of Python in the processor's
caches: whatever it calls costs several times what it does in a loop, and as much again where the
interpreter's lock has to be taken back from a thread that sends. So a parameter's hook only notes
that its gradient is there. All that were noted are brought into the flat buffer together, when the
parameter comes that was the last of a chunk in the round before, and when backward ends: nobody
outside of a backward pass ever sees a gradient that was noted only.

Which parameters those are is learnt in each round. Until it is known, and where the order changes,
gradients are brought one by one or a chunk late; the averages are the same.

Considered instead: hooks on the last parameter of each chunk only (whether the others' gradients
are of this pass cannot be told where gradients accumulate), one hook for all at the end of backward
(nothing would be sent meanwhile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import Variable

from bytescheduler.core.plan import Plan
from bytescheduler.torch.slots import Slot

__all__ = ["Harvest"]

_backward: Any = torch._C._current_graph_task_id  # pyright: ignore[reportPrivateUsage]


class Harvest:
    """What was noted of one backward pass, until it is brought.

    Args:
        bring: takes slots whose gradients are there, in the order of production.
        stream: on CUDA, tells the stream that gradients are produced on just now; they are brought
            on theirs.
        one_by_one: whether somebody wants to know when each gradient came.
    """

    def __init__(
        self,
        bring: Callable[[list[Slot]], None],
        *,
        stream: Callable[[], Any] | None,
        one_by_one: bool,
    ) -> None:
        self._bring = bring
        self._present = stream
        self._one_by_one = one_by_one
        self._stream: Any = None  # of all that are noted
        self._noted: list[Slot] = []
        self._pass = -1
        self._order: list[Slot] = []  # of production, in the present round
        self._learnt: list[Slot] = []
        self._plan: Plan | None = None

    def note(self, slot: Slot) -> None:
        """Called in backward: the gradient of ``slot``, which is idle, is there."""
        if self._pass != _backward():
            self._begin()
        stream = None if self._present is None else self._present()
        if slot.noted or stream != self._stream:
            self.flush()
            self._stream = stream
        slot.noted = True
        self._noted.append(slot)
        if slot.closes_chunk:
            self.flush()

    def flush(self) -> None:
        """Bring what was noted."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        for slot in noted:
            slot.noted = False
        self._order += noted
        if self._stream is None:
            self._bring(noted)
        else:
            with torch.cuda.stream(self._stream):
                self._bring(noted)

    def _begin(self) -> None:
        """The first gradient of a backward pass; one before it may have failed."""
        self.flush()
        self._pass = _backward()
        Variable._execution_engine.queue_callback(self.flush)  # pyright: ignore

    def learn(self, plan: Plan, slots: Iterable[Slot]) -> None:
        """A round of ``slots`` has ended: which of them were the last of a chunk of ``plan``.

        Those that were not produced count as such: nothing is known of when they come.
        """
        order, self._order = self._order, []
        if self._one_by_one or (plan is self._plan and order == self._learnt):
            return
        self._plan, self._learnt = plan, order
        last = {chunk: slot for slot in order for chunk in plan.chunks_of[slot.index]}
        early = set(order).difference(last.values())
        for slot in slots:
            slot.closes_chunk = slot not in early
