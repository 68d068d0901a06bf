"""Module buffers (batch norm's statistics, ...) follow rank 0, as in DistributedDataParallel.

There they are broadcast, with a wait, before each forward. Here the broadcast begins at ``step()``
and is awaited by the next forward or checkpoint: the values are the same, no iteration waits for
the round trip, and evaluating on one rank alone hangs nobody.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from bytescheduler.exceptions import TransportError
from bytescheduler.torch.bundles import Bundle, bundle
from bytescheduler.transports.base import Transport

__all__ = ["BufferSync"]


class BufferSync:
    """Keeps the buffers of ``model`` equal to rank 0's."""

    def __init__(self, model: nn.Module, transport: Transport) -> None:
        self._model = model
        self._transport = transport
        self._pending: list[tuple[Callable[[], object], Bundle]] = []

    def begin(self) -> None:
        """Start to broadcast rank 0's present values; collective."""
        if self._transport.world_size == 1:
            return
        self.finish()
        for part in bundle(self._model.buffers()):
            self._pending.append((self._transport.broadcast_async(part.raw), part))

    def finish(self) -> None:
        """Wait for the broadcast that is under way, if any, and adopt its values.

        Raises:
            TransportError: the engine failed.
        """
        pending, self._pending = self._pending, []
        for wait, part in pending:
            try:
                wait()
            except RuntimeError as error:
                rank = self._transport.rank
                raise TransportError(
                    f"rank {rank}: rank 0's module buffers did not arrive: {error}"
                ) from error
            if self._transport.rank != 0:
                part.adopt()
