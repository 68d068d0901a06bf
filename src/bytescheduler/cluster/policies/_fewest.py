"""Optimus' placement: the fewest servers, workers and parameter servers spread evenly over them.

On k nodes with as many workers and servers each, the busiest task exchanges over the network with
the fewest partners (the paper's theorem 1), and fewer nodes leave more partners on its own. Nodes
are taken by free amount of the cluster's scarcest resource, descending, from a heap: a job looks
only at as many nodes as it has tasks, which is what makes 16,000 nodes cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from bytescheduler.cluster.contract import (
    NOTHING,
    Allocation,
    JobState,
    Node,
    Resources,
    Shape,
    used_by_node,
)

__all__ = ["FreeNodes", "even_split", "place_on_fewest"]


class FreeNodes:
    """Free resources per node, and the nodes ordered by one of the resources, most free first."""

    def __init__(self, nodes: Sequence[Node], used: Mapping[int, Resources], order_by: int) -> None:
        self._order_by = order_by
        self.free = {node.id: node.capacity.plus(used.get(node.id, NOTHING), -1) for node in nodes}
        self._heap = [(-free[order_by], node) for node, free in self.free.items()]
        heapify(self._heap)

    def pop(self) -> int | None:
        """Take the node with the most free out of the order; None when there is no more."""
        return heappop(self._heap)[1] if self._heap else None

    def push(self, node: int) -> None:
        """Put a node back into the order."""
        heappush(self._heap, (-self.free[node][self._order_by], node))


def even_split(shape: Shape, k: int) -> list[Shape]:
    """Spread workers and servers over k nodes; what does not divide goes to opposite ends."""
    workers, more_workers = divmod(shape.workers, k)
    servers, more_servers = divmod(shape.servers, k)
    return [
        Shape(workers + (i < more_workers), servers + (i >= k - more_servers)) for i in range(k)
    ]


def place_on_fewest(
    wanted: Iterable[tuple[JobState, Shape]],
    nodes: Sequence[Node],
    kept: Mapping[str, Allocation],
    jobs: Sequence[JobState],
) -> dict[str, Allocation]:
    """Place jobs in the given order beside those that are kept.

    A job that does not fit is offered half its size, and so on: waiting with nothing, as in the
    paper, leaves the room unused that the smaller job can train on until the next decision.
    """
    open_nodes = FreeNodes(nodes, used_by_node(jobs, kept), _scarcest(jobs, nodes))
    placed = dict(kept)
    for job, shape in wanted:
        allocation = _place(job, shape, open_nodes)
        while allocation is None and shape != job.smallest:
            shape = Shape((shape.workers + 1) // 2, (shape.servers + 1) // 2)
            allocation = _place(job, shape, open_nodes)
        if allocation is not None:
            placed[job.name] = allocation
    return placed


def _scarcest(jobs: Sequence[JobState], nodes: Sequence[Node]) -> int:
    """Return the index of the resource that the jobs as requested need most of."""
    need = Resources(*map(sum, zip(*(job.demand(job.requested) for job in jobs), strict=True)))
    have = Resources(*map(sum, zip(*(node.capacity for node in nodes), strict=True)))
    shares = [n / h if h > 0 else 0.0 for n, h in zip(need, have, strict=True)]
    return shares.index(max(shares))


def _place(job: JobState, shape: Shape, open_nodes: FreeNodes) -> Allocation | None:
    """Place one job on the first k nodes that hold it, smallest k."""
    taken: list[int] = []
    skipped: list[int] = []
    room = 0
    allocation = None
    while len(taken) < sum(shape) and (node := open_nodes.pop()) is not None:
        workers = open_nodes.free[node].count(job.worker)
        servers = open_nodes.free[node].count(job.server) if job.server else 0
        if not workers and not servers:
            skipped.append(node)
            continue
        taken.append(node)
        room += max(workers, servers)
        if room >= max(shape):
            allocation = _spread(job, shape, taken, open_nodes)
            if allocation is not None:
                break
    for node in taken + skipped:
        open_nodes.push(node)
    return allocation


def _spread(
    job: JobState, shape: Shape, taken: Sequence[int], open_nodes: FreeNodes
) -> Allocation | None:
    """Take an even split, the larger parts of workers or those of servers on the first nodes."""
    free = open_nodes.free
    split = even_split(shape, len(taken))
    for parts in (split, split[::-1]):
        demands = [job.demand(part) for part in parts]
        if all(free[n].covers(demand) for n, demand in zip(taken, demands, strict=True)):
            for node, demand in zip(taken, demands, strict=True):
                free[node] = free[node].plus(demand, -1)
            placed = list(zip(taken, parts, strict=True))
            return Allocation(
                workers=tuple(node for node, part in placed for _ in range(part.workers)),
                servers=tuple(node for node, part in placed for _ in range(part.servers)),
            )
    return None
