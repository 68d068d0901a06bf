"""Gradients accumulated, cleared, thrown away, missing or not finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import (
    MODES,
    Case,
    Rows,
    adam,
    check_case,
    core,
    double_batch,
    double_classify,
    double_rows,
    keywords,
    paused,
    plain_loop,
    sgd,
    step_of,
)
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.multiprocess

# Where a single process adds the same numbers in another order than two ranks do.
REORDERED: dict[str, Any] = {
    "model": double_rows,
    "batch": double_batch,
    "loss": double_classify,
    "reference": "single",
    "tolerance": 1e-12,
}
CASES: dict[str, Case] = {}


# -- several backward passes for one step


def accumulate(
    model: Any, optimizer: Any, data: Any, loss: Any, *, pause: bool, rest: str = "dropped"
) -> None:
    """Two epochs of five batches, a step after each third."""
    for epoch in (data[:5], data[5:]):
        optimizer.zero_grad()
        for number, batch in enumerate(epoch, 1):
            last = number == len(epoch)
            whole = number % 3 == 0 or (last and rest == "stepped")
            if pause and not whole:
                with paused(model, optimizer):
                    (loss(model, batch) / 3).backward()
            else:
                (loss(model, batch) / 3).backward()
            if whole or (last and rest == "stepped unsent"):
                optimizer.step()
                optimizer.zero_grad()


def never_cleared(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()


def forward_in_advance(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """Two graphs are built before either is run backwards."""
    for first, second in zip(data[:-1:2], data[1::2], strict=True):
        optimizer.zero_grad()
        losses = [loss(model, first), loss(model, second)]
        for one in losses:
            one.backward()
        optimizer.step()


def two_losses_of_one_forward(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    for batch in data:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward(retain_graph=True)
        (3 * value).backward()
        optimizer.step()


def unsent_after_sent(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """The pass under no_sync comes last."""
    for first, second in zip(data[:-1:2], data[1::2], strict=True):
        optimizer.zero_grad()
        loss(model, first).backward()
        with paused(model, optimizer):
            loss(model, second).backward()
        optimizer.step()


def penalised(model: Any, batch: Any) -> torch.Tensor:
    x = batch[0].requires_grad_()
    value = F.cross_entropy(model(x), batch[1])
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + slope.square().sum()


class TwoHeads(nn.Module):
    """A trunk and two heads; each loss uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16, dtype=torch.float64)
        self.heads = nn.ModuleList(nn.Linear(16, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.heads[which](torch.tanh(self.trunk(x)))


def a_loss_for_each_head(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    for batch in data:
        optimizer.zero_grad()
        for which in range(2):
            loss(lambda x, which=which: model(x, which), batch).backward()
        optimizer.step()


def heads_by_turns_read_between(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """What one pass learns of the order of gradients is of no use in the next one."""
    for batch in data:
        optimizer.zero_grad()
        which = step_of(batch) % 2
        loss(lambda x, which=which: model(x, which), batch).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        optimizer.step()


CASES |= {
    f"{sent}, rest {rest}": Case(
        loop=partial(accumulate, pause=sent == "no_sync", rest=rest), steps=10
    )
    for sent in ("no_sync", "every pass sent")
    for rest in ("stepped", "dropped")
}
CASES |= {
    "no_sync, rest stepped unsent": Case(
        loop=partial(accumulate, pause=True, rest="stepped unsent"), steps=10, **REORDERED
    ),
    "never cleared": Case(loop=never_cleared),
    "forward in advance": Case(loop=forward_in_advance, **REORDERED),
    "two losses of one forward": Case(loop=two_losses_of_one_forward, **REORDERED),
    "unsent after sent": Case(loop=unsent_after_sent, **REORDERED),
    "a loss for each head": Case(**{**REORDERED, "model": TwoHeads}, loop=a_loss_for_each_head),
    "heads by turns": Case(**{**REORDERED, "model": TwoHeads}, loop=heads_by_turns_read_between),
    "gradient penalty": Case(loop=plain_loop, **{**REORDERED, "loss": penalised}),
}


# -- cleared, by whom, how and when


def by_optimizer(model: Any, optimizer: Any, *, to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=to_none)


def by_model(model: Any, optimizer: Any, *, to_none: bool) -> None:
    model.zero_grad(set_to_none=to_none)


def in_place(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def detached(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.detach_()
            parameter.grad.zero_()


def by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def deleted(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        del parameter.grad


def replaced(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def foreach(model: Any, optimizer: Any) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


CLEARERS: dict[str, Callable[..., None]] = {
    "optimizer to None": partial(by_optimizer, to_none=True),
    "optimizer to zero": partial(by_optimizer, to_none=False),
    "model to None": partial(by_model, to_none=True),
    "model to zero": partial(by_model, to_none=False),
    "in place": in_place,
    "detached": detached,
    "by hand": by_hand,
    "deleted": deleted,
    "replaced": replaced,
    "foreach": foreach,
}


def cleared(
    model: Any, optimizer: Any, data: Any, loss: Any, *, when: str, clear: Callable[..., None]
) -> None:
    for batch in data:
        if when == "before":
            clear(model, optimizer)
        value = loss(model, batch)
        if when == "between":
            clear(model, optimizer)
        value.backward()
        if when == "unstepped" and batch[3] % 2:
            clear(model, optimizer)  # the step has nothing, or zeros, to apply
        optimizer.step()
        if when in ("after", "unstepped"):
            clear(model, optimizer)


CASES |= {
    f"cleared {when}: {name}": Case(loop=partial(cleared, when=when, clear=clear))
    for name, clear in CLEARERS.items()
    for when in ("before", "between", "after", "unstepped")
}


def skipped_steps(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """A backward pass whose gradients nobody applies, now and then."""
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if batch[3] % 3:
            optimizer.step()


def written_by_hand(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """Gradients without a backward pass, and changed after one."""
    for batch in data:
        optimizer.zero_grad()
        if batch[3] % 2:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
        else:
            loss(model, batch).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        optimizer.step()


CASES |= {
    "skipped steps": Case(loop=skipped_steps),
    "written by hand": Case(loop=written_by_hand),
}


# -- missing on some ranks, in some steps, everywhere


class Optional(nn.Module):
    """A branch that is taken on demand, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.branch = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, take: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.branch(hidden)) if take else hidden)


TAKEN: dict[str, Callable[[int, int], bool]] = {
    "on rank 0": lambda rank, step: rank == 0,
    "on rank 1": lambda rank, step: rank == 1,
    "by turns": lambda rank, step: step % 2 == rank,
    "in some steps": lambda rank, step: step in (2, 3),
    "in the first step": lambda rank, step: step == 0,
    "from the third step": lambda rank, step: step >= 2,
    "never": lambda rank, step: False,
}


def branch_loss(model: Any, batch: Any, *, taken: Callable[[int, int], bool]) -> torch.Tensor:
    x, y, rank, step = batch
    return F.cross_entropy(model(x, taken(rank, step)), y)


CASES |= {
    f"branch taken {name}, {make.__name__}, {'None' if to_none else 'zero'}": Case(
        model=Optional,
        optimizer=make,
        loss=partial(branch_loss, taken=taken),
        loop=partial(cleared, when="before", clear=partial(by_optimizer, to_none=to_none)),
        ddp={"find_unused_parameters": True},
    )
    for name, taken in TAKEN.items()
    for make in (sgd, adam)
    for to_none in (True, False)
}


# -- frozen and thawed


def freeze(model: Any, *, trunk: bool, head: bool) -> None:
    core(model).first.requires_grad_(not trunk)
    core(model).head.requires_grad_(not head)


def switching(
    model: Any, optimizer: Any, data: Any, loss: Any, *, to_none: bool, when: str
) -> None:
    """Layers are frozen and thawed at step 2, 4 and 6."""
    plan = {2: (True, False), 4: (False, True), 6: (False, False)}
    for batch in data:
        step = step_of(batch)
        if step in plan and when == "before zero_grad":
            freeze(model, trunk=plan[step][0], head=plan[step][1])
        optimizer.zero_grad(set_to_none=to_none)
        if step in plan and when == "after zero_grad":
            freeze(model, trunk=plan[step][0], head=plan[step][1])
        loss(model, batch).backward()
        optimizer.step()


def frozen_rows() -> nn.Module:
    model = Rows()
    model.first.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    return model


CASES |= {
    f"switched {when}, {make.__name__}, {'None' if to_none else 'zero'}": Case(
        optimizer=make,
        loop=partial(switching, to_none=to_none, when=when),
        reference="single",
        steps=9,
    )
    for when in ("before zero_grad", "after zero_grad")
    for make in (sgd, adam)
    for to_none in (True, False)
}
CASES |= {
    "frozen from the start": Case(model=frozen_rows),
    "frozen and left out": Case(
        model=frozen_rows,
        arrange=lambda model: sgd([p for p in model.parameters() if p.requires_grad]),
    ),
}


# -- not finite


def poisoned(model: Any, batch: Any, *, value: float, ranks: tuple[int, ...]) -> torch.Tensor:
    x, y, rank, step = batch
    loss = F.cross_entropy(model(x), y)
    return loss * value if step == 2 and rank in ranks else loss


def drop_unless_finite(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """The usual guard, which must decide alike on all ranks."""
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()


CASES |= {
    f"{value} on ranks {ranks}, {'dropped' if loop is drop_unless_finite else 'applied'}": Case(
        loss=partial(poisoned, value=value, ranks=ranks), loop=loop
    )
    for value in (float("nan"), float("inf"))
    for ranks in ((1,), (0, 1))
    for loop in (plain_loop, drop_unless_finite)
}


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_same_bits(two_ranks, name):
    check_case(two_ranks, __name__, name)


def gradients_seen(rank: int, mode: str) -> bool:
    from cases import rows

    import bytescheduler.torch as bs

    model = Rows()
    with bs.ScheduledOptimizer(sgd(model.parameters()), model, **keywords(mode)) as optimizer:
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step * 2 + rank)
            x, y = rows(generator)
            F.cross_entropy(model(x), y).backward()
            mine = [p.grad.clone() for p in model.parameters()]
            box = [mine]
            torch.distributed.broadcast_object_list(box, src=0)
            if not all(torch.equal(a, b) for a, b in zip(mine, box[0], strict=True)):
                return False
            optimizer.step()
    return True


@pytest.mark.parametrize("mode", MODES)
def test_gradients_read_after_backward_are_the_average(two_ranks, mode):
    assert two_ranks.run(gradients_seen, mode) == [True, True]
