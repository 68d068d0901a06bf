"""Honest samples: how long an iteration takes under some settings, and how sure that is.

A sample is the median of consecutive iterations. The median does not see the odd checkpoint,
evaluation or data stall; its standard error comes from the median absolute deviation, which does
not either. Measuring goes on until the error is small for the noise that is there, and ends early
for settings that are clearly bad, because those cost most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from bytescheduler.core.config import Settings

__all__ = ["CLEARLY_BAD", "Sample", "enough", "pooled", "summarise"]

MIN_ITERATIONS: Final = 4
MAX_ITERATIONS: Final = 16
GOOD_ERROR: Final = 0.005  # standard error that a sample aims for, relative
CLEARLY_BAD: Final = 0.25  # slower than the best, relative: two such iterations end a sample
NOISE_FACTOR: Final = 4.0  # or this many times the best one's spread, where that is more
NORMAL_FROM_MAD: Final = 1.4826
MEDIAN_EFFICIENCY: Final = 1.2533  # standard error of a median over that of a mean
MIN_ERROR: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured setting.

    Attributes:
        settings: what was in force.
        seconds: median iteration time.
        error: standard error of ``seconds``, relative to it.
        spread: deviation of one iteration, relative to ``seconds``.
        times: the iterations that it comes from.
    """

    settings: Settings
    seconds: float
    error: float
    spread: float
    times: tuple[float, ...]


def summarise(settings: Settings, times: Sequence[float]) -> Sample:
    """The sample of these iterations, which must be one or more."""
    middle = median(times)
    spread = NORMAL_FROM_MAD * median(abs(value - middle) for value in times) / middle
    # Few values say little about their own spread.
    spread = max(spread, 0.02 if len(times) < MIN_ITERATIONS else 0.0)
    error = max(MEDIAN_EFFICIENCY * spread / math.sqrt(len(times)), MIN_ERROR)
    return Sample(settings=settings, seconds=middle, error=error, spread=spread, times=tuple(times))


def pooled(samples: Sequence[Sample]) -> Sample:
    """One sample out of several of the same settings."""
    return summarise(samples[0].settings, [value for item in samples for value in item.times])


def enough(settings: Settings, times: Sequence[float], best: Sample | None) -> bool:
    """Whether to stop measuring; ``best`` is the fastest sample so far.

    The first sample of all has nothing to be held against and may be a slow one: it is short.
    """
    if best is None:
        return len(times) >= MIN_ITERATIONS
    if len(times) >= 2:
        slower = 1.0 + max(CLEARLY_BAD, NOISE_FACTOR * best.spread)
        if min(times) > slower * best.seconds:
            return True
    if len(times) < MIN_ITERATIONS:
        return False
    return len(times) >= MAX_ITERATIONS or summarise(settings, times).error <= GOOD_ERROR
