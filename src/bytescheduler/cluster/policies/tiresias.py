"""Tiresias: least attained service in two queues, without any prediction.

Jobs keep the size that was asked for. A job starts in the first queue and moves to the end of the
second once executed seconds x GPUs reach 16 hours (workers count where a job uses no GPU). Jobs
run in queue order as far as the cluster reaches, skipping what does not fit; whatever runs keeps
its nodes. A long job can wait without end behind short ones: no promise against starvation.

As in the Pollux (OSDI 2021) study, whose results it reproduces to the second. Jobs that moved
together stay in order of submission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bytescheduler.cluster.contract import Allocation, JobState, Node
from bytescheduler.cluster.policies._gpus import place_on_most_free
from bytescheduler.cluster.policies._totals import admit_in_order

__all__ = ["tiresias"]

FIRST_QUEUE_GPU_SECONDS = 16 * 3600


def tiresias(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by the two queues; see the module's docstring."""
    del now
    running = admit_in_order(sorted(jobs, key=_queue_position), nodes)
    names = {job.name for job in running}
    kept = {name: held for name, held in previous.items() if name in names}
    wanted = [(job, job.requested) for job in running if job.name not in kept]
    return place_on_most_free(wanted, nodes, kept, jobs)


def _queue_position(job: JobState) -> tuple[bool, float]:
    gpus = job.requested.workers * (job.worker.gpu or 1)
    moved = job.service.reached(FIRST_QUEUE_GPU_SECONDS / gpus)
    return moved is not None, moved or 0.0
