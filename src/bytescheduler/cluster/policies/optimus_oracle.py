"""Optimus with oracle knowledge, as the Pollux (OSDI 2021) study compared against it.

Only GPUs count, and the job states carry true iterations left and true step times. Everybody gets
one worker in order of submission; then the job that saves most time, ``(t(n) - t(n + 1)) * left``,
gets one more while any gain is positive. Allocations whose size did not change stay, the others are
placed smallest first. No promise against starvation: with more jobs than GPUs the youngest wait.

Parameter-server jobs, which that study does not have, get servers in their requested ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from bytescheduler.cluster.contract import Allocation, JobState, Node, Resources, Shape
from bytescheduler.cluster.policies._gpus import place_on_most_free
from bytescheduler.cluster.policies._totals import total_capacity

__all__ = ["optimus_oracle"]


def optimus_oracle(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by marginal gain; see the module's docstring."""
    del now
    shapes = _shapes(jobs, total_capacity(nodes), previous)
    kept = {name: held for name, held in previous.items() if shapes.get(name) == held.shape}
    wanted = [
        (job, shapes[job.name]) for job in jobs if job.name in shapes and job.name not in kept
    ]
    wanted.sort(key=lambda pair: pair[1].workers)
    return place_on_most_free(wanted, nodes, kept, jobs)


def _shapes(
    jobs: Sequence[JobState], free: Resources, previous: Mapping[str, Allocation]
) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    gains: list[tuple[float, int, Shape]] = []
    for index, job in enumerate(jobs):
        held = previous.get(job.name)
        shape = held.shape if held and not job.rescalable else job.smallest
        demand = job.demand(shape)
        if free.covers(demand):
            free = free.plus(demand, -1)
            shapes[job.name] = shape
            _offer(gains, index, job, shape)
    while gains:
        _, index, more = heappop(gains)
        job = jobs[index]
        demand = _extra(job, shapes[job.name], more)
        if free.covers(demand):
            free = free.plus(demand, -1)
            shapes[job.name] = more
            _offer(gains, index, job, more)
    return shapes


def _extra(job: JobState, shape: Shape, more: Shape) -> Resources:
    """Return what ``more`` needs beyond ``shape``, which has one worker less."""
    servers = more.servers - shape.servers
    return job.worker.plus(job.server, servers) if job.server and servers else job.worker


def _offer(gains: list[tuple[float, int, Shape]], index: int, job: JobState, shape: Shape) -> None:
    """Put the gain of one more worker on the heap, if there is any."""
    if shape.workers >= job.limit.workers or not job.rescalable:
        return
    more = job.scaled(shape.workers + 1)
    gain = (job.step_time(*shape) - job.step_time(*more)) * job.remaining
    if gain > 0:
        heappush(gains, (-gain, index, more))
