"""One rank of a doctor's examination: does the engine average, how fast, and how soon.

``python -m bytescheduler.doctor.probe ENGINE`` in each rank, under the engine's launcher; rank 0
prints one line of JSON. The doctor starts it with two ranks on this machine. Under your own
launcher it measures between your own hosts::

    torchrun --nnodes 2 --nproc-per-node 1 ... -m bytescheduler.doctor.probe torch
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import numpy as np

from bytescheduler._imports import require
from bytescheduler.exceptions import TransportError
from bytescheduler.transports import Transport, create

__all__ = ["MARK", "main", "measure"]

MARK: Final = "bytescheduler-probe "  # before the line of JSON, as engines print much
SMALL: Final = 16  # float32 values, for latency
LARGE: Final = 2 << 20  # float32 values (8 MiB), for bandwidth
REPEATS: Final = 20
LARGE_REPEATS: Final = 5
CHUNK_SECONDS: Final = 30.0


def main(engine: str) -> int:
    """Open ``engine`` on this rank, measure, and print the result on rank 0."""
    transport = _open(engine)
    try:
        result = measure(transport, _zeros(engine))
    finally:
        transport.close()
    if transport.rank == 0:
        print(MARK + json.dumps(result), flush=True)
    return 0


def measure(transport: Transport, zeros: Callable[[int], Any]) -> dict[str, float]:
    """Check one average and time small and large ones; on all ranks alike.

    Returns:
        ``latency_s`` of a small chunk; ``bandwidth_bytes_per_s``, a large chunk's bytes over its
        time; ``world_size``.

    Raises:
        TransportError: the engine failed, or its averages are wrong.
    """
    small, large = zeros(SMALL), zeros(LARGE)
    small[:] = float(transport.rank)
    handles = [transport.prepare(0, small), transport.prepare(1, large)]
    transport.exchange(b"ready")
    _average(transport, handles[0], 0)
    expected = (transport.world_size - 1) / 2
    if abs(float(small[-1]) - expected) > 1e-6:
        raise TransportError(f"an average of ranks must be {expected}, got {float(small[-1])}")
    latency = median(_average(transport, handles[0], 0) for _ in range(REPEATS))
    _average(transport, handles[1], 1)
    seconds = median(_average(transport, handles[1], 1) for _ in range(LARGE_REPEATS))
    transport.exchange(b"done")
    return {
        "latency_s": latency,
        "bandwidth_bytes_per_s": 4 * LARGE / seconds,
        "world_size": transport.world_size,
    }


def _average(transport: Transport, handle: Any, index: int) -> float:
    """Average one chunk and return how long it took."""
    arrived = threading.Event()
    errors: list[BaseException] = []

    def done(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        arrived.set()

    begin = time.perf_counter()
    transport.start(handle, index, done)
    if not arrived.wait(CHUNK_SECONDS):
        raise TransportError(f"a chunk must come back within {CHUNK_SECONDS:g} s, none did")
    if errors:
        raise transport.explain(errors[0])
    return time.perf_counter() - begin


def _open(engine: str) -> Transport:
    if engine == "torch":
        distributed = require("torch.distributed", extra="torch")
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
    return create(engine)


def _zeros(engine: str) -> Callable[[int], Any]:
    """Buffers as the engine's users have them."""
    if engine in ("torch", "horovod", "byteps"):
        return require("torch", extra="torch").zeros
    return lambda size: np.zeros(size, np.float32)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
