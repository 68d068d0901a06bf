"""The settings that are tried: a finite grid, in octaves, bounded by the size of the model.

Iteration time depends on sizes through their logarithm, and two settings that are less than a
factor of two apart can hardly be told from each other by measuring. So nothing is lost by a grid
of powers of two, and a search over a few hundred points needs no optimiser inside: the acquisition
function is simply evaluated everywhere. What cannot win is left out: more than ``MAX_CHUNKS``
chunks (overhead), chunks larger than the model (all equal to one chunk), credit beyond the model.

Two settings are anchors, tried whatever happens: what DistributedDataParallel does (large buckets,
barrier), and our default. They are why tuning never ends on something slower than either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescheduler.core.config import (
    BARRIER_CREDIT_SIZE,
    BARRIER_PARTITION_SIZE,
    PARTITION_LIMITS,
    Mode,
    Settings,
)

__all__ = ["SCHEDULES", "Space", "features"]

SCHEDULES: Final[tuple[Mode, ...]] = ("priority", "fifo", "barrier")
MAX_CHUNKS: Final = 1024
MIN_PARTITION_SIZE: Final = 16 << 10
MAX_PARTITION_SIZE: Final = 64 << 20
CREDITS_IN_PARTITIONS: Final = (1, 2, 4, 8, 16)
ANCHOR_CHUNKS: Final = 32
FIRST_CHUNKS: Final = (64, 256)  # chunks per model in the first guesses


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The candidates for a model of ``total_bytes`` of gradients.

    Attributes:
        total_bytes: bytes of all gradients of one rank.
        base: the user's settings: where the search starts, and what it leaves alone.
    """

    total_bytes: int
    base: Settings

    @property
    def users(self) -> Settings:
        """The user's own sizes, under priority; the second anchor where they were left alone."""
        return self.at("priority", self.base.partition_size, self.base.credit_size)

    @property
    def anchors(self) -> tuple[Settings, Settings]:
        """Large buckets with a barrier, and priority with chunks that suit many networks."""
        low, high = PARTITION_LIMITS
        size = min(max(self.total_bytes // ANCHOR_CHUNKS, low), high)
        return (
            self.at("barrier", BARRIER_PARTITION_SIZE, BARRIER_CREDIT_SIZE),
            self.at("priority", size, 4 * size),
        )

    @property
    def known(self) -> tuple[Settings, ...]:
        """What nobody should be slower than for having tuned; of equals, the first is kept."""
        barrier, default = self.anchors
        return barrier, self.users, default

    @property
    def first_guesses(self) -> tuple[Settings, ...]:
        """Priority with chunks of a size that suits the model: medium, then small."""
        sizes = {self._partition(self.total_bytes // chunks): None for chunks in FIRST_CHUNKS}
        return tuple(self.at("priority", size, 4 * size) for size in sizes)

    def candidates(self) -> list[Settings]:
        """All settings of the grid, each once."""
        found = [
            self.at(mode, size, size * count)
            for mode in SCHEDULES
            for size in self._partitions()
            for count in CREDITS_IN_PARTITIONS
        ]
        return list(dict.fromkeys([self.users, *self.anchors, *self.first_guesses, *found]))

    def at(self, mode: Mode, partition_size: int, credit_size: int) -> Settings:
        """The settings, credit cut to what the model can have in flight."""
        credit = max(partition_size, min(credit_size, _octave_above(self.total_bytes)))
        return replace(self.base, mode=mode, partition_size=partition_size, credit_size=credit)

    def _partitions(self) -> list[int]:
        size = self._partition(self.total_bytes // MAX_CHUNKS)
        largest = self._partition(self.total_bytes)
        sizes = [size]
        while sizes[-1] < largest:
            sizes.append(2 * sizes[-1])
        return sizes

    def _partition(self, size: int) -> int:
        return min(max(_octave_above(size), MIN_PARTITION_SIZE), MAX_PARTITION_SIZE)


def features(settings: Settings) -> npt.NDArray[np.float64]:
    """Coordinates in which near settings take about equally long: octaves, and the schedule.

    Returns:
        Shape (4,): log2 of the partition size, log2 of credit over partition, and two 0/1 flags:
        out of order (not priority), barrier.
    """
    return np.array(
        [
            np.log2(settings.partition_size),
            np.log2(settings.credit_size / settings.partition_size),
            float(settings.mode in ("fifo", "barrier")),
            float(settings.mode == "barrier"),
        ]
    )


def _octave_above(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
