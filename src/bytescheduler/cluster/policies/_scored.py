"""Task-by-task placement: every task goes to the node that a scoring function likes best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from bytescheduler.cluster.contract import (
    NOTHING,
    Allocation,
    JobState,
    Node,
    Resources,
    Shape,
    used_by_node,
)

__all__ = ["alignment", "emptiness", "place_by_score"]

# score(demand of the task, free on the node, capacity of the node): higher is better
Score = Callable[[Resources, Resources, Resources], float]


def emptiness(demand: Resources, free: Resources, capacity: Resources) -> float:
    """Spread the load: the mean free fraction that is left (Kubernetes' least allocated)."""
    left = free.plus(demand, -1)
    fractions = [have / all_ for have, all_ in zip(left, capacity, strict=True) if all_ > 0]
    return sum(fractions) / len(fractions)


def alignment(demand: Resources, free: Resources, capacity: Resources) -> float:
    """Pack: the dot product of demand and free amounts as fractions of the node (Tetris)."""
    return sum(
        (need / all_) * (have / all_)
        for need, have, all_ in zip(demand, free, capacity, strict=True)
        if all_ > 0
    )


def place_by_score(
    wanted: Iterable[tuple[JobState, Shape]],
    nodes: Sequence[Node],
    kept: Mapping[str, Allocation],
    jobs: Sequence[JobState],
    score: Score,
    *,
    shrink: bool = False,
) -> dict[str, Allocation]:
    """Place jobs in the given order beside those that are kept.

    A job that does not fit is skipped or, with ``shrink``, offered one worker less until it fits.
    """
    used = used_by_node(jobs, kept)
    free = {node.id: node.capacity.plus(used.get(node.id, NOTHING), -1) for node in nodes}
    capacity = {node.id: node.capacity for node in nodes}
    placed = dict(kept)
    for job, shape in wanted:
        found = _place(job, shape, free, capacity, score)
        while found is None and shrink and shape.workers > 1:
            shape = job.scaled(shape.workers - 1)
            found = _place(job, shape, free, capacity, score)
        if found is not None:
            placed[job.name], free = found
    return placed


def _place(
    job: JobState,
    shape: Shape,
    free: Mapping[int, Resources],
    capacity: Mapping[int, Resources],
    score: Score,
) -> tuple[Allocation, dict[int, Resources]] | None:
    """Place the larger kind of task first: it has fewer nodes to choose from."""
    trial = dict(free)
    kinds = [(job.worker, shape.workers), (job.server or NOTHING, shape.servers)]
    taken: dict[int, list[int]] = {0: [], 1: []}
    for kind in sorted(taken, key=lambda kind: sum(kinds[kind][0]), reverse=True):
        demand, count = kinds[kind]
        for _ in range(count):
            fitting = [node for node in trial if trial[node].covers(demand)]
            if not fitting:
                return None
            best = max(fitting, key=lambda node: score(demand, trial[node], capacity[node]))
            trial[best] = trial[best].plus(demand, -1)
            taken[kind].append(best)
    return Allocation(workers=tuple(sorted(taken[0])), servers=tuple(sorted(taken[1]))), trial
