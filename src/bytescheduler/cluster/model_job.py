"""A job that follows a speed formula: parameter servers (synchronous or not) or all-reduce.

The formula gives the seconds per step of a job whose tasks all talk over the network, with servers
of equal load on reference machines. Where the tasks are changes that, for every policy alike:

    compute (t0)    times the slowest worker (synchronous) or the mean one (asynchronous)
    exchange (t2 synchronous and all-reduce, t1 asynchronous)
                    times the fraction of traffic that crosses nodes at the busiest task, and
                    times how uneven the parameter servers are loaded
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bytescheduler.cluster.contract import Allocation, Node
from bytescheduler.cluster.models.speed import Mode, SpeedModel
from bytescheduler.cluster.simulated_job import JobSpec, Knowledge, SimulatedJob

__all__ = ["ModelJob", "TrainingModel", "transfer_units"]

_EXCHANGE: dict[Mode, int] = {"sync": 2, "async": 1, "allreduce": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingModel:
    """How a job truly trains.

    Attributes:
        speed: seconds per step.
        steps: steps to convergence.
        steps_per_epoch: a loss is reported after each epoch.
        loss: b0 (per step), b1 and b2 of the loss curve; None if losses are not reported.
        threshold: the owner's convergence threshold (fraction of the largest loss per epoch).
        blocks: parameters per block; empty if the servers' load counts as even.
    """

    speed: SpeedModel
    steps: float
    steps_per_epoch: float = 1.0
    loss: tuple[float, float, float] | None = None
    threshold: float = 0.01
    blocks: tuple[int, ...] = ()

    def loss_at(self, step: float) -> float | None:
        """Return the true loss after ``step`` steps, if losses are reported."""
        if self.loss is None:
            return None
        b0, b1, b2 = self.loss
        return 1 / (b0 * step + b1) + b2


class ModelJob(SimulatedJob[float]):
    """One run of a training model.

    Args:
        spec: the workload's row.
        model: how it truly trains.
        imbalance: gives, for a number of servers, the largest server's load over the average.
    """

    def __init__(
        self,
        spec: JobSpec,
        model: TrainingModel,
        imbalance: Callable[[int], float] = lambda servers: 1.0,
    ) -> None:
        self.model = model
        self.steps_done = 0.0
        self._imbalance = imbalance
        self._step_time = float("inf")
        super().__init__(spec)

    def _progress(self) -> float:
        return self.steps_done

    def _restore(self, progress: float) -> None:
        self.steps_done = progress

    def _configure(self, allocation: Allocation, nodes: Mapping[int, Node]) -> None:
        slowness = [
            self.slowdowns.get(rank, 1.0) / nodes[node].speed
            for rank, node in enumerate(allocation.workers)
        ]
        model = self.model.speed
        t = list(model.coefficients)
        even = sum(slowness) / len(slowness)
        t[0] *= even if model.mode == "async" else max(slowness)
        t[_EXCHANGE[model.mode]] *= self._exchange_factor(allocation)
        workers, servers = allocation.shape
        placed = replace(model, coefficients=tuple(t))
        self._step_time = placed.step_time(workers, servers, len(set(allocation.workers)))

    def _exchange_factor(self, allocation: Allocation) -> float:
        if not allocation.servers:
            return 1.0
        workers, servers = allocation.shape
        remote = transfer_units(allocation) / max(workers, servers)
        return remote * self._imbalance(servers)

    def _train(self, seconds: float) -> float | None:
        needed = (self.model.steps - self.steps_done) * self._step_time
        if needed > seconds:
            self.steps_done += seconds / self._step_time
            return None
        self.steps_done = self.model.steps
        return min(seconds, float(-(-needed // 1)))

    def truth(self) -> Knowledge:
        """Return true steps left, the speed formula and the fraction done."""
        steps = self.model.steps
        return Knowledge(
            steps - self.steps_done, self.model.speed.step_time, self.steps_done / steps
        )

    def measured_step_time(self) -> float:
        """Return the true seconds per step under the present allocation."""
        return self._step_time

    def alone_seconds(self, workers: int) -> float:
        """Return the seconds of the whole run on that many workers, without restarts."""
        ratio = self.spec.requested.servers / self.spec.requested.workers
        servers = 0 if self.spec.server is None else max(1, round(ratio * workers))
        return self.model.steps * self.model.speed.step_time(workers, servers)


def transfer_units(allocation: Allocation) -> int:
    """Return the busiest task's transfers over the network per exchange (Optimus, section 4.2).

    A server exchanges one unit with each worker, over the network unless they share a node: with w
    workers and p servers, of which w_k and p_k on node k, the servers of node k transfer w - w_k
    units each and its workers p - p_k.
    """
    workers, servers = Counter(allocation.workers), Counter(allocation.servers)
    from_servers = (len(allocation.workers) - workers[node] for node in servers)
    from_workers = (len(allocation.servers) - servers[node] for node in workers)
    return max(max(from_servers, default=0), max(from_workers, default=0))
