"""A PyTorch model whose layers take time without computing and yield gradients of true size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device import Device
from benchmarks.job import EmulatedLayer, Job


class _Emulate(torch.autograd.Function):
    """Sleeps in forward and backward; the weight's gradient is a constant made beforehand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, layer: EmulatedModule) -> Tensor:
        ctx.layer = layer
        layer.device.compute(layer.forward_s)
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.layer.device.compute(ctx.layer.backward_s)
        return grads[0], ctx.layer.gradient, None


class EmulatedModule(nn.Module):
    """One layer of a profile on the emulated accelerator."""

    def __init__(self, layer: EmulatedLayer, device: Device) -> None:
        super().__init__()
        self.device = device
        self.forward_s, self.backward_s = layer.forward_s, layer.backward_s
        self.weight = nn.Parameter(torch.zeros(layer.numel)) if layer.numel else None
        self.gradient = torch.full((layer.numel,), 1e-3) if layer.numel else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight is not None:
            # A torch operation that reads the weight, as any real layer has; a custom function
            # alone is invisible to function modes.
            weight = weight.view_as(weight)
        return _Emulate.apply(x, weight, self)


class EmulatedModel(nn.Sequential):
    """All layers of a job, in forward order."""

    def __init__(self, job: Job) -> None:
        device = Device(job)
        super().__init__(*(EmulatedModule(layer, device) for layer in job.layers))


def make_input() -> Tensor:
    """What the model is fed: it requires a gradient, so that every layer has a backward."""
    return torch.ones(1, requires_grad=True)
