"""Chunks as NumPy sees them, for engines that take plain memory, and sums of 16-bit floats.

Buffers come from any framework. NumPy has no bfloat16 of its own, so both 16-bit formats are
handled as their bits: ``widen`` to float32, compute, ``narrow`` back, rounded to nearest even.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bytescheduler.exceptions import TransportError

__all__ = ["SIXTEEN_BIT", "as_array", "dtype_name", "narrow", "widen"]

_Bits = npt.NDArray[np.uint16]
_Floats = npt.NDArray[np.float32]

SIXTEEN_BIT: Final = ("float16", "bfloat16")


def dtype_name(buffer: Any) -> str:
    """The dtype of a tensor or array by NumPy's name, such as ``float32`` or ``bfloat16``."""
    return str(buffer.dtype).removeprefix("torch.")


def as_array(buffer: Any, *, engine: str) -> npt.NDArray[Any]:
    """A writable NumPy view of a contiguous CPU buffer; 16-bit floats as ``uint16``.

    Raises:
        TransportError: it lies on a GPU or has strides, so that there is no such view.
    """
    dtype = np.dtype(np.uint16) if dtype_name(buffer) in SIXTEEN_BIT else None
    try:
        if isinstance(buffer, np.ndarray):
            array: npt.NDArray[Any] = buffer.view(dtype) if dtype is not None else buffer
        else:
            array = _from_tensor(buffer, dtype)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise TransportError(f"the {engine} transport cannot use this buffer: {error}") from error
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise TransportError(
            f"the {engine} transport needs contiguous writable CPU buffers; copy it first"
        )
    return array


def _from_tensor(tensor: Any, dtype: np.dtype[Any] | None) -> npt.NDArray[Any]:
    if not hasattr(tensor, "detach"):
        return np.from_dlpack(tensor)
    plain = tensor.detach()
    if dtype is None:
        return plain.numpy()
    return plain.view(importlib.import_module("torch").int16).numpy().view(dtype)


def widen(bits: _Bits, dtype: str) -> _Floats:
    """16-bit floats as float32; exact."""
    return _WIDEN[dtype](bits)


def narrow(values: _Floats, dtype: str) -> _Bits:
    """float32 as 16-bit floats, rounded to nearest even; infinities and NaN are kept."""
    return _NARROW[dtype](values)


def _narrow_half(values: _Floats) -> _Bits:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def _widen_brain(bits: _Bits) -> _Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow_brain(values: _Floats) -> _Bits:
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


_WIDEN: Final[dict[str, Callable[[_Bits], _Floats]]] = {
    "float16": lambda bits: bits.view(np.float16).astype(np.float32),
    "bfloat16": _widen_brain,
}
_NARROW: Final[dict[str, Callable[[_Floats], _Bits]]] = {
    "float16": _narrow_half,
    "bfloat16": _narrow_brain,
}
