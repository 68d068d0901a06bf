"""How long each layer of a real model computes, for the simulator's bound."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from torch import Tensor, nn

ROUNDS = 6


def layer_rows(model: nn.Module, loss: Any) -> list[dict[str, Any]]:
    """One row for every module that owns parameters, in the order of first use.

    A layer's backward ends with its last gradient; its forward lasts until the next such module
    begins. What lies between the last forward and the first gradient is shared as 1 to 2.
    """
    recorder = _Recorder(model)
    for _ in range(ROUNDS):
        recorder.round(loss)
    return recorder.rows()


class _Recorder:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._entered: dict[nn.Module, float] = {}
        self._produced: dict[nn.Module, float] = {}
        self._forward: dict[nn.Module, list[float]] = {}
        self._backward: dict[nn.Module, list[float]] = {}

    def round(self, loss: Any) -> None:
        """One forward and backward with stopwatches, removed again afterwards."""
        self._entered.clear()
        self._produced.clear()
        owners = [m for m in self._model.modules() if list(m.parameters(recurse=False))]
        hooks: list[Any] = [m.register_forward_pre_hook(self._enter) for m in owners]
        for module in owners:
            stamp = self._stamp(module)
            hooks += [
                parameter.register_post_accumulate_grad_hook(stamp)
                for parameter in module.parameters(recurse=False)
            ]
        loss(self._model).backward()
        for hook in hooks:
            hook.remove()
        self._account()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._entered.setdefault(module, time.perf_counter())

    def _stamp(self, module: nn.Module) -> Any:
        def stamp(_: Tensor) -> None:
            self._produced[module] = time.perf_counter()

        return stamp

    def _account(self) -> None:
        begins = list(self._entered.items())
        ends = sorted(self._produced.items(), key=lambda item: item[1])
        turn = max(0.0, ends[0][1] - begins[-1][1])
        stops = [begin for _, begin in begins[1:]] + [begins[-1][1] + turn / 3]
        for (module, begin), stop in zip(begins, stops, strict=True):
            self._forward.setdefault(module, []).append(stop - begin)
        before = begins[-1][1] + turn / 3
        for module, end in ends:
            self._backward.setdefault(module, []).append(max(0.0, end - before))
            before = end

    def rows(self) -> list[dict[str, Any]]:
        names = {module: name for name, module in self._model.named_modules()}
        return [
            {
                "name": names[module] or "root",
                "numel": self._numel(module),
                "forward_s": median(times),
                "backward_s": median(self._backward.get(module, [0.0])),
            }
            for module, times in self._forward.items()
        ]

    def _numel(self, module: nn.Module) -> int:
        """Its own parameters and those of modules below it that are read but never called."""
        read = (part for part in module.modules() if part is module or part not in self._forward)
        return sum(p.numel() for part in read for p in part.parameters(recurse=False))
