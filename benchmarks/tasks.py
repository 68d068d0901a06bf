"""What is trained: a model and a function that runs its forward."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from benchmarks.emulated import EmulatedModel, make_input
from benchmarks.job import Job

Loss = Callable[[nn.Module], Tensor]


def emulated_task(job: Job) -> tuple[nn.Module, Loss]:
    """A job on the emulated accelerator."""
    x = make_input()
    return EmulatedModel(job), lambda model: model(x).sum()
