"""Horovod, for PyTorch tensors: whoever has it on a cluster keeps it and adds us.

Chunks are asynchronous in-place all-reduces under names that stay the same from step to step, so
that Horovod's response cache negotiates them by one bit each. Horovod moves nothing of a chunk
before every rank has submitted it: the others submit what is ready, and the leader's submissions,
which alone are held back by a credit, are the order (``negotiates``).

Announcements are broadcasts that the other ranks post in advance (see ``_announcements``): no
socket of ours, and no negotiation beyond Horovod's own cycle. Since Horovod warns of tensors that
only some ranks have submitted, rank 0 sends an empty one when nothing was said for a while.

Horovod has no completion callback; see ``_polling``. Its background loop wakes once per
HOROVOD_CYCLE_TIME (1 ms by default), which is the least time that a chunk or an announcement
takes. What this transport sets when it is the one that initialises Horovod is in ``DEFAULTS``; if
the script called ``hvd.init()`` before, Horovod's own settings hold (docs/horovod.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from bytescheduler._imports import require
from bytescheduler.exceptions import (
    ByteSchedulerError,
    ConfigurationError,
    PeerLostError,
)
from bytescheduler.transports._announcements import SLOT_SIZE, SLOTS, Posted
from bytescheduler.transports._named import Handle, NamedTransport
from bytescheduler.transports._polling import Poll
from bytescheduler.transports.base import Done

__all__ = ["DEFAULTS", "HorovodTransport"]

DEFAULTS: Final = {
    "HOROVOD_CYCLE_TIME": "0.5",  # milliseconds
    "HOROVOD_FUSION_THRESHOLD": "262144",  # bytes; larger chunks come back one by one
    "HOROVOD_CACHE_CAPACITY": "16384",  # names; below the number of chunks it thrashes
}
"""Environment variables for ``hvd.init()``, where the user has not set them."""

HEARTBEAT: Final = 20.0  # seconds; Horovod warns after 60

_numbers = count()  # of the transports of this process; equal on all ranks


class HorovodTransport(NamedTransport):
    """One rank's end of a Horovod process set.

    Args:
        process_set: a ``hvd.ProcessSet`` that includes this rank; all ranks by default.

    Raises:
        MissingDependencyError: horovod is not installed.
        ConfigurationError: the job is elastic, or this rank is not in ``process_set``.
    """

    ordered: bool = False
    negotiates: bool = True
    reentrant: bool = True

    def __init__(self, process_set: Any = None) -> None:
        _refuse_elastic()
        self._hvd = _initialised()
        self._set: Any = self._hvd.global_process_set if process_set is None else process_set
        if not self._set.included():
            raise ConfigurationError(
                f"rank {self._hvd.rank()} must belong to the process set {self._set}; "
                "wrap the optimizer on its members only"
            )
        self.rank = self._set.rank()
        self.world_size = self._set.size()
        self._root: int = self._set.ranks[0] if self._set.ranks else 0  # by global number
        self._prefix = f"bytescheduler.{self._set.process_set_id}.{next(_numbers)}"
        self._open("horovod", window=SLOTS, heartbeat=HEARTBEAT)

    def prepare(self, index: int, buffer: Any) -> Handle:
        return self._handle(f"{self._prefix}.{index}.{buffer.numel()}", buffer)

    def start(self, handle: Handle, priority: int, done: Done) -> None:
        self._begin(handle, partial(self._submit, handle.name), done)

    def exchange(self, payload: bytes) -> list[bytes]:
        torch: Any = require("torch", extra="horovod")
        own = torch.frombuffer(bytearray(payload) or bytearray(1), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(payload)]), "sizes").tolist()
        pieces = self._gather(own, "payloads").split([max(size, 1) for size in sizes])
        return [bytes(piece[:size].tolist()) for piece, size in zip(pieces, sizes, strict=True)]

    def broadcast(self, buffer: Any) -> None:
        if buffer.numel() and self.world_size > 1:
            raw = buffer.view(require("torch", extra="horovod").uint8)
            self._hvd.broadcast_(
                raw, self._root, name=f"{self._prefix}.state", process_set=self._set
            )

    def explain(self, error: BaseException) -> ByteSchedulerError:
        if isinstance(error, ByteSchedulerError):
            return error
        lost = PeerLostError(
            f"rank {self.rank}: Horovod stopped, because another rank died or ended its work "
            f"(horovodrun's output tells which): {error}"
        )
        lost.__cause__ = error
        return lost

    def _submit(self, name: str, tensor: Any) -> Poll:
        ticket = self._hvd.allreduce_async_(
            tensor, name=name, op=self._hvd.Average, process_set=self._set
        )
        return partial(self._finished, ticket)

    def _gather(self, tensor: Any, what: str) -> Any:
        name = f"{self._prefix}.{what}"
        return self._hvd.allgather(tensor, name=name, process_set=self._set)

    def _post(self, slot: int, message: Sequence[int]) -> Posted:
        torch: Any = require("torch", extra="horovod")
        content = torch.zeros(SLOT_SIZE, dtype=torch.int64)
        content[: len(message)] = torch.tensor(message, dtype=torch.int64)
        ticket = self._hvd.broadcast_async_(
            content, self._root, name=f"{self._prefix}.order.{slot}", process_set=self._set
        )
        return Posted(partial(self._finished, ticket), content.tolist)

    def _finished(self, ticket: int) -> bool:
        if not self._hvd.poll(ticket):
            return False
        self._hvd.synchronize(ticket)  # returns at once; raises what went wrong
        return True


def _refuse_elastic() -> None:
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        raise ConfigurationError(
            "the horovod transport needs a fixed set of workers, and this job is elastic "
            "(HOROVOD_ELASTIC=1); launch it without --min-np and --host-discovery-script, or "
            "keep Horovod's own optimizer"
        )


def _initialised() -> Any:
    """Horovod's PyTorch module, initialised; with our defaults where nobody set others."""
    hvd: Any = require("horovod.torch", extra="horovod")
    if not hvd.is_initialized():
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        hvd.init()
    return hvd
