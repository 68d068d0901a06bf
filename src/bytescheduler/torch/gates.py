"""Where a layer's forward waits for its own parameters.

Every module that directly owns parameters gets a forward pre-hook, containers included, and every
owner where a parameter is shared. Some modules read a child's weights without calling the child
(``nn.MultiheadAttention`` its ``out_proj``); which ones is seen in the first iteration, and the
parameters of modules that were not called move to the gate of the nearest called ancestor.
Whatever escapes this is caught by the promise (``promise.py``): gates decide when a wait happens,
not whether.

The order in which gates are passed first is the forward order of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Gates"]


class Gates:
    """Forward pre-hooks on ``model`` and on all modules that own planned parameters.

    Args:
        enter: called with a module's name and slots before its forward.
        enter_root: called before the model's own forward, first of all.
    """

    def __init__(
        self,
        model: nn.Module,
        enter: Callable[[str, Sequence[Any]], None],
        enter_root: Callable[[], None],
    ) -> None:
        self._model = model
        self._enter = enter
        self._enter_root = enter_root
        self._modules = dict(model.named_modules())
        self._slots: dict[str, list[Any]] = {}
        self._passed: dict[str, None] = {}
        self._handles: list[Any] = []
        self._all: Mapping[int, Any] = {}
        self.learned = False
        self.current = ""
        for name, module in self._modules.items():
            if name == "" or any(True for _ in module.parameters(recurse=False)):
                hook = _PreHook(self._pass, name)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def assign(self, slots: Mapping[int, Any]) -> None:
        """Say which slot stands for which parameter, by ``id``."""
        self._all = slots
        self._slots = {name: self._owned(module) for name, module in self._modules.items()}
        if self.learned:
            self._inherit()

    def order(self, names: Sequence[str]) -> list[str]:
        """All parameter names in the order of first use; empty before the first forward.

        Parameters of modules that were not called come after their predecessor in registration
        order.
        """
        if not self._passed:
            return []
        used = [slot.name for name in self._passed for slot in self._owned(self._modules[name])]
        return _merged(list(dict.fromkeys(used)), names)

    def learn(self) -> None:
        """End of the first iteration: from here on gates cover what was not called."""
        self.learned = True
        self._inherit()

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _owned(self, module: nn.Module) -> list[Any]:
        recurse = isinstance(module, torch.jit.ScriptModule)
        found = (self._all.get(id(p)) for p in module.parameters(recurse=recurse))
        return list(dict.fromkeys(slot for slot in found if slot is not None))

    def _inherit(self) -> None:
        for name in self._modules:
            if name in self._passed or not self._slots[name]:
                continue
            ancestor = name
            while ancestor and ancestor not in self._passed:
                ancestor = ancestor.rpartition(".")[0]
            if ancestor != name:
                self._slots[ancestor] = [*self._slots[ancestor], *self._slots[name]]

    def _pass(self, name: str) -> None:
        self.current = name
        if not self.learned and torch.is_grad_enabled():
            self._passed.setdefault(name)
        if name == "":
            self._enter_root()
        self._enter(name, self._slots[name])


class _PreHook:
    """A forward pre-hook that does not travel with copies of the model.

    Compiled models break their graph at it: a wait must not be traced.
    """

    def __init__(self, action: Callable[[str], None] | None, name: str) -> None:
        self._action = action
        self._untraced: Any = torch.compiler.disable(action) if action is not None else None
        self._name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._action is None:
            return
        if torch.compiler.is_compiling():
            self._untraced(self._name)
        else:
            self._action(self._name)

    def __deepcopy__(self, memo: Any) -> _PreHook:
        return _PreHook(None, self._name)

    def __reduce__(self) -> Any:
        return _PreHook, (None, self._name)


def _merged(order: list[str], names: Sequence[str]) -> list[str]:
    """``order``, and what it lacks of ``names`` each behind its predecessor in ``names``."""
    known = set(order)
    merged = list(order)
    previous: str | None = None
    for name in names:
        if name not in known:
            merged.insert(merged.index(previous) + 1 if previous is not None else 0, name)
        previous = name
    return merged
