"""Workloads: which jobs come when, read from CSV files.

Two formats, told apart by their header:

* a measured application per row (``name,time,application,num_replicas,batch_size``), replayed
  from a folder of traces;
* plain rows for one's own jobs (``name,time,workers,servers,mode,speed,steps`` and optional
  columns), documented in docs/cluster.md; ``speed`` is what ``bytescheduler cluster fit`` prints.

Everything is checked before anything runs; an error names file, line, column and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bytescheduler.cluster.applications import Application, load_applications
from bytescheduler.cluster.contract import Node, Resources, Shape
from bytescheduler.cluster.model_job import ModelJob, TrainingModel
from bytescheduler.cluster.models.speed import COEFFICIENTS, MODES, Mode, SpeedModel
from bytescheduler.cluster.parameter_blocks import assign_blocks, assign_blocks_like_mxnet
from bytescheduler.cluster.simulated_job import JobSpec
from bytescheduler.cluster.tables import Row, read_header, read_table
from bytescheduler.cluster.trace_job import TraceJob
from bytescheduler.exceptions import ConfigurationError

__all__ = ["ModelEntry", "TraceEntry", "Workload", "check_workload", "read_workload"]

TRACE_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
PLAIN_COLUMNS = ("name", "time", "workers", "servers", "mode", "speed", "steps")
GROWTH_LIMIT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """A job that replays a measured application."""

    spec: JobSpec
    application: Application
    batch: int

    def start(self, *, balanced_servers: bool) -> TraceJob:
        """Return the job at its beginning."""
        del balanced_servers
        return TraceJob(self.spec, self.application, self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A job that follows a speed formula."""

    spec: JobSpec
    model: TrainingModel

    def start(self, *, balanced_servers: bool) -> ModelJob:
        """Return the job at its beginning, with Optimus' parameter blocks or MXNet's."""
        return ModelJob(self.spec, self.model, _imbalance(self.model.blocks, balanced_servers))


Workload = Sequence[TraceEntry | ModelEntry]


def _imbalance(blocks: tuple[int, ...], balanced: bool) -> Callable[[int], float]:
    if not blocks:
        return lambda servers: 1.0
    return lambda servers: _block_imbalance(blocks, servers, balanced)


@lru_cache(maxsize=4096)
def _block_imbalance(blocks: tuple[int, ...], servers: int, balanced: bool) -> float:
    assign = assign_blocks if balanced else assign_blocks_like_mxnet
    return assign(blocks, servers).imbalance


def read_workload(path: Path, traces: Path | None = None) -> list[TraceEntry | ModelEntry]:
    """Read a workload, in order of submission.

    Args:
        path: the CSV file.
        traces: folder of applications, for the format with measured applications.

    Raises:
        ConfigurationError: malformed, empty, unknown application, duplicate names, negative times.
    """
    header = read_header(path)
    entries: list[TraceEntry | ModelEntry]
    if "application" in header:
        rows = read_table(path, TRACE_COLUMNS)
        if traces is None:
            raise ConfigurationError(
                f"{path} names measured applications; pass --traces DIR with a folder for each"
            )
        applications = load_applications(traces)
        entries = [_trace_entry(row, applications) for row in rows]
    else:
        rows = read_table(path, PLAIN_COLUMNS)
        entries = [_model_entry(row) for row in rows]
    _check_names(rows)
    return sorted(entries, key=lambda entry: entry.spec.submitted)


def _check_names(rows: Sequence[Row]) -> None:
    lines: dict[str, int] = {}
    for row in rows:
        name = row.text("name")
        if name in lines:
            raise row.error("name", f"a name that is not on line {lines[name]} already")
        lines[name] = row.line


def _trace_entry(row: Row, applications: Mapping[str, Application]) -> TraceEntry:
    application = applications[row.choice("application", sorted(applications))]
    batch = row.integer("batch_size", least=1)
    if batch not in application.batches:
        known = ", ".join(map(str, application.batches))
        raise row.error("batch_size", f"a batch size that was validated ({known})")
    replicas = row.integer("num_replicas", least=1)
    return TraceEntry(
        spec=JobSpec(
            name=row.text("name"),
            submitted=row.number("time", least=0),
            kind=application.name,
            requested=Shape(replicas),
            limit=Shape(application.most_replicas(batch)),
            worker=Resources(gpu=1),
        ),
        application=application,
        batch=batch,
    )


