"""A schedule in the manner of DeAR (Zhang et al., 2023) on the engine that we use.

An all-reduce is cut in two: gradients are reduce-scattered during backward, in the order of their
production, and all-gathered during the next forward, in the order of their use. Layers are fused
into buckets, whose size is swept. Gloo's own reduce-scatter sends as much as an all-reduce, so it
is made here of an all-to-all, which sends half of that, and a local sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.job import Job
from benchmarks.systems.base import Settings
from benchmarks.systems.torch_base import TorchSystem, Wrapped

if TYPE_CHECKING:
    import torch
    from torch import nn

DEFAULT_FUSION_BYTES = 25 << 20


class DearSystem(TorchSystem):
    """DeAR's default fusion size scaled like the model, and sizes around it."""

    name = "dear"
    engine = "gloo"

    def sweep(self, job: Job) -> list[Settings]:
        scaled = DEFAULT_FUSION_BYTES / job.scale
        return [{"fusion_bytes": round(scaled * factor)} for factor in (1, 0.25, 0.5, 2)]

    def wrap(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> Wrapped:
        dear = DearOptimizer(model, optimizer, settings["fusion_bytes"])
        return Wrapped(model=model, optimizer=dear, close=dear.close)  # type: ignore[arg-type]


class _Bucket:
    """Some parameters' gradients in one buffer, padded so that every rank has an equal shard."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
        import torch
        from torch import distributed as dist

        self._world, rank = dist.get_world_size(), dist.get_rank()
        self._optimizer = type(optimizer)(list(parameters), **optimizer.defaults)
        self._count = self._pending = len(parameters)
        numel = sum(parameter.numel() for parameter in parameters)
        self._flat = torch.zeros(-(-numel // self._world) * self._world)
        self._shards = list(self._flat.chunk(self._world))
        self._mine = self._shards[rank].clone()
        self._received = torch.empty_like(self._flat)
        self._work: Any = None
        self._views = torch.split(
            self._flat[:numel], [parameter.numel() for parameter in parameters]
        )
        for parameter, view in zip(parameters, self._views, strict=True):
            parameter.grad = view.view_as(parameter)

    def produced(self, _: torch.Tensor) -> None:
        """One more gradient is there; with the last one, start to reduce-scatter."""
        from torch import distributed as dist

        self._pending -= 1
        if self._pending == 0:
            self._work = dist.all_to_all_single(self._received, self._flat, async_op=True)

    def reduce(self) -> None:
        """Wait until my shard of every rank is here and average it."""
        self._pending = self._count
        self._work.wait()
        self._mine.copy_(self._received.view(self._world, -1).mean(0))

    def gather(self) -> None:
        """Start to all-gather the shards."""
        from torch import distributed as dist

        self._work = dist.all_gather(self._shards, self._mine, async_op=True)

    def update(self) -> None:
        """Wait for all shards and update the parameters, once."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._optimizer.step()
            self._flat.zero_()


class DearOptimizer:
    """Takes the place of the optimizer in the training loop."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, limit: int) -> None:
        owners = [
            (module, parameter)
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
        ]
        groups = _fuse([parameter for _, parameter in owners], limit)
        self._buckets = [_Bucket(group, optimizer) for group in groups]
        of = {p: bucket for group, bucket in zip(groups, self._buckets, strict=True) for p in group}
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(partial(_gate, of[parameter]))
            for module, parameter in owners
        ]
        self._hooks += [
            parameter.register_post_accumulate_grad_hook(of[parameter].produced)
            for _, parameter in owners
        ]

    def zero_grad(self) -> None:
        """Nothing: buckets are cleared after their update."""

    def step(self) -> None:
        """Wait for reduce-scatters, last layers first; start all-gathers, first layers first."""
        for bucket in reversed(self._buckets):
            bucket.reduce()
        for bucket in self._buckets:
            bucket.gather()

    def close(self) -> None:
        """Apply what is outstanding and remove the hooks."""
        for bucket in self._buckets:
            bucket.update()
        for hook in self._hooks:
            hook.remove()


def _gate(bucket: _Bucket, module: nn.Module, inputs: Any) -> None:
    bucket.update()


def _fuse(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Groups of neighbours in forward order, each closed once it holds ``limit`` bytes."""
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if sum(p.nbytes for p in groups[-1]) >= limit:
            groups.append([])
        groups[-1].insert(0, parameter)
    return groups[::-1]
