"""One worker of the tests of ``dist_async``: uses it rightly and wrongly, then says ``fine``.

``asynchronous.py FOLDER``; all checks share one process, since a process joins one job.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bytescheduler.mxnet as bs
from bytescheduler._mxnet_import import load
from bytescheduler.exceptions import ConfigurationError, UsageError

mx = load()
STEPS = 60
PUSHES = 20
FIRST_KEY = 500  # the trainer's are below
SHAPES = {FIRST_KEY: (3000,), FIRST_KEY + 1: (5, 7)}


def trains(folder: Path) -> bs.ScheduledTrainer:
    """Both workers update the same weights on the servers, and the loss falls."""
    mx.random.seed(1)
    net = mx.gluon.nn.Dense(4, in_units=30)
    net.initialize(mx.init.Xavier())
    trainer = bs.ScheduledTrainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.1},
        kvstore="dist_async",
        partition_size=256,
        credit_size="1KiB",
    )
    assert trainer.scheduled.type == "dist_async"
    assert trainer.scheduled.settings.partition_size == 256
    rng = np.random.default_rng(1)
    x, y = mx.nd.array(rng.normal(size=(16, 30))), mx.nd.array(rng.integers(0, 4, 16))
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for _ in range(STEPS):
        with mx.autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(16)
        losses.append(float(loss.mean().asscalar()))
    trainer.synchronize()
    assert losses[-1] < losses[0] / 2, losses
    raises(UsageError, lambda: trainer.save_states(str(folder / "states")), "on_kvstore=False")
    raises(UsageError, lambda: trainer.load_states(str(folder / "states")), "on_kvstore=False")
    return trainer


def counts_every_push_once(inner: Any) -> None:
    """Gradients that do not depend on weights: the order does not matter, each counts once."""
    store = bs.ScheduledKVStore(inner, partition_size=4096, credit_size=8192)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
    weights = {key: mx.nd.zeros(shape) for key, shape in SHAPES.items()}
    gradients = {key: mx.nd.full(shape, store.rank + 1) for key, shape in SHAPES.items()}
    for key, weight in weights.items():
        store.broadcast(key, weight, weight)
    for _ in range(PUSHES):
        for key, gradient in gradients.items():
            store.pushpull(key, gradient, out=weights[key], priority=-key)
    store.synchronize()
    inner._barrier()
    for key, weight in weights.items():
        store.pushpull(key, mx.nd.zeros(SHAPES[key]), out=weight, priority=-key)
    store.synchronize()
    total = PUSHES * sum(range(1, store.num_workers + 1))
    for weight in weights.values():
        np.testing.assert_array_equal(weight.asnumpy(), -total)
    store.close()


def refuses(inner: Any) -> None:
    """What only ``dist_sync`` can do, and settings that contradict."""
    net = mx.gluon.nn.Dense(4, in_units=30)
    net.initialize()
    store = bs.ScheduledKVStore(inner)

    def trainer(**options: Any) -> Any:
        return bs.ScheduledTrainer(net.collect_params(), "sgd", kvstore=store, **options)

    raises(ConfigurationError, lambda: trainer(update_on_kvstore=False), "servers must update")
    raises(ConfigurationError, lambda: trainer(mode="fifo"), "has its own settings")
    raises(ConfigurationError, lambda: store.set_optimizer(mx.optimizer.LAMB()), "whole tensors")
    key = FIRST_KEY + len(SHAPES)
    store.init(key, mx.nd.zeros(3))
    raises(ConfigurationError, lambda: store.push(key, mx.nd.ones(3)), "call set_optimizer")
    store.set_optimizer(mx.optimizer.SGD())
    assert store.settings.mode == "priority"
    automatic = bs.ScheduledKVStore(inner, mode="auto")
    automatic.set_optimizer(mx.optimizer.SGD())
    automatic.init(key + 1, mx.nd.zeros(3))
    raises(ConfigurationError, lambda: automatic.push(key + 1, mx.nd.ones(3)), "'auto'")


def raises(kind: type[Exception], call: Callable[[], Any], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def main(folder: str) -> None:
    trainer = trains(Path(folder))
    inner = trainer.scheduled._inner
    trainer.scheduled.close()
    inner._barrier()
    counts_every_push_once(inner)
    refuses(inner)
    print("fine", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
