"""Optimus (EuroSys 2018): who gets what by marginal gain, where on the fewest servers, evenly.

Allocation: every job first gets one worker and one parameter server, in order of submission. Then
the job with the largest gain gets one more worker or server: seconds saved, as predicted by its
fitted models, divided by the cluster share of that task's dominant resource. It stops when nothing
fits or no gain is positive. A heap holds the best offer of every job; a gain depends on its own
job only, so one offer changes per grant.

Three additions to the paper. An offer may be several tasks at once, by its mean gain: measured
speeds are not concave (a fifth worker that needs a second node can slow an all-reduce job that an
eighth speeds up) and predicted ones have errors, and one bad step must not end a job's growth. The
paper re-places every job at each decision; here a job keeps its
nodes while its size stays, and keeps its size while the new one would save less than the restart
costs: each change loses half a minute. And where a job is left out because the cluster is
fragmented, everything is placed anew with the oldest job first, so no job starves.

Young jobs, whose predictions are the least certain, count 0.95 of their gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from bytescheduler.cluster.contract import Allocation, JobState, Node, Resources, Shape
from bytescheduler.cluster.policies._fewest import place_on_fewest
from bytescheduler.cluster.policies._totals import total_capacity

__all__ = ["allocate", "optimus"]

YOUNG_PROGRESS = 0.1
YOUNG_WEIGHT = 0.95
RESTART_SECONDS = 30.0
ALL_REDUCE_GROWTH = ((1, 0), (2, 0), (4, 0))
GROWTH = (*ALL_REDUCE_GROWTH, (0, 1), (0, 2), (0, 4), (1, 1), (2, 2))


class Growth(NamedTuple):
    """More workers and servers, what they need and their dominant share of the cluster."""

    workers: int
    servers: int
    demand: Resources
    share: float


# minus the weighted gain per share, the job's index, what it would get
Offer = tuple[float, int, Growth]


def optimus(
    jobs: Sequence[JobState],
    nodes: Sequence[Node],
    previous: Mapping[str, Allocation],
    now: float,
) -> dict[str, Allocation]:
    """Decide by marginal gain; see the module's docstring."""
    del now
    shapes = allocate(jobs, total_capacity(nodes), previous)
    kept = {name: held for name, held in previous.items() if shapes.get(name) == held.shape}
    wanted = _smallest_first([job for job in jobs if job.name in shapes], shapes, nodes)
    placed = place_on_fewest([w for w in wanted if w[0].name not in kept], nodes, kept, jobs)
    if len(placed) == len(shapes):
        return placed
    fixed = {job.name for job in jobs if not job.rescalable}
    kept = {name: held for name, held in kept.items() if name in fixed}
    left_out = [job for job in jobs if job.name in shapes and job.name not in placed]
    urgent = list(dict.fromkeys(job.name for job in [jobs[0], *left_out]))
    by_name = {job.name: job for job in jobs}
    first = [(by_name[name], by_name[name].smallest) for name in urgent if name not in kept]
    rest = [w for w in wanted if w[0].name not in kept and w[0].name not in urgent]
    return place_on_fewest([*first, *rest], nodes, kept, jobs)


def _smallest_first(
    jobs: Sequence[JobState], shapes: Mapping[str, Shape], nodes: Sequence[Node]
) -> list[tuple[JobState, Shape]]:
    total = total_capacity(nodes)
    wanted = [(job, shapes[job.name]) for job in jobs]
    return sorted(wanted, key=lambda pair: pair[0].demand(pair[1]).dominant_share(total))


def allocate(
    jobs: Sequence[JobState], total: Resources, previous: Mapping[str, Allocation]
) -> dict[str, Shape]:
    """Return how many workers and servers every job gets; jobs beyond the total get none."""
    shapes: dict[str, Shape] = {}
    free = total
    for job in jobs:
        held = previous.get(job.name)
        shape = held.shape if held and not job.rescalable else job.smallest
        if free.covers(job.demand(shape)):
            free = free.plus(job.demand(shape), -1)
            shapes[job.name] = shape
    _grow(jobs, shapes, free, total)
    return {
        job.name: _unless_worthless(job, shapes[job.name], previous.get(job.name))
        for job in jobs
        if job.name in shapes
    }


def _grow(
    jobs: Sequence[JobState], shapes: dict[str, Shape], free: Resources, total: Resources
) -> None:
    """Grant one offer after the other, the largest gain per share first."""
    offers: list[Offer] = []
    growths = [_growths(job, total) for job in jobs]
    for index, job in enumerate(jobs):
        if job.name in shapes and job.rescalable:
            offers += _best_offer(index, job, shapes[job.name], growths[index], free)
    heapify(offers)
    while offers:
        _, index, growth = heappop(offers)
        job = jobs[index]
        shape = shapes[job.name]
        if free.covers(growth.demand):
            free = free.plus(growth.demand, -1)
            shape = Shape(shape.workers + growth.workers, shape.servers + growth.servers)
            shapes[job.name] = shape
        for offer in _best_offer(index, job, shape, growths[index], free):
            heappush(offers, offer)


def _growths(job: JobState, total: Resources) -> list[Growth]:
    """Return the growths that an offer may be."""
    growths: list[Growth] = []
    for workers, servers in GROWTH if job.server else ALL_REDUCE_GROWTH:
        share = workers * job.worker.dominant_share(total)
        if job.server is not None:
            share += servers * job.server.dominant_share(total)
        growths.append(Growth(workers, servers, job.demand(Shape(workers, servers)), share))
    return growths


def _best_offer(
    index: int, job: JobState, shape: Shape, growths: Sequence[Growth], free: Resources
) -> list[Offer]:
    """Return the growth with the most gain per share, if any gains and fits."""
    now = job.step_time(*shape)
    best, best_gain = None, 0.0
    for growth in growths:
        workers, servers = shape.workers + growth.workers, shape.servers + growth.servers
        if workers > job.limit.workers or servers > job.limit.servers:
            continue
        gain = (now - job.step_time(workers, servers)) / growth.share
        if gain > best_gain and free.covers(growth.demand):
            best, best_gain = growth, gain
    if best is None:
        return []
    weight = job.remaining * (YOUNG_WEIGHT if job.progress < YOUNG_PROGRESS else 1.0)
    return [(-best_gain * weight, index, best)]


def _unless_worthless(job: JobState, shape: Shape, held: Allocation | None) -> Shape:
    """Keep the held size where a larger one would not win back its restart."""
    if held is None or held.shape == shape or sum(shape) < sum(held.shape):
        return shape
    saved = job.time_left(held.shape) - job.time_left(shape)
    return shape if saved > RESTART_SECONDS else held.shape
