"""BytePS, for PyTorch tensors: push and pull through its servers, with its own priority queue.

For who runs BytePS on a cluster (with RDMA, say) and keeps it. Workers, servers and scheduler are
started as BytePS's documentation says, or by ``bytescheduler launch``; credit inside BytePS stays
off (``BYTEPS_SCHEDULING_CREDIT`` unset), since two schedulers with windows of their own would
fight. A server answers when all workers have pushed, in any order; the leader's order is followed.

What BytePS 0.2.5 asks of its callers, and this file does:

* a name is used for one size and declared in the same order everywhere: ``prepare`` does so, and
  all other names are declared by the constructor;
* a server sends its answer from the memory that the next push of the same name overwrites, so a
  fast worker can corrupt what a slow one still receives. Every buffer therefore has two names,
  used in turn: that a push under the second is answered proves that all have received the first;
* its ``synchronize`` holds the interpreter's lock while it waits, so it is called for finished
  handles only (see ``_polling``);
* it has no bfloat16 (averaged in single precision here) and no empty tensors.

BytePS does not notice that a worker died or left; whoever starts the workers must end the others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final

from bytescheduler._imports import require
from bytescheduler.exceptions import ConfigurationError, TransportClosedError, TransportError
from bytescheduler.transports._announcements import SLOT_SIZE, Posted
from bytescheduler.transports._buffers import dtype_name
from bytescheduler.transports._named import Handle, NamedTransport
from bytescheduler.transports._polling import Poll
from bytescheduler.transports.base import Done

__all__ = ["BytePSTransport"]

ENV_CREDIT: Final = "BYTEPS_SCHEDULING_CREDIT"
PIECE: Final = 256 << 10  # bytes of state in one operation
PIECE_TIMEOUT: Final = 120.0  # seconds for all ranks to come to the same set-up call

_numbers = count()  # of the transports of this process; equal on all ranks


class BytePSTransport(NamedTransport):
    """One worker's end of BytePS; initialises it where the script has not.

    Raises:
        MissingDependencyError: byteps is not installed.
        ConfigurationError: credit inside BytePS is switched on.
    """

    ordered: bool = False
    tunable: ClassVar[bool] = False  # servers keep what was declared

    def __init__(self) -> None:
        if os.environ.get(ENV_CREDIT, "0") != "0":
            raise ConfigurationError(
                f"{ENV_CREDIT} must not be set, got {os.environ[ENV_CREDIT]}: two schedulers with "
                "credits of their own wait for each other; unset it and use credit_size"
            )
        self._torch: Any = require("torch", extra="torch")
        bps: Any = require("byteps.torch", extra="torch")
        bps.init()
        self._ops: Any = require("byteps.torch.ops", extra="torch")
        self.rank, self.world_size = bps.rank(), bps.size()
        self._prefix = f"bytescheduler.{next(_numbers)}"
        self._uses: dict[str, int] = {}
        for name in ("order", "sizes", "state"):
            self._declare(name)
        self._open("byteps", window=1)

    def prepare(self, index: int, buffer: Any) -> Handle:
        name = f"{index}.{buffer.numel()}.{dtype_name(buffer)}"
        if buffer.numel():
            self._declare(name)
        return self._handle(name, buffer)

    def start(self, handle: Handle, priority: int, done: Done) -> None:
        if self._closed:
            raise TransportClosedError(f"rank {self.rank}: the transport was closed")
        if not handle.buffer.numel() or self.world_size == 1:
            done(None)
            return
        submit = partial(self._push_pull, handle.name, average=True, priority=-priority)
        self._begin(handle, submit, done)

    def exchange(self, payload: bytes) -> list[bytes]:
        torch = self._torch
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(payload)
        self._sum("sizes", sizes)
        payloads: list[bytes] = []
        for rank, size in enumerate(sizes.tolist()):
            data = bytearray(payload if rank == self.rank else size)
            if data:
                self._spread(torch.frombuffer(data, dtype=torch.uint8), rank)
            payloads.append(bytes(data))
        return payloads

    def broadcast(self, buffer: Any) -> None:
        if buffer.numel():
            self._spread(buffer.view(self._torch.uint8), 0)

    # -- inside

    def _spread(self, raw: Any, root: int) -> None:
        """Overwrite ``raw`` with the content that it has on rank ``root``, piece by piece."""
        piece = self._torch.zeros(PIECE, dtype=self._torch.uint8)
        for part in raw.split(PIECE):
            piece.zero_()
            if self.rank == root:
                piece[: len(part)] = part
            self._sum("state", piece)
            part.copy_(piece[: len(part)])

    def _sum(self, name: str, tensor: Any) -> None:
        """Add ``tensor`` over all ranks, in place; blocks."""
        if self.world_size == 1:
            return
        ended = threading.Event()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            ended.set()

        self._poller.add(self._push_pull(name, tensor, average=False, priority=0), done)
        if not ended.wait(PIECE_TIMEOUT):
            raise TransportError(
                f"rank {self.rank}: not all ranks came to the same call within {PIECE_TIMEOUT:g} s"
            )
        if errors[0] is not None:
            raise errors[0]

    def _post(self, slot: int, message: Sequence[int]) -> Posted:
        torch = self._torch
        content = torch.zeros(SLOT_SIZE, dtype=torch.int64)
        content[: len(message)] = torch.tensor(message, dtype=torch.int64)
        poll = self._push_pull("order", content, average=False, priority=0)
        return Posted(poll, content.tolist)

    def _declare(self, name: str) -> None:
        if name not in self._uses:
            self._uses[name] = 0
            for turn in range(2):
                self._ops.declare(self._name(name, turn))

    def _name(self, name: str, turn: int) -> str:
        return f"{self._prefix}.{name}.{turn}"

    def _push_pull(self, name: str, tensor: Any, *, average: bool, priority: int) -> Poll:
        turn = self._uses[name] % 2
        self._uses[name] += 1
        ticket = self._ops.push_pull_async_inplace(
            tensor, average=average, name=self._name(name, turn), version=0, priority=priority
        )

        def finished() -> bool:
            if not self._ops.poll(ticket):
                return False
            self._ops.synchronize(ticket)
            return True

        return finished
