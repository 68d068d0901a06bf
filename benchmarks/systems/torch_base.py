"""What the systems over PyTorch share: the user's training loop."""

from __future__ import annotations

import importlib.util
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.job import Job
from benchmarks.systems.base import Session, System

if TYPE_CHECKING:
    import torch
    from torch import nn

ITERATIONS_UNTIL_ASKED = 8
SIZES_AND_MODE = ("mode", "partition_size", "credit_size")
Task = Callable[[], tuple["nn.Module", Callable[["nn.Module"], "torch.Tensor"]]]


def installed(module: str) -> str | None:
    """None if ``module`` can be imported, otherwise what is missing."""
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


@dataclass(slots=True, kw_only=True)
class Wrapped:
    """A wrapped job: what the loop calls.

    Attributes:
        settled: whether what has to be learnt is learnt, on rank 0.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    close: Callable[[], None]
    settled: Callable[[], bool] = lambda: True


class TorchSession(Session):
    """The loop that a user writes: zero, forward, backward, step."""

    def __init__(self, wrapped: Wrapped, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        self._wrapped = wrapped
        self._loss = loss

    def iterate(self) -> None:
        self._wrapped.optimizer.zero_grad()
        self._loss(self._wrapped.model).backward()
        self._wrapped.optimizer.step()

    def settle(self) -> list[dict[str, Any]]:
        import torch
        from torch import distributed

        history: list[dict[str, Any]] = []
        going_on = torch.ones(1)
        while going_on:
            for _ in range(ITERATIONS_UNTIL_ASKED):
                self.iterate()
                history.append({"at": time.time(), "settings": self._settings()})
            going_on[:] = not self._wrapped.settled()
            distributed.broadcast(going_on, 0)
        return history

    def _settings(self) -> dict[str, Any]:
        settings = getattr(self._wrapped.optimizer, "settings", None)
        return {name: getattr(settings, name) for name in SIZES_AND_MODE} if settings else {}

    def close(self) -> None:
        self._wrapped.close()


class TorchSystem(System):
    """A system that wraps a PyTorch model and its optimizer."""

    def missing(self) -> str | None:
        return installed("torch")

    def open(self, job: Job, settings: Mapping[str, Any]) -> Session:
        from benchmarks.tasks import emulated_task

        model, loss = emulated_task(job)
        return self.open_task(model, loss, settings)

    def open_task(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module], torch.Tensor],
        settings: Mapping[str, Any],
    ) -> Session:
        """Wrap any model; ``loss`` runs a forward of what it is given."""
        import torch

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return TorchSession(self.wrap(model, optimizer, settings), loss)

    @abstractmethod
    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
    ) -> Wrapped:
        """Make the pair train over all workers (collective)."""


def nothing() -> None:
    """For systems that have nothing to undo."""
