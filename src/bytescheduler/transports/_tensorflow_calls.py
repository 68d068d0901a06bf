"""TensorFlow's collective operations as blocking calls that another thread can cancel.

Each operation is a small traced function whose group and instance keys are arguments, so that the
whole process shares four graphs. ``CancellationManager``, ``check_collective_ops_peer_health`` and
``abort_collective_ops`` have no public names; they are what TensorFlow's own multi-worker strategy
uses for the same purposes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt

from bytescheduler._imports import require

__all__ = ["Calls", "engine_error"]

_Array = npt.NDArray[Any]

HEALTH_TIMEOUT_MS: Final = 3000
UNAVAILABLE: Final = 14  # the status code that aborted collectives report


class Calls:
    """The collective operations of one group, each as a function that can be cancelled."""

    def __init__(self, group_key: int, world_size: int) -> None:
        tf = require("tensorflow", extra="tensorflow")
        cancellation = require("tensorflow.python.eager.cancellation", extra="tensorflow")
        self._tensor = tf.convert_to_tensor
        self._context = require("tensorflow.python.eager.context", extra="tensorflow").context()
        self._manager = cancellation.CancellationManager()
        self._group = (tf.constant(world_size), tf.constant(group_key))
        self._cancelled = threading.Event()

    def reduce(self, key: int, array: _Array, *, average: bool) -> _Array:
        """Return the sum or average of all ranks' ``array`` of one dimension."""
        tensor = self._tensor(array)
        function = _reduce_function(tensor.dtype, "Div" if average else "Id")
        return self._run(function, tensor, key)

    def send(self, key: int, array: _Array) -> _Array:
        """Send an int64 ``array`` to all other ranks; returns when they have it."""
        return self._run(_send_function(), self._tensor(array), key)

    def receive(self, key: int, length: int) -> _Array:
        """Block until rank 0's next int64 array of ``length`` on this key."""
        return self._run(_receive_function(), self._tensor([length]), key)

    def alive(self, task: str) -> bool:
        """Whether the process of ``task`` answers."""
        try:
            self._context.check_collective_ops_peer_health(task, timeout_in_ms=HEALTH_TIMEOUT_MS)
        except engine_error():
            return False
        return True

    def cancel(self) -> None:
        """End every call that waits, with CancelledError; later ones fail at once."""
        self._cancelled.set()
        self._manager.start_cancel()

    def abort(self, reason: str) -> None:
        """Make all collectives of this process fail, for good; peers see it too."""
        self._context.abort_collective_ops(UNAVAILABLE, reason)

    def _run(self, function: Any, value: Any, key: int) -> _Array:
        if self._cancelled.is_set():  # TensorFlow itself may begin to wait in spite of it
            raise _errors().CancelledError(None, None, "the transport was closed")
        call = self._manager.get_cancelable_function(function)
        return call(value, *self._group, self._tensor(key)).numpy()


@functools.cache
def _reduce_function(dtype: Any, final_op: str) -> Any:
    def body(value: Any, size: Any, group: Any, instance: Any) -> Any:
        return _raw_ops().CollectiveReduceV2(
            input=value,
            group_size=size,
            group_key=group,
            instance_key=instance,
            ordering_token=[],
            merge_op="Add",
            final_op=final_op,
            communication_hint="RING",
        )

    return _concrete(body, dtype)


@functools.cache
def _send_function() -> Any:
    def body(value: Any, size: Any, group: Any, instance: Any) -> Any:
        return _raw_ops().CollectiveBcastSendV2(
            input=value, group_size=size, group_key=group, instance_key=instance
        )

    return _concrete(body, "int64")


@functools.cache
def _receive_function() -> Any:
    def body(shape: Any, size: Any, group: Any, instance: Any) -> Any:
        return _raw_ops().CollectiveBcastRecvV2(
            group_size=size, group_key=group, instance_key=instance, shape=shape, T="int64"
        )

    return _concrete(body, "int32")


def _concrete(body: Callable[..., Any], dtype: Any) -> Any:
    """Trace ``body(vector of dtype, group size, group key, instance key)`` for the host."""
    tf = require("tensorflow", extra="tensorflow")
    number = tf.TensorSpec([], tf.int32)
    signature = (tf.TensorSpec([None], dtype), number, number, number)
    with tf.init_scope(), tf.device("/CPU:0"):
        function = tf.function(body, input_signature=signature, autograph=False)
        return function.get_concrete_function()


def _raw_ops() -> Any:
    return require("tensorflow", extra="tensorflow").raw_ops


def engine_error() -> type[Exception]:
    """What the calls raise when they fail or are cancelled."""
    return _errors().OpError


def _errors() -> Any:
    return require("tensorflow", extra="tensorflow").errors
