"""SRTF: the job with the shortest remaining time first, preemptive, at the size asked for.

Ordered by predicted time left, admitted as far as the cluster reaches, skipping what does not fit;
a job that goes on running keeps its nodes. Long jobs can wait without end behind short ones: no
promise against starvation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bytescheduler.cluster.contract import Allocation, JobState, Node
from bytescheduler.cluster.policies._gpus import place_on_most_free
from bytescheduler.cluster.policies._totals import admit_in_order

__all__ = ["srtf"]


def srtf(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by predicted time left; see the module's docstring."""
    del now
    by_time_left = sorted(jobs, key=lambda job: job.time_left(job.requested))
    running = admit_in_order(by_time_left, nodes)
    names = {job.name for job in running}
    kept = {name: held for name, held in previous.items() if name in names}
    wanted = [(job, job.requested) for job in running if job.name not in kept]
    return place_on_most_free(wanted, nodes, kept, jobs)
