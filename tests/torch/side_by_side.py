"""Train the same model with DistributedDataParallel and with us, and compare the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bytescheduler.torch as bs

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
SMALL = {"partition_size": 512, "credit_size": 2048}


def batches(rank: int, count: int, make: Callable[[torch.Generator], Any]) -> list[Any]:
    """``count`` batches of this rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [make(generator) for _ in range(count)]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest absolute difference by name, where there is one."""
    assert one.keys() == other.keys()
    found = {}
    for name, tensor in one.items():
        if not torch.equal(tensor, other[name]):
            found[name] = float((tensor.double() - other[name].double()).abs().max())
    return found


def plain_loop(
    model: Any, optimizer: Any, data: list[Any], loss: Callable[[Any, Any], Any]
) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def train_ddp(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    data: list[Any],
    loss: Callable[[Any, Any], Any],
    loop: Callable[..., None] = plain_loop,
    **ddp: Any,
) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, **ddp)
    loop(wrapped, make_optimizer(model.parameters()), data, loss)
    result = weights(model)
    dist.barrier()
    return result


def train_ours(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    data: list[Any],
    loss: Callable[[Any, Any], Any],
    loop: Callable[..., None] = plain_loop,
    **ours: Any,
) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    optimizer = bs.ScheduledOptimizer(
        make_optimizer(model.parameters()), model, **{**SMALL, **ours}
    )
    with optimizer:
        loop(model, optimizer, data, loss)
        return weights(model)


def compare(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    data: list[Any],
    loss: Callable[[Any, Any], Any],
    loop: Callable[..., None] = plain_loop,
    ddp: dict[str, Any] | None = None,
    **ours: Any,
) -> dict[str, float]:
    """Differences between the weights after training both ways."""
    expected = train_ddp(model, make_optimizer, data, loss, loop, **(ddp or {}))
    actual = train_ours(model, make_optimizer, data, loss, loop, **ours)
    return differences(expected, actual)
