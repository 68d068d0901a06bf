"""Parameters, and the flat memory in which their gradients live.

A ``Slot`` knows one parameter, the view of the flat buffer that is its gradient, and where that
gradient is just now. A ``Memory`` is one plan's worth of them. Neither knows of exchange, optimizer
or module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytescheduler.core import Layout, ParameterSpec
from bytescheduler.torch.promise import plainly

__all__ = ["Memory", "Named", "Slot", "State", "clear_gradient", "facts_of", "store", "trainable"]

Named = Sequence[tuple[str, nn.Parameter]]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class State(Enum):
    """Where a parameter's gradient is; see ``session.py``."""

    IDLE = 0
    POSTED = 1
    STEPPED = 2


class Slot:
    """One parameter and its place in the flat buffer.

    Attributes:
        view: the gradient's memory, shaped and strided like the parameter.
        flag: the presence flag, one element behind the gradient.
        fresh: ``view`` holds something of this iteration, from this rank or from others.
        produced: this rank has contributed to it.
        noted, closes_chunk: see ``harvest.py``.
        clear: what to do with ``p.grad`` after the update: nothing, "none" or "zero".
        event: on CUDA, marks when ``view`` was written.
        stand_in: the parameter's class while it is in flight.
    """

    __slots__ = (
        "clear", "closes_chunk", "cls", "event", "flag", "fresh", "index", "name", "noted",
        "parameter", "produced", "stand_in", "state", "view",
    )  # fmt: skip

    stand_in: type[Any]

    def __init__(self, index: int, name: str, parameter: Any, flat: torch.Tensor) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.cls = type(parameter)
        self.state = State.IDLE
        self.fresh = self.produced = self.noted = False
        self.closes_chunk = True
        self.clear = ""
        self.event: Any = None
        self.view: Any = _shaped(flat[: parameter.numel()], parameter)
        self.flag = _Flag(flat[parameter.numel() : parameter.numel() + 1])
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            self.view.copy_(parameter.grad)
            parameter.grad = self.view

    @property
    def gradient(self) -> torch.Tensor | None:
        """``p.grad`` as autograd sees it, whatever is in flight."""
        with plainly():
            return self.parameter.grad

    @gradient.setter
    def gradient(self, gradient: torch.Tensor | None) -> None:
        with plainly():
            self.parameter.grad = gradient

    def blank(self) -> None:
        """This rank has no gradient: contribute zeros, unless others' are here already."""
        if not self.fresh:
            self.view.zero_()
            self.flag.put(False)
            self.fresh = True

    def leave(self) -> None:
        """Into flight: hidden from autograd, and a promise to everybody else."""
        parameter = self.parameter
        parameter.grad = None
        parameter.__class__ = self.stand_in
        self.state = State.POSTED

    def reopen(self) -> None:
        """Out of flight in the middle of an iteration; what is averaged so far stays hidden."""
        if self.state is State.POSTED:
            self.parameter.__class__ = self.cls
            self.state = State.IDLE

    def land(self) -> None:
        """Out of flight: the average is in ``p.grad``, if any rank produced one."""
        if self.state is State.IDLE:
            return
        self.parameter.__class__ = self.cls
        self.view.__class__ = torch.Tensor
        self.state = State.IDLE
        if self.produced or self.flag.is_set():
            self.gradient = self.view

    def end_iteration(self) -> None:
        """The update was applied: forget this iteration, clear what was to be cleared."""
        self.fresh = self.produced = False
        if self.clear:
            clear_gradient(self.parameter, self.clear == "none")
            self.clear = ""


def store(slots: Sequence[Slot]) -> None:
    """Bring this rank's gradients into the buffer, added to what the iteration has already.

    No parameter of ``slots`` may be in flight.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    with torch.no_grad():
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient is not slot.view:
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                if slot.fresh:
                    slot.view.add_(dense)
                else:
                    targets.append(slot.view)
                    sources.append(dense)
            slot.flag.put(True)
            slot.fresh = slot.produced = True
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]


class _Flag:
    """A presence flag: one element of the flat buffer, of which only zero or not zero counts.

    On the CPU its bits are written directly, which takes a tenth of a tensor operation.
    """

    __slots__ = ("_bits", "_element", "_one")

    def __init__(self, element: torch.Tensor) -> None:
        self._element = element
        self._bits: Any = None
        if element.device.type == "cpu":
            integer = _INTEGERS[element.element_size()]
            self._bits = element.view(integer).numpy()
            self._one = int(torch.ones(1, dtype=element.dtype).view(integer))

    def put(self, present: bool) -> None:
        """Say whether this rank has produced a gradient."""
        if self._bits is None:
            self._element.fill_(float(present))
        else:
            self._bits[0] = self._one if present else 0

    def is_set(self) -> bool:
        """Whether some rank has."""
        return bool(self._element.item() > 0 if self._bits is None else self._bits[0])


class Memory:
    """Flat gradient buffers laid out in forward order, one per dtype and device.

    Args:
        named: the parameters; existing gradients move into the buffers.
        order: their positions in forward order; as given by default.
    """

    def __init__(self, named: Named, order: Sequence[int] | None = None) -> None:
        self.named = tuple(named)
        on_cpu = all(p.device.type == "cpu" for _, p in named)  # a signal is read by the host
        self.layout = Layout([_spec(name, p) for name, p in named], order, signal=on_cpu)
        samples = {_buffer_of(p): p for _, p in named}
        self.flat = {
            name: torch.zeros(size, dtype=samples[name].dtype, device=samples[name].device)
            for name, size in self.layout.sizes.items()
        }
        self.slots = [
            Slot(index, name, p, self.flat[_buffer_of(p)][self.layout.offsets[index] :])
            for index, (name, p) in enumerate(named)
        ]
        self.by_parameter = {id(slot.parameter): slot for slot in self.slots}
        self._by_view = {id(slot.view): slot for slot in self.slots}

    def find(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose parameter or gradient ``tensor`` is."""
        return self.by_parameter.get(id(tensor)) or self._by_view.get(id(tensor))


def trainable(
    model: nn.Module, optimizer: Optimizer, sparse: Sequence[nn.Parameter]
) -> list[tuple[str, nn.Parameter]]:
    """The parameters of ``model`` that ``optimizer`` trains through the flat buffer, by name."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    wanted -= {id(p) for p in sparse}
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) in wanted]


def facts_of(named: Iterable[tuple[str, torch.Tensor]], kind: str) -> dict[str, str]:
    """What ranks must agree on of each tensor; ``kind`` says what they are."""
    return {f"{kind} {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in named}


def clear_gradient(parameter: Any, set_to_none: bool) -> None:
    """What ``Optimizer.zero_grad`` does to one parameter."""
    gradient = parameter.grad
    if gradient is None:
        return
    if set_to_none:
        parameter.grad = None
    else:
        gradient.detach_()
        gradient.zero_()


def _buffer_of(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype}@{parameter.device}"


def _spec(name: str, parameter: torch.Tensor) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        numel=parameter.numel(),
        itemsize=parameter.element_size(),
        buffer=_buffer_of(parameter),
    )


def _shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The memory of ``flat`` in the parameter's shape, with its strides if they are dense.

    Not a view in autograd's sense: users detach gradients in place.
    """
    template = torch.empty_like(parameter, device="meta")  # preserve_format: dense strides
    memory = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return memory.set_(
        flat.untyped_storage(), flat.storage_offset(), parameter.shape, template.stride()
    )
