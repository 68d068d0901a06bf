"""The demo's training, as a worker does it: an epoch per command, weights in a file at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.digits import accuracy, load_digits, make_network

SEED = 1234
BATCH = 96
LEARNING_RATE = 1e-3
BUCKETS_PER_MODEL = 4
WIDTH = 64


class Training:
    """Digits, trained with or without scheduling."""

    def __init__(self, kind: str, trace: str | None) -> None:
        place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._train, self._test = load_digits(*place)
        self._network = make_network(SEED, WIDTH)
        self._optimizer: Any = torch.optim.AdamW(self._network.parameters(), lr=LEARNING_RATE)
        self._model = self._network
        size = sum(parameter.nbytes for parameter in self._network.parameters())
        if kind == "ddp":
            bucket_mb = size / BUCKETS_PER_MODEL / (1 << 20)
            self._model = nn.parallel.DistributedDataParallel(
                self._network, bucket_cap_mb=bucket_mb
            )
        elif kind == "scheduled":
            self._schedule(trace)
        self._epochs = 0

    def _schedule(self, trace: str | None) -> None:
        import bytescheduler.torch as bs

        # So few iterations would all be spent on the search that is the default.
        self._optimizer = bs.ScheduledOptimizer(
            self._optimizer, self._network, mode="priority", trace=trace
        )

    def epoch(self) -> dict[str, Any]:
        """One pass over this rank's share; seconds of each iteration and the last loss."""
        begins: list[float] = []
        loss = torch.zeros(())
        for images, labels in self._train.batches(BATCH, seed=self._epochs):
            begins.append(time.perf_counter())
            self._optimizer.zero_grad()
            loss = functional.cross_entropy(self._model(images), labels)
            loss.backward()
            self._optimizer.step()
        self._epochs += 1
        return {"seconds": [b - a for a, b in pairwise(begins)], "loss": float(loss.detach())}

    def finish(self, path: str) -> dict[str, Any]:
        """Unwrap, test, and leave the weights in ``path``."""
        if hasattr(self._optimizer, "unwrap"):
            self._optimizer.unwrap()
        torch.save(self._network.state_dict(), path)
        return {"accuracy": accuracy(self._network, self._test), "bytes": _bytes(self._network)}


def _bytes(network: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())


_current: list[Training] = []


def obey(command: Mapping[str, Any]) -> dict[str, Any]:
    """``begin``, ``epoch`` or ``finish``."""
    if command["what"] == "begin":
        _current[:] = [Training(command["kind"], command.get("trace"))]
        return {}
    if command["what"] == "epoch":
        return _current[0].epoch()
    return _current[0].finish(command["path"].format(rank=os.environ["RANK"]))
