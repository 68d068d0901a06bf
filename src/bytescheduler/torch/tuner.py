"""What rank 0's tuner has to know of a PyTorch job: model, engine, device, rate of the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from bytescheduler.core import Settings
from bytescheduler.core.exchange import Tuner
from bytescheduler.torch.agreement import broadcast_tensors
from bytescheduler.torch.slots import facts_of
from bytescheduler.transports import Transport, name_of
from bytescheduler.tuning import make_tuner, timed_broadcast

__all__ = ["broadcast_timed", "tuner_of"]


def broadcast_timed(transport: Transport, tensors: Sequence[Tensor]) -> float | None:
    """Collective: overwrite ``tensors`` with rank 0's; bytes per second, None where unknown."""

    def broadcast() -> None:
        broadcast_tensors(transport, tensors)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)

    return timed_broadcast(transport, broadcast, _bytes(tensors))


def tuner_of(
    transport: Transport,
    settings: Settings,
    named: list[tuple[str, nn.Parameter]],
    bandwidth: float | None,
) -> Tuner | None:
    """The tuner or report that is asked for; on rank 0, None elsewhere."""
    if transport.rank != 0:
        return None
    return make_tuner(
        settings,
        signature=repr(facts_of(named, "parameter")),
        world_size=transport.world_size,
        engine=name_of(transport),
        device=_device(named[0][1].device) if named else "cpu",
        total_bytes=_bytes(parameter for _, parameter in named),
        bandwidth=bandwidth,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _device(device: torch.device) -> str:
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type
