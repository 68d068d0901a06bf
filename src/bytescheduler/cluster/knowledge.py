"""What the scheduler is told of each job: the truth, or what it can learn by measuring.

Oracles get ``job.truth()``. ``Learner`` knows only what a real controller
would: five measurements before the start (the paper's pre-run), then the step time and the losses
that show while the job runs, with measurement noise. ``with_errors`` distorts either, to see how
much a policy depends on good predictions.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from bytescheduler.cluster.contract import Shape
from bytescheduler.cluster.model_job import ModelJob
from bytescheduler.cluster.models.convergence import ConvergenceTracker
from bytescheduler.cluster.models.speed import Measurement, SpeedTracker
from bytescheduler.cluster.simulated_job import Knowledge
from bytescheduler.cluster.trace_job import TraceJob
from bytescheduler.exceptions import ConfigurationError

__all__ = ["NO_KNOWLEDGE", "Errors", "Learner", "with_errors"]

SPEED_NOISE = 0.02
LOSS_NOISE = 0.005
PRIOR_EPOCHS = 50
FEWEST_LOSSES = 5
NO_KNOWLEDGE = Knowledge(float("inf"), lambda workers, servers: float("inf"), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors injected into what the scheduler is told (0.2: 20 % too much or too little).

    Every job's steps left, and its step time for every number of workers and servers, is wrong by
    exactly that much, up or down by a coin that is thrown once.

    Raises:
        ConfigurationError: an error outside of [0, 1).
    """

    convergence: float = 0.0
    speed: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("convergence", self.convergence), ("speed", self.speed)):
            if not 0 <= value < 1:
                raise ConfigurationError(f"the {name} error must be in [0, 1), got {value}")


def with_errors(knowledge: Knowledge, name: str, errors: Errors, seed: int) -> Knowledge:
    """Return the knowledge with errors injected."""

    def coin(what: str) -> int:
        return 1 if zlib.crc32(f"{seed}/{name}/{what}".encode()) & 1 else -1

    def step_time(workers: int, servers: int) -> float:
        wrong = 1 + errors.speed * coin(f"{workers},{servers}")
        return knowledge.step_time(workers, servers) * wrong

    remaining = knowledge.remaining * (1 + errors.convergence * coin("steps"))
    return Knowledge(
        remaining, step_time if errors.speed else knowledge.step_time, knowledge.progress
    )


class Learner:
    """Learns one job's models from what shows while it runs.

    Args:
        job: the job.
        seed: seed of the measurement noise.
    """

    def __init__(self, job: TraceJob | ModelJob, seed: int) -> None:
        self._job = job
        self._rng = np.random.default_rng([seed, zlib.crc32(job.spec.name.encode())])
        self._speed = _speed_tracker(job)
        self._convergence = _convergence_tracker(job)
        self._epochs_seen = 0
        for shape in _pre_run_shapes(job):
            self._measure(shape, job.truth().step_time(*shape))

    def _measure(self, shape: Shape, seconds: float, nodes: int = 0) -> None:
        noisy = seconds * (1 + SPEED_NOISE * float(self._rng.standard_normal()))
        self._speed.observe(Measurement(shape.workers, shape.servers, noisy, nodes))

    def observe(self) -> None:
        """Take in what the job showed since the last call."""
        job = self._job
        if job.allocation is not None and isinstance(job, TraceJob):
            nodes, workers, seconds = job.measured()
            self._measure(Shape(workers), seconds, nodes)
        elif job.allocation is not None and isinstance(job, ModelJob):
            self._measure(job.allocation.shape, job.measured_step_time())
        if isinstance(job, ModelJob) and self._convergence is not None:
            self._observe_losses(job, self._convergence)

    def _observe_losses(self, job: ModelJob, tracker: ConvergenceTracker) -> None:
        epochs = int(job.steps_done / job.model.steps_per_epoch)
        for epoch in range(self._epochs_seen + 1, epochs + 1):
            step = epoch * job.model.steps_per_epoch
            noise = 1 + LOSS_NOISE * float(self._rng.standard_normal())
            tracker.observe(step, (job.model.loss_at(step) or 0.0) * noise)
        self._epochs_seen = max(self._epochs_seen, epochs)

    def knowledge(self) -> Knowledge:
        """Return what is known by now."""
        remaining, done = self._remaining()
        return Knowledge(remaining, self._speed.model.step_time, done / max(done + remaining, 1e-9))

    def _remaining(self) -> tuple[float, float]:
        job = self._job
        if isinstance(job, TraceJob):
            return _trace_steps_left(job), job.application.iterations_done(job.batch, job.epoch)
        if self._convergence is None:
            return job.model.steps - job.steps_done, job.steps_done
        if self._epochs_seen < FEWEST_LOSSES:
            prior = PRIOR_EPOCHS * job.model.steps_per_epoch
            return max(prior - job.steps_done, job.model.steps_per_epoch), job.steps_done
        left = self._convergence.steps_left(job.steps_done)
        return max(left, job.model.steps_per_epoch), job.steps_done


def _speed_tracker(job: TraceJob | ModelJob) -> SpeedTracker:
    if isinstance(job, TraceJob):
        return SpeedTracker("allreduce", job.batch)
    return SpeedTracker(job.model.speed.mode, job.model.speed.batch)


def _convergence_tracker(job: TraceJob | ModelJob) -> ConvergenceTracker | None:
    if isinstance(job, TraceJob) or job.model.loss is None:
        return None
    return ConvergenceTracker(
        threshold=job.model.threshold, steps_per_epoch=job.model.steps_per_epoch
    )


def _pre_run_shapes(job: TraceJob | ModelJob) -> list[Shape]:
    """Return up to five shapes that differ as much as the job's limits allow."""
    most = job.spec.limit
    workers = sorted({1, 2, max(1, most.workers // 4), max(1, most.workers // 2), most.workers})
    if job.spec.server is None:
        return [Shape(n) for n in workers if n <= most.workers]
    servers = max(1, most.servers // 2)
    pairs = [(1, 1), (2, 1), (most.workers, servers), (most.workers, most.servers), (1, servers)]
    pairs.append((max(1, most.workers // 2), max(1, servers // 2)))
    return [Shape(*pair) for pair in dict.fromkeys(pairs)][:5]


def _trace_steps_left(job: TraceJob) -> float:
    """Return epochs left times iterations per epoch so far; the owner set the epochs."""
    finished = max(job.epoch, 1)
    per_epoch = job.application.iterations_done(job.batch, finished) / finished
    return max(1.0, (job.application.max_epochs - job.epoch) * per_epoch)
