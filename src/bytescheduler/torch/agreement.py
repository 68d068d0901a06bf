"""What ranks must agree on before anything is changed, and the values that they start from."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from bytescheduler.exceptions import ByteSchedulerError, RankMismatchError
from bytescheduler.torch.bundles import bundle
from bytescheduler.transports.base import Transport

__all__ = ["agree", "broadcast_optimizer_state", "broadcast_tensors"]

SHOWN = 5  # differences spelled out in an error


def agree(transport: Transport, what: str, check: Callable[[], Mapping[str, str]]) -> None:
    """Collective: run ``check`` on all ranks and compare the facts that it returns.

    Raises:
        ByteSchedulerError: the error of ``check``, on the rank where it failed.
        RankMismatchError: on all ranks, if facts differ or another rank's check failed.
    """
    facts: Mapping[str, str] = {}
    problem: ByteSchedulerError | None = None
    try:
        facts = check()
    except ByteSchedulerError as error:
        problem = error
    mine = (str(problem) if problem is not None else "", dict(facts))
    answers = [pickle.loads(data) for data in transport.exchange(pickle.dumps(mine))]
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(answers):
        if text:
            raise RankMismatchError(f"rank {rank} refused {what}: {text}")
    leader = answers[0][1]
    differences = [
        f"{name} is {theirs.get(name, 'absent')} on rank {rank}, "
        f"{leader.get(name, 'absent')} on rank 0"
        for rank, (_, theirs) in enumerate(answers)
        for name in sorted(leader.keys() | theirs.keys())
        if leader.get(name) != theirs.get(name)
    ]
    if differences:
        more = len(differences) - SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        raise RankMismatchError(
            f"{what} must be equal on all ranks; {'; '.join(differences[:SHOWN])}{tail}"
        )


def broadcast_tensors(transport: Transport, tensors: Sequence[torch.Tensor]) -> None:
    """Collective: overwrite ``tensors`` with rank 0's values, one message per dtype and device."""
    if transport.world_size == 1:
        return
    for part in bundle(tensors):
        transport.broadcast(part.raw)
        if transport.rank != 0:
            part.adopt()


def broadcast_optimizer_state(transport: Transport, optimizer: Optimizer) -> None:
    """Collective: give all ranks rank 0's optimizer state and hyper-parameters, if it has any."""
    payload = b""
    if transport.rank == 0 and optimizer.state:
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        payload = buffer.getvalue()
    leader = transport.exchange(payload)[0]
    if leader and transport.rank != 0:
        state: Any = torch.load(io.BytesIO(leader), map_location="cpu", weights_only=False)
        optimizer.load_state_dict(state)
