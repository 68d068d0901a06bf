"""Optimus' rule for stragglers: a worker at half the median speed or less is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["find_stragglers"]

STRAGGLER_FRACTION = 0.5


def find_stragglers(speeds: Sequence[float]) -> list[int]:
    """Return the ranks whose speed (steps/s) is at most half of the median."""
    if len(speeds) < 2:
        return []
    limit = STRAGGLER_FRACTION * median(speeds)
    return [rank for rank, speed in enumerate(speeds) if speed <= limit]
