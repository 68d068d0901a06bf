"""Ranks of the engine tests: each row trains small models and compares weights.

Started by an engine's launcher as ``FILE FOLDER ROW...``; every row is a function that raises where
the behaviour is not the documented one, and its verdict goes to ``FOLDER/<rank>.json``.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import bytescheduler.torch as bs

STEPS = 4

Wrap = Callable[[torch.optim.Optimizer, nn.Module], Any]
Loop = Callable[[Any, nn.Module, Callable[[], torch.Tensor]], None]
Weights = dict[str, torch.Tensor]


def write_verdicts(
    rows: Mapping[str, Callable[[], None]], names: Sequence[str], rank: int, folder: Path
) -> None:
    verdicts: dict[str, str] = {}
    for name in names:
        try:
            rows[name]()
        except BaseException:
            verdicts[name] = traceback.format_exc()
            break
        finally:
            (folder / f"{rank}.json").write_text(json.dumps(verdicts))
        verdicts[name] = "ok"
    (folder / f"{rank}.json").write_text(json.dumps(verdicts))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))


def plain_loop(optimizer: Any, model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def scheduled(transport: str, **options: Any) -> Wrap:
    options = {"partition_size": 256, "credit_size": 1024, **options}
    return lambda optimizer, model: bs.ScheduledOptimizer(
        optimizer, model, transport=transport, **options
    )


def train(
    wrap: Wrap,
    rank: int,
    *,
    build: Callable[[], nn.Module] = network,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    loop: Loop = plain_loop,
    steps: int = STEPS,
    inputs: Callable[[torch.Generator], torch.Tensor] = lambda g: torch.randn(4, 10, generator=g),
) -> Weights:
    """Train on this rank's own data and return the weights."""
    torch.manual_seed(7)
    model = build()
    optimizer = wrap(make(model.parameters(), lr=0.1), model)
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x, y = inputs(generator), torch.randint(3, (4,), generator=generator)
        loop(optimizer, model, lambda x=x, y=y: F.cross_entropy(model(x), y))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if isinstance(optimizer, bs.ScheduledOptimizer):
        optimizer.unwrap()
    return weights


def one_process(
    world_size: int, *, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
) -> Weights:
    """What ``train`` must give: every rank's gradients, summed in order and divided, here."""
    torch.manual_seed(7)
    model = network()
    optimizer = make(model.parameters(), lr=0.1)
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(world_size):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            x = torch.randn(4, 10, generator=generator)
            y = torch.randint(3, (4,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += torch.zeros_like(p) if p.grad is None else p.grad
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total / world_size
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(ours: Weights, theirs: Weights, *, tolerance: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, n=name: f"{n}: {text}",
        )
