"""``torch.compile``, of each block and of the whole model.

The compilers are those without code generation (``eager``, ``aot_eager``): gates and hooks meet the
same graphs, and nothing waits for a C++ compiler. Their arithmetic is PyTorch's own, so that the
results are equal to the last bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
)
from torch import nn
from torch.nn import functional as F

import bytescheduler.torch as bs

pytestmark = pytest.mark.multiprocess


class Blocks(nn.Module):
    """A parameter of the root, and blocks that may be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def compiled(rank: int, mode: str, what: str, backend: str, when: str) -> Any:
    """Train compiled with us, and plainly in a single process."""
    case = Case(model=Blocks, optimizer=adam, steps=5)
    torch.compiler.reset()
    model: Any = case.make()
    trained = _compile(model, what, backend) if when == "before wrapping" else model
    with bs.ScheduledOptimizer(adam(model.parameters()), model, **keywords(mode)) as optimizer:
        if when == "after wrapping":
            trained = _compile(model, what, backend)
        for batch in numbered(case, rank):
            optimizer.zero_grad()
            F.cross_entropy(trained(batch[0]), batch[1]).backward()
            optimizer.step()
        found = outcome(model, optimizer)
    return differences(_alone(case), found)


def _compile(model: Any, what: str, backend: str) -> Any:
    if what == "whole":
        return torch.compile(model, backend=backend)
    if what == "in place":
        model.compile(backend=backend)
        return model
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def _alone(case: Case) -> Any:
    model = case.make()
    optimizer = case.make_optimizer(model)
    for pair in zip(*[numbered(case, rank) for rank in range(2)], strict=True):
        optimizer.zero_grad()
        (sum(classify(model, batch) for batch in pair) / 2).backward()
        optimizer.step()
    return outcome(model, optimizer)


@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@pytest.mark.parametrize("what", ["blocks", "whole", "in place"])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_models_train_to_the_same_bits(two_ranks, mode, what, when):
    assert two_ranks.run(compiled, mode, what, "aot_eager", when) == [{}, {}]


@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_dynamo_alone_trains_to_the_same_bits(two_ranks, what):
    assert two_ranks.run(compiled, "priority", what, "eager", "after wrapping") == [{}, {}]


def compiled_model_is_wrapped(rank: int) -> Any:
    """The object that ``torch.compile`` returns is handed to the wrapper itself."""
    case = Case(model=Rows, optimizer=adam)
    torch.compiler.reset()
    inner = case.make()
    model: Any = torch.compile(inner, backend="aot_eager")
    with bs.ScheduledOptimizer(adam(model.parameters()), model, **SMALL) as optimizer:
        for batch in numbered(case, rank):
            optimizer.zero_grad()
            classify(model, batch).backward()
            optimizer.step()
        found = outcome(inner, optimizer)
    return differences(_alone(case), found)


def test_a_compiled_model_may_be_wrapped_itself(two_ranks):
    assert two_ranks.run(compiled_model_is_wrapped) == [{}, {}]


def graphs_of_blocks(rank: int) -> int:
    """Compilations after the first two steps, which may still learn."""
    case = Case(model=Blocks, optimizer=adam, steps=6)
    torch.compiler.reset()
    model: Any = case.make()
    compilations: list[int] = []
    done: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(len(done))
        return graph.forward

    for block in model.blocks:
        block.compile(backend=backend)
    with bs.ScheduledOptimizer(adam(model.parameters()), model, **SMALL) as optimizer:
        for batch in numbered(case, rank):
            optimizer.zero_grad()
            classify(model, batch).backward()
            optimizer.step()
            done.append(batch[-1])
    return sum(step > 2 for step in compilations)


def test_blocks_are_not_compiled_again_and_again(two_ranks):
    assert two_ranks.run(graphs_of_blocks) == [0, 0]