def _model_entry(row: Row) -> ModelEntry:
    mode: Mode = row.choice("mode", MODES)  # type: ignore[assignment]
    requested = Shape(
        row.integer("workers", least=1),
        row.integer("servers", least=0 if mode == "allreduce" else 1),
    )
    if mode == "allreduce" and requested.servers:
        raise row.error("servers", "0, because an all-reduce job has none")
    return ModelEntry(spec=_plain_spec(row, mode, requested), model=_plain_model(row, mode))


def _plain_spec(row: Row, mode: Mode, requested: Shape) -> JobSpec:
    limits = [
        row.integer(column, least=asked, default=str(GROWTH_LIMIT * asked))
        for column, asked in zip(("max_workers", "max_servers"), requested, strict=True)
    ]
    restarts = row.integer("max_restarts", least=0) if row.has("max_restarts") else None
    return JobSpec(
        name=row.text("name"),
        submitted=row.number("time", least=0),
        kind=row.values.get("kind") or mode,
        requested=requested,
        limit=Shape(*limits),
        worker=_resources(row, "worker", gpu="1" if mode == "allreduce" else "0"),
        server=None if mode == "allreduce" else _resources(row, "server", gpu="0"),
        max_restarts=restarts,
    )


def _resources(row: Row, task: str, gpu: str) -> Resources:
    demand = Resources(
        cpu=row.number(f"{task}_cpu", least=0, default="1"),
        memory=row.number(f"{task}_memory", least=0, default="0"),
        gpu=row.number(f"{task}_gpu", least=0, default=gpu),
    )
    if not any(demand):
        raise row.error(f"{task}_cpu", "a demand of something, CPU, memory or GPU")
    return demand


def _plain_model(row: Row, mode: Mode) -> TrainingModel:
    coefficients = row.numbers("speed", COEFFICIENTS[mode])
    if not any(coefficients):
        raise row.error("speed", "at least one coefficient above 0")
    return TrainingModel(
        speed=SpeedModel(
            mode=mode,
            coefficients=coefficients,
            batch=row.number("batch_size", least=1, default="1"),
        ),
        steps=row.number("steps", least=1),
        steps_per_epoch=row.number("steps_per_epoch", least=1, default="1"),
        loss=_loss_curve(row) if row.has("loss") else None,
        threshold=row.number("threshold", least=1e-9, default="0.01"),
    )


def _loss_curve(row: Row) -> tuple[float, float, float]:
    b0, b1, b2 = row.numbers("loss", 3)
    if not (b0 > 0 and b1 > 0):
        raise row.error("loss", "b0 and b1 above 0")
    return b0, b1, b2


def check_workload(workload: Workload, nodes: Sequence[Node]) -> None:
    """Check that the cluster can run every job as requested, alone.

    Raises:
        ConfigurationError: the workload is empty, a name occurs twice or a job is larger than the
            cluster.
    """
    if not workload:
        raise ConfigurationError("a workload must have at least one job, got none")
    seen: set[str] = set()
    for entry in workload:
        spec = entry.spec
        if spec.name in seen:
            raise ConfigurationError(f"job names must differ, got {spec.name!r} twice")
        seen.add(spec.name)
        if spec.submitted < 0:
            raise ConfigurationError(
                f"job {spec.name!r}: the time must be at least 0, got {spec.submitted}"
            )
        if not _fits_alone(spec, nodes):
            raise ConfigurationError(
                f"job {spec.name!r} is larger than the cluster: it asks for "
                f"{spec.requested.workers} workers and {spec.requested.servers} servers, which do "
                f"not fit on {len(nodes)} empty nodes; ask for less or add nodes"
            )


def _fits_alone(spec: JobSpec, nodes: Sequence[Node]) -> bool:
    """Say whether workers then servers, or servers then workers, fit node by node."""
    workers = (spec.worker, spec.requested.workers)
    if spec.server is None:
        return _fills([workers], nodes)
    servers = (spec.server, spec.requested.servers)
    return _fills([workers, servers], nodes) or _fills([servers, workers], nodes)


def _fills(tasks: Sequence[tuple[Resources, int]], nodes: Sequence[Node]) -> bool:
    left = [count for _, count in tasks]
    for node in nodes:
        free = node.capacity
        for index, (demand, _) in enumerate(tasks):
            taken = min(left[index], free.count(demand))
            left[index] -= taken
            free = free.plus(demand, -taken)
    return not any(left)
