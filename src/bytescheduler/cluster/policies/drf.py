"""DRF: dominant resource fairness, work-conserving, spread by load.

Progressive filling (Ghodsi et al., NSDI 2011): the job with the smallest dominant share gets one
more worker, with parameter servers in its requested ratio, until nothing fits; a job takes no more
than was asked for (its demand). ``drf_elastic`` is the same with what the job can use at most as
its demand, for clusters whose jobs can all be resized: a harder peer for Optimus. Tasks spread over
the least allocated nodes, as Kubernetes places by default. A job keeps its nodes while
its size stays. Equal shares are served in order of submission, and where the oldest job finds no
place the nodes are cleared for it, so no job starves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from bytescheduler.cluster.contract import Allocation, JobState, Node, Resources, Shape
from bytescheduler.cluster.policies._scored import emptiness, place_by_score
from bytescheduler.cluster.policies._totals import total_capacity

__all__ = ["drf", "drf_elastic"]


def drf(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by equal dominant shares up to the requests; see the module's docstring."""
    del now
    return _decide(jobs, nodes, previous, {job.name: job.requested.workers for job in jobs})


def drf_elastic(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by equal dominant shares up to what jobs can use; see the module's docstring."""
    del now
    return _decide(jobs, nodes, previous, {job.name: job.limit.workers for job in jobs})


def _decide(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    most: Mapping[str, int],
) -> dict[str, Allocation]:
    shapes = _fill(jobs, total_capacity(nodes), previous, most)
    kept = {name: held for name, held in previous.items() if shapes.get(name) == held.shape}
    placed = _place(jobs, shapes, nodes, kept)
    if not jobs or jobs[0].name in placed:
        return placed
    fixed = {job.name for job in jobs if not job.rescalable}
    kept = {name: held for name, held in kept.items() if name in fixed}
    return _place(jobs, shapes, nodes, kept)


def _place(
    jobs: Sequence[JobState],
    shapes: Mapping[str, Shape],
    nodes: Sequence[Node],
    kept: Mapping[str, Allocation],
) -> dict[str, Allocation]:
    wanted = [
        (job, shapes[job.name]) for job in jobs if job.name in shapes and job.name not in kept
    ]
    return place_by_score(wanted, nodes, kept, jobs, emptiness, shrink=True)


def _fill(
    jobs: Sequence[JobState],
    total: Resources,
    previous: Mapping[str, Allocation],
    most: Mapping[str, int],
) -> dict[str, Shape]:
    """Return every job's size by progressive filling, up to ``most`` workers each."""
    shapes: dict[str, Shape] = {}
    free = total
    queue: list[tuple[float, int]] = []
    for index, job in enumerate(jobs):
        held = previous.get(job.name)
        if held and not job.rescalable:
            shapes[job.name] = held.shape
            free = free.plus(job.demand(held.shape), -1)
        else:
            queue.append((0.0, index))
    heapify(queue)
    while queue:
        _, index = heappop(queue)
        job = jobs[index]
        shape = shapes.get(job.name, Shape(0))
        more = job.scaled(shape.workers + 1)
        extra = job.demand(more).plus(job.demand(shape), -1)
        if shape.workers >= most[job.name] or not free.covers(extra):
            continue
        free = free.plus(extra, -1)
        shapes[job.name] = more
        heappush(queue, (job.demand(more).dominant_share(total), index))
    return shapes
