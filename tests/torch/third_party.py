"""Optimizers as people write them, of which most cannot be applied a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer


class Lion(Optimizer):
    """Each parameter by itself: may be split."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(average.lerp(p.grad, 0.1).sign(), alpha=group["lr"])
                    average.lerp_(p.grad, 1 - group["beta"])


class _Counting(Optimizer):
    """Momentum that warms up; where the count of steps is kept is the subclass's choice."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def count(self, group: dict[str, Any]) -> int:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, self.count(group) / 4)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-rate)


class InGroup(_Counting):
    def count(self, group: dict[str, Any]) -> int:
        group["step"] = group.get("step", 0) + 1
        return group["step"]


class InGroupTensor(_Counting):
    def count(self, group: dict[str, Any]) -> int:
        if "step" not in group:
            group["step"] = torch.zeros(())
        group["step"] += 1
        return int(group["step"])


class InAttribute(_Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    def count(self, group: dict[str, Any]) -> int:
        self.steps += 1
        return self.steps


class InPrivateAttribute(_Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._steps = 0

    def count(self, group: dict[str, Any]) -> int:
        self._steps += 1
        return self._steps


class InList(_Counting):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history: list[float] = []

    def count(self, group: dict[str, Any]) -> int:
        self.history.append(group["lr"])
        return len(self.history)


class InGlobalState(_Counting):
    def count(self, group: dict[str, Any]) -> int:
        self.state["global"]["step"] = self.state["global"].get("step", 0) + 1
        return self.state["global"]["step"]


class GlobalNorm(Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used]).norm()
        for p in used:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


class LateNorm(Optimizer):
    """Clips all gradients together; the limit is far away at first, then it binds."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "limit": 1e6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.stack([p.grad.norm() for p in used]).norm())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * min(1.0, group["limit"] / norm), alpha=group["lr"])


class Noisy(Optimizer):
    """Langevin dynamics: random numbers are drawn in the order of the parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad + 0.01 * torch.randn_like(p), alpha=-group["lr"])


class Lookahead(SGD):
    """Every second step goes back half of the way."""

    def __init__(self, params: Any, lr: float = 0.1, *, every: int = 2) -> None:
        super().__init__(params, lr, momentum=0.5)
        self.every = every
        self._calls = 0
        self._slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self._calls += 1
        if self._calls % self.every == 0:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        self._slow[p].lerp_(p, 0.5)
                        p.copy_(self._slow[p])
        return loss


class Extra(SGD):
    """A subclass with more arguments, to its constructor and to ``step``."""

    def __init__(self, params: Any, lr: float = 0.1, *, scale: float = 1.0) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.scale = scale

    def step(self, closure: Any = None, *, scale: float | None = None) -> Any:
        factor = self.scale if scale is None else scale
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor)
        return super().step(closure)


class Renamed(SGD):
    """A subclass that changes nothing: may be split."""


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "Lion": Lion,
    "Renamed": lambda p: Renamed(p, 0.1, momentum=0.9),
    "InGroup": InGroup,
    "InGroupTensor": InGroupTensor,
    "InAttribute": InAttribute,
    "InPrivateAttribute": InPrivateAttribute,
    "InList": InList,
    "InGlobalState": InGlobalState,
    "GlobalNorm": GlobalNorm,
    "LateNorm": LateNorm,
    "Noisy": Noisy,
    "Lookahead": Lookahead,
    "Extra": lambda p: Extra(p, scale=0.5),
}
