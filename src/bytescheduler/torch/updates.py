"""The user's own optimizer, applied to some of its parameters at a time.

No optimizer is written again: ``step`` of the user's object runs on ``param_groups`` that hold only
the parameters of the moment, with the hyper-parameters as they were at ``step()``. That is right
for optimizers that treat each parameter by itself, which those of ``torch.optim`` do except LBFGS.

Of a class that is not from there, nothing can be known: a clip over all gradients may bind only
after weeks, a counter may hide in any attribute. (Trying a split step on live data was considered:
it cannot see the first kind and disturbs the second.) It is applied whole, behind the exchange,
unless its user declares it ``separable``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["Updater"]

_OPTIMIZERS = sys.modules[Optimizer.__module__]  # torch deletes the attribute of that name

_Group = dict[str, Any]
_HARMLESS = frozenset(
    {
        "__init__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__repr__",
        "__dict__",
        "__weakref__",
        "__static_attributes__",
        "__firstlineno__",
    }
)


class Updater:
    """Applies updates through ``optimizer``.

    Args:
        separable: whether parameters may be updated a few at a time; None to judge by the class.
    """

    def __init__(self, optimizer: Optimizer, separable: bool | None = None) -> None:
        self.optimizer = optimizer
        self._separable = _is_separable(type(optimizer)) if separable is None else separable
        self._groups: list[_Group] = []
        self._group_of: dict[torch.Tensor, int] = {}

    @property
    def separable(self) -> bool:
        """Whether parameters may be updated a few at a time, and no step hook wants them all."""
        return self._separable and not self._hooked

    def snapshot(self) -> None:
        """Note the hyper-parameters that ``apply`` shall use."""
        groups = self.optimizer.param_groups
        self._groups = [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in groups
        ]
        self._group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}

    def apply(self, parameters: Sequence[torch.Tensor]) -> None:
        """Update ``parameters`` only, with the hyper-parameters of the snapshot."""
        if not parameters:
            return
        members: list[list[torch.Tensor]] = [[] for _ in self._groups]
        for parameter in parameters:
            members[self._group_of[parameter]].append(parameter)
        whole = self.optimizer.param_groups
        self.optimizer.param_groups = [
            {**group, "params": some}
            for group, some in zip(self._groups, members, strict=True)
            if some
        ]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = whole

    def apply_all(self) -> None:
        """One ordinary step of the user's optimizer."""
        self.optimizer.step()

    @property
    def _hooked(self) -> bool:
        return any(
            getattr(owner, f"_{scope}optimizer_{when}_hooks", None)
            for owner, scope, when in (
                (self.optimizer, "", "step_pre"),
                (self.optimizer, "", "step_post"),
                (_OPTIMIZERS, "global_", "pre"),
                (_OPTIMIZERS, "global_", "post"),
            )
        )


def _is_separable(cls: type[Optimizer]) -> bool:
    """An optimizer of ``torch.optim``, or a subclass that changes nothing of how it steps."""
    if issubclass(cls, torch.optim.LBFGS):
        return False
    for ancestor in cls.__mro__:
        if ancestor.__module__.startswith("torch.optim."):
            return ancestor is not Optimizer
        inherited = {name for base in ancestor.__mro__[1:] for name in vars(base)}
        if vars(ancestor).keys() & inherited - _HARMLESS:
            return False
    return False


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
