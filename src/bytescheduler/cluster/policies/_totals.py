"""Counting against the cluster's total, before anything is placed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bytescheduler.cluster.contract import JobState, Node, Resources

__all__ = ["admit_in_order", "total_capacity"]


def total_capacity(nodes: Sequence[Node]) -> Resources:
    """Return the sum over all nodes."""
    return Resources(*(sum(amounts) for amounts in zip(*(n.capacity for n in nodes), strict=True)))


def admit_in_order(jobs: Iterable[JobState], nodes: Sequence[Node]) -> list[JobState]:
    """Return the jobs whose requested size still fits in the total, skipping those that do not."""
    free = total_capacity(nodes)
    admitted: list[JobState] = []
    for job in jobs:
        demand = job.demand(job.requested)
        if free.covers(demand):
            free = free.plus(demand, -1)
            admitted.append(job)
    return admitted
