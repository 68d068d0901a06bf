"""One wrapped optimizer at work: hooks in, gates out.

Life of a parameter in one iteration::

    IDLE ──backward: copied into the flat buffer, posted──▶ POSTED ──step()──▶ STEPPED
      ▲                                                       │                  │
      │◀── read_gradient / clipping: waited for, p.grad ──────┘                  │
      │◀── gate, or first use: waited for, user's optimizer applied ─────────────┘

Only the training thread passes through here; the exchange's thread moves bytes and nothing else.
While a parameter is POSTED or STEPPED it is a promise (see ``promise.py``) and its ``grad`` slot is
empty as autograd sees it, so a further backward pass cannot add to memory that is on the wire.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytescheduler.core import Exchange, Layout, ParameterSpec, Settings
from bytescheduler.core.exchange import Tuner
from bytescheduler.core.trace import Observer
from bytescheduler.exceptions import StaleParameterError
from bytescheduler.torch import promise
from bytescheduler.torch.agreement import agree
from bytescheduler.torch.buffers import BufferSync
from bytescheduler.torch.gates import Gates
from bytescheduler.torch.sparse import average_sparse_gradients
from bytescheduler.torch.updates import Updater
from bytescheduler.transports.base import Transport

__all__ = ["Session", "State", "facts_of", "trainable"]

ACTIVE = b"1"
JOINED = b"0"


class State(Enum):
    """Where a parameter's gradient is."""

    IDLE = 0
    POSTED = 1
    STEPPED = 2


