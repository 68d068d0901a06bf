"""``bytescheduler cluster fit FILE``: models from a user's own measurements.

The header says what the file holds: ``step,loss`` (optionally ``learning_rate``,
``steps_per_epoch``, ``threshold``) is a loss curve; ``workers,servers,step_time`` (optionally
``nodes``, ``batch_size``) are speeds, for which every formula that applies is fitted and the best
is named. What is printed goes into the ``speed`` and ``loss`` columns of a plain workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bytescheduler._imports import require
from bytescheduler.cluster.models.convergence import ConvergenceTracker
from bytescheduler.cluster.models.speed import (
    MODES,
    Measurement,
    Mode,
    SpeedModel,
    fit_speed,
    relative_errors,
)
from bytescheduler.cluster.report import print_table
from bytescheduler.cluster.tables import Row, read_header, read_table
from bytescheduler.exceptions import ConfigurationError

__all__ = ["run"]


def run(path: Path, plot: Path | None) -> int:
    """Fit, print and perhaps draw; return 0.

    Raises:
        ConfigurationError: the file holds neither losses nor speeds, or is malformed.
    """
    if plot is not None and (plot.is_dir() or not plot.absolute().parent.is_dir()):
        raise ConfigurationError(f"cannot write {plot}: not a file in an existing folder")
    header = read_header(path)
    if "loss" in header:
        _fit_losses(read_table(path, ("step", "loss")), plot)
    elif "step_time" in header:
        _fit_speeds(read_table(path, ("workers", "servers", "step_time")), plot)
    else:
        raise ConfigurationError(
            f"{path}, line 1: expected the columns step,loss or workers,servers,step_time, "
            f"got {','.join(header)}"
        )
    return 0


def _table(title: str, *columns: str) -> Any:
    table = require("rich.table", extra="cluster").Table(title=title)
    for column in columns:
        table.add_column(column)
    return table


def _fit_losses(rows: Sequence[Row], plot: Path | None) -> None:
    tracker = ConvergenceTracker(
        threshold=rows[0].number("threshold", least=1e-9, default="0.01"),
        steps_per_epoch=rows[0].number("steps_per_epoch", least=1, default="1"),
    )
    last = -1.0
    for row in rows:
        step, loss = row.number("step", least=0), row.number("loss")
        if step <= last:
            raise row.error("step", f"a step after {last:g}, the one before")
        if loss <= 0:
            raise row.error("loss", "a number above 0")
        has_rate = row.has("learning_rate")
        tracker.observe(step, loss, row.number("learning_rate", least=0) if has_rate else None)
        last = step
    fit, left = tracker.fit, tracker.interval(last)
    table = _table(
        "Convergence: loss = scale * (1 / (b0*(step - start) + b1) + b2)", "what", "value"
    )
    table.add_row("b0 b1 b2", f"{fit.b0:.6g} {fit.b1:.6g} {fit.b2:.6g}")
    table.add_row("scale", f"{fit.scale:.6g}")
    table.add_row("start", f"{fit.start:g}")
    raw = (fit.b0 / fit.scale, fit.b1 / fit.scale, fit.b2 * fit.scale)
    table.add_row("loss column", " ".join(f"{value:.6g}" for value in raw))
    table.add_row("steps left", f"{left.expected:,.0f} (90 %: {left.low:,.0f} to {left.high:,.0f})")
    print_table(table)
    if plot is not None:
        steps = [row.number("step") for row in rows]
        measured = [row.number("loss") for row in rows]
        shown = [step for step in steps if step >= fit.start]
        _draw(plot, "step", "loss", (steps, measured), (shown, [fit.loss(s) for s in shown]))


def _fit_speeds(rows: Sequence[Row], plot: Path | None) -> None:
    batch = rows[0].number("batch_size", least=1, default="1")
    measurements = [_measurement(row) for row in rows]
    table = _table("Speed", "mode", "speed column", "mean error", "largest error")
    fits = _applicable_fits(measurements, batch)
    for model, errors in fits:
        coefficients = " ".join(f"{value:.6g}" for value in model.coefficients)
        table.add_row(model.mode, coefficients, f"{errors.mean():.1%}", f"{errors.max():.1%}")
    print_table(table)
    if plot is not None:
        best = fits[0][0]
        measured = [m.seconds_per_step for m in measurements]
        predicted = [best.step_time(m.workers, m.servers, m.nodes) for m in measurements]
        ends = [min(measured), max(measured)]
        labels = ("measured seconds per step", f"predicted ({best.mode})")
        _draw(plot, *labels, (measured, predicted), (ends, ends))


def _measurement(row: Row) -> Measurement:
    seconds = row.number("step_time", least=0)
    if seconds == 0:
        raise row.error("step_time", "seconds above 0")
    return Measurement(
        row.integer("workers", least=1),
        row.integer("servers", least=0),
        seconds,
        row.integer("nodes", least=1) if row.has("nodes") else 0,
    )


def _applicable_fits(
    measurements: Sequence[Measurement], batch: float
) -> list[tuple[SpeedModel, Any]]:
    """Return the fitted models, best first, with their relative errors."""
    with_servers = {m.servers > 0 for m in measurements}
    if len(with_servers) > 1:
        raise ConfigurationError(
            "measurements must be all with parameter servers or all without (servers = 0); "
            "fit them from two files"
        )
    wanted: tuple[Mode, ...] = (
        tuple(mode for mode in MODES if mode != "allreduce")
        if with_servers == {True}
        else ("allreduce",)
    )
    models = [fit_speed(mode, measurements, batch) for mode in wanted]
    fits = [(model, relative_errors(model, measurements)) for model in models]
    return sorted(fits, key=lambda fit: float(np.mean(fit[1])))


def _draw(
    path: Path,
    x_label: str,
    y_label: str,
    points: tuple[Sequence[float], Sequence[float]],
    line: tuple[Sequence[float], Sequence[float]],
) -> None:
    """Draw measurements as points and the fit as a line."""
    require("matplotlib", extra="cluster").use("Agg")
    plt = require("matplotlib.pyplot", extra="cluster")
    figure, axis = plt.subplots(figsize=(8, 5))
    axis.scatter(*points, s=18, label="measured")
    axis.plot(*line, color="tab:red", label="fit")
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.legend()
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigurationError(f"--plot must name a picture such as x.png, got {path}") from error
    finally:
        plt.close(figure)
