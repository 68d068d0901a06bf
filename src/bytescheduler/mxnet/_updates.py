"""Weights that are updated on the servers: push gradients, get weights back.

A chunk is cut at the borders of parameters, each piece is a key that holds weights, and the servers
run the user's optimizer on it. A key cannot be cut anew, since the optimizer's state lives beside
it on the server; the first cut stays.

With ``dist_sync`` the order is rank 0's, as everywhere. With ``dist_async`` the servers answer
every worker at once, so nobody can wait for anybody: each worker is a leader of its own, with its
own credit, and there is nothing to announce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bytescheduler._server_optimizer import ServerOptimizer
from bytescheduler.core import Layout
from bytescheduler.exceptions import ConfigurationError
from bytescheduler.transports._kvstore_buffers import as_floats
from bytescheduler.transports._kvstore_engine import Array
from bytescheduler.transports._kvstore_keys import piece_lengths
from bytescheduler.transports._kvstore_opening import Opening
from bytescheduler.transports.kvstore import KVStoreTransport

__all__ = ["AsyncUpdates", "SyncUpdates", "require_elementwise"]

WHOLE_TENSOR_OPTIMIZERS = frozenset({"LAMB", "LANS", "LARS", "LBSGD", "Nadam"})


def require_elementwise(optimizer: Any) -> None:
    """Refuse optimizers that must see whole tensors.

    Raises:
        ConfigurationError: an update depends on a norm of the tensor, or counts calls.
    """
    name = type(optimizer).__name__
    if name in WHOLE_TENSOR_OPTIMIZERS:
        raise ConfigurationError(
            f"updates on servers work for optimizers that treat elements alike, {name} needs "
            "whole tensors and the servers have pieces; pass update_on_kvstore=False"
        )


class SyncUpdates(KVStoreTransport):
    """Chunks of gradients go out, chunks of weights come back.

    Args:
        layout, buffers: as the exchange has them.
        weights: initial weights by buffer, laid out as the gradients are.

    Attributes:
        parameter_of: the parameter's position for every key that was made.
    """

    def __init__(
        self,
        kvstore: Any,
        layout: Layout,
        buffers: Mapping[str, Array],
        weights: Mapping[str, Array],
    ) -> None:
        super().__init__(kvstore, average=False, rests=True)
        self.parameter_of: dict[int, int] = {}
        self._layout = layout
        self._buffers = buffers
        self._weights = weights

    def prepare(self, index: int, buffer: Any) -> Any:
        """See ``Transport``; once per chunk.

        Raises:
            ConfigurationError: the buffers are cut anew.
        """
        if index in self._cut:
            raise ConfigurationError(
                "the partition size cannot change while the servers update the weights, since "
                "the optimizer's state lies there in pieces; pass update_on_kvstore=False to tune "
                "it"
            )
        self._cut.add(index)
        view = as_floats(buffer)
        name, start = self._place(view)
        pieces = list(self._parts(name, start, start + view.size))
        arrays = self._store.engine.array
        handle = self._handle(
            view,
            (
                (self._buffers[name][first:last], arrays(self._weights[name][first:last].copy()))
                for _, first, last in pieces
            ),
        )
        for key, (parameter, _, _) in zip(handle.keys, pieces, strict=True):
            self.parameter_of[key] = parameter
        return handle

    def install(self, optimizer: Any, index_of: Mapping[int, Any]) -> None:
        """Collective, blocking: send the optimizer to the servers.

        Args:
            index_of: the optimizer's index for each parameter's position.
        """
        self._opening.settle(timeout=None)
        if self._store.rank == 0:
            indices = {key: index_of[place] for key, place in self.parameter_of.items()}
            self._store.kvstore.set_optimizer(ServerOptimizer(optimizer, indices))
        self._store.barrier()

    def _place(self, view: Array) -> tuple[str, int]:
        name = str(view.dtype)
        offset = view.ctypes.data - self._buffers[name].ctypes.data
        return name, offset // view.itemsize

    def _parts(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Parameter, first and last element of each piece between two elements of a buffer."""
        for parameter in self._layout.order:
            spec, offset = self._layout.specs[parameter], self._layout.offsets[parameter]
            first, last = max(start, offset), min(stop, offset + spec.numel)
            if spec.buffer != name or first >= last:
                continue
            for length in piece_lengths(last - first, spec.itemsize):
                yield parameter, first, first + length
                first += length


class AsyncUpdates(SyncUpdates):
    """The same over ``dist_async``; to the exchange every worker is alone."""

    def install(self, optimizer: Any, index_of: Mapping[int, Any]) -> None:
        """Collective, blocking: see ``SyncUpdates``."""
        super().install(optimizer, index_of)
        self._opening.open(self.stripe.keys.allocated)
        self._membership.watch.start()

    def wake(self, iteration: int) -> None:
        """Nothing is announced."""

    def _require(self, kind: str) -> None:
        if "async" not in kind:
            raise ConfigurationError(f"expected a store of type dist_async, got {kind!r}")

    def _connect(self) -> None:
        self.rank, self.world_size = 0, 1
        self._opening = Opening(self._store, self.stripe.keys.allocated, lambda opened: None)

    def _close_channel(self) -> None:
        self.stripe.drained.set()
