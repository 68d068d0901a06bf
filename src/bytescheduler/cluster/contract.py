"""What a scheduling policy sees and what it answers.

A policy is a pure function, ``policy(jobs, nodes, previous, now) -> {job name: Allocation}``: the
simulator, a test and a real controller call the very same code, and any decision can be replayed
from its four arguments. Classes with state (the published Tiresias keeps its queues) were
considered: what they remember is either in the previous allocation or a fact about the job, so the
facts travel with the job (``JobState.service``) and the policies keep nothing.

Everything a decision may depend on is in these few frozen types::

    Node        what one machine offers
    JobState    one job as the scheduler knows it: demands, limits, estimates, history
    Allocation  which node holds each worker and each parameter server of one job

A job is placed whole or not at all (gang), and a job that is missing from the answer waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bytescheduler.exceptions import UsageError

__all__ = [
    "Allocation",
    "JobState",
    "Node",
    "Policy",
    "Resources",
    "ServiceRecord",
    "Shape",
    "check_allocations",
    "used_by_node",
]

TOLERANCE = 1e-9
COUNTLESS = 1_000_000


class Resources(NamedTuple):
    """An amount of each resource: CPU cores, memory (GiB), GPUs."""

    cpu: float = 0.0
    memory: float = 0.0
    gpu: float = 0.0

    def plus(self, other: Resources, times: float = 1) -> Resources:
        """Return ``self + times * other``."""
        return Resources(
            self.cpu + times * other.cpu,
            self.memory + times * other.memory,
            self.gpu + times * other.gpu,
        )

    def covers(self, demand: Resources) -> bool:
        """Say whether ``demand`` fits into this amount."""
        return (
            demand.cpu <= self.cpu + TOLERANCE
            and demand.memory <= self.memory + TOLERANCE
            and demand.gpu <= self.gpu + TOLERANCE
        )

    def count(self, demand: Resources) -> int:
        """Return how often ``demand`` fits; a demand of nothing fits a million times."""
        times = float(COUNTLESS)
        for have, need in zip(self, demand, strict=True):
            if need > 0:
                times = min(times, have / need)
        return max(0, int(times + TOLERANCE))

    def dominant_share(self, capacity: Resources) -> float:
        """Return the largest share of ``capacity`` that this amount takes (0 to inf)."""
        share = 0.0
        for need, have in zip(self, capacity, strict=True):
            if need > 0:
                share = max(share, need / have if have > 0 else float("inf"))
        return share


NOTHING = Resources()


class Shape(NamedTuple):
    """How many workers and parameter servers; no servers means all-reduce."""

    workers: int
    servers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine. ``speed`` is its compute speed relative to the reference machine."""

    id: int
    capacity: Resources
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Node ids of one job's workers and servers, in rank order."""

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()

    @property
    def shape(self) -> Shape:
        """The numbers of workers and servers."""
        return Shape(len(self.workers), len(self.servers))

    @property
    def nodes(self) -> frozenset[int]:
        """Every node that holds a part of the job."""
        return frozenset(self.workers) | frozenset(self.servers)


