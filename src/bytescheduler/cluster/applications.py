"""Measured applications: step times by placement and statistics by epoch, as Pollux published them.

One folder per application (``placements.csv``, ``scalability.csv``, ``validation-BATCH.csv``).
The rules are those of the Pollux (OSDI 2021) simulator, so that results compare with the published
ones to the second; every number that is interpolated is computed once and kept, because a replay
asks for the same few thousand of them again and again.

Notation:
    b       total batch size (samples)              n     replicas
    s       accumulation steps per iteration        S, V  gradient's squared norm, variance
    scale   n * per-replica batch * (s + 1) / smallest validated batch
    gain    (V + S) / (V / scale + S): progress per iteration
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bytescheduler._imports import require
from bytescheduler.cluster.tables import Row, read_table
from bytescheduler.exceptions import ConfigurationError

__all__ = ["Application", "BatchPlan", "load_applications"]

EPSILON = 1e-8
MOST_NODES_MEASURED = 16
GPUS_PER_PACKED_NODE = 4
# The epochs that Pollux trains for at most, and the samples per replica where memory limits them.
EPOCH_LIMITS = {
    "bert": 2,
    "cifar10": 100,
    "ncf": 10,
    "imagenet": 90,
    "deepspeech2": 80,
    "yolov3": 50,
}
REPLICA_BATCH_LIMITS = {"yolov3": 8}

Floats = npt.NDArray[np.float64]
Placement = tuple[int, ...]


class BatchPlan(NamedTuple):
    """Per-replica batch and gradient accumulation steps of one iteration."""

    local: int
    accumulation: int


class StepTimes(NamedTuple):
    """Seconds of one forward and backward pass with exchange, and the exchange's part of it."""

    step: float
    sync: float

    def iteration(self, accumulation: int) -> float:
        """Return the seconds of an iteration with that many accumulation steps."""
        return self.step + accumulation * (self.step - self.sync)


class Validation(NamedTuple):
    """What one validated batch size recorded, one entry per epoch."""

    progress: Floats
    iteration: Floats
    squared_norm: Floats
    variance: Floats


