"""Buffers of any framework as NumPy views, without a copy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.transports._kvstore_engine import Array

__all__ = ["as_bytes", "as_floats"]

SUMMED: Final = ("float16", "float32", "float64")


def as_floats(buffer: Any) -> Array:
    """Return a view of a buffer whose elements MXNet's servers can add.

    Raises:
        ConfigurationError: they cannot, or the buffer is not contiguous CPU memory.
    """
    name = str(getattr(buffer, "dtype", type(buffer).__name__)).removeprefix("torch.")
    if name not in SUMMED:
        raise ConfigurationError(
            f"the kvstore transport averages {', '.join(SUMMED)} (MXNet's servers add nothing "
            f"else), got {name}; keep gradients in float32, or use another transport"
        )
    return _flat(_as_numpy(buffer))


def as_bytes(buffer: Any) -> Array:
    """Return the bytes of a contiguous buffer of any dtype, as a view."""
    if hasattr(buffer, "untyped_storage"):
        return _as_numpy(buffer.detach().reshape(-1).view(_torch_byte(buffer)))
    return _flat(_as_numpy(buffer)).view(np.uint8)


def _as_numpy(buffer: Any) -> Array:
    if isinstance(buffer, np.ndarray):
        return buffer
    device = str(getattr(buffer, "device", "cpu"))
    if device != "cpu":
        raise ConfigurationError(
            f"the kvstore transport takes buffers in CPU memory, got one on {device}; parameter "
            "servers send from there, so keep the model on the CPU or use another transport"
        )
    if hasattr(buffer, "detach"):
        return buffer.detach().numpy()
    return np.from_dlpack(buffer)


def _flat(view: Array) -> Array:
    if not view.flags.c_contiguous or not view.flags.writeable:
        raise ConfigurationError(
            "the kvstore transport takes contiguous, writable buffers, got strides "
            f"{view.strides} for shape {view.shape}; make it contiguous first"
        )
    return view.reshape(-1)


def _torch_byte(tensor: Any) -> Any:
    if not tensor.is_contiguous():
        raise ConfigurationError(
            f"broadcast takes contiguous tensors, got strides {tuple(tensor.stride())}; "
            "call contiguous() first"
        )
    import torch

    return torch.uint8
