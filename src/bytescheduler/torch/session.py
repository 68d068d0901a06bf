"""One wrapped optimizer at work: gradients in, current parameters out.

Life of a parameter in one iteration::

    IDLE ──backward: copied into the flat buffer, posted──▶ POSTED ──step()──▶ STEPPED
      ▲                                                       │                  │
      │◀── p.grad is read (clipping): averaged, in p.grad ────┘                  │
      │◀── gate, or first use: averaged, user's optimizer applied ───────────────┘

Only the training thread passes through here; the exchange's thread moves bytes and nothing else.
While a parameter is POSTED or STEPPED it is a promise (see ``promise.py``) and its ``grad`` slot is
empty as autograd sees it, so a further backward pass cannot add to memory that is on the wire.

Every parameter is posted once per *round*. One backward and one step make a round; a further
backward before the step makes another, and what a rank did not produce is posted as zeros, so that
no rank waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytescheduler.core import Exchange, Settings
from bytescheduler.core.exchange import Tuner
from bytescheduler.core.trace import ComputeLane, Observer
from bytescheduler.torch import promise
from bytescheduler.torch.agreement import agree
from bytescheduler.torch.buffers import BufferSync
from bytescheduler.torch.gates import Gates
from bytescheduler.torch.harvest import Harvest
from bytescheduler.torch.keeper import Keeper
from bytescheduler.torch.roster import Roster
from bytescheduler.torch.slots import (
    Memory,
    Named,
    Slot,
    State,
    clear_gradient,
    facts_of,
    store,
)
from bytescheduler.torch.sparse import average_sparse_gradients
from bytescheduler.torch.updates import Updater
from bytescheduler.transports.base import Transport

__all__ = ["Session"]

ACTIVE = b"1"
JOINED = b"0"


class Session:
    """Runs one model and optimizer over one transport.

    Args:
        named: the parameters to exchange, by name, in registration order.
        sparse: parameters whose gradients are sparse; they are exchanged whole in ``step``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        named: Named,
        sparse: Sequence[nn.Parameter],
        transport: Transport,
        settings: Settings,
        *,
        sync_buffers: bool = True,
        separable: bool | None = None,
        observer: Observer | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.transport = transport
        self._optimizer = optimizer
        self._updater = Updater(optimizer, separable)
        self._observer = observer
        self._lane = ComputeLane(observer) if observer is not None else None
        self._tuner = tuner
        self._stream: Any = getattr(transport, "stream", None)  # the engine's, on CUDA
        self._lock = threading.RLock()
        self._paused = 0
        self._joining = False
        self._touched = False  # something was posted since the last step
        self._stepped: dict[int, Slot] = {}  # in forward order
        self._sparse = list(sparse)
        self._roster = Roster(model, optimizer, sparse)
        self._sparse_averaged = False
        self.keeper = Keeper(self)
        self._buffers = BufferSync(model, transport) if sync_buffers else None
        self._gates = Gates(model, self._enter, self._enter_root)
        self._adopt(Memory(named), settings)

    # -- life cycle

    @property
    def settings(self) -> Settings:
        """What is in force now."""
        return self.exchange.settings

    def set_paused(self, paused: bool) -> None:
        """Leave gradients alone from now on (accumulation), or no longer."""
        self._harvest.flush()
        self._paused += 1 if paused else -1

    def set_joining(self, joining: bool) -> None:
        """Ask at each iteration who still has data, from now on, or no longer."""
        self._joining = joining

    def join(self) -> None:
        """This rank has no more data: take part in the others' steps until none has any."""
        while ACTIVE in self.transport.exchange(JOINED):
            self._joining = False
            self.zero_grad(set_to_none=True)  # the last average is not a contribution
            self.step()
            self._joining = True

    def synchronize(self) -> None:
        """Everything current: gradients if a step is yet to come, weights otherwise; buffers."""
        self._harvest.flush()
        if self._any(State.POSTED):
            self.bring_gradients()
        self.make_current(list(self._stepped.values()))
        if self._buffers is not None:
            self._buffers.finish()

    @property
    def unfinished(self) -> bool:
        """An iteration was begun and not stepped: its gradients are nobody's yet."""
        return self._touched

    def close(self, *, finish: bool = True) -> None:
        """Take all hooks off and end the thread, after applying what is in flight if ``finish``."""
        try:
            if finish and self.exchange.error is None:
                self.synchronize()
        finally:
            self._gates.remove()
            self._release()
            self.exchange.close(drain=finish)

    def _adopt(self, memory: Memory, settings: Settings) -> None:
        self.memory = memory
        self._slots = memory.slots
        for slot in memory.slots:
            slot.stand_in = self.keeper.stand_in(slot.cls)
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(slot))
            for slot in memory.slots
        ]
        self._harvest = Harvest(
            self._bring,
            stream=(lambda: self._present) if self._stream is not None else None,
            one_by_one=self._observer is not None,
        )
        self._gates.assign(memory.by_parameter)
        self._roster.survey(memory.named)
        self.exchange = Exchange(
            memory.layout,
            memory.flat,
            self.transport,
            settings,
            self._observer,
            self._tuner,
            self._fence if self._stream is not None else None,
        )

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        for slot in self._slots:
            slot.land()

    def _rebuild(self, named: Named, order: Sequence[str]) -> None:
        """Collective: another set of parameters, or another forward order, from here on."""
        settings = self.exchange.settings
        self.exchange.stop()
        self._release()
        position = {name: index for index, (name, _) in enumerate(named)}
        order_of = [position[name] for name in order if name in position]
        self._adopt(Memory(named, order_of), settings)

    # -- backward

    def _hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            if self._paused:
                return
            if slot.state is State.IDLE:
                self._harvest.note(slot)
                return
            self._harvest.flush()
            self._reopen(slot)
            self._bring([slot])

        return on_gradient

    def _bring(self, slots: Sequence[Slot]) -> None:
        """Into the buffer, and on their way."""
        self._touch()
        store(slots)
        self._post(slots)

    def _reopen(self, slot: Slot) -> None:
        """A gradient arrives for a parameter that is in flight."""
        if slot.state is State.POSTED:  # a further backward pass before step()
            if self.exchange.posted(slot.index):
                self._complete_round()
            self._await([slot.index])
            slot.reopen()
        else:  # of a graph that is older than the step
            self._update_under(slot)

    def _update_under(self, slot: Slot) -> None:
        """Apply a pending update although a new gradient has arrived; then put that in place."""
        gradient = slot.gradient
        slot.gradient = None
        self.make_current([slot])
        kept = slot.gradient
        slot.gradient = gradient if kept is None or gradient is None else kept.add_(gradient)

    def _touch(self) -> None:
        """This iteration exchanges something; in a ``join``, tell those who ran out of data."""
        if self._touched:
            return
        self._touched = True
        if self._lane is not None:
            self._lane.begin("backward")
        if self._joining:
            self.transport.exchange(ACTIVE)

    def _post(self, slots: Sequence[Slot]) -> None:
        event = self._present.record_event() if self._stream is not None else None
        for slot in slots:
            slot.event = event
            slot.leave()
        self.exchange.post(*[slot.index for slot in slots])

    def _flush(self) -> None:
        """Post what this rank did not produce in this round, so that no rank waits for it."""
        self._touch()
        self.make_current(list(self._stepped.values()))
        missing = self.exchange.missing()
        self._await(missing)  # of the round before
        slots = [self._slots[index] for index in missing]
        for slot in slots:
            slot.reopen()
            if slot.gradient is not None:  # accumulated under no_sync, or kept
                store([slot])
            else:
                slot.blank()
        self._post(slots)

    def _complete_round(self) -> None:
        if self.exchange.round_open:
            self._flush()

    # -- step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the user's optimizer, now or as parameters are needed."""
        self._harvest.flush()
        if self._lane is not None:
            self._lane.end()
        self._follow_requires_grad()
        if closure is not None:
            return self._step_with(closure)
        if self._unsent():
            self._complete_round()
            self._flush()
        elif self.exchange.round_open or not self._touched:
            self._flush()
        if self._any(State.POSTED) and self._lazy:
            self._updater.snapshot()
            self._updater.apply([p for p in self._roster.dormant if p.grad is not None])
            self._defer()
            self._end_iteration()
        else:
            self._gather()
            self._timed("update", "step", self._updater.apply_all)
            self._end_iteration()
            self._learn_order()
        return None

    @property
    def _lazy(self) -> bool:
        ready = self._updater.separable and self._gates.learned and not self._sparse
        return ready and self.exchange.settings.mode != "barrier"

    def _unsent(self) -> bool:
        """Whether a pass under no_sync() followed one that was sent."""
        with promise.plainly():
            return any(
                s.state is State.POSTED and s.parameter.grad is not None for s in self._slots
            )

    def _any(self, state: State) -> bool:
        return any(slot.state is state for slot in self._slots)

    def _defer(self) -> None:
        for index in self.memory.layout.order:
            slot = self._slots[index]
            if slot.state is State.POSTED:
                slot.state = State.STEPPED
                self._stepped[index] = slot

    def _end_iteration(self) -> None:
        self._touched = self._sparse_averaged = False
        for slot in self._slots:
            if slot.state is State.IDLE:
                slot.end_iteration()
        self._harvest.learn(self.exchange.plan, self._slots)
        self.exchange.step()
        if self._buffers is not None:
            self._buffers.begin()

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def synchronised() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.bring_gradients()
            return self._mean_loss(loss)

        if self._touched:
            self.bring_gradients()
        loss = self._optimizer.step(synchronised)
        self._end_iteration()
        return loss

    def _mean_loss(self, loss: Any) -> Any:
        """The loss that decides a line search must be the same on all ranks."""
        answers = self.transport.exchange(repr(float(loss)).encode())
        mean = sum(float(answer) for answer in answers) / len(answers)
        return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

    # -- gradients come back

    def bring_gradients(self) -> None:
        """Between backward and step: all gradients averaged and visible in ``p.grad``."""
        self._harvest.flush()
        if self.exchange.round_open or not self._touched:
            self._flush()
        self._gather()

    def _gather(self) -> None:
        self._await(range(len(self._slots)))
        for slot in self._slots:
            if slot.state is State.POSTED:
                slot.land()
        if self._sparse and not self._sparse_averaged:
            average_sparse_gradients(self.transport, self._sparse)
            self._sparse_averaged = True

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear gradients; of those in flight, as soon as they have been used."""
        self._harvest.flush()
        if self._any(State.POSTED):
            self.bring_gradients()
        self._touched = self._sparse_averaged = False
        for slot in self._slots:
            if slot.state is State.STEPPED:
                slot.clear = "none" if set_to_none else "zero"
            else:
                slot.fresh = slot.produced = False
                clear_gradient(slot.parameter, set_to_none)
        for parameter in [*self._sparse, *self._roster.dormant]:
            clear_gradient(parameter, set_to_none)

    # -- gates

    def _enter_root(self) -> None:
        """The model's forward begins; without gradients it may take paths never seen."""
        if self._buffers is not None:
            self._buffers.finish()
        if not torch.is_grad_enabled():
            self.make_current(list(self._stepped.values()))

    def _enter(self, module: str, slots: Sequence[Slot]) -> None:
        """A module's forward begins: its parameters must be current."""
        if self._lane is not None:
            self._lane.end()
        if self._stepped:
            self.make_current(slots)
        if self._lane is not None:
            self._lane.begin(f"forward {module}")

    def make_current(self, slots: Sequence[Slot]) -> None:
        with self._lock:
            wanted = [slot for slot in slots if slot.state is State.STEPPED]
            if not wanted:
                return
            self._await([slot.index for slot in wanted])
            batch = list(dict.fromkeys([*wanted, *self._arrived()]))
            self._timed("update", wanted[0].name, lambda: self._apply(batch))

    def _arrived(self) -> Iterator[Slot]:
        """Those that are back as well, in forward order: one call of the optimizer for all."""
        for index, slot in self._stepped.items():
            if not self.exchange.returned(index):
                return
            yield slot

    def _apply(self, batch: Sequence[Slot]) -> None:
        for slot in batch:
            del self._stepped[slot.index]
            slot.land()
        parameters = [slot.parameter for slot in batch if slot.gradient is not None]
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self._updater.apply(parameters)
        else:
            self._updater.apply(parameters)
        for slot in batch:
            slot.end_iteration()

    def _await(self, indices: Iterable[int]) -> None:
        self.exchange.wait(indices)
        if self._stream is not None:
            self._present.wait_stream(self._stream)

    # -- changes of plan

    def _learn_order(self) -> None:
        """Collective, after the first iteration: forward order as rank 0 saw it."""
        if self._gates.learned:
            return
        mine = "\0".join(self._gates.order([slot.name for slot in self._slots]))
        order = self.transport.exchange(mine.encode())[0].decode()
        if order:
            self._gates.learn()
            self._rebuild(self.memory.named, order.split("\0"))

    def _follow_requires_grad(self) -> None:
        """Collective when something changed: parameters that were frozen, thawed or added."""
        if not self._roster.changed(self._slots):
            return
        if self._touched:
            self._complete_round()
            self._gather()
        self.make_current(list(self._stepped.values()))
        named = self._roster.trainable()
        facts = facts_of(named, "parameter")
        what = "the set of trainable parameters"
        self.exchange.meet(what)
        agree(self.transport, what, lambda: facts)
        kept = [self._slots[index].name for index in self.memory.layout.order]
        added = [name for name, _ in named if name not in set(kept)]
        self._rebuild(named, [*kept, *added])
        self._touched = False

    # -- small things

    @property
    def module(self) -> str:
        """Name of the module whose forward began last."""
        return self._gates.current

    @property
    def _present(self) -> torch.cuda.Stream:
        """What this thread launches kernels on, on the gradients' device."""
        return torch.cuda.current_stream(self._stream.device)

    def _fence(self, chunk: Any) -> None:
        """On CUDA, in the background thread: the chunk waits for the writes of its gradients."""
        for index, _ in chunk.spans:
            event = self._slots[index].event
            if event is not None:
                self._stream.wait_event(event)

    def _timed(self, lane: str, name: str, action: Callable[[], None]) -> None:
        if self._observer is None:
            action()
            return
        begin = time.perf_counter()
        action()
        self._observer.span(lane, name, begin, time.perf_counter())
