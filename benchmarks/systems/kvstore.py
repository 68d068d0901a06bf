"""MXNet's parameter server: plain ``dist_sync``, and with P3's priority slicing.

MXNet's engine starts a push when the gradient is there and a forward operator when its weight is;
there is no barrier to begin with. The emulated job follows that: each layer pushes and pulls
after its backward, with the priority that Gluon's trainer gives it, and its next forward waits for
its own weight. Servers update the weights, as ``dist_sync`` does by default.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import count
from typing import Any

from benchmarks.device import Device
from benchmarks.job import Job
from benchmarks.systems.base import Session, Settings, System
from benchmarks.systems.torch_base import installed

BIG_ARRAY_ELEMENTS = 1_000_000
"""MXNet's default: larger arrays are spread over all servers."""
SLICE_ELEMENTS = 40_000
"""P3's default slice."""
_keys = count()


class KVStoreSystem(System):
    """``dist_sync`` with arrays spread over the servers above the default size, scaled."""

    name = "kvstore"
    engine = "kvstore"

    def missing(self) -> str | None:
        return installed("mxnet")

    def sweep(self, job: Job) -> list[Settings]:
        scaled = BIG_ARRAY_ELEMENTS / job.scale
        return [{"elements": max(1, round(scaled * factor))} for factor in (1, 0.1)]

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        return {"MXNET_KVSTORE_BIGARRAY_BOUND": str(settings["elements"])}

    def open(self, job: Job, settings: Mapping[str, Any]) -> Session:
        return _Session(job)


class P3System(KVStoreSystem):
    """MXNet's own priority-based parameter propagation."""

    name = "p3"

    def sweep(self, job: Job) -> list[Settings]:
        scaled = max(1, round(SLICE_ELEMENTS / job.scale))
        return [{"elements": SLICE_ELEMENTS}, {"elements": scaled}]

    def environment(self, settings: Mapping[str, Any]) -> dict[str, str]:
        return {
            "DMLC_PS_VAN_TYPE": "p3",
            "MXNET_KVSTORE_SLICE_THRESHOLD": str(settings["elements"]),
        }


@functools.cache
def store() -> Any:
    """This process's connection to the servers (collective)."""
    import numpy

    numpy.bool = bool  # MXNet 1.9.1 reads this alias, which NumPy 1.24 removed.
    import mxnet

    connection = mxnet.kv.create("dist_sync")
    connection.set_optimizer(mxnet.optimizer.SGD(learning_rate=0.01))
    return connection


class _Session(Session):
    def __init__(self, job: Job) -> None:
        import mxnet

        self._store = store()
        self._layers = job.layers
        self._device = Device(job)
        self._keys = [next(_keys) for _ in job.layers]
        self._weights = [mxnet.nd.zeros((layer.numel,)) for layer in job.layers]
        self._gradients = [mxnet.nd.full((layer.numel,), 1e-3) for layer in job.layers]
        for key, weight in zip(self._keys, self._weights, strict=True):
            self._store.init(key, weight)

    def iterate(self) -> None:
        for layer, weight in zip(self._layers, self._weights, strict=True):
            weight.wait_to_read()
            self._device.compute(layer.forward_s)
        for index in reversed(range(len(self._layers))):
            self._device.compute(self._layers[index].backward_s)
            key = self._keys[index]
            self._store.push(key, self._gradients[index], priority=-index)
            self._store.pull(key, out=self._weights[index], priority=-index)

    def close(self) -> None:
        for weight in self._weights:
            weight.wait_to_read()
