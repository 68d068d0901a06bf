"""Steps of every kind: optimizers, closures, schedules, groups, clipping, AMP, averaging, hooks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import third_party
import torch
from cases import (
    MODES,
    NO_DIFFERENCE,
    Case,
    Rows,
    adam,
    check_case,
    core,
    differences,
    double_batch,
    double_classify,
    double_rows,
    keywords,
    numbered,
    outcome,
    plain_loop,
    sgd,
    step_of,
)
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bytescheduler.torch as bs

pytestmark = pytest.mark.multiprocess
CASES: dict[str, Case] = {}
DOUBLE: dict[str, Any] = {
    "model": double_rows,
    "batch": double_batch,
    "loss": double_classify,
    "reference": "single",
    "tolerance": 1e-12,
}


# -- optimizers of torch.optim, their variants, and other people's

VARIANTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "SGD, one by one": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "SGD, maximize": lambda p: torch.optim.SGD(p, 0.01, maximize=True, dampening=0.1, momentum=0.5),
    "SGD, tensor rate": lambda p: torch.optim.SGD(p, torch.tensor(0.1)),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "Adam, tensor rate": lambda p: torch.optim.Adam(p, torch.tensor(1e-2)),
    "AdamW, fused, amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, fused=True, amsgrad=True),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "Adamax": torch.optim.Adamax,
    "ASGD": lambda p: torch.optim.ASGD(p, t0=2),
    "NAdam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
}
if hasattr(torch.optim, "Adafactor"):
    VARIANTS["Adafactor"] = torch.optim.Adafactor
ELSEWHERE = {"SparseAdam", "LBFGS", "Muon", "Optimizer"}  # cases of their own, below and in others
CASES |= {name: Case(optimizer=make) for name, make in VARIANTS.items()}
if hasattr(torch.optim, "Muon"):
    CASES["Muon"] = Case(
        model=lambda: nn.Sequential(
            nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)
        ),
        optimizer=lambda p: torch.optim.Muon(p, lr=1e-2),
    )
CASES |= {
    f"third party: {name}": Case(optimizer=make, steps=7)
    for name, make in third_party.MAKERS.items()
}


def with_limit(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    for batch in data:
        if batch[3] == 3:
            for group in optimizer.param_groups:
                group["limit"] = 0.1
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()


CASES["third party: LateNorm"] = Case(optimizer=third_party.LateNorm, loop=with_limit, steps=7)


def test_every_optimizer_of_torch_has_a_case():
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert classes - ELSEWHERE <= {name.partition(",")[0] for name in VARIANTS}


# -- closures


def with_closure(model: Any, optimizer: Any, data: Any, loss: Any) -> list[float]:
    losses = []
    for batch in data:

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            return value

        losses.append(float(optimizer.step(closure)))
    return losses


CASES |= {
    f"closure, {name}": Case(optimizer=make, loop=with_closure, **DOUBLE)
    for name, make in {
        "SGD": sgd,
        "Adam": adam,
        "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=4),
        "LBFGS, strong Wolfe": lambda p: torch.optim.LBFGS(
            p, max_iter=4, line_search_fn="strong_wolfe"
        ),
    }.items()
}


def closure_now_and_then(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    with_closure(model, optimizer, data[:2], loss)
    plain_loop(model, optimizer, data[2:5], loss)
    with_closure(model, optimizer, data[5:], loss)


CASES["closure now and then"] = Case(**DOUBLE, loop=closure_now_and_then, steps=7)


# -- schedules and hyper-parameters

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


def advance(schedule: Any, step: int) -> None:
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(1.0 + step)
    else:
        schedule.step()


def scheduled(rank: int, name: str, before: bool, momentum: float) -> Any:
    """Differences by mode, with warnings as errors."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=momentum)

    def train(mode: str | None) -> Any:
        model = case.make()
        optimizer: Any = make(model.parameters())
        early = SCHEDULES[name](optimizer) if before else None
        if mode is not None:
            optimizer = bs.ScheduledOptimizer(optimizer, model, **keywords(mode))
        schedule = early or SCHEDULES[name](optimizer)
        rates = []
        for batch in data if mode is not None else joined:
            optimizer.zero_grad()
            (case.loss if mode is not None else both)(model, batch).backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            advance(schedule, len(rates))
        found = outcome(model, optimizer, rates)
        if mode is not None:
            optimizer.unwrap()
        return found

    case = Case(steps=6)
    data = numbered(case, rank)
    joined = list(zip(*[numbered(case, other) for other in range(2)], strict=True))

    def both(model: Any, pair: Any) -> Any:
        return sum(case.loss(model, batch) for batch in pair) / 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = train(None)
        return {mode: differences(expected, train(mode)) for mode in MODES}


