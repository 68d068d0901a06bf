"""This project: its orders over one engine, and its own choice of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.job import Job, nearest_power_of_two, unique
from benchmarks.systems.base import Settings
from benchmarks.systems.torch_base import TorchSystem, Wrapped

CHUNKS_PER_MODEL = (128, 64, 256)
CREDITS = (4, 2)


class PrioritySystem(TorchSystem):
    """``ScheduledOptimizer`` in its default mode."""

    name = "bytescheduler"
    engine = "gloo"
    mode = "priority"
    transport = "torch"

    def sweep(self, job: Job) -> list[Settings]:
        sizes = [nearest_power_of_two(job.gradient_bytes / count) for count in CHUNKS_PER_MODEL]
        return unique(
            [
                {"partition_size": size, "credit_size": size * credit}
                for size in sizes
                for credit in CREDITS
            ]
        )

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
    """Mode and sizes measured during warm-up, by the package itself."""

    name = "bytescheduler-auto"
    mode = "auto"

    def sweep(self, job: Job) -> list[Settings]:
        return [{}]
