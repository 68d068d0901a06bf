"""What a rank wants to train and how, checked here and compared with the other ranks.

Everything that can be wrong on one rank is checked inside of the collective comparison, so that a
mistake on one rank is an error on all of them and nobody waits for a rank that gave up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bytescheduler.core import Settings
from bytescheduler.exceptions import UsageError
from bytescheduler.torch.agreement import agree
from bytescheduler.torch.slots import facts_of, trainable
from bytescheduler.transports.base import Transport

__all__ = ["Proposal", "agree_on"]


class Proposal:
    """One rank's optimizer, model and settings.

    Attributes:
        named: the parameters that go through the flat buffer, by name.
        sparse: the parameters whose gradients are sparse.

    Raises:
        UsageError: optimizer and model do not fit together.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, settings: Settings) -> None:
        _check_fit(optimizer, model)
        self.optimizer = optimizer
        self.settings = settings
        self._model = model
        self.sparse = _sparse_parameters(model, optimizer)
        self.named = trainable(model, optimizer, self.sparse)
        if not self.named and not self.sparse:
            raise UsageError(
                "optimizer must train at least one parameter of model with requires_grad=True, "
                "got none; build the optimizer from model.parameters()"
            )

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks."""
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        return {
            **facts_of(self._model.named_parameters(), "parameter"),
            **facts_of(self._model.named_buffers(), "buffer"),
            **{f"training of {name}": "on" for name, _ in self.named},
            "optimizer": f"{type(self.optimizer).__name__} with groups of {groups}",
            "mode": self.settings.mode,
            "partition_size": str(self.settings.partition_size),
            "credit_size": str(self.settings.credit_size),
        }


def agree_on(transport: Transport, make: Callable[[], Proposal]) -> Proposal:
    """Collective: make this rank's proposal and compare it with all others.

    Raises:
        ByteSchedulerError: what ``make`` raised, on this rank.
        RankMismatchError: proposals differ, or another rank's ``make`` raised.
    """
    made: list[Proposal] = []

    def check() -> dict[str, str]:
        made.append(make())
        return made[0].facts()

    agree(transport, "model, optimizer and settings", check)
    return made[0]


def _check_fit(optimizer: Optimizer, model: nn.Module) -> None:
    mine = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [tuple(p.shape) for p in parameters if id(p) not in mine]
    if strangers:
        raise UsageError(
            f"optimizer's parameters must be the model's, got {len(strangers)} that are not "
            f"(shapes {strangers[:3]}); build the optimizer from model.parameters(), after the "
            "model was moved to its device"
        )
    devices = {str(p.device) for p in parameters}
    if len(devices) > 1:
        raise UsageError(
            f"all parameters must be on one device, got {sorted(devices)}; "
            "use one process per device"
        )
    for p in parameters:
        lazy = isinstance(p, nn.parameter.UninitializedParameter)
        if lazy or not p.is_floating_point() or p.layout is not torch.strided:
            raise UsageError(
                f"parameter {mine[id(p)]!r} must be an initialised dense real floating-point "
                f"tensor, got {'a lazy one' if lazy else f'{p.dtype}, {p.layout}'}; run the model "
                "once before wrapping, or keep the parameter out of this optimizer"
            )


def _sparse_parameters(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    found = dict.fromkeys(m.weight for m in tables if m.sparse and m.weight.requires_grad)
    return [weight for weight in found if id(weight) in optimized]
