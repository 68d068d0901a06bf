"""Time on an emulated accelerator."""

from __future__ import annotations

import os
import random
import time

from benchmarks.job import Job


class Device:
    """Sleeps for as long as an accelerator would compute.

    ``sleep`` always oversleeps a little. An accelerator does not, so what one layer took too long
    is taken off the next: the sum is right to within one layer. The host's own work between
    layers is *not* taken off; it counts in full, as on a device that waits for its host.

    Args:
        job: whose layers compute here, each once forward and once backward in an iteration. By its
            skew some iterations take longer, on each rank others, for every system the same.
    """

    def __init__(self, job: Job) -> None:
        self._debt = 0.0
        self._skew = job.skew
        self._calls_per_iteration = 2 * len(job.layers)
        self._calls = 0
        self._slower = 1.0
        self._random = random.Random(os.environ.get("RANK"))

    def compute(self, seconds: float) -> None:
        """Let ``seconds`` of compute pass, or as much more as this iteration is slower."""
        if self._calls % self._calls_per_iteration == 0:
            self._slower = 1.0 + self._skew * self._random.random()
        self._calls += 1
        wanted = self._slower * seconds - self._debt
        if wanted <= 0:
            self._debt = -wanted
            return
        begin = time.perf_counter()
        time.sleep(wanted)
        self._debt = time.perf_counter() - begin - wanted
