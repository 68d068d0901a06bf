"""A job that replays a measured application (all-reduce), by the rules of Pollux's simulator."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from bytescheduler.cluster.applications import Application, BatchPlan
from bytescheduler.cluster.contract import Allocation, Node
from bytescheduler.cluster.simulated_job import JobSpec, Knowledge, SimulatedJob

__all__ = ["TraceJob", "gpus_per_node"]


class EpochProgress(NamedTuple):
    """The present epoch (from 0) and the statistical progress since the start."""

    epoch: int
    progress: float


class TraceJob(SimulatedJob[EpochProgress]):
    """One run of ``application`` with total batch size ``batch``."""

    def __init__(self, spec: JobSpec, application: Application, batch: int) -> None:
        self.application = application
        self.batch = batch
        self.epoch = 0
        self._done = 0.0
        self._placement: tuple[int, ...] = ()
        self._plan = BatchPlan(0, 0)
        self._compute_speed = 1.0
        self._goodputs: dict[int, float] = {}
        super().__init__(spec)

    def _progress(self) -> EpochProgress:
        return EpochProgress(self.epoch, self._done)

    def _restore(self, progress: EpochProgress) -> None:
        self.epoch, self._done = progress

    def _configure(self, allocation: Allocation, nodes: Mapping[int, Node]) -> None:
        self._placement = gpus_per_node(allocation.workers)
        self._plan = self.application.plan(self.batch, len(allocation.workers))
        self._compute_speed = min(
            nodes[node].speed / self.slowdowns.get(rank, 1.0)
            for rank, node in enumerate(allocation.workers)
        )
        self._goodputs = {}

    def _goodput(self) -> float:
        if self.epoch not in self._goodputs:
            goodput = self.application.goodput(self._placement, self._plan, self.epoch)
            self._goodputs[self.epoch] = goodput * self._compute_speed
        return self._goodputs[self.epoch]

    def _train(self, seconds: float) -> float | None:
        left = seconds
        while left > 0:
            goodput = self._goodput()
            epoch_end = self.application.epoch_end(self.epoch)
            if self._done + goodput * left < epoch_end:
                self._done += goodput * left
                return None
            left -= round((epoch_end - self._done) / goodput)
            self._done = epoch_end
            self.epoch += 1
            if self.epoch == self.application.max_epochs:
                return seconds - left
        return None

    def truth(self) -> Knowledge:
        """Return true iterations left and true step times on packed placements."""
        return Knowledge(
            self.application.iterations_left(self.batch, self.epoch),
            self.true_step_time,
            self.epoch / self.application.max_epochs,
        )

    def true_step_time(self, workers: int, servers: int) -> float:
        """Return the seconds per iteration, packed four to a node (there are no servers)."""
        del servers
        return self.application.packed_step_time(self.batch, workers)

    def measured(self) -> tuple[int, int, float]:
        """Return nodes, workers and seconds per iteration under the present allocation."""
        times = self.application.step_times(self._placement, self._plan.local)
        seconds = times.iteration(self._plan.accumulation) / self._compute_speed
        return len(self._placement), sum(self._placement), seconds

    def alone_seconds(self, workers: int) -> float:
        """Return the seconds of all epochs on packed nodes, without restarts."""
        full, rest = divmod(workers, 4)
        placement = (4,) * full + ((rest,) if rest else ())
        plan = self.application.plan(self.batch, workers)
        seconds, done = 0.0, 0.0
        for epoch in range(self.application.max_epochs):
            end = self.application.epoch_end(epoch)
            seconds += (end - done) / self.application.goodput(placement, plan, epoch)
            done = end
        return seconds


def gpus_per_node(workers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of the runs of equal node ids."""
    return tuple(len(list(run)) for _, run in groupby(workers))
