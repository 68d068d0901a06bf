"""This project over Horovod: the same adapter, another transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.job import Job, nearest_power_of_two
from benchmarks.systems.base import Settings
from benchmarks.systems.ours import PrioritySystem
from benchmarks.systems.torch_base import installed
from bytescheduler.transports.horovod import DEFAULTS

CHUNKS = ((64, 2), (64, 4), (128, 2), (128, 4), (32, 2), (32, 4))
"""In the model, and of the credit; Horovod does the chunks of one cycle one after the other."""


class PrioritySystemOverHorovod(PrioritySystem):
    """``ScheduledOptimizer(transport="horovod")``."""

    name = "bytescheduler-horovod"
    engine = "horovod"
    transport = "horovod"

    def missing(self) -> str | None:
        return super().missing() or installed("horovod")

    def sweep(self, job: Job) -> list[Settings]:
        sizes = [(nearest_power_of_two(job.gradient_bytes / n), credit) for n, credit in CHUNKS]
        return [{"partition_size": size, "credit_size": size * credit} for size, credit in sizes]

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        return DEFAULTS