@pytest.mark.parametrize("before", [True, False], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_give_the_same_bits_and_no_warning(two_ranks, name, before):
    assert two_ranks.run(scheduled, name, before, 0.9) == [NO_DIFFERENCE] * 2


def changed_after_step(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """What is set after ``step()`` counts for the next one only."""
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.5)
            else:
                group["lr"] *= 0.5
            group["weight_decay"] = 0.01 * step_of(batch)
            if "betas" in group:
                group["betas"] = (0.5, 0.9)
            if "momentum" in group:
                group["momentum"] = 0.1 * step_of(batch)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    named: Any = model
    return torch.optim.SGD(
        [
            {"params": named.head.parameters(), "lr": 0.5, "momentum": 0.5},
            {"params": [named.first.weight, named.second.bias]},
            {"params": [named.first.bias, named.second.weight], "weight_decay": 0.1},
        ],
        lr=0.1,
    )


def added_later(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """The head is trained from the third step on, the second layer from the fourth."""
    for number, batch in enumerate(data):
        if number == 2:
            optimizer.add_param_group({"params": list(core(model).head.parameters()), "lr": 0.5})
        if number == 3:
            core(model).second.requires_grad_(True)
            optimizer.add_param_group({"params": list(core(model).second.parameters())})
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        model.zero_grad()


def partly_trained() -> nn.Module:
    model = Rows()
    model.second.requires_grad_(False)
    return model


CASES |= {
    f"changed after step, {name}": Case(optimizer=make, loop=changed_after_step)
    for name, make in {
        "SGD": sgd,
        "AdamW": adam,
        "tensor rate": lambda p: torch.optim.Adam(p, torch.tensor(1e-2)),
    }.items()
}
CASES |= {
    "several groups": Case(arrange=grouped),
    "several groups, changed after step": Case(arrange=grouped, loop=changed_after_step),
    "some parameters are nobody's": Case(arrange=lambda model: sgd(model.head.parameters())),
    "group added later": Case(
        model=partly_trained,
        arrange=lambda model: sgd(model.first.parameters()),
        loop=added_later,
        reference="single",
    ),
}


# -- between backward and step


def clipped(model: Any, optimizer: Any, data: Any, loss: Any, *, clip: Any) -> list[Any]:
    seen = []
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        seen.append(clip(list(model.parameters())))
        optimizer.step()
    return [value for value in seen if value is not None]


def by_norm_of_each(parameters: list[Any]) -> None:
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, 0.05)


def by_hook(model: Any, optimizer: Any, data: Any, loss: Any) -> None:
    """Tensor hooks see this rank's gradient, before it is averaged."""
    handles = [p.register_hook(lambda g: g.clamp(-0.01, 0.01)) for p in model.parameters()]
    plain_loop(model, optimizer, data, loss)
    for handle in handles:
        handle.remove()


CLIPS: dict[str, Callable[[list[Any]], Any]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "norm, foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "infinity norm": lambda p: nn.utils.clip_grad_norm_(p, 0.01, norm_type=float("inf")),
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.01),
    "norm of each": by_norm_of_each,
    "clamp": lambda p: [q.grad.clamp_(-0.01, 0.01) for q in p] and None,
    "data": lambda p: [q.grad.data.mul_(0.5) for q in p] and None,
    "noise": lambda p: [q.grad.add_(0.01) for q in p] and None,
    "read only": lambda p: torch.stack([q.grad.norm() for q in p]).norm(),
}
CASES |= {f"clip: {name}": Case(loop=partial(clipped, clip=clip)) for name, clip in CLIPS.items()}
CASES["clip: tensor hooks"] = Case(loop=by_hook)


# -- AMP


