"""Finding the best partition size, credit size and schedule: online, offline, remembered.

Adapters call :func:`make_tuner` once on rank 0 and hand the result to the exchange::

    tuner = make_tuner(settings, signature=..., world_size=..., engine=..., device=...,
                       total_bytes=..., bandwidth=...) if rank == 0 else None
    exchange = Exchange(layout, buffers, transport, settings, observer, tuner)

The environment says where ``bytescheduler tune`` wants iterations reported (``ENV_REPORT``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from bytescheduler.core.config import Settings
from bytescheduler.core.exchange import Tuner
from bytescheduler.tuning.auto import AutoTuner
from bytescheduler.tuning.bandwidth import settings_of_rank_0, timed_broadcast
from bytescheduler.tuning.cache import Cache
from bytescheduler.tuning.report import ENV_REPORT, IterationReport

__all__ = [
    "ENV_REPORT",
    "AutoTuner",
    "Cache",
    "IterationReport",
    "make_tuner",
    "settings_of_rank_0",
    "timed_broadcast",
]


def make_tuner(
    settings: Settings,
    *,
    signature: str,
    world_size: int,
    engine: str,
    device: str,
    total_bytes: int,
    bandwidth: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Tuner | None:
    """What rank 0's exchange needs: a tuner for ``mode="auto"``, a report if wanted, or None.

    Args:
        settings: the user's.
        signature: names, shapes and dtypes of the parameters.
        world_size: number of ranks; with one there is nothing to tune.
        engine: name of the transport, see :func:`bytescheduler.transports.name_of`.
        device: kind of device, e.g. ``cpu`` or ``cuda NVIDIA H100``.
        total_bytes: bytes of all gradients of one rank; with none there is nothing to tune either.
        bandwidth: bytes per second between ranks, where the adapter has measured it with
            :func:`timed_broadcast`.
        environ: the process's environment by default.
    """
    tuner: Tuner | None = None
    if settings.mode == "auto" and world_size > 1 and total_bytes:
        tuner = AutoTuner.for_job(
            signature=signature,
            world_size=world_size,
            engine=engine,
            device=device,
            total_bytes=total_bytes,
            initial=settings,
            bandwidth=bandwidth,
        )
    path = (os.environ if environ is None else environ).get(ENV_REPORT)
    if not path:
        return tuner
    report = IterationReport(
        path, settings=settings, total_bytes=total_bytes, world_size=world_size
    )
    return _Reporting(report, tuner)


class _Reporting:
    """Reports each iteration, then asks the tuner, if there is one."""

    def __init__(self, report: IterationReport, tuner: Tuner | None) -> None:
        self._report = report
        self._tuner = tuner

    def step(self, now: float) -> Settings | None:
        self._report.step(now)
        return None if self._tuner is None else self._tuner.step(now)

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
