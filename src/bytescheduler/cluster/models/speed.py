"""How fast a job trains with given numbers of workers, servers and nodes.

Seconds per step are linear in non-negative coefficients t, so fitting is non-negative least squares
on inverted speeds, weighted so that relative errors count. Gaussian processes and neural networks
were considered: they need many more than the five to ten measurements that a running job offers,
and they do not extrapolate.

Notation:
    w, p    workers, parameter servers      M    total batch size
    N       nodes that hold the workers     f    steps per second

    synchronous    1/f = t0*M/w + t1 + t2*w/p + t3*w + t4*p             Optimus (EuroSys 2018)
    asynchronous   w/f = t0 + t1*w/p + t2*w + t3*p                      Optimus (EuroSys 2018)
    all-reduce     1/f = t0*M/w + t1 + t2*[w > 1] + t3*(N-1)/N + t4*(w-1)

In the last one, t2 is the exchange among GPUs (a ring moves nearly the same bytes for any w; the
exact (w-1)/w could not be told from t0 and t1), t3 what it costs more between nodes, t4 the latency
per member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from bytescheduler._imports import require
from bytescheduler.exceptions import ConfigurationError

__all__ = ["MODES", "Measurement", "Mode", "SpeedModel", "SpeedTracker", "fit_speed"]

Mode = Literal["sync", "async", "allreduce"]
MODES: tuple[Mode, ...] = get_args(Mode)
COEFFICIENTS: dict[Mode, int] = {"sync": 5, "async": 4, "allreduce": 5}
PACKED_PER_NODE = 4


class Measurement(NamedTuple):
    """One measured configuration; ``nodes`` matters for all-reduce only (0: packed by four)."""

    workers: int
    servers: int
    seconds_per_step: float
    nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedModel:
    """A fitted or given speed function.

    Attributes:
        coefficients: t0, t1, ... of the module's docstring.
        batch: total batch size M (samples).
    """

    mode: Mode
    coefficients: tuple[float, ...]
    batch: float = 1.0

    def step_time(self, workers: int, servers: int = 0, nodes: int = 0) -> float:
        """Return seconds per step of the whole job (for asynchronous jobs: of any worker)."""
        t = self.coefficients
        if self.mode == "sync":
            return (
                t[0] * self.batch / workers
                + t[1]
                + t[2] * workers / servers
                + t[3] * workers
                + t[4] * servers
            )
        if self.mode == "async":
            return (t[0] + t[1] * workers / servers + t[2] * workers + t[3] * servers) / workers
        nodes = nodes or -(-workers // PACKED_PER_NODE)
        return (
            t[0] * self.batch / workers
            + t[1]
            + t[2] * (workers > 1)
            + t[3] * (nodes - 1) / nodes
            + t[4] * (workers - 1)
        )

    def speed(self, workers: int, servers: int = 0, nodes: int = 0) -> float:
        """Return f, the steps per second."""
        return 1 / self.step_time(workers, servers, nodes)


def _features(mode: Mode, measurement: Measurement, batch: float) -> list[float]:
    """Return the factors of the coefficients: ``step_time`` with each of them 1 in turn."""
    count = COEFFICIENTS[mode]
    units = np.eye(count)
    return [
        SpeedModel(mode=mode, coefficients=tuple(unit), batch=batch).step_time(
            measurement.workers, measurement.servers, measurement.nodes
        )
        for unit in units
    ]


def fit_speed(mode: Mode, measurements: Sequence[Measurement], batch: float = 1.0) -> SpeedModel:
    """Fit a speed function to measurements by non-negative least squares.

    Args:
        mode: which formula.
        measurements: at least one; five start a job, ten bring the error under 10 %.
        batch: total batch size M (samples).

    Raises:
        ConfigurationError: no measurement, or one that is impossible.
    """
    if not measurements:
        raise ConfigurationError("a speed fit needs at least one measurement, got none")
    for measurement in measurements:
        _check(mode, measurement)
    seconds = np.array([m.seconds_per_step for m in measurements])
    rows = np.array([_features(mode, m, batch) for m in measurements]) / seconds[:, None]
    scale = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    solution, _ = require("scipy.optimize", extra="cluster").nnls(rows / scale, np.ones(len(rows)))
    return SpeedModel(mode=mode, coefficients=tuple((solution / scale).tolist()), batch=batch)


def _check(mode: Mode, measurement: Measurement) -> None:
    least_servers = 0 if mode == "allreduce" else 1
    if measurement.workers < 1 or measurement.servers < least_servers:
        raise ConfigurationError(
            f"a {mode} job has at least 1 worker and {least_servers} servers, got {measurement}"
        )
    if not 0 < measurement.seconds_per_step < np.inf:
        raise ConfigurationError(f"seconds per step must be positive, got {measurement}")


class SpeedTracker:
    """A speed model that is refitted as measurements come in.

    Measurements of the same configuration are averaged, so a job that runs long with one
    configuration does not drown what was seen of the others. The fit is renewed at the first,
    second, fourth, eighth, ... measurement of a configuration: in between, means hardly move.
    """

    def __init__(self, mode: Mode, batch: float = 1.0) -> None:
        self._mode: Mode = mode
        self._batch = batch
        self._seen: dict[tuple[int, int, int], tuple[int, float]] = {}
        self._model: SpeedModel | None = None

    def observe(self, measurement: Measurement) -> None:
        """Take one measurement into account."""
        _check(self._mode, measurement)
        key = (measurement.workers, measurement.servers, measurement.nodes)
        count, mean = self._seen.get(key, (0, 0.0))
        mean += (measurement.seconds_per_step - mean) / (count + 1)
        self._seen[key] = (count + 1, mean)
        if (count + 1) & count == 0:
            self._model = None

    @property
    def model(self) -> SpeedModel:
        """The model fitted to all measurements so far."""
        if self._model is None:
            averaged = [Measurement(w, p, mean, n) for (w, p, n), (_, mean) in self._seen.items()]
            self._model = fit_speed(self._mode, averaged, self._batch)
        return self._model


def relative_errors(
    model: SpeedModel, measurements: Sequence[Measurement]
) -> npt.NDArray[np.float64]:
    """Return ``|predicted - measured| / measured`` of each measurement's seconds per step."""
    predicted = [model.step_time(m.workers, m.servers, m.nodes) for m in measurements]
    measured = np.array([m.seconds_per_step for m in measurements])
    return np.abs(np.array(predicted) - measured) / measured
