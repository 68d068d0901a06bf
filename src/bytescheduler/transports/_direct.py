"""Averages over few ranks by sending straight to each of them, on Gloo's ``send`` and ``recv``.

Gloo's own ``all_reduce`` is a ring of two dependent phases in segments: eight messages for a chunk
between two ranks, each with a wake-up of a thread or two. Where a chunk is as small as ours that
costs more processor time than moving the bytes does. Sent straight, the same bytes take one message
each way between two ranks, and between more two phases instead of ``2 (n - 1)``: every rank sums
one slice (reduce-scatter), then hands it to all others (all-gather). The number of messages grows
with the square of the ranks, so it is for ``MOST_RANKS`` at most.

Summands are added in the order of the ranks, wherever a chunk was cut: the average of a gradient
does not depend on the partition size, as it does to the last bits with a ring.

Gloo offers no call-back for a message, so one thread waits for them, in the order in which they
were sent.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch

from bytescheduler.transports.base import Done

__all__ = ["MOST_RANKS", "DirectAverage"]

MOST_RANKS: Final = 8
GRAIN: Final = 1 << 15  # elements, up to which PyTorch adds in the calling thread

Works = Sequence[Any]


class DirectAverage:
    """Averages tensors over the ranks of a Gloo group.

    Args:
        group: the process group; nothing else may send point to point in it.
        rank, world_size: of the group; ``world_size`` from 2 to ``MOST_RANKS``.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = world_size
        self._others = [(rank + hop) % world_size for hop in range(1, world_size)]
        self._spare: list[torch.Tensor] = []
        self._under_way: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="bytescheduler-gloo", daemon=True)
        self._thread.start()

    def start(self, tensor: torch.Tensor, tag: int, done: Done) -> None:
        """Begin to average ``tensor``, one-dimensional, in place; ``tag`` is alike on all ranks."""
        stages = self._pair(tensor, tag) if self._size == 2 else self._scatter(tensor, tag)
        self._advance(stages, done)

    def close(self) -> None:
        """End the thread as soon as nothing is under way."""
        self._under_way.put(None)

    def _watch(self) -> None:
        while (step := self._under_way.get()) is not None:
            step()

    def _advance(self, stages: Iterator[Works], done: Done, works: Works = ()) -> None:
        """Wait for ``works``, then send what comes next, or be done."""
        try:
            for work in works:
                work.wait()
            following = next(stages, None)
        except RuntimeError as error:
            done(error)
            return
        if following is None:
            done(None)
        else:
            self._under_way.put(partial(self._advance, stages, done, following))

    def _pair(self, tensor: torch.Tensor, tag: int) -> Iterator[Works]:
        (peer,) = self._others
        memory, theirs = self._borrow(tensor)
        yield [
            self._group.recv([theirs], peer, tag),
            self._group.send([tensor], peer, tag),
        ]
        _average(tensor, [tensor, theirs])
        self._spare.append(memory)

    def _scatter(self, tensor: torch.Tensor, tag: int) -> Iterator[Works]:
        slices = tensor.tensor_split(self._size)
        mine = slices[self._rank]
        memory = [self._borrow(mine) for _ in self._others]
        parts = {rank: part for rank, (_, part) in zip(self._others, memory, strict=True)}
        yield self._swap(parts, {rank: slices[rank] for rank in self._others}, 2 * tag)
        parts[self._rank] = mine
        _average(mine, [parts[rank] for rank in range(self._size)])
        self._spare += [whole for whole, _ in memory]
        yield self._swap(
            {rank: slices[rank] for rank in self._others},
            dict.fromkeys(self._others, mine),
            2 * tag + 1,
        )

    def _swap(
        self, incoming: dict[int, torch.Tensor], outgoing: dict[int, torch.Tensor], tag: int
    ) -> Works:
        received = [
            self._group.recv([part], rank, tag) for rank, part in incoming.items() if part.numel()
        ]
        sent = [
            self._group.send([part], rank, tag) for rank, part in outgoing.items() if part.numel()
        ]
        return received + sent

    def _borrow(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory, and a tensor of the shape and type of ``like`` in it."""
        size = like.numel() * like.element_size()
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = torch.empty(size, dtype=torch.uint8)
        if memory.numel() < size:
            memory = torch.empty(size, dtype=torch.uint8)
        return memory, memory[:size].view(like.dtype)


def _average(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write the mean of ``parts``, added in their order, to ``out``, which may be one of them.

    In pieces small enough for PyTorch not to open a second pool of threads beside the trainer's.
    """
    for piece, *summands in zip(
        out.split(GRAIN), *(part.split(GRAIN) for part in parts), strict=True
    ):
        total = torch.add(summands[0], summands[1], out=summands[0])
        for summand in summands[2:]:
            total.add_(summand)
        torch.div(total, len(summands), out=piece)
