"""What is trained: a model, and a function that runs the forward of whatever wraps it."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.digits import load_digits, make_network
from benchmarks.emulated import EmulatedModel, make_input
from benchmarks.job import Job
from benchmarks.text import VOCABULARY, SmallTransformer, documentation, windows

Loss = Callable[[nn.Module], Tensor]
Task = tuple[nn.Module, Loss]


def emulated_task(job: Job) -> Task:
    """A job on the emulated accelerator."""
    x = make_input()
    return EmulatedModel(job), lambda model: model(x).sum()


def _place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def cnn_task(*, batch: int = 96, width: int = 32) -> Task:
    """A small VGG on digits."""
    batches = cycle(load_digits(*_place())[0].batches(batch, seed=0))

    def loss(model: nn.Module) -> Tensor:
        images, labels = next(batches)
        return functional.cross_entropy(model(images), labels)

    return make_network(seed=0, width=width), loss


def transformer_task(*, batch: int = 16) -> Task:
    """A small transformer on Python's documentation."""
    torch.manual_seed(0)
    model = SmallTransformer()
    batches = windows(documentation(), model.context, batch=batch, seed=_place()[0])

    def loss(model: nn.Module) -> Tensor:
        tokens = next(batches)
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    return model, loss


REAL_TASKS: dict[str, Callable[[], Task]] = {
    "cnn": lambda: cnn_task(width=64),
    "cnn-small": cnn_task,
    "cnn-long": lambda: cnn_task(width=64, batch=384),
    "transformer": transformer_task,
    "transformer-long": lambda: transformer_task(batch=64),
    "small": lambda: cnn_task(batch=16),
}
