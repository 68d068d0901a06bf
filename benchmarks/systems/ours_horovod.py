"""This project over Horovod: the same adapter, another transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.systems.ours import PrioritySystem
from benchmarks.systems.torch_base import installed

ADVISED = {
    "HOROVOD_CYCLE_TIME": "0.5",
    "HOROVOD_FUSION_THRESHOLD": str(256 << 10),
    "HOROVOD_CACHE_CAPACITY": "16384",
}
"""What docs/horovod.md tells users to set."""


class PrioritySystemOverHorovod(PrioritySystem):
    """``ScheduledOptimizer(transport="horovod")``."""

    name = "bytescheduler-horovod"
    engine = "horovod"
    transport = "horovod"

    def missing(self) -> str | None:
        return super().missing() or installed("horovod")

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        return ADVISED
