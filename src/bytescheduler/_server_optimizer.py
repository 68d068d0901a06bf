"""The optimizer that MXNet's servers run when the weights are updated there.

MXNet hands every push of every key to one optimizer. Here keys are pieces of parameters, and there
are keys that are no parameters at all: announcements, signs of life, set-up messages. This wrapper
gives the user's optimizer the pieces, and lets the servers keep what was pushed for the others.

The module must be importable on a server, which unpickles it while it is still importing MXNet; so
it imports nothing of MXNet, and only this package has to be installed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["ServerOptimizer"]

_FIRST_KEY: Final = 1 << 16  # the transport's keys; below are the user's


class ServerOptimizer:
    """Wraps an ``mxnet.optimizer.Optimizer``.

    Args:
        inner: the user's.
        parameter_of: the parameter's index for each key that is a piece of one.
    """

    aggregate_num = 0  # one key per call

    def __init__(self, inner: Any, parameter_of: Mapping[int, int]) -> None:
        self.inner = inner
        self.multi_precision = bool(inner.multi_precision)
        self.pieces = frozenset(parameter_of)
        for multipliers in (inner.lr_mult, inner.wd_mult):
            by_index = dict(multipliers)
            for key, index in parameter_of.items():
                if index in by_index:
                    multipliers[key] = by_index[index]

    def _set_current_context(self, device_id: int) -> None:
        """MXNet's updater says where the next key lives; counts are kept per device."""
        self.inner._set_current_context(device_id)

    def create_state_multi_precision(self, index: int, weight: Any) -> Any:
        """State of a key."""
        if self._is_message(index):
            return None
        return self.inner.create_state_multi_precision(index, weight)

    def update_multi_precision(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """Overwrite ``weight``, what the server holds, after all workers pushed."""
        if self._is_message(index):
            grad.copyto(weight)
        else:
            self.inner.update_multi_precision(index, weight, grad, state)

    def _is_message(self, index: int) -> bool:
        return index >= _FIRST_KEY and index not in self.pieces
