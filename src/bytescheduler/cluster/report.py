"""What a simulation amounts to: numbers, a table, JSON and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bytescheduler._imports import require
from bytescheduler.cluster.simulator import JobResult, SimulationResult
from bytescheduler.exceptions import ConfigurationError

__all__ = [
    "Summary",
    "plot_results",
    "print_table",
    "results_table",
    "summarise",
    "to_json",
    "write_json",
]

PLOT_INCHES_PER_POLICY = 4.5
PLAIN_WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one policy. Times in seconds.

    Attributes:
        makespan: last completion minus first submission.
        utilisation: used fraction of the scarcest resource over the makespan.
        restarts: how often jobs were placed anew, without the first time.
        mean_fairness, worst_fairness: finish-time fairness, a job's JCT over its duration on an
            equal share of the cluster (Themis, NSDI 2020); up to 1 is fair.
    """

    mean_jct: float
    median_jct: float
    p99_jct: float
    makespan: float
    utilisation: float
    restarts: int
    mean_fairness: float
    worst_fairness: float


def summarise(result: SimulationResult) -> Summary:
    """Return the figures of one simulation."""
    jcts = [job.jct for job in result.jobs]
    fairness = [job.jct / job.alone for job in result.jobs]
    return Summary(
        mean_jct=float(np.mean(jcts)),
        median_jct=float(np.median(jcts)),
        p99_jct=float(np.percentile(jcts, 99)),
        makespan=max(j.finished for j in result.jobs) - min(j.submitted for j in result.jobs),
        utilisation=result.utilisation,
        restarts=sum(job.restarts for job in result.jobs),
        mean_fairness=float(np.mean(fairness)),
        worst_fairness=max(fairness),
    )


def results_table(results: Mapping[str, SimulationResult]) -> Any:
    """Return a rich table with one line per policy."""
    table = require("rich.table", extra="cluster").Table(title="Policies (times in s)")
    table.add_column("policy")
    for column in (
        "mean JCT", "median JCT", "p99 JCT", "makespan", "utilisation", "restarts",
        "fairness mean", "fairness worst",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for name, result in results.items():
        summary = summarise(result)
        table.add_row(
            name,
            f"{summary.mean_jct:,.1f}",
            f"{summary.median_jct:,.1f}",
            f"{summary.p99_jct:,.1f}",
            f"{summary.makespan:,.0f}",
            f"{summary.utilisation:.1%}",
            str(summary.restarts),
            f"{summary.mean_fairness:.2f}",
            f"{summary.worst_fairness:.2f}",
        )
    return table


def print_table(table: Any) -> None:
    """Print a rich table, wide enough to read where the output is not a terminal."""
    console = require("rich.console", extra="cluster").Console
    screen = console()
    (screen if screen.is_terminal else console(width=PLAIN_WIDTH)).print(table)


def to_json(results: Mapping[str, SimulationResult]) -> dict[str, Any]:
    """Return what ``--json`` writes."""
    return {"policies": {name: _policy_json(result) for name, result in results.items()}}


def _policy_json(result: SimulationResult) -> dict[str, Any]:
    summary = summarise(result)
    return {
        "mean_jct_s": summary.mean_jct,
        "median_jct_s": summary.median_jct,
        "p99_jct_s": summary.p99_jct,
        "makespan_s": summary.makespan,
        "utilisation": summary.utilisation,
        "restarts": summary.restarts,
        "mean_finish_time_fairness": summary.mean_fairness,
        "worst_finish_time_fairness": summary.worst_fairness,
        "jct_s": {job.name: job.jct for job in result.jobs},
    }


def write_json(results: Mapping[str, SimulationResult], path: Path) -> None:
    """Write the figures and every job's JCT."""
    path.write_text(json.dumps(to_json(results), indent=2) + "\n", encoding="utf-8")


def plot_results(results: Mapping[str, SimulationResult], path: Path) -> None:
    """Draw the distribution of JCTs and, per policy, a Gantt picture.

    Raises:
        ConfigurationError: the file's ending is no picture format.
    """
    require("matplotlib", extra="cluster").use("Agg")
    plt = require("matplotlib.pyplot", extra="cluster")
    rows = 1 + len(results)
    figure, axes = plt.subplots(rows, 1, figsize=(11, PLOT_INCHES_PER_POLICY * rows))
    _draw_distribution(axes[0], results)
    kinds = sorted({job.kind for result in results.values() for job in result.jobs})
    colours = {kind: plt.get_cmap("tab10")(i % 10) for i, kind in enumerate(kinds)}
    for axis, (name, result) in zip(axes[1:], results.items(), strict=True):
        _draw_gantt(axis, name, result, colours)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ConfigurationError(f"--plot must name a picture such as x.png, got {path}") from error
    finally:
        plt.close(figure)


def _draw_distribution(axis: Any, results: Mapping[str, SimulationResult]) -> None:
    for name, result in results.items():
        jcts = np.sort([job.jct for job in result.jobs])
        axis.step(jcts, np.arange(1, len(jcts) + 1) / len(jcts), where="post", label=name)
    axis.set(xscale="log", xlabel="job completion time (s)", ylabel="fraction of jobs")
    axis.set_title("Distribution of job completion times")
    axis.legend()
    axis.grid(alpha=0.3)


def _draw_gantt(axis: Any, name: str, result: SimulationResult, colours: Mapping[str, Any]) -> None:
    """One line per job; waiting is grey, the more workers the more solid the colour."""
    most = max((len(s.allocation.workers) for j in result.jobs for s in j.spans), default=1)
    for line, job in enumerate(result.jobs):
        axis.plot([job.submitted, job.finished], [line, line], color="0.85", lw=1, zorder=1)
        _draw_spans(axis, line, job, most, colours[job.kind])
    for kind, colour in colours.items():
        axis.plot([], [], color=colour, lw=4, label=kind)
    axis.set(xlabel="time (s)", ylabel="job", title=f"{name}: who runs when")
    axis.legend(fontsize="small", ncols=2)


def _draw_spans(axis: Any, line: int, job: JobResult, most: int, colour: Any) -> None:
    for span in job.spans:
        opacity = 0.3 + 0.7 * len(span.allocation.workers) / most
        bar = [(span.start, span.end - span.start)]
        axis.broken_barh(bar, (line - 0.4, 0.8), color=colour, alpha=opacity, zorder=2)
