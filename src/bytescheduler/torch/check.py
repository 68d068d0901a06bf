"""``BYTESCHEDULER_CHECK=1``: an independent watch over every operation that takes a parameter.

Gates and promises are meant to make it impossible to use a parameter that is not current. This mode
sees every PyTorch function call while it is on and raises where one got through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode, resolve_name

from bytescheduler.torch.promise import GRADIENT, METADATA, Promise, promises_in

__all__ = ["CheckMode"]


class _Keeper(Protocol):
    def require_current(self, tensors: Iterable[Promise], function: str) -> None: ...


class CheckMode(TorchFunctionMode):
    """Raises StaleParameterError where a parameter is used before its update was applied."""

    def __init__(self, keeper: _Keeper) -> None:
        super().__init__()
        self._keeper = keeper

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in METADATA and func not in GRADIENT:
            name = resolve_name(func) or repr(func)
            self._keeper.require_current(promises_in((args, kwargs)), name)
        return result