def scaled(
    model: Any, optimizer: Any, data: Any, loss: Any, *, clip: bool, to_none: bool = True
) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for batch in data:
        optimizer.zero_grad(set_to_none=to_none)
        scaler.scale(loss(model, batch)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def overflowing(model: Any, batch: Any, *, ranks: tuple[int, ...]) -> torch.Tensor:
    """Infinite in the second step and the fourth, on some ranks."""
    x, y, rank, step = batch
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    return loss * float("inf") if step in (1, 3) and rank in ranks else loss


def autocast(model: Any, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(batch[0]), batch[1])


CASES |= {
    f"scaler, {'clipped, ' if clip else ''}overflow on {ranks}, {'None' if to_none else 'zero'}": (
        Case(
            loop=partial(scaled, clip=clip, to_none=to_none),
            loss=partial(overflowing, ranks=ranks),
            optimizer=make,
            steps=6,
        )
    )
    for clip in (True, False)
    for ranks, to_none, make in (
        ((), True, sgd),
        ((0,), True, adam),
        ((1,), False, sgd),
        ((0, 1), True, sgd),
    )
}
CASES |= {
    "autocast bf16": Case(loss=autocast),
    "autocast bf16, AdamW": Case(loss=autocast, optimizer=adam),
}


# -- right after step


def looked_at(model: Any, optimizer: Any, data: Any, loss: Any, *, look: Any) -> list[Any]:
    seen = []
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        seen.append(look(core(model), optimizer))
    return seen


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda m, o: sum(p.norm() for p in m.parameters()),
    "data": lambda m, o: m.head.weight.data.clone(),
    "detach": lambda m, o: m.second.weight.detach().clone(),
    "item": lambda m, o: torch.tensor(m.first.bias[0].item()),
    "numpy": lambda m, o: torch.tensor(m.first.weight.detach().numpy().copy()),
    "asarray": lambda m, o: torch.tensor(np.array(m.first.weight.detach())),
    "list": lambda m, o: torch.tensor(m.head.bias.tolist()),
    "vector": lambda m, o: nn.utils.parameters_to_vector(m.parameters()),
    "stack": lambda m, o: torch.cat([p.flatten() for p in m.parameters()]),
    "foreach": lambda m, o: torch.stack(torch._foreach_norm(list(m.parameters()))),
    "state dict": lambda m, o: m.state_dict()["head.weight"].clone(),
    "copy": lambda m, o: copy.deepcopy(m).first.weight,
    "index": lambda m, o: m.first.weight[3].detach().clone(),
    "gradient": lambda m, o: m.first.weight.grad.clone(),
    "gradient norm": lambda m, o: sum(p.grad.norm() for p in m.parameters()),
    "optimizer's parameters": lambda m, o: sum(
        p.sum() for g in o.param_groups for p in g["params"]
    ),
    "optimizer's state": lambda m, o: sum(s["momentum_buffer"].sum() for s in o.state.values()),
    "storage": lambda m, o: torch.tensor(m.head.weight.untyped_storage().tolist()),
    "dlpack": lambda m, o: torch.from_dlpack(m.head.weight.detach()).clone(),
    "compare": lambda m, o: torch.tensor(torch.equal(m.head.weight, m.head.weight * 1)),
    "text": lambda m, o: torch.tensor(list(repr(m.head.bias).encode())),
}


def weights_written(model: Any, optimizer: Any) -> torch.Tensor:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)
    model.head.weight.data *= 0.9
    model.first.weight.data = model.first.weight.data * 1.01
    nn.init.constant_(model.second.bias, 0.5)
    return torch.zeros(())


LOOKS["written"] = weights_written
CASES |= {f"look: {name}": Case(loop=partial(looked_at, look=look)) for name, look in LOOKS.items()}


def averaged(model: Any, optimizer: Any, data: Any, loss: Any, *, how: Any) -> list[torch.Tensor]:
    average = how(core(model))
    for batch in data:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        average.update_parameters(core(model))
    return [p.detach() for p in average.parameters()]


class ByHand:
    """A moving average as people write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    def update_parameters(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.data

    def parameters(self) -> Any:
        return list(self.shadow.values())


CASES |= {
    f"average: {name}": Case(loop=partial(averaged, how=how))
    for name, how in {
        "SWA": AveragedModel,
        "EMA": lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "by hand": ByHand,
    }.items()
}


# -- steps that are not the rule


def step_alone(model: Any, optimizer: Any, data: Any, loss: Any, *, to_none: bool) -> None:
    """Steps before the first backward, twice after one, and after ``zero_grad``."""
    optimizer.step()
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        optimizer.step()


CASES |= {
    f"step alone, {make.__name__}, {'None' if to_none else 'zero'}": Case(
        loop=partial(step_alone, to_none=to_none), optimizer=make
    )
    for make in (sgd, adam)
    for to_none in (True, False)
}


class Expected(Exception):
    pass


def interrupted(model: Any, optimizer: Any, data: Any, loss: Any, *, where: str) -> None:
    """The same exception on all ranks, once, caught by the user, who goes on."""
    pending = {"raise"}

    def explode(*_: Any) -> None:
        if pending:
            pending.clear()
            raise Expected

    for batch in data:
        handle = core(model).second.register_forward_hook(
            lambda *_, batch=batch: (
                explode() if where == "forward" and step_of(batch) == 2 else None
            )
        )
        try:
            optimizer.zero_grad()
            loss(model, batch).backward()
            if where == "between" and step_of(batch) == 2:
                explode()
            optimizer.step()
        except Expected:
            pass
        finally:
            handle.remove()


CASES |= {
    f"exception: {where}": Case(
        loop=partial(interrupted, where=where), reference="ddp" if where == "between" else "single"
    )
    for where in ("forward", "between")
}


@pytest.mark.parametrize("name", CASES)
def test_training_gives_the_same_bits(two_ranks, name):
    check_case(two_ranks, __name__, name)
