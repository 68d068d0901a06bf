"""TensorFlow's collective operations as blocking calls that another thread can cancel.

Each call runs one operation eagerly, past its public wrapper, which has no way to be cancelled.
Inside a ``tf.function`` it could be cancelled as well, but a function's executor changes threads so
often that it cost as much again as the collective. What has no public name here is what
TensorFlow's own multi-worker strategy uses for the same purposes.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy.typing as npt

from bytescheduler._imports import require

__all__ = ["Calls", "engine_error"]

_Array = npt.NDArray[Any]

HEALTH_TIMEOUT_MS: Final = 3000
UNAVAILABLE: Final = 14  # the status code that aborted collectives report


class Calls:
    """The collective operations of one group, each as a call that can be cancelled."""

    def __init__(self, group_key: int, world_size: int) -> None:
        tf = require("tensorflow", extra="tensorflow")
        cancellation = require("tensorflow.python.eager.cancellation", extra="tensorflow")
        execute = require("tensorflow.python.eager.execute", extra="tensorflow")
        self._execute = execute.execute_with_cancellation
        self._tensor = tf.convert_to_tensor
        self._device = tf.device
        self._context = require("tensorflow.python.eager.context", extra="tensorflow").context()
        self._manager = cancellation.CancellationManager()
        self._group = (tf.constant(world_size), tf.constant(group_key))
        self._message = ("T", tf.int64.as_datatype_enum)
        self._cancelled = threading.Event()

    def reduce(self, key: int, array: _Array, *, average: bool) -> _Array:
        """Return the sum or average of all ranks' ``array`` of one dimension."""
        tensor = self._tensor(array)
        attributes = (
            *("T", tensor.dtype.as_datatype_enum),
            *("merge_op", "Add", "final_op", "Div" if average else "Id"),
            *("communication_hint", "RING", "Nordering_token", 0),
        )
        return self._run(b"CollectiveReduceV2", [tensor, *self._named(key)], attributes)

    def send(self, key: int, array: _Array) -> _Array:
        """Send an int64 ``array`` to all other ranks; returns when they have it."""
        inputs = [self._tensor(array), *self._named(key)]
        return self._run(b"CollectiveBcastSendV2", inputs, self._message)

    def receive(self, key: int, length: int) -> _Array:
        """Block until rank 0's next int64 array of ``length`` on this key."""
        inputs = [*self._named(key), self._tensor([length])]
        return self._run(b"CollectiveBcastRecvV2", inputs, self._message)

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

    def _named(self, key: int) -> tuple[Any, ...]:
        return (*self._group, self._tensor(key))

    def _run(self, name: bytes, inputs: list[Any], attributes: tuple[Any, ...]) -> _Array:
        if self._cancelled.is_set():  # TensorFlow itself may begin to wait in spite of it
            raise _errors().CancelledError(None, None, "the transport was closed")
        with self._device("/CPU:0"):
            (result,) = self._execute(name, 1, inputs, attributes, self._context, self._manager)
        return result.numpy()


def engine_error() -> type[Exception]:
    """What the calls raise when they fail or are cancelled."""
    return _errors().OpError


def _errors() -> Any:
    return require("tensorflow", extra="tensorflow").errors
