"""A job whose iteration time is a formula, so that thousands of iterations cost nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

from bytescheduler.core.config import Settings
from bytescheduler.tuning.auto import AutoTuner
from bytescheduler.tuning.space import Space

TOTAL_BYTES = 32 << 20
START = Settings(mode="auto")


class AnalyticJob:
    """Seconds: ``compute`` and, on top, overhead per chunk, the tail that a chunk leaves, and what
    the schedule exposes of the exchange.

    Args:
        exchange: seconds that all gradients take; may be changed while it runs.
        overhead: seconds per chunk.
        noise: deviation of an iteration, relative.
    """

    def __init__(
        self,
        *,
        exchange: float = 0.1,
        overhead: float = 1e-4,
        compute: float = 0.1,
        noise: float = 0.02,
        seed: int = 0,
    ) -> None:
        self.exchange = exchange
        self.overhead = overhead
        self.compute = compute
        self.noise = noise
        self.random = random.Random(seed)
        self.space = Space(total_bytes=TOTAL_BYTES, base=Settings())
        self.settings = START
        self.now = 0.0
        self.lost = 0.0
        self.iterations = 0

    def seconds(self, settings: Settings) -> float:
        chunks = TOTAL_BYTES / settings.partition_size
        in_flight = settings.credit_size / TOTAL_BYTES
        exposed = {"barrier": 0.5, "fifo": 0.3}.get(settings.mode, 0.0)
        tail = (1 / chunks + in_flight) * self.exchange * (settings.mode != "barrier")
        starved = 0.1 * self.exchange * (settings.credit_size == settings.partition_size)
        cost = 0.0 if settings.mode == "barrier" else self.overhead * chunks
        return self.compute + exposed * self.exchange + tail + starved + cost

    def best(self) -> float:
        return min(self.seconds(settings) for settings in self.space.candidates())

    def tuner(self, **arguments: object) -> AutoTuner:
        tuner = AutoTuner(self.space, initial=self.settings, **arguments)  # type: ignore[arg-type]
        tuner.step(self.now)
        return tuner

    def run(
        self,
        tuner: AutoTuner,
        until: Callable[[], bool],
        limit: int = 5000,
        disturbed: Callable[[int], float] = lambda iteration: 1.0,
    ) -> None:
        """Iterate until ``until()``; ``disturbed`` multiplies an iteration's time."""
        best = self.best()
        for iteration in range(limit):
            if until():
                return
            noise = 1 + self.noise * abs(self.random.gauss(0, 1))
            seconds = self.seconds(self.settings) * noise * disturbed(iteration)
            self.lost += self.seconds(self.settings) - best
            self.now += seconds
            self.iterations += 1
            self.settings = tuner.step(self.now) or self.settings
        raise AssertionError(f"not reached within {limit} iterations")

    def tune(self, tuner: AutoTuner | None = None, limit: int = 5000) -> AutoTuner:
        tuner = tuner or self.tuner()
        self.run(tuner, lambda: not tuner.searching, limit)
        return tuner

    def excess(self) -> float:
        """How far the settings in force are from the best, relative."""
        return self.seconds(self.settings) / self.best() - 1
