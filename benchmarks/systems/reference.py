"""What limits are made of: compute, the exchange, and both side by side. Not systems to choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class ComputeBesideExchange(ComputeAlone):
    """Compute, and beside it an exchange of as many bytes that no layer waits for.

    What both take together on processors that they share: no order of chunks is faster.
    """

    name = "side-by-side"

    def sweep(self, job: Job) -> list[Settings]:
        return ExchangeAlone().sweep(job)

    def open_task(
        self, model: Any, loss: Callable[[Any], Any], settings: Mapping[str, Any]
    ) -> Session:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        exchange = _Exchange(size, settings["pieces"])
        compute = super().open_task(model, loss, settings)
        return _SideBySide(compute, exchange)


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

    def start(self) -> list[Any]:
        from torch import distributed as dist

        return [dist.all_reduce(piece, async_op=True) for piece in self._pieces]

    def iterate(self) -> None:
        for work in self.start():
            work.wait()

    def close(self) -> None:
        self._pieces = ()


class _SideBySide(Session):
    def __init__(self, compute: Session, exchange: _Exchange) -> None:
        self._compute = compute
        self._exchange = exchange

    def iterate(self) -> None:
        works = self._exchange.start()
        self._compute.iterate()
        for work in works:
            work.wait()

    def close(self) -> None:
        self._compute.close()
        self._exchange.close()
