"""One worker of the tests of losses: exchanges a gradient until somebody is lost."""

from __future__ import annotations

import time

import numpy as np

from bytescheduler.core import Exchange, Layout, ParameterSpec, Settings
from bytescheduler.transports.kvstore import KVStoreTransport

transport = KVStoreTransport()
layout = Layout([ParameterSpec(name="weight", numel=100_000, itemsize=4)])
buffers = {"flat": np.zeros(layout.sizes["flat"], np.float32)}
settings = Settings(partition_size=1 << 16, credit_size=1 << 18)
exchange = Exchange(layout, buffers, transport, settings)
print("training", flush=True)
while True:
    exchange.post(0)
    exchange.wait([0])
    exchange.step()
    time.sleep(0.01)  # emulated compute