class Application:
    """One measured application.

    Args:
        folder: its traces.

    Raises:
        ConfigurationError: a file is missing or malformed, or the application is not known.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        if self.name not in EPOCH_LIMITS:
            raise ConfigurationError(
                f"unknown application {self.name!r}; known: {', '.join(sorted(EPOCH_LIMITS))}"
            )
        placements = read_table(
            folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time")
        )
        scalability = read_table(
            folder / "scalability.csv",
            ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"),
        )
        self._measured = _by_placement(placements)
        self._interpolate = _Interpolator(placements, scalability)
        self._validations = _read_validations(folder)
        self.batches = sorted(self._validations)
        self.max_epochs = EPOCH_LIMITS[self.name]
        local = [row.integer("local_bsz", least=1) for row in placements]
        self.smallest_local = min(local)
        self.largest_local = REPLICA_BATCH_LIMITS.get(self.name, max(local))
        self._most_replicas = max(row.integer("num_replicas", least=1) for row in scalability)
        self._step_times: dict[tuple[Placement, int], StepTimes] = {}
        self._packed: dict[tuple[int, int], float] = {}
        self._gains: dict[tuple[int, int], float] = {}
        self._epoch_end = self._read_epoch_ends(folder)

    def _read_epoch_ends(self, folder: Path) -> list[float]:
        epochs = min(len(run.progress) for run in self._validations.values())
        if epochs < self.max_epochs:
            raise ConfigurationError(
                f"{folder}: every validation file must hold {self.max_epochs} epochs, "
                f"the shortest holds {epochs}"
            )
        runs = [run.progress[:epochs] for run in self._validations.values()]
        return np.min(runs, axis=0).tolist()

    def epoch_end(self, epoch: int) -> float:
        """Return the statistical progress at which ``epoch`` (counted from 0) is complete."""
        return self._epoch_end[epoch]

    def iterations_left(self, batch: int, epoch: int) -> float:
        """Return the true iterations at ``batch`` from ``epoch`` to the completing one, or 1."""
        completing = self.max_epochs - 1
        if completing <= epoch:
            return 1.0
        iteration = self._validations[batch].iteration
        return float(iteration[completing] - iteration[epoch])

    def iterations_done(self, batch: int, epochs: int) -> float:
        """Return the iterations at ``batch`` after that many whole epochs, at least one."""
        return float(self._validations[batch].iteration[max(epochs, 1) - 1])

    def most_replicas(self, batch: int) -> int:
        """Return how many replicas ``batch`` can feed and were measured (NCF runs on one)."""
        if self.name == "ncf":
            return 1
        return max(1, min(batch // self.smallest_local, self._most_replicas))

    def plan(self, batch: int, replicas: int) -> BatchPlan:
        """Split a total batch over replicas and accumulation steps."""
        local = math.ceil(batch / replicas - EPSILON)
        accumulation = math.ceil(local / self.largest_local - EPSILON) - 1
        if replicas == 1 and batch > self.batches[0]:
            accumulation = max(1, accumulation)
        return self._capped(local, replicas, accumulation)

    def _capped(self, local: int, replicas: int, accumulation: int) -> BatchPlan:
        per_replica = math.ceil(local / (accumulation + 1) - EPSILON)
        most = self.batches[-1] // (replicas * (accumulation + 1))
        return BatchPlan(min(per_replica, most), accumulation)

    def step_times(self, placement: Placement, local: int) -> StepTimes:
        """Return the measured or interpolated step times.

        Args:
            placement: GPUs on each node, in order.
            local: samples per replica and pass.
        """
        key = (placement, local)
        if key not in self._step_times:
            self._step_times[key] = self._look_up(placement, local)
        return self._step_times[key]

    def _look_up(self, placement: Placement, local: int) -> StepTimes:
        smallest = min(placement[i:] + placement[:i] for i in range(len(placement)))
        table = self._measured.get("".join(map(str, smallest)))
        if table is not None:
            times = [float(np.interp(local, table[:, 0], table[:, c])) for c in (1, 2)]
        else:
            nodes = min(len(placement), MOST_NODES_MEASURED)
            times = self._interpolate(nodes, sum(placement), local)
        return StepTimes(*times)

    def packed_step_time(self, batch: int, replicas: int) -> float:
        """Return the true seconds per iteration with replicas packed four to a node."""
        key = (batch, replicas)
        if key not in self._packed:
            self._packed[key] = self._packed_step_time(batch, replicas)
        return self._packed[key]

    def _packed_step_time(self, batch: int, replicas: int) -> float:
        full, rest = divmod(replicas, GPUS_PER_PACKED_NODE)
        placement = (GPUS_PER_PACKED_NODE,) * full + ((rest,) if rest else ())
        local, accumulation = self.plan(batch, replicas)
        if replicas == 1 and accumulation < 1:
            local, accumulation = self._capped(batch, replicas, 1)
        return self.step_times(placement, local).iteration(accumulation)

    def goodput(self, placement: Placement, plan: BatchPlan, epoch: int) -> float:
        """Return statistical progress per second in ``epoch``."""
        seconds = self.step_times(placement, plan.local).iteration(plan.accumulation)
        return self.gain(sum(placement) * plan.local * (plan.accumulation + 1), epoch) / seconds

    def gain(self, batch: int, epoch: int) -> float:
        """Return statistical progress per iteration at that total batch in ``epoch``."""
        key = (batch, epoch)
        if key not in self._gains:
            self._gains[key] = self._gain(batch, epoch)
        return self._gains[key]

    def _gain(self, batch: int, epoch: int) -> float:
        norms = [self._validations[size].squared_norm[epoch] for size in self.batches]
        variances = [self._validations[size].variance[epoch] for size in self.batches]
        norm = float(np.interp(batch, self.batches, norms))
        variance = float(np.interp(batch, self.batches, variances))
        scale = batch / self.batches[0]
        return (variance + norm) / (variance / scale + norm)


def _by_placement(rows: list[Row]) -> dict[str, Floats]:
    found: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row in rows:
        key = row.text("placement")
        if not key.isdigit():
            raise row.error("placement", "digits, one per node")
        found[key].append(
            (row.number("local_bsz"), row.number("step_time"), row.number("sync_time"))
        )
    return {key: np.array(sorted(values)) for key, values in found.items()}


class _Interpolator:
    """Linear (Delaunay) interpolation over nodes, replicas and per-replica batch.

    Outside of what was measured, where Pollux's simulator stops, the nearest measured point counts.
    """

    def __init__(self, placements: list[Row], scalability: list[Row]) -> None:
        points, values = _mean_points(placements)
        for row in scalability:
            points.append(
                tuple(row.number(name) for name in ("num_nodes", "num_replicas", "local_bsz"))
            )
            values.append((row.number("step_time"), row.number("sync_time")))
        self._points, self._values = np.array(points, float), np.array(values)
        scipy = require("scipy.interpolate", extra="cluster")
        self._linear = scipy.LinearNDInterpolator(self._points, self._values)

    def __call__(self, nodes: int, replicas: int, local: int) -> list[float]:
        """Return step and sync time (s)."""
        times: list[float] = self._linear([[nodes, replicas, local]])[0].tolist()
        if any(map(math.isnan, times)):
            ratios = self._points / (nodes, replicas, local)
            nearest = int(np.argmin(np.sum(np.log(ratios) ** 2, axis=1)))
            return self._values[nearest].tolist()
        return times


def _mean_points(rows: list[Row]) -> tuple[list[tuple[float, ...]], list[tuple[float, float]]]:
    grouped: defaultdict[tuple[float, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        digits = row.text("placement")
        key = (len(digits), sum(map(int, digits)), row.number("local_bsz", least=1))
        grouped[key].append((row.number("step_time"), row.number("sync_time")))
    points = sorted(grouped)
    means = [np.mean(grouped[point], axis=0) for point in points]
    return points, [(float(mean[0]), float(mean[1])) for mean in means]


def _read_validations(folder: Path) -> dict[int, Validation]:
    found: dict[int, Validation] = {}
    for path in sorted(folder.glob("validation-*.csv")):
        match = re.fullmatch(r"validation-(\d+)\.csv", path.name)
        if match is None:
            raise ConfigurationError(f"{path}: the name must be validation-BATCH.csv")
        columns = ("progress", "iteration", "grad_sqr", "grad_var")
        rows = read_table(path, columns)
        found[int(match[1])] = Validation(
            *(np.array([row.number(column) for row in rows]) for column in columns)
        )
    if not found:
        raise ConfigurationError(f"{folder}: no validation-BATCH.csv; is this a trace folder?")
    return found


@lru_cache(maxsize=4)
def load_applications(folder: Path) -> dict[str, Application]:
    """Read every application under ``folder``.

    Raises:
        ConfigurationError: the folder is missing, empty or malformed.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"--traces must name a folder of applications, got {folder}")
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    if not folders:
        raise ConfigurationError(f"{folder}: holds no application; expected APP/placements.csv")
    return {path.name: Application(path) for path in folders}
