"""What happens when a parameter or gradient in flight is touched; see ``promise.py``.

The session knows what to wait for; this class knows what was asked for, by whom, and what the user
must see meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from bytescheduler.exceptions import StaleParameterError
from bytescheduler.torch.promise import Promise, gradient_class, parameter_class
from bytescheduler.torch.slots import Memory, Slot, State

__all__ = ["Keeper"]


class _Work(Protocol):
    """What the session does for it."""

    memory: Memory

    @property
    def module(self) -> str: ...

    def make_current(self, slots: Sequence[Slot]) -> None: ...

    def bring_gradients(self) -> None: ...


class Keeper:
    """Redeems the promises of one session."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._stand_ins: dict[type, type[Any]] = {}
        self._gradient_class = gradient_class(self)

    def stand_in(self, cls: type[Any]) -> type[Any]:
        """The class that a parameter of class ``cls`` has while it is in flight."""
        if cls not in self._stand_ins:
            self._stand_ins[cls] = parameter_class(cls, self)
        return self._stand_ins[cls]

    def redeem(self, promises: Iterable[Promise]) -> None:
        """Make the values of ``promises`` current."""
        for tensor in list(promises):
            slot = self._work.memory.find(tensor)
            if slot is not None:
                self._work.make_current([slot])

    def read_gradient(self, parameter: Any) -> torch.Tensor | None:
        """What ``parameter.grad`` gives while it is in flight."""
        slot = self._work.memory.by_parameter[id(parameter)]
        if slot.state is State.STEPPED and slot.produced:
            if slot.clear == "none":
                return None
            slot.view.__class__ = self._gradient_class
            return slot.view
        self.bring_home(parameter)
        return slot.gradient

    def write_gradient(self, parameter: Any, gradient: torch.Tensor | None) -> None:
        """What ``parameter.grad = gradient`` does while it is in flight."""
        slot = self._work.memory.by_parameter[id(parameter)]
        if slot.state is State.STEPPED and gradient is None:
            slot.clear = "none"
            return
        self.bring_home(parameter)
        slot.gradient = gradient

    def bring_home(self, tensor: Any) -> None:
        """End the promise that ``tensor`` is: weights current, or gradients averaged."""
        slot = self._work.memory.find(tensor)
        if slot is not None and slot.state is State.STEPPED:
            self._work.make_current([slot])
        elif slot is not None and slot.state is State.POSTED:
            self._work.bring_gradients()

    def require_current(self, tensors: Iterable[Promise], function: str) -> None:
        """For BYTESCHEDULER_CHECK: raise if any of ``tensors`` was used while not current."""
        for tensor in tensors:
            slot = self._work.memory.by_parameter.get(id(tensor))
            if slot is not None and slot.state is State.STEPPED:
                raise StaleParameterError(
                    f"{function} used parameter {slot.name!r} in module "
                    f"{self._work.module!r} before its update was applied; "
                    "call optimizer.synchronize() before it"
                )
