"""A parameter whose update is still on its way is a promise: who uses it first, redeems it.

Between ``step()`` and the moment its gradient has come back and its update was applied, a
parameter's class is exchanged for a subclass whose ``__torch_function__`` sees every operation
that takes it as an argument. The first one that needs the value waits, applies the update, gives
the parameter its own class back, and goes on. So no forward pass, evaluation, checkpoint, moving
average or log can read a stale weight, whichever module reads whose parameter; and nothing is left
of it afterwards. PyTorch's own lazy modules change a parameter's class in the same way.

Gates (forward pre-hooks, see ``gates.py``) redeem whole modules at once, before their forward;
the promise is the net below them.

Gradients are promises likewise: in flight, the tensor behind ``p.grad`` is hidden, so that a second
backward pass cannot add to memory that is on the wire, and reading ``p.grad`` brings it back.

Considered instead: recording in a ``TorchFunctionMode`` which module uses which parameter first,
and a barrier whenever the recorded path may change. It costs iterations with a barrier, cannot see
uses outside the model, and is only as good as the record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

__all__ = [
    "METADATA",
    "Keeper",
    "Promise",
    "gradient_class",
    "parameter_class",
    "plainly",
    "promises_in",
]


class Keeper(Protocol):
    """Who can redeem promises."""

    def redeem(self, promises: Iterable[Promise]) -> None: ...

    def bring_home(self, tensor: Any) -> None: ...

    def read_gradient(self, parameter: Any) -> torch.Tensor | None: ...

    def write_gradient(self, parameter: Any, gradient: torch.Tensor | None) -> None: ...


_PROPERTIES = """
    shape dtype device layout requires_grad is_leaf ndim itemsize nbytes names grad_fn _version
    is_cuda is_sparse is_quantized is_meta is_nested is_cpu is_mps is_xpu _backward_hooks
"""
_METHODS = """
    size dim numel nelement ndimension stride element_size is_contiguous is_floating_point
    is_complex is_signed get_device storage_offset __len__ __hash__ register_hook
    register_post_accumulate_grad_hook
"""


def _existing(names: str) -> list[Any]:
    return [getattr(torch.Tensor, name) for name in names.split() if hasattr(torch.Tensor, name)]


METADATA: frozenset[Any] = frozenset(
    [attribute.__get__ for attribute in _existing(_PROPERTIES)] + _existing(_METHODS)
)
_READ_GRADIENT: Any = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_WRITE_GRADIENT: Any = torch.Tensor.grad.__set__  # type: ignore[attr-defined]
_DELETE_GRADIENT: Any = torch.Tensor.grad.__delete__  # type: ignore[attr-defined]
GRADIENT: frozenset[Any] = frozenset([_READ_GRADIENT, _WRITE_GRADIENT, _DELETE_GRADIENT])


class Promise(torch.Tensor):
    """Mixed into the classes that stand in for tensors whose content is in flight."""

    keeper: ClassVar[Keeper]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with plainly():
                return func(*args, **kwargs)
        if func == _READ_GRADIENT:
            return cls.keeper.read_gradient(args[0])
        if func in (_WRITE_GRADIENT, _DELETE_GRADIENT):
            return cls.keeper.write_gradient(args[0], args[1] if len(args) > 1 else None)
        cls.keeper.redeem(promises_in((args, kwargs)))
        if next(promises_in((args, kwargs)), None) is not None:  # only its gradient is in flight
            with plainly():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.keeper.bring_home(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.keeper.bring_home(self)
        return self.__reduce_ex__(protocol)


def parameter_class(base: type[nn.Parameter], keeper: Keeper) -> type[Any]:
    """The stand-in for parameters of class ``base``."""
    return type("InFlightParameter", (Promise, base), {"keeper": keeper})


def gradient_class(keeper: Keeper) -> type[Any]:
    """The stand-in for gradient tensors."""
    return type("InFlightGradient", (Promise,), {"keeper": keeper})


def promises_in(values: Any) -> Iterator[Promise]:
    """Every promise among ``values``, at any depth of lists, tuples and dictionaries."""
    if isinstance(values, Promise):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from promises_in(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from promises_in(value)


def plainly() -> Any:
    """A context in which promises are used as the tensors that they stand for."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateUsage]
