"""One worker of the tests: trains a small Gluon model and writes its weights.

``training.py OUTPUT CASES [KIND]`` with ``CASES`` a JSON list of objects: ``name``, ``optimizer``,
``options``, ``trainer`` (``plain``, ``scheduled`` or ``ScheduledTrainer``), ``on_server``,
``settings``, and more, see ``Run``. All cases run in one job, since starting one takes longer than
training. Servers keep the last optimizer that they were sent, so plain trainers with updates on
servers come last, when the scheduled stores have closed.
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


class Elementwise(mx.gluon.HybridBlock):
    """No matrix product: MXNet has none of float16 on CPUs."""

    def __init__(self) -> None:
        super().__init__(prefix="net_")
        with self.name_scope():
            self.scale = self.params.get("scale", shape=(1, 64))
            self.offset = self.params.get("offset", shape=(1, 64))

    def hybrid_forward(self, F: Any, x: Any, scale: Any, offset: Any) -> Any:
        return F.broadcast_add(F.broadcast_mul(F.flatten(x), scale), offset)


NETS = {"layers": Net, "elementwise": Elementwise}


def batches(rank: int, dtype: str) -> Any:
    rng = np.random.default_rng(rank)
    while True:
        x = rng.normal(size=(BATCH, 1, 8, 8))
        yield mx.nd.array(x, dtype=dtype), mx.nd.array(rng.integers(0, 10, BATCH))


class Run:
    """A net and its trainer, which may be replaced by others in the middle."""

    def __init__(self, store: Any, case: dict[str, Any], prefix: int) -> None:
        self._store = store
        self._case = case
        self.net = self._make_net()
        self.trainer = self._make_trainer(prefix)

    def step(self, x: Any, y: Any) -> None:
        loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        with mx.autograd.record():
            loss = loss_of(self.net(x), y)
        loss.backward()
        if "clip" not in self._case:
            self.trainer.step(BATCH * self._store.num_workers)
            return
        self.trainer.allreduce_grads()
        parameters = self.net.collect_params().values()
        gradients = [p.grad() for p in parameters if p.grad_req != "null"]
        mx.gluon.utils.clip_global_norm(gradients, self._case["clip"])
        self.trainer.update(BATCH * self._store.num_workers)

    def resume(self, folder: Path, prefix: int) -> None:
        """Go on with what was saved: a new net and a new trainer, of other initial values."""
        files = [str(folder / f"{self._case['name']}.{self._store.rank}.{kind}") for kind in "ps"]
        self.net.save_parameters(files[0])
        self.trainer.save_states(files[1])
        self.net = self._make_net()
        self.trainer = self._make_trainer(prefix)
        self.trainer.load_states(files[1])  # makes the keys, with the initial values
        self.net.load_parameters(files[0])

    def weights(self) -> dict[str, np.ndarray]:
        parameters = self.net.collect_params().items()
        return {name.split("net_")[-1]: value.data().asnumpy() for name, value in parameters}

    def _make_net(self) -> Any:
        mx.random.seed(5)
        np.random.seed(5)
        net = NETS[self._case.get("net", "layers")]()
        net.initialize(mx.init.Xavier())
        net.cast(self._case.get("dtype", "float32"))
        if self._case.get("hybridize", True):
            net.hybridize()
        return net

    def _make_trainer(self, prefix: int) -> Any:
        options = dict(self._case["options"])
        if "schedule" in self._case:
            options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(**self._case["schedule"])
        if self._case["trainer"] == "ScheduledTrainer":  # on keys from 0; one per job
            return bs.ScheduledTrainer(
                self.net.collect_params(),
                self._case["optimizer"],
                options,
                kvstore=self._store,
                update_on_kvstore=self._case["on_server"],
                **self._case["settings"],
            )
        return mx.gluon.Trainer(
            self.net.collect_params(),
            self._case["optimizer"],
            options,
            kvstore=Renumbered(self._store, prefix),
            update_on_kvstore=self._case["on_server"],
            compression_params=self._case.get("compression"),
        )


def train(store: Any, case: dict[str, Any], prefix: int, folder: Path) -> dict[str, np.ndarray]:
    run = Run(store, case, prefix)
    data = batches(store.rank, case.get("dtype", "float32"))
    for step in range(case.get("steps", STEPS)):
        run.step(*next(data))
        if case.get("halve_at") == step:
            run.trainer.set_learning_rate(run.trainer.learning_rate / 2)
        if case.get("resume_at") == step:
            run.resume(folder, prefix + 50)
    mx.nd.waitall()
    if case["trainer"] == "ScheduledTrainer":
        run.trainer.synchronize()
        run.trainer.scheduled.close()
    return run.weights()


class Renumbered(mx.kv.KVStoreBase):
    """Several trainers on one store: each has its own keys."""

    def __init__(self, store: Any, first: int) -> None:
        self._store = store
        self._first = first
        self._compressed = False

    type = property(lambda self: self._store.type)
    rank = property(lambda self: self._store.rank)
    num_workers = property(lambda self: self._store.num_workers)

    def is_capable(self, capability: str) -> bool:
        return True

    def broadcast(self, key: int, value: Any, out: Any, priority: int = 0) -> None:
        self._store.broadcast(self._first + key, value, out, priority)
        mx.nd.waitall()  # MXNet's own store orders this pull before no push of the same key

    def set_gradient_compression(self, parameters: Any) -> None:
        self._store.set_gradient_compression(parameters)
        self._compressed = True

    def pushpull(self, key: int, value: Any, out: Any = None, priority: int = 0) -> None:
        if self._compressed:  # MXNet's own store refuses to do both at once
            self._store.push(self._first + key, value, priority)
            self._store.pull(self._first + key, value if out is None else out, priority)
        else:
            self._store.pushpull(self._first + key, value, out, priority)

    def set_optimizer(self, optimizer: Any) -> None:
        optimizer.param_dict = {self._first + k: p for k, p in optimizer.param_dict.items()}
        self._store.set_optimizer(optimizer)


def main(output: str, text: str, kind: str = "dist_sync") -> None:
    inner = mx.kv.create(kind)
    for number, case in enumerate(json.loads(text), start=1):
        store = inner
        if case["trainer"] == "scheduled":
            store = bs.ScheduledKVStore(inner, **case["settings"])
        weights = train(store, case, 100 * number, Path(output))
        np.savez(Path(output) / f"{case['name']}.{inner.rank}.npz", **weights)
        if case["trainer"] == "scheduled":
            store.close()
        inner._barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
