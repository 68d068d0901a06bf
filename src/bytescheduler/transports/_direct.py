"""Averages over few ranks by sending straight to each of them, on Gloo's ``send`` and ``recv``.

Gloo's own ``all_reduce`` is a ring of two dependent phases in segments: eight messages for a chunk
between two ranks, each with a wake-up of a thread or two. Where a chunk is as small as ours that
costs more processor time than moving the bytes does. Sent straight, the same bytes take one message
each way between two ranks, and between more two phases instead of ``2 (n - 1)``: every rank sums
one slice (reduce-scatter), then hands it to all others (all-gather). The number of messages grows
with the square of the ranks, so it is for ``MOST_RANKS`` at most; and what is larger than
``MOST_BYTES`` is better off in a ring, which adds one segment while it receives the next.

Summands are added in the order of the ranks, wherever a chunk was cut: among sizes up to that, the
average of a gradient does not depend on the partition size, as it does to the last bits in a ring.

Gloo offers no call-back for a message, so a thread waits for them, in the order in which they were
sent. When what it waits for is not ready on another rank yet, one more thread sees to those behind
it, and ends when there are none.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, Final

import torch

from bytescheduler.transports.base import Done

__all__ = ["MOST_BYTES", "MOST_RANKS", "DirectAverage"]

MOST_RANKS: Final = 8
MOST_BYTES: Final = 1 << 20
GRAIN: Final = 1 << 15  # elements, up to which PyTorch adds in the calling thread
PATIENCE: Final = 3.0  # times what waiting for a message usually takes
LEAST_PATIENCE: Final = 5e-3  # seconds
WEIGHT: Final = 0.1  # of the last one in what is usual

Works = Sequence[Any]
Pieces = Sequence[torch.Tensor]
_Item = tuple[Iterator[Works], Works, Done]


class DirectAverage:
    """Averages tensors over the ranks of a Gloo group.

    Args:
        group: the process group; nothing else may send point to point in it.
        rank, world_size: of the group; ``world_size`` from 2 to ``MOST_RANKS``.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self._group = group
        self._rank = rank
        self._others = [(rank + hop) % world_size for hop in range(1, world_size)]
        self._spare: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._under_way: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._watchers: dict[threading.Thread, float] = {}  # since when each waits for a message
        self._usual = 0.0  # seconds that it takes
        self._lock = threading.Lock()
        self._add_watcher()

    def start(self, tensor: torch.Tensor, tag: int, done: Done) -> None:
        """Begin to average ``tensor``, one-dimensional, in place; ``tag`` is alike on all ranks."""
        stages = self._swap_whole if len(self._others) == 1 else self._swap_slices
        self._advance(stages(tensor, tag), (), done)

    def look(self) -> None:
        """See to messages behind one that is late; also done with each that is sent."""
        if not self._under_way.empty() and self._held_up():
            self._add_watcher()

    def forget(self) -> None:
        """Give back memory that was kept for chunks of sizes which do not come any more."""
        self._spare.clear()

    def close(self, timeout: float) -> None:
        """End the threads as soon as nothing is under way; wait ``timeout`` seconds for each.

        A thread that outlived the interpreter inside of Gloo would abort the process.
        """
        self._under_way.put(None)
        with self._lock:
            watchers = self._watchers.keys() - {threading.current_thread()}
        for watcher in watchers:
            watcher.join(timeout)

    def _add_watcher(self) -> None:
        watcher = threading.Thread(target=self._watch, name="bytescheduler-gloo", daemon=True)
        with self._lock:
            self._watchers[watcher] = inf
        watcher.start()

    def _watch(self) -> None:
        watcher = threading.current_thread()
        while (item := self._take(watcher)) is not None:
            self._advance(*item)
            with self._lock:
                seconds = time.perf_counter() - self._watchers[watcher]
                self._watchers[watcher] = inf
                self._usual += WEIGHT * (seconds - self._usual)

    def _take(self, watcher: threading.Thread) -> _Item | None:
        """What is to be waited for next; None when this watcher shall end."""
        with self._lock:
            if len(self._watchers) > 1 and self._under_way.empty():
                del self._watchers[watcher]
                return None
        item = self._under_way.get()
        if item is None:
            self._under_way.put(None)  # for the others
            return None
        with self._lock:
            self._watchers[watcher] = time.perf_counter()
        return item

    def _held_up(self) -> bool:
        """All watchers have waited for some time, each for one message."""
        with self._lock:
            patience = max(PATIENCE * self._usual, LEAST_PATIENCE)
            return time.perf_counter() - max(self._watchers.values()) > patience

    def _advance(self, stages: Iterator[Works], works: Works, done: Done) -> None:
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
            self._under_way.put((stages, following, done))
            self.look()

    def _swap_whole(self, tensor: torch.Tensor, tag: int) -> Iterator[Works]:
        (peer,) = self._others
        theirs = self._borrow(tensor)
        yield self._swap({peer: theirs}, {peer: tensor}, tag)
        _average(tensor, [tensor, theirs])
        self._give_back([theirs])

    def _swap_slices(self, tensor: torch.Tensor, tag: int) -> Iterator[Works]:
        slices = tensor.tensor_split(len(self._others) + 1)
        mine = slices[self._rank]
        outgoing = {rank: slices[rank] for rank in self._others}
        parts = {rank: self._borrow(mine) for rank in self._others}
        yield self._swap(parts, outgoing, 2 * tag)
        borrowed = list(parts.values())
        parts[self._rank] = mine
        _average(mine, [parts[rank] for rank in range(len(slices))])
        self._give_back(borrowed)
        yield self._swap(outgoing, dict.fromkeys(self._others, mine), 2 * tag + 1)

    def _swap(
        self, incoming: dict[int, torch.Tensor], outgoing: dict[int, torch.Tensor], tag: int
    ) -> Works:
        receive, send = self._group.recv, self._group.send
        received = [receive([part], rank, tag) for rank, part in incoming.items() if part.numel()]
        return received + [
            send([part], rank, tag) for rank, part in outgoing.items() if part.numel()
        ]

    def _borrow(self, like: torch.Tensor) -> torch.Tensor:
        try:
            return self._spare[like.numel(), like.dtype].pop()
        except (KeyError, IndexError):  # none yet, or another thread has just taken the last
            return torch.empty_like(like)

    def _give_back(self, borrowed: Pieces) -> None:
        for tensor in borrowed:
            self._spare.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)


def _average(out: torch.Tensor, parts: Pieces) -> None:
    """Write the mean of ``parts``, added in their order, to ``out``, which is one of them.

    In pieces small enough for PyTorch not to open a second pool of threads beside the trainer's.
    """
    if out.numel() > GRAIN:
        for pieces in zip(*(tensor.split(GRAIN) for tensor in (out, *parts)), strict=True):
            _average(pieces[0], pieces[1:])
        return
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    torch.div(total, len(parts), out=out)
