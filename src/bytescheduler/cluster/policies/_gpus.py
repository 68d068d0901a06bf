"""Placement of the Pollux study: always the node with the most free slots next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bytescheduler.cluster.contract import (
    NOTHING,
    Allocation,
    JobState,
    Node,
    Resources,
    Shape,
    used_by_node,
)

__all__ = ["place_on_most_free"]


def place_on_most_free(
    wanted: Iterable[tuple[JobState, Shape]],
    nodes: Sequence[Node],
    kept: Mapping[str, Allocation],
    jobs: Sequence[JobState],
    *,
    blocking: bool = False,
) -> dict[str, Allocation]:
    """Place jobs in the given order beside those that are kept.

    A job that does not fit is skipped or, where it is ``blocking``, ends the placement.

    Each job fills the node that has room for most of its workers, then the next such node; equal
    nodes in order. On a cluster of plain GPUs this is the node with the most free GPUs.
    """
    used = used_by_node(jobs, kept)
    free = {node.id: node.capacity.plus(used.get(node.id, NOTHING), -1) for node in nodes}
    placed = dict(kept)
    for job, shape in wanted:
        trial = free.copy()
        tasks = [(job.worker, shape.workers), (job.server or NOTHING, shape.servers)]
        larger_first = sorted((0, 1), key=lambda kind: sum(tasks[kind][0]), reverse=True)
        taken = {kind: _take(trial, *tasks[kind]) for kind in larger_first}
        workers, servers = taken[0], taken[1]
        if workers is not None and servers is not None:
            free = trial
            placed[job.name] = Allocation(workers=workers, servers=servers)
        elif blocking:
            break
    return placed


def _take(free: dict[int, Resources], demand: Resources, tasks: int) -> tuple[int, ...] | None:
    """Take room for ``tasks`` from ``free``; None if there is not enough."""
    taken: list[int] = []
    while len(taken) < tasks:
        node = max(free, key=lambda node: free[node].count(demand), default=None)
        count = 0 if node is None else min(free[node].count(demand), tasks - len(taken))
        if node is None or count == 0:
            return None
        taken += [node] * count
        free[node] = free[node].plus(demand, -count)
    return tuple(taken)
