"""Horovod: tensors negotiated and fused in cycles, first in first out, a barrier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.job import Job
from benchmarks.systems.base import Settings
from benchmarks.systems.torch_base import TorchSystem, Wrapped, installed, nothing

DEFAULT_FUSION_BYTES = 128 << 20
DEFAULT_CYCLE_MS = 1.0


class HorovodSystem(TorchSystem):
    """Fusion scaled like the model, cycles of 1 ms (the default) and 5 ms."""

    name = "horovod"
    engine = "horovod"

    def missing(self) -> str | None:
        return super().missing() or installed("horovod")

    def sweep(self, job: Job) -> list[Settings]:
        scaled = DEFAULT_FUSION_BYTES / job.scale
        return [
            {"fusion_bytes": max(1, round(scaled * factor)), "cycle_ms": cycle}
            for cycle in (DEFAULT_CYCLE_MS, 5.0)
            for factor in (1, 0.125)
        ]

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        return {
            "HOROVOD_FUSION_THRESHOLD": str(settings["fusion_bytes"]),
            "HOROVOD_CYCLE_TIME": str(settings["cycle_ms"]),
        }

    def wrap(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> Wrapped:
        import horovod.torch as hvd

        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        return Wrapped(model=model, optimizer=wrapped, close=nothing)
