"""The trace simulator: a workload, a cluster and a policy give every job's completion time.

Discrete steps, as in Pollux's simulator, so that results compare to the second; an event queue was
considered, but every policy here decides at fixed times anyway and a step costs microseconds per
job. The order within a step:

1. every placed job advances by ``step_seconds``; completions are exact within the step;
2. nodes fail or come back (a job on a failed node falls back to its last checkpoint), workers
   become slow or, if slow, are replaced;
3. at decision times the policy is called with the submitted, unfinished jobs; a job whose list of
   nodes changed is placed anew and loses ``restart_seconds`` first.

Everything is seeded and no clock is read: equal arguments give equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bytescheduler.cluster.contract import (
    Allocation,
    Node,
    Resources,
    check_allocations,
)
from bytescheduler.cluster.faults import FaultSettings, NodeFailures, Stragglers
from bytescheduler.cluster.knowledge import NO_KNOWLEDGE, Errors, Learner, with_errors
from bytescheduler.cluster.model_job import ModelJob
from bytescheduler.cluster.models.stragglers import find_stragglers
from bytescheduler.cluster.policies import PolicyEntry
from bytescheduler.cluster.simulated_job import Knowledge
from bytescheduler.cluster.trace_job import TraceJob
from bytescheduler.cluster.workload import Workload, check_workload
from bytescheduler.exceptions import ConfigurationError, UsageError

__all__ = ["JobResult", "Settings", "SimulationResult", "Span", "simulate"]

Job = TraceJob | ModelJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to simulate. Times in seconds.

    Attributes:
        step_seconds: length of one step.
        decision_seconds: time between decisions, a multiple of the step.
        restart_seconds: what a job that is placed anew loses.
        checkpoint_seconds: how often jobs save their progress, which matters when nodes fail.
        horizon_seconds: when to give up.
        errors: injected into what policies are told; None tells what was learned (or the truth,
            to an oracle), errors of 0 tell the truth to every policy.
        faults: what goes wrong.
        seed: of measurement noise, errors and faults.

    Raises:
        ConfigurationError: a time that is not positive, or decisions that fall between steps.
    """

    step_seconds: int = 60
    decision_seconds: int = 60
    restart_seconds: int = 30
    checkpoint_seconds: int = 600
    horizon_seconds: int = 365 * 86_400
    errors: Errors | None = None
    faults: FaultSettings = field(default_factory=FaultSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "decision_seconds", "checkpoint_seconds", "horizon_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be positive, got {getattr(self, name)}")
        if self.restart_seconds < 0:
            raise ConfigurationError(
                f"restart_seconds must be at least 0, got {self.restart_seconds}"
            )
        for name in ("decision_seconds", "checkpoint_seconds"):
            if getattr(self, name) % self.step_seconds:
                raise ConfigurationError(
                    f"{name} must be a multiple of step_seconds ({self.step_seconds}), "
                    f"got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time under one allocation."""

    start: float
    end: float
    allocation: Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What became of one job. Times in seconds.

    Attributes:
        alone: duration with an equal share of the cluster, the yardstick of finish-time fairness.
    """

    name: str
    kind: str
    submitted: float
    finished: float
    restarts: int
    spans: tuple[Span, ...]
    alone: float

    @property
    def jct(self) -> float:
        """Completion minus submission."""
        return self.finished - self.submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """All jobs in order of submission, and the used fraction of the scarcest resource."""

    jobs: tuple[JobResult, ...]
    utilisation: float


def simulate(
    workload: Workload,
    nodes: Sequence[Node],
    policy: PolicyEntry,
    settings: Settings | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SimulationResult:
    """Replay a workload under a policy.

    Args:
        workload: at least one job.
        nodes: the cluster, in order of id.
        policy: which policy, with what it is told.
        settings: see ``Settings``.
        on_progress: called with finished and all jobs whenever a job finishes.

    Raises:
        ConfigurationError: the workload or the cluster breaks a rule.
        UsageError: the policy broke its contract or places nothing any more.
    """
    check_workload(workload, nodes)
    return _Simulation(workload, nodes, policy, settings or Settings()).run(on_progress)


class _Simulation:
    """The state of one run."""

    def __init__(
        self, workload: Workload, nodes: Sequence[Node], policy: PolicyEntry, settings: Settings
    ) -> None:
        self._policy, self._settings, self._nodes = policy, settings, tuple(nodes)
        self._by_id = {node.id: node for node in nodes}
        entries = sorted(workload, key=lambda entry: entry.spec.submitted)
        self._all: list[Job] = [
            entry.start(balanced_servers=policy.balances_servers) for entry in entries
        ]
        self._waiting = self._all[::-1]
        self._active: list[Job] = []
        self._learners: dict[str, Learner] = {}
        self._failures = NodeFailures(nodes, settings.faults, settings.seed)
        self._stragglers = Stragglers(settings.faults, settings.seed)
        self._spans: dict[str, list[Span]] = {job.spec.name: [] for job in self._all}
        self._now = 0
        self._held_seconds = Resources()
        self._present_seconds = {job.spec.name: 0.0 for job in self._all}

    def run(self, on_progress: Callable[[int, int], None] | None) -> SimulationResult:
        while self._active or self._waiting:
            self._check_horizon()
            self._advance()
            self._apply_faults()
            if self._now % self._settings.checkpoint_seconds == 0:
                for job in self._active:
                    job.checkpoint()
            if self._now % self._settings.decision_seconds == 0:
                self._decide()
            finished = len(self._all) - len(self._active) - len(self._waiting)
            if on_progress is not None:
                on_progress(finished, len(self._all))
        return self._result()

    def _check_horizon(self) -> None:
        if self._now >= self._settings.horizon_seconds:
            raise UsageError(
                f"{len(self._active)} jobs are not done after {self._now} s (horizon_seconds); "
                "do nodes fail faster than jobs reach a checkpoint?"
            )

    def _advance(self) -> None:
        step = self._settings.step_seconds
        for job in self._active:
            self._present_seconds[job.spec.name] += step * len(self._active)
            allocation, executed = job.allocation, job.executed
            job.advance(self._now, step)
            if allocation is not None:
                self._record(job, allocation, job.executed - executed)
        self._now += step
        self._active = [job for job in self._active if job.finished is None]
        while self._waiting and self._waiting[-1].spec.submitted <= self._now:
            self._active.append(self._waiting.pop())

    def _record(self, job: Job, allocation: Allocation, seconds: float) -> None:
        spans, end = self._spans[job.spec.name], self._now + seconds
        if spans and spans[-1].allocation is allocation and spans[-1].end == self._now:
            spans[-1] = Span(spans[-1].start, end, allocation)
        else:
            spans.append(Span(self._now, end, allocation))
        held = self._held_seconds.plus(job.spec.worker, seconds * len(allocation.workers))
        if job.spec.server is not None:
            held = held.plus(job.spec.server, seconds * len(allocation.servers))
        self._held_seconds = held

    def _apply_faults(self) -> None:
        failed = self._failures.advance(self._now)
        for job in self._active:
            if job.allocation is None:
                continue
            if failed and not failed.isdisjoint(job.allocation.nodes):
                job.fail()
                continue
            self._apply_stragglers(job, len(job.allocation.workers))

    def _apply_stragglers(self, job: Job, workers: int) -> None:
        slow = dict(job.slowdowns)
        if slow and self._settings.faults.replace_stragglers:
            speeds = [1 / slow.get(rank, 1.0) for rank in range(workers)]
            replaced = find_stragglers(speeds)
            slow = {rank: slowdown for rank, slowdown in slow.items() if rank not in replaced}
            if replaced:
                job.pause(self._settings.restart_seconds)
        slow |= self._stragglers.strike(workers, self._settings.step_seconds)
        if slow != job.slowdowns:
            job.slow_down(slow, self._by_id)

    def _decide(self) -> None:
        states = [job.state(self._know(job)) for job in self._active]
        up = [node for node in self._nodes if node.id not in self._failures.down]
        previous = {
            job.spec.name: job.allocation for job in self._active if job.allocation is not None
        }
        for job in self._active:
            job.service.note(self._now, job.executed)
        decision = self._policy.decide(states, up, previous, float(self._now)) if up else {}
        if decision != previous:
            check_allocations(states, up, decision)
        if states and not decision and not self._waiting and not self._failures.down:
            raise UsageError(
                f"at {self._now} s the policy places none of the {len(states)} jobs left on the "
                "empty cluster; they would wait for ever"
            )
        for job in self._active:
            allocation = decision.get(job.spec.name)
            job.place(allocation, self._by_id, self._settings.restart_seconds)

    def _know(self, job: Job) -> Knowledge:
        errors, name = self._settings.errors, job.spec.name
        if self._policy.knowledge == "nothing":
            return NO_KNOWLEDGE
        if errors is not None:
            return with_errors(job.truth(), name, errors, self._settings.seed)
        if self._policy.knowledge == "truth":
            return job.truth()
        if name not in self._learners:
            self._learners[name] = Learner(job, self._settings.seed)
        self._learners[name].observe()
        return self._learners[name].knowledge()

    def _result(self) -> SimulationResult:
        return SimulationResult(
            jobs=tuple(self._job_result(job) for job in self._all),
            utilisation=self._utilisation(),
        )

    def _job_result(self, job: Job) -> JobResult:
        spec, finished = job.spec, job.finished or 0.0
        return JobResult(
            name=spec.name,
            kind=spec.kind,
            submitted=spec.submitted,
            finished=finished,
            restarts=max(job.restarts, 0),
            spans=tuple(self._spans[spec.name]),
            alone=self._alone(job),
        )

    def _alone(self, job: Job) -> float:
        """Return the duration on an equal share among the jobs that were there on average."""
        lived = sum(span.end - span.start for span in self._spans[job.spec.name])
        present = self._present_seconds[job.spec.name]
        steps = max((job.finished or 0.0) - job.spec.submitted, lived, 1.0)
        contenders = max(1.0, present / steps)
        share = int(self._most_workers(job) / contenders)
        return job.alone_seconds(max(1, min(share, job.spec.requested.workers)))

    def _most_workers(self, job: Job) -> int:
        return sum(node.capacity.count(job.spec.worker) for node in self._nodes)

    def _utilisation(self) -> float:
        end = max(job.finished or 0.0 for job in self._all)
        start = min(job.spec.submitted for job in self._all)
        total = Resources()
        for node in self._nodes:
            total = total.plus(node.capacity, end - start)
        return self._held_seconds.dominant_share(total)
