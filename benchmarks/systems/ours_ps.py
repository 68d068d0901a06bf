"""This project over MXNet's parameter servers: the same adapter, another transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.systems.ours import PrioritySystem
from benchmarks.systems.torch_base import installed


class PrioritySystemOverServers(PrioritySystem):
    """``ScheduledOptimizer(transport="kvstore")``; the servers only add."""

    name = "bytescheduler-ps"
    engine = "servers"
    transport = "kvstore"

    def missing(self) -> str | None:
        return super().missing() or installed("mxnet")

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        """A job of parameter servers lasts as long as its connection: one for each setting."""
        return {"BENCHMARK_PARTITION_SIZE": str(settings.get("partition_size"))}
