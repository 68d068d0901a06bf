"""The rate between ranks, seen on the broadcast of initial parameters that happens anyway.

A long transfer counts as it is, cold buffers and a busy machine included. A short one, where the
first connection may take longer than the bytes, is repeated and the quickest counts. That tells
networks apart, which is all that default sizes and the cache of tuned settings (in bins of an
octave) want of it; ``bytescheduler doctor`` measures with care.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

from bytescheduler.core.config import Mode, Settings
from bytescheduler.transports.base import Transport

__all__ = ["settings_of_rank_0", "timed_broadcast"]

LEAST_BYTES: Final = 1 << 20  # less than this times latency, not bandwidth
SHORT_S: Final = 0.05  # what takes less is timed again
REPEATS: Final = 2


def timed_broadcast(
    transport: Transport, broadcast: Callable[[], object], size: int
) -> float | None:
    """Collective: call ``broadcast``, once or a few times, and return its bytes per second.

    Tiny exchanges before and after see to it that all ranks begin together and have received
    everything. ``broadcast`` must wait for the device, where it works on one.

    Args:
        size: bytes that it sends.

    Returns:
        The same on every rank. None where there is nobody to send to, or too little to send.
    """
    if transport.world_size == 1:
        broadcast()
        return None
    seconds = _time(transport, broadcast)
    if seconds < SHORT_S and size >= LEAST_BYTES:
        seconds = min(seconds, *(_time(transport, broadcast) for _ in range(REPEATS)))
    return size / seconds if size >= LEAST_BYTES else None


def settings_of_rank_0(transport: Transport, settings: Settings) -> Settings:
    """Collective: ``settings`` with rank 0's sizes and mode, which its environment may set."""
    mine = f"{settings.partition_size} {settings.credit_size} {settings.mode}"
    partition, credit, mode = transport.exchange(mine.encode())[0].decode().split()
    return replace(
        settings,
        partition_size=int(partition),
        credit_size=int(credit),
        mode=cast("Mode", mode),
    )


def _time(transport: Transport, broadcast: Callable[[], object]) -> float:
    """Seconds on the slowest rank."""
    transport.exchange(b"")
    begin = time.perf_counter()
    broadcast()
    transport.exchange(b"")
    seconds = repr(time.perf_counter() - begin)
    return max(float(answer) for answer in transport.exchange(seconds.encode()))
