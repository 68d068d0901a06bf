"""Gradients of ``nn.Embedding(sparse=True)``: exchanged as rows, in ``step()``.

A sparse gradient has no place in the flat buffer, and optimizers such as SparseAdam insist on
sparse ones. So its indices and values are gathered from all ranks through the transport's small
messages, which any engine has, and added up. This waits for the slowest rank: a model that has such
a parameter is stepped with a barrier.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch

from bytescheduler.transports.base import Transport

__all__ = ["average_sparse_gradients"]


def average_sparse_gradients(
    transport: Transport, parameters: Sequence[torch.nn.Parameter]
) -> None:
    """Collective: replace each ``p.grad`` by the mean over ranks; kept where no rank has one."""
    if transport.world_size == 1:
        return
    buffer = io.BytesIO()
    torch.save([_coordinates(p) for p in parameters], buffer)
    answers = [torch.load(io.BytesIO(data)) for data in transport.exchange(buffer.getvalue())]
    for position, parameter in enumerate(parameters):
        parts = [answer[position] for answer in answers if answer[position] is not None]
        if not parts:
            continue
        indices = torch.cat([part[0] for part in parts], dim=1)
        values = torch.cat([part[1] for part in parts]) / transport.world_size
        total = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        parameter.grad = total.coalesce().to(parameter.device)


def _coordinates(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor] | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce().cpu()
    return gradient.indices(), gradient.values()
