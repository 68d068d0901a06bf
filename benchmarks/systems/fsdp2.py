"""PyTorch's FSDP2 (``fully_shard``): parameters in shards, gathered before each use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.job import Job
from benchmarks.systems.base import Settings
from benchmarks.systems.torch_base import TorchSystem, Wrapped, nothing

SMALL_SHARE = 0.01
"""Layers below this share of the model are left to the root's group."""


class Fsdp2System(TorchSystem):
    """Every large layer is a group of its own; reshard after forward, and not."""

    name = "fsdp2"
    engine = "gloo"

    def sweep(self, job: Job) -> list[Settings]:
        return [{"reshard": False}, {"reshard": True}]

    def wrap(self, model: Any, optimizer: Any, settings: Mapping[str, Any]) -> Wrapped:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        total = sum(parameter.numel() for parameter in model.parameters())
        options = {"mesh": mesh, "reshard_after_forward": settings["reshard"]}
        for child in model.children():
            if sum(p.numel() for p in child.parameters()) > SMALL_SHARE * total:
                fully_shard(child, **options)
        fully_shard(model, **options)
        sharded = torch.optim.SGD(model.parameters(), lr=optimizer.param_groups[0]["lr"])
        return Wrapped(model=model, optimizer=sharded, close=nothing)