class _Slot:
    """One parameter, and its place in the flat buffer.

    Attributes:
        view: the gradient's memory, shaped and strided like the parameter.
        flag: the presence flag, one element.
        fresh: this iteration's gradient of this or another rank is in ``view``.
        produced: this rank has contributed to it.
        clear: what to do with ``p.grad`` after the update: keep, "none" or "zero".
    """

    __slots__ = (
        "clear", "cls", "event", "flag", "fresh", "index", "name", "parameter", "produced",
        "state", "view",
    )  # fmt: skip

    def __init__(self, index: int, name: str, parameter: nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.parameter: Any = parameter
        self.cls = type(parameter)
        self.state = State.IDLE
        self.fresh = False
        self.produced = False
        self.clear = ""
        self.event: Any = None
        self.view: Any = None
        self.flag: Any = None


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
        named: Sequence[tuple[str, nn.Parameter]],
        sparse: Sequence[nn.Parameter],
        transport: Transport,
        settings: Settings,
        *,
        sync_buffers: bool = True,
        observer: Observer | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.transport = transport
        self._optimizer = optimizer
        self._updater = Updater(optimizer)
        self._observer = observer
        self._tuner = tuner
        self._lock = threading.RLock()
        self._paused = 0
        self._stepped: dict[int, _Slot] = {}  # STEPPED, in forward order
        self._touched = False  # something was posted since the last step
        self._joining = False
        self._sparse_averaged = False
        self._model = model
        self._sparse = list(sparse)
        self._classes: dict[type, type] = {}
        self._gradient_class = promise.gradient_class(self)
        self._buffers = BufferSync(model, transport) if sync_buffers else None
        self._gates = Gates(model, self._enter, self._enter_root)
        self._handles: list[Any] = []
        self._slots: list[_Slot] = []
        self._adopt(named, None, settings)

    # -- life cycle

    @property
    def settings(self) -> Settings:
        """What is in force now."""
        return self.exchange.settings

    def set_paused(self, paused: bool) -> None:
        """Leave gradients alone from now on (accumulation), or no longer."""
        self._paused += 1 if paused else -1

    def join(self) -> None:
        """This rank has no more data: take part in the others' steps until none has any."""
        while self.transport.exchange(JOINED).count(ACTIVE):
            self._joining = False
            self.step()
            self._joining = True

    def set_joining(self, joining: bool) -> None:
        """Ask at each iteration who still has data, from now on, or no longer."""
        self._joining = joining

    def close(self, *, finish: bool = True) -> None:
        """Apply what is in flight, take all hooks off, end the thread."""
        try:
            if finish and self.exchange.error is None:
                self.synchronize()
        finally:
            self._gates.remove()
            self._release()
            self.exchange.close()

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for slot in self._slots:
            self._settle(slot)

    def _adopt(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        order: Sequence[int] | None,
        settings: Settings,
    ) -> None:
        """Lay out buffers for ``named`` in ``order``; carry over gradients that exist."""
        self._named = tuple(named)
        slots = [_Slot(index, name, p) for index, (name, p) in enumerate(named)]
        specs = [_spec(name, p) for name, p in named]
        self._layout = Layout(specs, order)
        self._flat = _allocate(self._layout, [p for _, p in named])
        for slot in slots:
            self._place(slot)
        self._slots = slots
        self._slot_of = {id(slot.parameter): slot for slot in slots}
        self._slot_of_view = {id(slot.view): slot for slot in slots}
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(self._hook(slot)) for slot in slots
        ]
        self._gates.assign(self._slot_of)
        self._survey()
        self.exchange = Exchange(
            self._layout,
            self._flat,
            self.transport,
            settings,
            self._observer,
            self._tuner,
            self._fence if self._stream is not None else None,
        )

    def _place(self, slot: _Slot) -> None:
        """Point ``slot`` into its buffer; an existing gradient moves there."""
        index, p = slot.index, slot.parameter
        flat = self._flat[self._layout.specs[index].buffer]
        start, flag = self._layout.offsets[index], self._layout.flag_offset(index)
        slot.flag = flat[flag : flag + 1]
        slot.view = _shaped(flat[start:flag], p)
        if p.grad is not None and p.grad.layout is torch.strided:
            slot.view.copy_(p.grad)
            p.grad = slot.view

    def _rebuild(self, named: Sequence[tuple[str, nn.Parameter]], order: Sequence[str]) -> None:
        """Collective: another set of parameters, or another forward order, from here on."""
        settings = self.exchange.settings
        self.exchange.stop()
        self._release()
        position = {name: index for index, (name, _) in enumerate(named)}
        self._adopt(named, [position[name] for name in order if name in position], settings)

    # -- backward

    def _hook(self, slot: _Slot) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            if not self._paused:
                self._gradient(slot)

        return on_gradient

    def _gradient(self, slot: _Slot) -> None:
        if slot.state is not State.IDLE:
            self._recall(slot)
        self._touch()
        self._store(slot)
        self._post(slot)

    def _recall(self, slot: _Slot) -> None:
        """A further gradient arrived while one is in flight: bring that one home first."""
        if slot.state is State.POSTED:
            self._complete_round()
            self._take_back(slot)
            return
        gradient = _grad_of(slot.parameter)
        self._set_grad(slot.parameter, None)
        self._current([slot])
        if slot.parameter.grad is None:
            slot.parameter.grad = gradient
        else:
            slot.parameter.grad.add_(gradient)

    def _touch(self) -> None:
        """This iteration exchanges something; in a ``join``, tell those who ran out of data."""
        if not self._touched:
            self._touched = True
            if self._joining:
                self.transport.exchange(ACTIVE)

    def _store(self, slot: _Slot) -> None:
        """Bring this rank's gradient into the buffer, added to what the iteration has already."""
        gradient = _grad_of(slot.parameter)
        with torch.no_grad():
            if gradient is not slot.view:
                gradient = _dense(gradient.detach())
                if slot.fresh:
                    slot.view.add_(gradient)
                else:
                    slot.view.copy_(gradient)
            slot.flag.fill_(1.0)
        slot.fresh = slot.produced = True

    def _post(self, slot: _Slot) -> None:
        self._set_grad(slot.parameter, None)
        self._promise(slot)
        slot.state = State.POSTED
        if self._stream is not None:
            slot.event = torch.cuda.current_stream().record_event()
        self.exchange.post(slot.index)

    def _complete_round(self) -> None:
        """Post what this rank did not produce, so that no rank waits for it; wait for all."""
        self._flush()
        self._await(range(len(self._slots)))

    def _flush(self) -> None:
        self._touch()
        self._current(list(self._stepped.values()))
        for index in self.exchange.missing():
            slot = self._slots[index]
            self._take_back(slot)
            if _grad_of(slot.parameter) is not None:  # accumulated under no_sync, or kept
                self._store(slot)
            elif not slot.fresh:
                slot.view.zero_()
                slot.flag.zero_()
                slot.fresh = True
            self._post(slot)

    def _take_back(self, slot: _Slot) -> None:
        """Out of flight, in the middle of an iteration: a gradient of its own waits to be added."""
        if slot.state is State.POSTED:
            slot.state = State.IDLE
            slot.parameter.__class__ = slot.cls

    # -- step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the user's optimizer, now or as parameters are needed."""
        if closure is not None:
            return self._step_with(closure)
        self._follow_requires_grad()
        if any(s.state is State.POSTED and _grad_of(s.parameter) is not None for s in self._slots):
            self._complete_round()  # no_sync() after a pass that was sent: one more round
            self._flush()
        elif self.exchange.round_open or not self._touched:
            self._flush()
        self._finish_step(lazy=self._lazy and not self._all_back())
        return None

    @property
    def _lazy(self) -> bool:
        ready = self._updater.separable and self._gates.learned and not self._sparse
        return ready and self.exchange.settings.mode != "barrier"

    def _all_back(self) -> bool:
        return not any(slot.state is State.POSTED for slot in self._slots)

    def _finish_step(self, *, lazy: bool) -> None:
        if lazy:
            self._updater.snapshot()
            self._defer()
        else:
            self._gather()
            self._average_sparse()
            self._timed("update", "step", self._updater.apply_all)
        self._end_iteration()
        if not lazy:
            self._learn_order()

    def _defer(self) -> None:
        for index in self._layout.order:
            slot = self._slots[index]
            if slot.state is State.POSTED:
                slot.state = State.STEPPED
                self._stepped[index] = slot

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def synchronised() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._bring_gradients()
            return self._mean_loss(loss)

        if self._touched:
            self._bring_gradients()
        loss = self._optimizer.step(synchronised)
        self._end_iteration()
        return loss

    def _end_iteration(self) -> None:
        self._touched = self._sparse_averaged = False
        for slot in self._slots:
            if slot.state is State.IDLE:
                slot.fresh = slot.produced = False
        self.exchange.step()
        if self._buffers is not None:
            self._buffers.begin()

    def _mean_loss(self, loss: Any) -> Any:
        """The loss that decides a line search must be the same on all ranks."""
        value = float(loss)
        answers = self.transport.exchange(repr(value).encode())
        mean = sum(float(answer) for answer in answers) / len(answers)
        return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean

    # -- gradients come back

    def _bring_gradients(self) -> None:
        """Between backward and step: all gradients averaged and visible in ``p.grad``."""
        if self.exchange.round_open or not self._touched:
            self._flush()
        self._gather()
        self._average_sparse()

    def _gather(self) -> None:
        self._await(range(len(self._slots)))
        for slot in self._slots:
            if slot.state is State.POSTED:
                self._settle(slot)

    def _settle(self, slot: _Slot) -> None:
        """Out of flight: own class, and the average in ``p.grad`` if any rank produced one."""
        if slot.state is State.IDLE:
            return
        slot.parameter.__class__ = slot.cls
        slot.view.__class__ = torch.Tensor
        slot.state = State.IDLE
        if self._used(slot):
            self._set_grad(slot.parameter, slot.view)

    def _used(self, slot: _Slot) -> bool:
        if slot.produced:
            return True
        return bool(slot.flag.item() > 0)

    def _average_sparse(self) -> None:
        if self._sparse and not self._sparse_averaged:
            average_sparse_gradients(self.transport, self._sparse)
            self._sparse_averaged = True

    # -- the keeper of promises

    def redeem(self, promises: Iterable[promise.Promise]) -> None:
        """Make the values of ``promises`` current; gradients that are only posted come back too."""
        for tensor in list(promises):
            slot = self._slot_of.get(id(tensor)) or self._slot_of_view.get(id(tensor))
            if slot is not None and slot.state is State.STEPPED:
                self._current([slot])

    def read_gradient(self, parameter: Any) -> torch.Tensor | None:
        """What ``parameter.grad`` gives while it is in flight."""
        slot = self._slot_of[id(parameter)]
        if slot.state is State.STEPPED and slot.produced:
            if slot.clear == "none":
                return None
            slot.view.__class__ = self._gradient_class
            return slot.view
        if slot.state is State.STEPPED:
            self._current([slot])
        else:
            self._bring_gradients()
        return slot.parameter.grad

    def write_gradient(self, parameter: Any, gradient: torch.Tensor | None) -> None:
        """What ``parameter.grad = gradient`` does while it is in flight."""
        slot = self._slot_of[id(parameter)]
        if slot.state is State.STEPPED and gradient is None:
            slot.clear = "none"
            return
        if slot.state is State.STEPPED:
            self._current([slot])
        else:
            self._bring_gradients()
        self._set_grad(parameter, gradient)

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear gradients; of those in flight, as soon as they have been used."""
        if any(slot.state is State.POSTED for slot in self._slots):
            self._bring_gradients()
        self._touched = False
        for slot in self._slots:
            if slot.state is State.STEPPED:
                slot.clear = "none" if set_to_none else "zero"
            else:
                slot.fresh = slot.produced = False
                _clear(slot.parameter, set_to_none)
        for parameter in [*self._sparse, *self._dormant]:
            _clear(parameter, set_to_none)

    # -- gates

    def synchronize(self) -> None:
        """Everything current: gradients if a step is yet to come, weights otherwise; buffers."""
        if any(slot.state is State.POSTED for slot in self._slots):
            self._bring_gradients()
        self._current(list(self._stepped.values()))
        if self._buffers is not None:
            self._buffers.finish()

    def _enter_root(self) -> None:
        if self._buffers is not None:
            self._buffers.finish()
        if not torch.is_grad_enabled():
            self._current(list(self._stepped.values()))

    def _enter(self, slots: Sequence[_Slot]) -> None:
        """A module's forward is about to begin: its parameters must be current."""
        if self._stepped:
            self._current(slots)

    def _current(self, slots: Sequence[_Slot]) -> None:
        with self._lock:
            wanted = [slot for slot in slots if slot.state is State.STEPPED]
            if not wanted:
                return
            self._await([slot.index for slot in wanted])
            batch = {slot.index: slot for slot in wanted}
            batch.update((slot.index, slot) for slot in self._arrived())
            self._timed("update", wanted[0].name, lambda: self._apply(list(batch.values())))

    def _arrived(self) -> Iterator[_Slot]:
        """Those that are back as well, in forward order: one call of the optimizer for all."""
        for index, slot in self._stepped.items():
            if not self.exchange.returned(index):
                return
            yield slot

    def _apply(self, batch: Sequence[_Slot]) -> None:
        for slot in batch:
            del self._stepped[slot.index]
            self._settle(slot)
        with torch.inference_mode(False), torch.no_grad():
            self._updater.apply([s.parameter for s in batch if s.parameter.grad is not None])
        for slot in batch:
            slot.fresh = slot.produced = False
            if slot.clear:
                _clear(slot.parameter, slot.clear == "none")
                slot.clear = ""

    def _await(self, indices: Iterable[int]) -> None:
        self.exchange.wait(indices)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    # -- changes of plan

    def _learn_order(self) -> None:
        """Collective, after the first iteration: forward order as rank 0 saw it."""
        if self._gates.learned:
            return
        mine = "\0".join(self._gates.order([slot.name for slot in self._slots]))
        order = self.transport.exchange(mine.encode())[0].decode()
        if order:
            self._gates.learn()
            self._rebuild(self._named, order.split("\0"))

    def _follow_requires_grad(self) -> None:
        """Collective when something changed: parameters that were frozen, thawed or added."""
        if not self._changed():
            return
        if self._touched:
            self._complete_round() if self.exchange.round_open else None
            self._gather()
        named = trainable(self._model, self._optimizer, self._sparse)
        agree(self.transport, "the set of trainable parameters", lambda: facts_of(named))
        kept = [self._slots[index].name for index in self._layout.order]
        added = [name for name, _ in named if name not in set(kept)]
        self._rebuild(named, [*kept, *added])
        self._touched = False

    def _changed(self) -> bool:
        with promise.plainly():
            return (
                any(not slot.parameter.requires_grad for slot in self._slots)
                or any(parameter.requires_grad for parameter in self._dormant)
                or _count(self._optimizer) != self._optimized
            )

    def _survey(self) -> None:
        """Note which of the optimizer's parameters take no part, to see when that changes."""
        self._optimized = _count(self._optimizer)
        taking_part = {id(p) for _, p in self._named} | {id(p) for p in self._sparse}
        self._dormant = [
            p
            for group in self._optimizer.param_groups
            for p in group["params"]
            if id(p) not in taking_part
        ]

    # -- small things

    @property
    def _stream(self) -> Any:
        return getattr(self.transport, "stream", None)

    def _fence(self, chunk: Any) -> None:
        for index, _ in chunk.spans:
            event = self._slots[index].event
            if event is not None:
                self._stream.wait_event(event)

    def _promise(self, slot: _Slot) -> None:
        stand_in = self._classes.get(slot.cls)
        if stand_in is None:
            stand_in = self._classes[slot.cls] = promise.parameter_class(slot.cls, self)
        slot.parameter.__class__ = stand_in

    def _set_grad(self, parameter: Any, gradient: torch.Tensor | None) -> None:
        with promise.plainly():
            parameter.grad = gradient

    def _timed(self, lane: str, name: str, action: Callable[[], None]) -> None:
        if self._observer is None:
            action()
            return
        begin = time.perf_counter()
        action()
        self._observer.span(lane, name, begin, time.perf_counter())

    def require_current(self, tensors: Iterable[promise.Promise], function: str) -> None:
        """For BYTESCHEDULER_CHECK: raise if any of ``tensors`` was used while not current."""
        for tensor in tensors:
            slot = self._slot_of.get(id(tensor))
            if slot is not None and slot.state is State.STEPPED:
                raise StaleParameterError(
                    f"{function} used parameter {slot.name!r} in module "
                    f"{self._gates.current!r} before its update was applied; "
                    "call optimizer.synchronize() before it"
                )


