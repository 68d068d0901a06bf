"""A Gluon CNN on handwritten digits, trained on parameter servers.

    bytescheduler launch --servers 2 --workers 2 -- python examples/mxnet/digits.py

Every worker sees its own part of the data. What differs from plain Gluon is marked.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import bytescheduler.mxnet as bs  # before mxnet, which it imports on today's NumPy

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip

HELD_OUT = 297


def network() -> gluon.HybridBlock:
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, activation="relu"),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Dense(64, activation="relu"),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="per worker")
    args = parser.parse_args()

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[:, None]
    labels = digits.target.astype("float32")

    mx.random.seed(1)
    net = network()
    net(mx.nd.array(images[:1]))
    kv = bs.ScheduledKVStore("dist_sync")  # instead of mx.kv.create("dist_sync")
    trainer = gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9},
        kvstore=kv,
        update_on_kvstore=False,
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    order = np.random.default_rng(0)
    batch = args.batch_size * kv.num_workers
    for epoch in range(args.epochs):
        shuffled = order.permutation(len(images) - HELD_OUT)
        for start in range(0, len(shuffled) - batch + 1, batch):
            mine = shuffled[start + kv.rank : start + batch : kv.num_workers]
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images[mine])), mx.nd.array(labels[mine]))
            loss.backward()
            trainer.step(batch)
        scores = net(mx.nd.array(images[-HELD_OUT:])).asnumpy()
        accuracy = float((scores.argmax(1) == labels[-HELD_OUT:]).mean())
        if kv.rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
