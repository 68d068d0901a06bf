"""FIFO: first come, first served, at the size that was asked for.

The oldest job that does not fit blocks all younger ones (no backfilling), so no job starves; what
runs is never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bytescheduler.cluster.contract import Allocation, JobState, Node
from bytescheduler.cluster.policies._gpus import place_on_most_free

__all__ = ["fifo"]


def fifo(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by order of submission; see the module's docstring."""
    del now
    running = dict(previous)
    waiting = [(job, job.requested) for job in jobs if job.name not in running]
    return place_on_most_free(waiting, nodes, running, jobs, blocking=True)