def trainable(
    model: nn.Module, optimizer: Optimizer, sparse: Sequence[nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """The parameters of ``model`` that ``optimizer`` trains through the flat buffer, by name."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted -= {id(p) for p in sparse}
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) in wanted]


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _grad_of(parameter: Any) -> Any:
    with promise.plainly():
        return parameter.grad


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _clear(parameter: Any, set_to_none: bool) -> None:
    gradient = parameter.grad
    if gradient is None:
        return
    if set_to_none:
        parameter.grad = None
    else:
        gradient.detach_()
        gradient.zero_()


def _spec(name: str, parameter: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        numel=parameter.numel(),
        itemsize=parameter.element_size(),
        buffer=f"{parameter.dtype}@{parameter.device}",
    )


def facts_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """What ranks must agree on of each parameter."""
    return {f"parameter {name}": f"{tuple(p.shape)} {p.dtype}" for name, p in named}


def _allocate(layout: Layout, parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    sample = {_spec("", p).buffer: p for p in parameters}
    return {
        name: torch.zeros(size, dtype=sample[name].dtype, device=sample[name].device)
        for name, size in layout.sizes.items()
    }


def _shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of ``flat`` with the parameter's shape, and its strides if they are dense."""
    template = torch.empty_like(parameter, device="meta")  # preserve_format: dense strides
    return flat.as_strided(parameter.shape, template.stride(), flat.storage_offset())
