"""What the families of tests share: small models, a training run described as data, references.

A ``Case`` is trained in each mode with ``ScheduledOptimizer`` and once without: with
DistributedDataParallel, or in a single process that averages the losses of all ranks' batches. Both
give the same sums in the same order where each parameter is used once per forward, so that results
are equal to the last bit with two ranks. Weights, buffers, optimizer state and whatever the loop
returns are compared.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import bytescheduler.torch as bs

MODES = ("priority", "fifo", "barrier", "one chunk")
SMALL = {"partition_size": 512, "credit_size": 2048}
WHOLE = {"partition_size": 1 << 20, "credit_size": 1 << 20}
NO_DIFFERENCE: dict[str, Any] = {mode: {} for mode in MODES}

Outcome = dict[str, torch.Tensor]
Loop = Callable[[Any, Any, list[Any], Callable[[Any, Any], Any]], Any]


class Rows(nn.Module):
    """Three layers over rows of eight numbers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, dtype=dtype)
        self.second = nn.Linear(16, 16, dtype=dtype)
        self.head = nn.Linear(16, 4, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def keywords(mode: str = "priority", **ours: Any) -> dict[str, Any]:
    """Those of ``ScheduledOptimizer`` in one of ``MODES``; the last is the first without a cut."""
    if mode == "one chunk":
        return {**WHOLE, **ours}
    return {**SMALL, "mode": mode, **ours}


def double_rows() -> nn.Module:
    return Rows(torch.float64)


def rows(g: torch.Generator) -> Any:
    return torch.randn(6, 8, generator=g), torch.randint(4, (6,), generator=g)


def double_batch(g: torch.Generator) -> Any:
    x, y = rows(g)
    return x.double(), y


def classify(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def double_classify(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def batches(rank: int, count: int, make: Callable[[torch.Generator], Any]) -> list[Any]:
    """``count`` batches of this rank, the same in every run."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return [make(generator) for _ in range(count)]


def plain_loop(model: Any, optimizer: Any, data: list[Any], loss: Callable[..., Any]) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


def paused(model: Any, optimizer: Any) -> AbstractContextManager[Any]:
    """No exchange of gradients: DistributedDataParallel's way, ours, or nothing to do."""
    for owner in (model, optimizer):
        if hasattr(owner, "no_sync"):
            return owner.no_sync()
    return nullcontext()


def step_of(batch: Any) -> int:
    """The number of the step, of one rank's batch or of all ranks' batches together."""
    return batch[-1] if isinstance(batch[-1], int) else batch[0][-1]


def core(model: Any) -> Any:
    """The user's module, without DistributedDataParallel around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        reference: "ddp", or "single" where DistributedDataParallel does not do it.
        tolerance: largest difference allowed; above zero only where sums have another order.
        arrange: makes the optimizer from the model, where parameters alone do not say enough.
    """

    model: Callable[[], nn.Module] = Rows
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    arrange: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    batch: Callable[[torch.Generator], Any] = rows
    loss: Callable[[Any, Any], Any] = classify
    loop: Loop = plain_loop
    steps: int = 5
    reference: str = "ddp"
    ddp: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    modes: Sequence[str] = MODES

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.arrange(model) if self.arrange else self.optimizer(model.parameters())


def run_case(rank: int, module: str, name: str, **ours: Any) -> dict[str, dict[str, float]]:
    """Scenario: the differences of ``module.CASES[name]`` from its reference, by mode."""
    case: Case = importlib.import_module(module).CASES[name]
    expected = REFERENCES[case.reference](case, rank)
    return {
        mode: differences(expected, train_ours(case, rank, mode=mode, **ours), case.tolerance)
        for mode in case.modes
    }


def check_case(pool: Any, module: str, name: str) -> None:
    """Train ``module.CASES[name]`` on all ranks of ``pool`` and expect the reference's results."""
    case: Case = importlib.import_module(module).CASES[name]
    for rank, found in enumerate(pool.run(run_case, module, name)):
        assert found == {mode: {} for mode in case.modes}, f"rank {rank}"


def numbered(case: Case, rank: int) -> list[Any]:
    """This rank's batches, the rank and the number of the step appended to each."""
    made = batches(rank, case.steps, case.batch)
    return [(*batch, rank, step) for step, batch in enumerate(made)]


def train_ours(case: Case, rank: int, **ours: Any) -> Outcome:
    model = case.make()
    inner = case.make_optimizer(model)
    with bs.ScheduledOptimizer(inner, model, **keywords(**ours)) as optimizer:
        seen = case.loop(model, optimizer, numbered(case, rank), case.loss)
        return outcome(model, optimizer, seen)


def train_ddp(case: Case, rank: int) -> Outcome:
    model = case.make()
    optimizer = case.make_optimizer(model)
    wrapped = DistributedDataParallel(model, **case.ddp)
    seen = case.loop(wrapped, optimizer, numbered(case, rank), case.loss)
    result = outcome(model, optimizer, seen)
    dist.barrier()
    return result


def train_single(case: Case, rank: int) -> Outcome:
    """One process: each loss is the mean of those of all ranks' batches."""
    model = case.make()
    optimizer = case.make_optimizer(model)
    each = [numbered(case, other) for other in range(dist.get_world_size())]
    joined = list(zip(*each, strict=True))

    def loss(model: Any, batches: Any) -> Any:
        return sum(case.loss(model, batch) for batch in batches) / len(batches)

    return outcome(model, optimizer, case.loop(model, optimizer, joined, loss))


REFERENCES: dict[str, Callable[[Case, int], Outcome]] = {"ddp": train_ddp, "single": train_single}


def outcome(model: nn.Module, optimizer: Any = None, seen: Any = None) -> Outcome:
    """Weights, buffers, optimizer state and observations, copied, by name."""
    found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, (torch.Tensor, float, int)):
                    found[f"state of {index}: {key}"] = torch.as_tensor(value).clone()
    for index, value in enumerate(seen if seen is not None else ()):
        found[f"seen {index}"] = copy.deepcopy(torch.as_tensor(value).detach())
    return found


def differences(one: Outcome, other: Outcome, tolerance: float = 0.0) -> dict[str, float]:
    """Largest absolute difference by name, where it is above ``tolerance``; NaN equals NaN."""
    found = {name: float("inf") for name in one.keys() ^ other.keys()}
    for name in one.keys() & other.keys():
        a, b = one[name].double(), other[name].double()
        if one[name].shape != other[name].shape or one[name].dtype != other[name].dtype:
            found[name] = float("inf")
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(same, torch.zeros_like(a), (a - b).abs().nan_to_num(torch.inf))
        if gap.numel() and float(gap.max()) > tolerance:
            found[name] = float(gap.max())
    return found
