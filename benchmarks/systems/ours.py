"""This project: its orders over one engine, and its own choice of them."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.job import Job, nearest_power_of_two, unique
from benchmarks.systems.base import Settings
from benchmarks.systems.torch_base import TorchSystem, Wrapped

CHUNKS_OF_TWO = (128, 64, 256)
"""Chunks per model with two workers; a chunk takes as many messages more as there are workers."""
CREDITS = (4, 2)
DEFAULTS: Settings = {}
"""Sizes that follow the bandwidth, which those above do not."""


class PrioritySystem(TorchSystem):
    """``ScheduledOptimizer`` with sizes that stay as they are."""

    name = "bytescheduler"
    engine = "gloo"
    mode = "priority"
    transport = "torch"

    def sweep(self, job: Job) -> list[Settings]:
        share = job.workers / 2
        sizes = [nearest_power_of_two(job.gradient_bytes * share / n) for n in CHUNKS_OF_TWO]
        first, *others = [
            {"partition_size": size, "credit_size": size * credit}
            for size in sizes
            for credit in CREDITS
        ]
        return unique([first, DEFAULTS, *others])

    def wrap(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> Wrapped:
        import bytescheduler.torch as bs

        scheduled = bs.ScheduledOptimizer(
            optimizer, model, mode=self.mode, transport=self.transport, **settings
        )
        return Wrapped(model=model, optimizer=scheduled, close=scheduled.unwrap)


class FifoSystem(PrioritySystem):
    """The same engine without priorities."""

    name = "fifo"
    mode = "fifo"


class BarrierSystem(PrioritySystem):
    """The same engine with neither priorities nor gates."""

    name = "barrier"
    mode = "barrier"


class AutoSystem(PrioritySystem):
    """The default: mode and sizes found by the package itself in a session before, and remembered.

    Repeats are shorter than the tuner's start-up, so they run under what was found and are not
    disturbed by the search that would follow.
    """

    name = "bytescheduler-auto"
    mode = "auto"
    learns = True

    def sweep(self, job: Job) -> list[Settings]:
        return [{}]

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        return {"XDG_CACHE_HOME": _memory().name}

    def wrap(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> Wrapped:
        wrapped = super().wrap(model, optimizer, settings)
        return replace(wrapped, settled=_News(Path(os.environ["XDG_CACHE_HOME"])))


@functools.cache
def _memory() -> tempfile.TemporaryDirectory[str]:
    """The lab's own cache directory: not the user's, and gone with the lab."""
    return tempfile.TemporaryDirectory(prefix="bytescheduler-lab-")


def remembered(folder: Path) -> dict[Path, int]:
    """The tuner's files in a cache directory, with their times."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}


class _News:
    """Whether the tuner has remembered something since it was asked last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = remembered(folder)

    def __call__(self) -> bool:
        known, self._known = self._known, remembered(self._folder)
        return self._known != known
