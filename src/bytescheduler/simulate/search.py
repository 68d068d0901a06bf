"""Good chunk and credit sizes, and what an iteration loses to what, according to the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bytescheduler.simulate.engine import simulate
from bytescheduler.simulate.model import Network, Policy, Profile, Result, Schedule

__all__ = ["Loss", "best_schedule", "losses"]

PARTITIONS = tuple(1 << power for power in range(16, 27, 2))
CREDITS_IN_PARTITIONS = (1, 2, 4, 16)
BUCKETS = tuple(1 << power for power in range(20, 29, 2))
MAX_CHUNKS = 20_000
"""Settings that cut a model into more chunks than this are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Seconds per iteration that ``cause`` costs: what would be gained without it."""

    cause: str
    seconds: float


def best_schedule(
    profile: Profile, network: Network, policy: Policy, *, buckets: bool = False
) -> tuple[Schedule, Result]:
    """The fastest schedule of ``policy`` over a grid of sizes, and its result.

    Args:
        profile: the job's layers.
        network: the engine and the links.
        policy: the order.
        buckets: search over DistributedDataParallel's bucket size instead (``barrier`` only).
    """
    candidates = _bucket_schedules() if buckets else _chunk_schedules(profile, policy)
    results = [(schedule, simulate(profile, network, schedule)) for schedule in candidates]
    return min(results, key=lambda pair: pair[1].iteration_s)


def _bucket_schedules() -> list[Schedule]:
    return [Schedule(policy="barrier", bucket_bytes=size) for size in BUCKETS]


def _chunk_schedules(profile: Profile, policy: Policy) -> list[Schedule]:
    total = profile.gradient_bytes
    largest = PARTITIONS[-1]
    return [
        Schedule(policy=policy, partition_bytes=size, credit_bytes=size * count)
        for size in PARTITIONS
        for count in CREDITS_IN_PARTITIONS
        if size == largest or (total / size <= MAX_CHUNKS and size <= total)
    ]


def losses(profile: Profile, network: Network, schedule: Schedule) -> list[Loss]:
    """Where an iteration's distance from its bound goes, largest loss first.

    Each cause is taken away alone, so that the parts need not add up to the whole: two causes
    may hide behind each other.
    """
    actual = simulate(profile, network, schedule).iteration_s
    without = {
        "announcements": replace(network, announcement_s=0.0),
        "chunk overhead": replace(network, overhead_s=0.0),
        "latency": replace(network, latency_s=0.0, announcement_s=network.announce_s),
    }
    gains = [
        Loss(cause=cause, seconds=actual - simulate(profile, changed, schedule).iteration_s)
        for cause, changed in without.items()
    ]
    return sorted(gains, key=lambda loss: -loss.seconds)
