"""The user's own optimizer, applied to some of its parameters at a time.

No optimizer is written again: ``step`` of the user's object runs on ``param_groups`` that hold only
the parameters of the moment, with the hyper-parameters as they were at ``step()``. That is right
for optimizers that treat each parameter by itself, which those of ``torch.optim`` do except LBFGS.
Of any other class it is found out, once and on live data: one step is computed whole and in two
halves, and only if both agree to the last bit, and no hyper-parameter moved, is it split from then
on. Whatever cannot be split is applied whole, behind a barrier.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["Updater"]

_Group = dict[str, Any]


class Updater:
    """Applies updates through ``optimizer``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        cls = type(optimizer)
        known = cls.__module__.startswith("torch.optim.")
        self._separable: bool | None = known and cls is not torch.optim.LBFGS if known else None
        self._steps = 0
        self._groups: list[_Group] = []
        self._group_of: dict[torch.Tensor, int] = {}

    @property
    def separable(self) -> bool:
        """Whether parameters may be updated a few at a time, and no step hook wants them all."""
        return self._separable is True and not self._hooked

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
        """One ordinary step of the user's optimizer; finds out whether it can be split."""
        self._steps += 1
        if self._separable is None and self._steps > 1 and not self._hooked:
            self._separable = self._probe()
        else:
            self.optimizer.step()

    @property
    def _hooked(self) -> bool:
        optimizer: Any = self.optimizer
        return bool(
            getattr(optimizer, "_optimizer_step_pre_hooks", None)
            or getattr(optimizer, "_optimizer_step_post_hooks", None)
        )

    def _probe(self) -> bool:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = self._save(parameters)
        self.snapshot()
        self.optimizer.step()
        after = self._save(parameters)
        groups = self._groups
        self.snapshot()
        steady = repr(groups) == repr(self._groups) and before[2] == after[2]
        self._restore(parameters, before)
        with_gradient = [p for p in parameters if p.grad is not None]
        half = len(with_gradient) // 2
        for some in (with_gradient[half:], with_gradient[:half]):
            self.apply(some)
        same = all(torch.equal(p, q) for p, q in zip(parameters, after[0], strict=True))
        self._restore(parameters, after)
        return steady and same

    def _save(self, parameters: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any], str]:
        state: Any = self.optimizer.state
        attributes = {
            name: value
            for name, value in vars(self.optimizer).items()
            if isinstance(value, (int, float, str, tuple)) and not name.startswith("_")
        }
        return (
            [p.detach().clone() for p in parameters],
            [copy.deepcopy(state[p]) if p in state else None for p in parameters],
            repr(attributes),
        )

    def _restore(self, parameters: Sequence[torch.Tensor], saved: tuple[list[Any], list[Any], str]):
        state: Any = self.optimizer.state
        with torch.no_grad():
            for parameter, value, kept in zip(parameters, saved[0], saved[1], strict=True):
                parameter.copy_(value)
                if kept is None:
                    state.pop(parameter, None)
                else:
                    state[parameter] = copy.deepcopy(kept)


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
