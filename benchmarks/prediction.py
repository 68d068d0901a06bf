"""What the simulator says of a measured cell, to be held against it.

The simulator is given what the cell's references measured (compute alone, exchange alone) and the
settings that each system ran with; its iteration times are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.job import make_job
from bytescheduler.core.config import resolve_settings
from bytescheduler.simulate import Network, Schedule, simulate

__all__ = ["MESSAGE_S", "predict"]

MESSAGE_S: Final = 0.3e-3
"""Seconds of one message: half of what ``python -m benchmarks exchange`` shows for 64 KiB."""
UNLIMITED: Final = 1 << 40  # bytes of credit

_SCHEDULES: Final[Mapping[str, Callable[[Mapping[str, Any]], Schedule]]] = {
    "ddp": lambda s: Schedule(policy="barrier", bucket_bytes=s["bucket_bytes"]),
    "horovod": lambda s: Schedule(policy="barrier", bucket_bytes=1),  # waits for no full buffer
    "dear": lambda s: Schedule(
        policy="dear", partition_bytes=s["fusion_bytes"], credit_bytes=UNLIMITED
    ),
    "fifo": lambda s: _in_chunks("fifo", s),
    "barrier": lambda s: _in_chunks("barrier", s),
    "bytescheduler": lambda s: _in_chunks("priority", s),
    "bytescheduler-horovod": lambda s: _in_chunks("priority", s),
}
"""All-reduce systems; parameter servers and TensorFlow are not what the references measure."""


def predict(cell: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per iteration of those systems of a cell that the simulator has a schedule for.

    Args:
        cell: the JSON document of one comparison.
    """
    job = make_job(cell["profile"], cell["workers"], scale=cell["scale"])
    profile = job.as_profile(cell["compute_s"])
    network = Network(
        workers=2,  # the measured exchange holds what more of them cost
        bandwidth=job.gradient_bytes / cell["exchange_s"],
        latency_s=MESSAGE_S,
    )
    known = {"model_bytes": job.gradient_bytes, "bandwidth": network.bandwidth}
    return {
        name: simulate(
            profile, network, _SCHEDULES[name]({**known, **entry["settings"]})
        ).iteration_s
        for name, entry in cell["systems"].items()
        if name in _SCHEDULES
    }


def _in_chunks(policy: Any, settings: Mapping[str, Any]) -> Schedule:
    """Sizes as they were set, or else as they follow from model and bandwidth."""
    resolved = resolve_settings(
        mode=policy,
        partition_size=settings.get("partition_size"),
        credit_size=settings.get("credit_size"),
        model_bytes=settings["model_bytes"],
        bandwidth=settings["bandwidth"],
        environ={},
    )
    return Schedule(
        policy=policy,
        partition_bytes=resolved.partition_size,
        credit_bytes=resolved.credit_size,
    )
