"""Behaviours of Horovod's PyTorch optimizer that users rely on, and what ours does (docs)."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import rows
import torch
from rows import assert_equal, plain_loop, scheduled, train
from torch import nn
from torch.nn import functional as F

import bytescheduler.torch as bs
from bytescheduler.exceptions import UsageError
from bytescheduler.torch._horovod import unwrap_horovod
from bytescheduler.transports.horovod import DEFAULTS, HorovodTransport

SETS = [hvd.ProcessSet([rank]) for rank in range(2)]  # Horovod wants them when it starts


def peer(**options: Any) -> rows.Wrap:
    """Horovod's own optimizer, with parameters named by the model."""

    def wrap(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        options.setdefault("named_parameters", list(model.named_parameters()))
        return hvd.DistributedOptimizer(optimizer, **options)

    return wrap


def handed_over(**options: Any) -> rows.Wrap:
    """A script that wraps with Horovod, and hands the result to us."""
    return lambda optimizer, model: scheduled("horovod")(peer(**options)(optimizer, model), model)


def same_weights_as_horovods_optimizer() -> None:
    for make in (torch.optim.SGD, torch.optim.AdamW):
        theirs = train(peer(), hvd.rank(), make=make)
        assert_equal(train(scheduled("horovod"), hvd.rank(), make=make), theirs)


def a_distributed_optimizer_is_taken_over() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("bytescheduler").addHandler(handler)
    theirs = train(peer(), hvd.rank())
    assert_equal(train(handed_over(), hvd.rank()), theirs)
    expected = ["took over SGD with 6 parameters from hvd.DistributedOptimizer"]
    assert seen == (expected if hvd.rank() == 0 else [])
    logging.getLogger("bytescheduler").removeHandler(handler)


def horovods_hooks_are_gone_after_the_takeover() -> None:
    model = rows.network()
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = unwrap_horovod(wrapped)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups is wrapped.param_groups
    for _ in range(3):  # Horovod's hook would refuse the second backward without a step
        model(torch.ones(1, 10)).sum().backward()
    assert not wrapped._handles
    assert unwrap_horovod(optimizer) is None


def unnamed_parameters() -> None:
    theirs = train(peer(named_parameters=None), hvd.rank())
    assert_equal(train(handed_over(named_parameters=None), hvd.rank()), theirs)


def duplicate_names() -> None:
    model = rows.network()
    twice = [("same", p) for p in model.parameters()]
    with pytest.raises(ValueError, match="unique"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), twice)
    optimizer = scheduled("horovod")(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain_loop(optimizer, model, lambda: model(torch.ones(1, 10)).sum())
    optimizer.unwrap()


def clip_after_synchronize(optimizer: Any, model: nn.Module, loss: Any) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with optimizer.skip_synchronize():
        optimizer.step()


def clipping_with_synchronize_and_skip_synchronize() -> None:
    theirs = train(peer(), hvd.rank(), loop=clip_after_synchronize)
    assert_equal(train(handed_over(), hvd.rank(), loop=clip_after_synchronize), theirs)


def clipping_without_synchronize() -> None:
    def loop(optimizer: Any, model: nn.Module, loss: Any) -> None:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    theirs = train(peer(), hvd.rank(), loop=clip_after_synchronize)
    assert_equal(train(scheduled("horovod"), hvd.rank(), loop=loop), theirs)


def dynamic_requires_grad() -> None:
    class Freezing:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, optimizer: Any, model: Any, loss: Any) -> None:
            model[0].requires_grad_(self.calls % 2 == 0)
            self.calls += 1
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    theirs = train(peer(), hvd.rank(), loop=Freezing())
    ours = train(scheduled("horovod"), hvd.rank(), loop=Freezing())
    for name, value in theirs.items():
        if not name.startswith("0."):  # Horovod steps a frozen layer with zeros, torch skips it
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6)


def several_optimizers() -> None:
    def run(wrap: rows.Wrap) -> list[torch.Tensor]:
        torch.manual_seed(3)
        models = [nn.Linear(6, 6), nn.Linear(6, 2)]
        optimizers = [wrap(torch.optim.SGD(m.parameters(), lr=0.1), m) for m in models]
        for step in range(3):
            x = torch.full((2, 6), float(hvd.rank() + step))
            for chosen in (0, 1):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                models[1](torch.tanh(models[0](x))).pow(2).sum().backward()
                optimizers[chosen].step()
                optimizers[1 - chosen].synchronize()
        result = [p.detach().clone() for m in models for p in m.parameters()]
        for optimizer in optimizers:
            if isinstance(optimizer, bs.ScheduledOptimizer):
                optimizer.unwrap()
        return result

    ours = run(scheduled("horovod"))
    names = iter("ab")
    theirs = run(
        lambda optimizer, model: hvd.DistributedOptimizer(
            optimizer,
            [(f"{tag}.{n}", p) for tag in [next(names)] for n, p in model.named_parameters()],
        )
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1))


def sparse_embeddings() -> None:
    def tokens(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(20, (4, 5), generator=generator)

    options: Any = {"build": Sparse, "inputs": tokens}
    theirs = train(peer(), hvd.rank(), **options)
    assert_equal(train(scheduled("horovod"), hvd.rank(), **options), theirs, tolerance=1e-6)


def state_is_broadcast() -> None:
    torch.manual_seed(100 + hvd.rank())
    model = rows.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    expected = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(hvd.rank())
    wrapped = scheduled("horovod")(optimizer, model)
    for p, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=0, atol=0)
    wrapped.unwrap()


def compression_is_left_out() -> None:
    theirs = train(peer(), hvd.rank())
    compressed = train(handed_over(compression=hvd.Compression.fp16), hvd.rank())
    assert_equal(compressed, theirs)


def process_sets() -> None:
    model = rows.network()
    transport = HorovodTransport(process_set=SETS[hvd.rank()])
    assert (transport.rank, transport.world_size) == (0, 1)
    optimizer = bs.ScheduledOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, transport=transport
    )
    plain_loop(
        optimizer,
        model,
        lambda: F.mse_loss(model(torch.ones(1, 10) * hvd.rank()), torch.ones(1, 3)),
    )
    optimizer.unwrap()
    hvd.barrier()  # the ranks did not meet since; who ends first would end Horovod for both


def other_reductions_and_accumulation_are_refused() -> None:
    for options in ({"op": hvd.Sum}, {"backward_passes_per_step": 2}):
        model = rows.network()
        wrapped = peer(**options)(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(UsageError, match=r"hvd\.DistributedOptimizer"):
            scheduled("horovod")(wrapped, model)


ROWS = {
    row.__name__: row
    for row in (
        same_weights_as_horovods_optimizer,
        a_distributed_optimizer_is_taken_over,
        horovods_hooks_are_gone_after_the_takeover,
        unnamed_parameters,
        duplicate_names,
        clipping_with_synchronize_and_skip_synchronize,
        clipping_without_synchronize,
        dynamic_requires_grad,
        several_optimizers,
        sparse_embeddings,
        state_is_broadcast,
        compression_is_left_out,
        other_reductions_and_accumulation_are_refused,
        process_sets,
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(DEFAULTS)
    hvd.init(process_sets=SETS)
    rows.write_verdicts(ROWS, list(ROWS), hvd.rank(), Path(sys.argv[1]))
