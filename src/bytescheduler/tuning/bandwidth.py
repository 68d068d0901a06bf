"""The rate between ranks, seen on the broadcast of initial parameters that happens anyway.

One timing of one transfer, cold buffers and a busy machine included: over loopback, beside other
work, it was seen to repeat within a factor of 2.7. That is enough to tell networks apart, which is
all that the cache of tuned settings wants of it (``cache`` has bins of an octave). A measurement
with warm buffers and repeats would cost seconds on a slow network; ``bytescheduler doctor`` has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from bytescheduler.transports.base import Transport

__all__ = ["timed_broadcast"]

LEAST_BYTES: Final = 1 << 20  # less than this times latency, not bandwidth


def timed_broadcast(
    transport: Transport, broadcast: Callable[[], object], size: int
) -> float | None:
    """Collective: call ``broadcast``, and return its bytes per second on this rank.

    Tiny exchanges before and after see to it that all ranks begin together and have received
    everything. ``broadcast`` must wait for the device, where it works on one.

    Args:
        size: bytes that it sends.

    Returns:
        None where there is nobody to send to, or too little to send.
    """
    if transport.world_size == 1:
        broadcast()
        return None
    transport.exchange(b"")
    begin = time.perf_counter()
    broadcast()
    transport.exchange(b"")
    seconds = time.perf_counter() - begin
    return size / seconds if size >= LEAST_BYTES else None
