"""Our optimizer over BytePS beside BytePS's own ones, on real workers, server and scheduler.

BytePS's own optimizers use one name per tensor, and its server answers from memory that the next
push of that name overwrites, so a fast worker spoils what a slow one receives. Here all workers
meet after each of their steps, which hides that; ours need not.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

import byteps.torch as bps
import rows
import torch
from rows import Weights, assert_equal, scheduled, train
from torch import nn
from torch.nn import functional as F

_meetings = count()


def meet() -> None:
    """Return when all workers have called this."""
    bps.push_pull(torch.ones(1), name=f"meeting.{next(_meetings) % 2}")


def plain_and_meet(optimizer: Any, model: nn.Module, loss: Any) -> None:
    rows.plain_loop(optimizer, model, loss)
    meet()


def peer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    return bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def cross_barrier(make: Any, model: nn.Module) -> Weights:
    """Train by BytePS's optimizer without a barrier.

    Its own end, by ``num_steps``, can lose updates: its thread stops at a mark behind which it has
    itself put back what is not finished yet. So the end is waited for here.
    """
    from byteps.torch.cross_barrier import CrossBarrier

    optimizer = CrossBarrier(
        model,
        make(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
    )
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(rows.STEPS):
        generator = torch.Generator().manual_seed(1000 * bps.rank() + step)
        x, y = torch.randn(4, 10, generator=generator), torch.randint(3, (4,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for lock in optimizer._locks.values():
            with lock:  # held until the parameter's update was applied
                pass
        meet()
    optimizer._event_queue.put((None, None, None))
    optimizer._poller.join()
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_weights_as_byteps_own_optimizer() -> None:
    theirs = train(peer, bps.rank(), loop=plain_and_meet)
    assert_equal(train(scheduled("byteps"), bps.rank()), theirs)


def same_weights_as_one_process() -> None:
    for make in (torch.optim.SGD, torch.optim.AdamW):
        expected = rows.one_process(bps.size(), make=make)
        assert_equal(train(scheduled("byteps"), bps.rank(), make=make), expected)


def same_weights_as_cross_barrier() -> None:
    ours = train(scheduled("byteps"), bps.rank())
    torch.manual_seed(7)
    assert_equal(ours, cross_barrier(torch.optim.SGD, rows.network()), tolerance=1e-6)


def clipping_which_cross_barrier_cannot_do() -> None:
    def clip(optimizer: Any, model: nn.Module, loss: Any) -> None:
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def clip_with_byteps(optimizer: Any, model: nn.Module, loss: Any) -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        meet()

    theirs = train(peer, bps.rank(), loop=clip_with_byteps)
    assert_equal(train(scheduled("byteps"), bps.rank(), loop=clip), theirs)


ROWS = {
    row.__name__: row
    for row in (
        same_weights_as_one_process,
        same_weights_as_byteps_own_optimizer,
        clipping_which_cross_barrier_cannot_do,
        same_weights_as_cross_barrier,  # last: importing it changes BytePS's other optimizer
    )
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    bps.init()
    rows.write_verdicts(ROWS, list(ROWS), bps.rank(), Path(sys.argv[1]))
