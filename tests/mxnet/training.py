"""One worker of the tests: trains a small Gluon model and writes its weights.

``training.py OUTPUT CASES`` with ``CASES`` a JSON list of objects: ``name``, ``optimizer``,
``options``, ``trainer`` (``plain`` or ``scheduled``), ``on_server``, and more, see ``train``. All
cases run in one process, since a job of parameter servers lives as long as its workers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import bytescheduler.mxnet as bs
from bytescheduler._mxnet_import import load

mx = load()
STEPS = 50
BATCH = 8


class Net(mx.gluon.HybridBlock):
    """Convolution, batch normalisation and two dense layers."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.convolution = mx.gluon.nn.Conv2D(6, 3, in_channels=1, use_bias=False)
            self.norm = mx.gluon.nn.BatchNorm(in_channels=6)
            self.hidden = mx.gluon.nn.Dense(40, in_units=216, activation="relu")
            self.out = mx.gluon.nn.Dense(10, in_units=40)

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return self.out(self.hidden(self.norm(self.convolution(x)).flatten()))


def batches(rank: int, dtype: str) -> Any:
    rng = np.random.default_rng(rank)
    while True:
        x = rng.normal(size=(BATCH, 1, 8, 8))
        yield mx.nd.array(x, dtype=dtype), mx.nd.array(rng.integers(0, 10, BATCH))


def train(store: Any, case: dict[str, Any], prefix: int) -> dict[str, np.ndarray]:
    mx.random.seed(5)
    np.random.seed(5)
    net = Net()
    net.initialize(mx.init.Xavier())
    dtype = case.get("dtype", "float32")
    net.cast(dtype)
    if case.get("hybridize", True):
        net.hybridize()
    options = dict(case.get("options", {}))
    if "schedule" in case:
        options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(**case["schedule"])
    trainer = mx.gluon.Trainer(
        net.collect_params(),
        case["optimizer"],
        options,
        kvstore=Renumbered(store, prefix),
        update_on_kvstore=case["on_server"],
    )
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    data = batches(store.rank, dtype)
    for step in range(case.get("steps", STEPS)):
        x, y = next(data)
        with mx.autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(BATCH * store.num_workers)
        if case.get("halve_at") == step:
            trainer.set_learning_rate(trainer.learning_rate / 2)
        if case.get("save_at") == step:
            trainer.save_states(case["state_file"].format(rank=store.rank))
            trainer.load_states(case["state_file"].format(rank=store.rank))
    mx.nd.waitall()
    return {
        name.split("net_")[-1]: parameter.data().asnumpy()
        for name, parameter in net.collect_params().items()
    }


class Renumbered(mx.kv.KVStoreBase):
    """Several trainers on one store: each has its own keys."""

    def __init__(self, store: Any, first: int) -> None:
        self._store = store
        self._first = first

    type = property(lambda self: self._store.type)
    rank = property(lambda self: self._store.rank)
    num_workers = property(lambda self: self._store.num_workers)

    def is_capable(self, capability: str) -> bool:
        return True

    def broadcast(self, key: int, value: Any, out: Any, priority: int = 0) -> None:
        self._store.broadcast(self._first + key, value, out, priority)
        mx.nd.waitall()  # MXNet's own store orders this pull before no push of the same key

    def pushpull(self, key: int, *args: Any, **kwargs: Any) -> None:
        self._store.pushpull(self._first + key, *args, **kwargs)

    def set_optimizer(self, optimizer: Any) -> None:
        optimizer.param_dict = {self._first + k: p for k, p in optimizer.param_dict.items()}
        self._store.set_optimizer(optimizer)


def main(output: str, text: str) -> None:
    inner = mx.kv.create("dist_sync")
    for number, case in enumerate(json.loads(text)):
        store = inner
        if case["trainer"] == "scheduled":
            store = bs.ScheduledKVStore(inner, **case.get("settings", {}))
        weights = train(store, case, 100 * number)
        np.savez(Path(output) / f"{case['name']}.{inner.rank}.npz", **weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
