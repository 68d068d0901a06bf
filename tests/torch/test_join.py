"""Uneven inputs: ranks with fewer batches keep the others company until all have run out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    MODES,
    SMALL,
    Case,
    Rows,
    adam,
    classify,
    differences,
    keywords,
    numbered,
    outcome,
    plain_loop,
    sgd,
)
from torch import nn
from torch.nn import functional as F

import bytescheduler.torch as bs

pytestmark = pytest.mark.multiprocess
every_mode = pytest.mark.parametrize("mode", MODES)


def train(model: Any, optimizer: Any, data: list[Any]) -> None:
    plain_loop(model, optimizer, data, classify)


def uneven(rank: int, counts: list[int], make: str, **ours: Any) -> Any:
    """Differences from one process that averages what there is over all ranks; then even again."""
    optimizers = {"sgd": sgd, "adam": adam}
    case = Case(optimizer=optimizers[make], steps=8)
    each = [numbered(case, other)[: counts[other]] for other in range(len(counts))]
    after = [numbered(case, other)[6:] for other in range(len(counts))]
    model = case.make()
    with bs.ScheduledOptimizer(case.make_optimizer(model), model, **keywords(**ours)) as optimizer:
        with optimizer.join():
            train(model, optimizer, each[rank])
        train(model, optimizer, after[rank])
        found = outcome(model, optimizer)
    return differences(alone(case, each, after), found, 0.0 if len(counts) == 2 else 1e-5)


def alone(case: Case, each: Any, after: Any) -> Any:
    model = case.make()
    optimizer = case.make_optimizer(model)
    rounds = [
        [batches[step] for batches in each if step < len(batches)]
        for step in range(max(map(len, each)))
    ]
    rounds += [list(pair) for pair in zip(*after, strict=True)]
    for present in rounds:
        optimizer.zero_grad()
        (sum(classify(model, batch) for batch in present) / len(each)).backward()
        optimizer.step()
    return outcome(model, optimizer)


@every_mode
@pytest.mark.parametrize("make", ["sgd", "adam"])
@pytest.mark.parametrize("counts", [[5, 3], [3, 5], [4, 4], [0, 3], [3, 0], [1, 5], [0, 0]])
def test_a_rank_that_has_run_out_takes_part_without_a_gradient(two_ranks, counts, make, mode):
    if counts == [0, 0]:
        mode = "priority"
    assert two_ranks.run(uneven_with_mode, counts, make, mode) == [{}, {}]


def uneven_with_mode(rank: int, counts: list[int], make: str, mode: str) -> Any:
    return uneven(rank, counts, make, mode=mode)


@every_mode
@pytest.mark.parametrize("counts", [[6, 4, 2], [2, 4, 6], [0, 5, 3]])
def test_three_ranks_run_out_one_after_the_other(three_ranks, counts, mode):
    assert three_ranks.run(uneven_with_mode, counts, "sgd", mode) == [{}, {}, {}]


def twice(rank: int) -> Any:
    """A join for each epoch."""
    case = Case(steps=8)
    model = case.make()
    data = numbered(case, rank)
    with bs.ScheduledOptimizer(sgd(model.parameters()), model, **SMALL) as optimizer:
        for epoch in range(2):
            with optimizer.join():
                train(model, optimizer, data[4 * epoch :][: 4 if rank == epoch else 2])
        return outcome(model, optimizer)


def test_a_join_for_each_epoch_leaves_all_ranks_equal(two_ranks):
    first, second = two_ranks.run(twice)
    assert differences(first, second) == {}


class Expected(Exception):
    pass


def accumulated(rank: int, counts: list[int]) -> Any:
    """Two passes per step, the first under no_sync."""
    case = Case(steps=10)
    model = case.make()
    data = numbered(case, rank)[: 2 * counts[rank]]
    with bs.ScheduledOptimizer(sgd(model.parameters()), model, **SMALL) as optimizer:
        with optimizer.join():
            for number, batch in enumerate(data):
                with optimizer.no_sync() if number % 2 == 0 else nullcontext():
                    classify(model, batch).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return outcome(model, optimizer)


@pytest.mark.parametrize("counts", [[4, 2], [1, 4]])
def test_accumulation_in_a_join(two_ranks, counts):
    first, second = two_ranks.run(accumulated, counts)
    assert differences(first, second) == {}


def clipped(rank: int, counts: list[int]) -> Any:
    case = Case(steps=5)
    model = case.make()
    with bs.ScheduledOptimizer(adam(model.parameters()), model, **SMALL) as optimizer:
        with optimizer.join():
            for batch in numbered(case, rank)[: counts[rank]]:
                optimizer.zero_grad()
                classify(model, batch).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
        return outcome(model, optimizer)


@pytest.mark.parametrize("counts", [[5, 2], [2, 5]])
def test_gradients_read_in_a_join(two_ranks, counts):
    first, second = two_ranks.run(clipped, counts)
    assert differences(first, second) == {}


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


def with_buffers(rank: int, counts: list[int]) -> Any:
    case = Case(model=Normalised, steps=5)
    model = case.make()
    with bs.ScheduledOptimizer(adam(model.parameters()), model, **SMALL) as optimizer:
        with optimizer.join():
            train(model, optimizer, numbered(case, rank)[: counts[rank]])
        optimizer.synchronize()
        return outcome(model, optimizer)


@pytest.mark.parametrize("counts", [[5, 2], [2, 5]])
def test_buffers_are_equal_after_a_join(two_ranks, counts):
    first, second = two_ranks.run(with_buffers, counts)
    assert differences(first, second) == {}


def unused_branch(rank: int) -> Any:
    """What no remaining rank produces is not updated, weight decay or not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(8, 4), "other": nn.Linear(8, 4)})
    before = model["other"].weight.detach().clone()
    with bs.ScheduledOptimizer(sgd(model.parameters()), model, **SMALL) as optimizer:
        with optimizer.join():
            for x, y, *_ in numbered(Case(), rank)[: 5 - 3 * rank]:
                optimizer.zero_grad()
                F.cross_entropy(model["one"](x), y).backward()
                optimizer.step()
        return torch.equal(before, model["other"].weight)


def test_parameters_that_nobody_uses_stay(two_ranks):
    assert two_ranks.run(unused_branch) == [True, True]


def stopped(rank: int) -> str:
    """An error inside the block is the user's, and leaves it."""
    model = Rows()
    with bs.ScheduledOptimizer(sgd(model.parameters()), model, **SMALL) as optimizer:

        def fail_after_two() -> None:
            with optimizer.join():
                train(model, optimizer, numbered(Case(), rank)[:2])
                raise Expected

        with pytest.raises(Expected):
            fail_after_two()
        dist.barrier()
        train(model, optimizer, numbered(Case(), rank)[2:])
    return "went on"


def test_an_error_inside_a_join_reaches_the_user(two_ranks):
    assert two_ranks.run(stopped) == ["went on"] * 2