@dataclass(slots=True)
class ServiceRecord:
    """How long a job held its workers, noted at every decision time.

    ``reached`` answers from the noted times only, so that two jobs that cross a limit between the
    same two decisions count as having crossed it together.
    """

    times: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def note(self, now: float, executed_seconds: float) -> None:
        """Note at ``now`` that the job has held workers for ``executed_seconds`` in all."""
        if not self.seconds or executed_seconds > self.seconds[-1]:
            self.times.append(now)
            self.seconds.append(executed_seconds)

    @property
    def executed(self) -> float:
        """Seconds for which the job has held workers."""
        return self.seconds[-1] if self.seconds else 0.0

    def reached(self, executed_seconds: float) -> float | None:
        """Return the first noted time with at least that much service; None if not yet."""
        index = bisect_left(self.seconds, executed_seconds)
        return self.times[index] if index < len(self.times) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One submitted, unfinished job as the scheduler knows it.

    Attributes:
        submitted: time of submission (s).
        worker, server: demand of one worker and of one parameter server; ``server`` is None for an
            all-reduce job.
        requested: what the owner asked for.
        limit: the most that the job can use.
        remaining: steps still to do, as known (estimated, or true for an oracle).
        step_time: seconds per step as known, for numbers of workers and servers.
        progress: fraction of the job that is done (0 to 1), as known.
        service: how long it has held workers, and since when.
        rescalable: False once the job used up its restarts; it then keeps its allocation.
    """

    name: str
    submitted: float
    worker: Resources
    server: Resources | None = None
    requested: Shape
    limit: Shape
    remaining: float
    step_time: Callable[[int, int], float]
    progress: float = 0.0
    service: ServiceRecord = field(default_factory=ServiceRecord)
    rescalable: bool = True

    def demand(self, shape: Shape) -> Resources:
        """Return what ``shape`` needs in all."""
        total = NOTHING.plus(self.worker, shape.workers)
        return total.plus(self.server, shape.servers) if self.server else total

    def scaled(self, workers: int) -> Shape:
        """Return a shape with that many workers and servers in the requested ratio."""
        if self.server is None:
            return Shape(workers)
        ratio = self.requested.servers / self.requested.workers
        return Shape(workers, min(self.limit.servers, max(1, round(workers * ratio))))

    @property
    def smallest(self) -> Shape:
        """One worker, and one server where there are servers."""
        return Shape(1, 0 if self.server is None else 1)

    def time_left(self, shape: Shape) -> float:
        """Return the seconds left at ``shape``, as known."""
        return self.remaining * self.step_time(shape.workers, shape.servers)


class Policy(Protocol):
    """A scheduling policy.

    Called at every decision with the jobs that are submitted and unfinished in order of
    submission, the nodes that are up in order of id, the allocations in force (of these jobs, on
    these nodes) and the time in seconds. It must not change or remember its arguments.
    """

    def __call__(
        self,
        jobs: Sequence[JobState],
        nodes: Sequence[Node],
        previous: Mapping[str, Allocation],
        now: float,
    ) -> dict[str, Allocation]:
        """Return the allocation of every job that shall run until the next decision."""
        ...


def used_by_node(
    jobs: Iterable[JobState], allocations: Mapping[str, Allocation]
) -> dict[int, Resources]:
    """Return what the allocations take from each node that they touch."""
    used: dict[int, Resources] = {}
    for job in jobs:
        allocation = allocations.get(job.name)
        if allocation is None:
            continue
        for node, count in Counter(allocation.workers).items():
            used[node] = used.get(node, NOTHING).plus(job.worker, count)
        for node, count in Counter(allocation.servers).items():
            used[node] = used.get(node, NOTHING).plus(job.server or NOTHING, count)
    return used


def check_allocations(
    jobs: Sequence[JobState], nodes: Sequence[Node], allocations: Mapping[str, Allocation]
) -> None:
    """Check a policy's answer against the contract.

    Raises:
        UsageError: an unknown job or node, a job that is placed in part, or a node that would hold
            more than it has; the policy is at fault.
    """
    by_name = {job.name: job for job in jobs}
    capacity = {node.id: node.capacity for node in nodes}
    for name, allocation in allocations.items():
        job = by_name.get(name)
        if job is None:
            raise UsageError(f"a policy must place submitted, unfinished jobs only, got {name!r}")
        if not allocation.workers or bool(allocation.servers) != (job.server is not None):
            raise UsageError(f"job {name!r} must be placed whole or not at all, got {allocation}")
    for node, used in used_by_node(jobs, allocations).items():
        if node not in capacity:
            raise UsageError(f"a policy must use nodes that are up, got node {node}")
        if not capacity[node].covers(used):
            raise UsageError(f"node {node} has {capacity[node]}, but was given {used}")
