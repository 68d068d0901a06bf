"""One job's life in the simulator, whatever trains inside it.

``SimulatedJob`` keeps what all jobs share (waiting, restart delay, service, checkpoints);
subclasses say how training advances: ``TraceJob`` replays a measured all-reduce application epoch
by epoch, ``ModelJob`` follows a speed formula step by step. The order of calls per time step is
``advance``, then ``state`` for the policy, then ``place``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from bytescheduler.cluster.contract import (
    Allocation,
    JobState,
    Node,
    Resources,
    ServiceRecord,
    Shape,
)

__all__ = ["JobSpec", "Knowledge", "SimulatedJob"]

Progress = TypeVar("Progress")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What every row of a workload says, in whatever format.

    Attributes:
        submitted: time of submission (s).
        kind: application or model, for reports.
        requested, limit: numbers of workers and servers asked for, and at most usable.
        worker, server: demand of one worker and of one server (None: all-reduce).
        max_restarts: how often a policy may resize the job; None means without limit.
    """

    name: str
    submitted: float
    kind: str
    requested: Shape
    limit: Shape
    worker: Resources
    server: Resources | None = None
    max_restarts: int | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a scheduler is told of a job: steps left, seconds per step, fraction done."""

    remaining: float
    step_time: Callable[[int, int], float]
    progress: float


class SimulatedJob(ABC, Generic[Progress]):
    """Base class of the jobs in the simulator. Times are seconds."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.allocation: Allocation | None = None
        self.finished: float | None = None
        self.restarts = -1
        self.executed = 0.0
        self.service = ServiceRecord()
        self.slowdowns: dict[int, float] = {}
        self._delay = 0.0
        self._checkpoint = self._progress()

    @abstractmethod
    def _progress(self) -> Progress:
        """Return the progress that a checkpoint must hold."""

    @abstractmethod
    def _restore(self, progress: Progress) -> None:
        """Go back to what ``_progress`` returned."""

    @abstractmethod
    def _train(self, seconds: float) -> float | None:
        """Train for at most ``seconds``; return the seconds until completion, None if not yet."""

    @abstractmethod
    def _configure(self, allocation: Allocation, nodes: Mapping[int, Node]) -> None:
        """Prepare to train on ``allocation``, which may be the same with other slowdowns."""

    @abstractmethod
    def truth(self) -> Knowledge:
        """Return what an oracle knows."""

    @abstractmethod
    def alone_seconds(self, workers: int) -> float:
        """Return the seconds that the whole job takes alone on that many workers."""

    def advance(self, now: float, seconds: float) -> None:
        """Live from ``now`` for ``seconds`` under the present allocation."""
        if self.allocation is None:
            return
        delay = min(self._delay, seconds)
        self._delay -= delay
        used = self._train(seconds - delay) if seconds > delay else None
        if used is not None:
            self.finished = now + delay + used
        self.executed += seconds if used is None else delay + used

    def place(
        self, allocation: Allocation | None, nodes: Mapping[int, Node], restart_seconds: float
    ) -> None:
        """Change the allocation; a job that is placed anew loses ``restart_seconds`` first."""
        if allocation == self.allocation:
            return
        self.checkpoint()
        self.allocation = allocation
        self.slowdowns = {}
        if allocation is not None:
            self.restarts += 1
            self._delay = restart_seconds
            self._configure(allocation, nodes)

    def slow_down(self, slowdowns: dict[int, float], nodes: Mapping[int, Node]) -> None:
        """Make workers (by rank) that many times slower; replaces earlier slowdowns."""
        self.slowdowns = slowdowns
        if self.allocation is not None:
            self._configure(self.allocation, nodes)

    def pause(self, seconds: float) -> None:
        """Lose at least the next ``seconds`` (a worker is being replaced)."""
        self._delay = max(self._delay, seconds)

    def checkpoint(self) -> None:
        """Save the progress made so far."""
        self._checkpoint = self._progress()

    def fail(self) -> None:
        """Lose the allocation and everything since the last checkpoint."""
        self._restore(self._checkpoint)
        self.allocation = None
        self.slowdowns = {}

    def state(self, knowledge: Knowledge) -> JobState:
        """Return what a policy sees."""
        spec = self.spec
        cap = spec.max_restarts
        return JobState(
            name=spec.name,
            submitted=spec.submitted,
            worker=spec.worker,
            server=spec.server,
            requested=spec.requested,
            limit=spec.limit,
            remaining=knowledge.remaining,
            step_time=knowledge.step_time,
            progress=knowledge.progress,
            service=self.service,
            rescalable=cap is None or self.restarts < cap,
        )
