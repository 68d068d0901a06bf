"""Tetris (SIGCOMM 2014): multi-resource packing, short and small jobs first.

Jobs keep the size that was asked for. They are ordered by remaining work, predicted time left times
the dominant share of what they hold, admitted in that order as far as they can be placed, and
packed by alignment: each task goes to the node whose free resources have the largest dot product
with its demand. A job that goes on running keeps its nodes. Long jobs can wait without end: no
promise against starvation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bytescheduler.cluster.contract import Allocation, JobState, Node
from bytescheduler.cluster.policies._scored import alignment, place_by_score
from bytescheduler.cluster.policies._totals import admit_in_order, total_capacity

__all__ = ["tetris"]


def tetris(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by remaining work and alignment; see the module's docstring."""
    del now
    total = total_capacity(nodes)

    def remaining_work(job: JobState) -> float:
        return job.time_left(job.requested) * job.demand(job.requested).dominant_share(total)

    running = admit_in_order(sorted(jobs, key=remaining_work), nodes)
    names = {job.name for job in running}
    kept = {name: held for name, held in previous.items() if name in names}
    wanted = [(job, job.requested) for job in running if job.name not in kept]
    return place_by_score(wanted, nodes, kept, jobs, alignment)
