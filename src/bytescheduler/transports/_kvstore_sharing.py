"""Small collectives on bytes, for set-up time: gather and broadcast, bit for bit.

Every worker contributes bytes that lie in a range of its own, zeros elsewhere, and the servers add.
They add floating-point numbers only, so two bytes travel as one number below 65,536 in float32: all
dtypes, signed zeros and NaN payloads included, arrive as they were. That is twice the traffic of a
float32 array, once per job.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from bytescheduler.transports._kvstore_engine import Array, Store, zeros

__all__ = ["BLOCKS", "SMALL", "Sharing"]

SMALL: Final = 1 << 10  # elements of the key for little content
BLOCKS: Final = (1 << 17,) * 4  # elements of the keys for much, several in flight
_LENGTH: Final = np.dtype(np.int64)


class Sharing:
    """Collective sums of bytes; all workers call the same with the same sizes.

    Args:
        small: a key of ``SMALL`` elements.
        blocks: a key for each of ``BLOCKS``.
        wait: waits for an event; raises when the job has failed.
    """

    def __init__(
        self,
        store: Store,
        small: int,
        blocks: Sequence[int],
        wait: Callable[[threading.Event], None],
    ) -> None:
        self._store = store
        self._small = [_Block(store, small, SMALL)]
        self._large = [
            _Block(store, key, length) for key, length in zip(blocks, BLOCKS, strict=True)
        ]
        self._wait = wait

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all workers, by rank."""
        rank, workers = self._store.rank, self._store.workers
        lengths = np.zeros(workers, _LENGTH)
        lengths[rank] = len(payload)
        self.add(lengths.view(np.uint16))
        longest = (int(lengths.max()) + 1) // 2 * 2
        everything = np.zeros(workers * longest, np.uint8)
        begin = rank * longest
        everything[begin : begin + len(payload)] = np.frombuffer(payload, np.uint8)
        self.add(everything.view(np.uint16))
        return [
            everything[other * longest : other * longest + int(length)].tobytes()
            for other, length in enumerate(lengths)
        ]

    def broadcast(self, content: Array) -> None:
        """Overwrite ``content`` (bytes, one-dimensional, contiguous) with rank 0's."""
        words = np.zeros((content.size + 1) // 2, np.uint16)
        if self._store.rank == 0:
            words.view(np.uint8)[: content.size] = content
        self.add(words)
        content[:] = words.view(np.uint8)[: content.size]

    def add(self, words: Array) -> None:
        """Overwrite ``words`` (uint16) with the sums; at most one worker's word is not zero."""
        blocks = self._small if words.size <= SMALL else self._large
        pending: list[tuple[_Block, Array]] = []
        for block, part in _parts(words, blocks):
            if len(pending) == len(blocks):
                self._end(*pending.pop(0))
            block.begin(part)
            pending.append((block, part))
        for block, part in pending:
            self._end(block, part)

    def _end(self, block: _Block, part: Array) -> None:
        self._wait(block.done)
        part[:] = block.buffer[: part.size].astype(np.uint16)


class _Block:
    """One key, its buffer, and an event for the round that is open."""

    def __init__(self, store: Store, key: int, length: int) -> None:
        self._store = store
        self._key = key
        self.buffer = zeros(length)
        self.array = store.engine.array(self.buffer)
        self.done = threading.Event()

    def begin(self, part: Array) -> None:
        self.done.clear()
        self.buffer[: part.size] = part
        self.buffer[part.size :] = 0
        self._store.push_pull((self._key,), (self.array,), 0)
        self._store.engine.when_ready(self.done.set, read=(self.array,))


def _parts(words: Array, blocks: Sequence[_Block]) -> Iterator[tuple[_Block, Array]]:
    start = turn = 0
    while start < words.size:
        block = blocks[turn % len(blocks)]
        yield block, words[start : start + block.buffer.size]
        start += block.buffer.size
        turn += 1
