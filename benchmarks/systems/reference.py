"""What the limit is made of: compute alone, and the exchange alone. Not systems to choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.job import Job
from benchmarks.systems.base import Session, Settings, System
from benchmarks.systems.torch_base import TorchSystem, Wrapped, installed, nothing


class ComputeAlone(TorchSystem):
    """Forward, backward and update, nothing exchanged."""

    name = "compute"
    engine = "gloo"

    def sweep(self, job: Job) -> list[Settings]:
        return [{}]

    def wrap(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> Wrapped:
        return Wrapped(model=model, optimizer=optimizer, close=nothing)


class ExchangeAlone(System):
    """All gradients in one buffer, in pieces of equal size that are started at once."""

    name = "exchange"
    engine = "gloo"

    def missing(self) -> str | None:
        return installed("torch")

    def sweep(self, job: Job) -> list[Settings]:
        return [{"pieces": count} for count in (1, 8, 32)]

    def open(self, job: Job, settings: Mapping[str, Any]) -> Session:
        return _Exchange(job.gradient_bytes, settings["pieces"])


class _Exchange(Session):
    def __init__(self, size: int, pieces: int) -> None:
        import torch

        self._pieces = torch.full((max(1, size // 4),), 1e-3).chunk(pieces)

    def iterate(self) -> None:
        from torch import distributed as dist

        for work in [dist.all_reduce(piece, async_op=True) for piece in self._pieces]:
            work.wait()

    def close(self) -> None:
        self._pieces = ()
