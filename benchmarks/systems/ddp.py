"""PyTorch's DistributedDataParallel: buckets, first in first out, a barrier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.job import Job
from benchmarks.systems.base import Settings
from benchmarks.systems.torch_base import TorchSystem, Wrapped, nothing

DEFAULT_BUCKET_BYTES = 25 << 20


class DistributedDataParallelSystem(TorchSystem):
    """Its default bucket scaled like the model, and sizes around it."""

    name = "ddp"
    engine = "gloo"

    def sweep(self, job: Job) -> list[Settings]:
        scaled = DEFAULT_BUCKET_BYTES / job.scale
        return [{"bucket_bytes": round(scaled * factor)} for factor in (1, 0.25, 0.5, 2, 4)]

    def wrap(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> Wrapped:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=settings["bucket_bytes"] / (1 << 20),
            gradient_as_bucket_view=True,
        )
        return Wrapped(model=wrapped, optimizer=optimizer, close=nothing)
