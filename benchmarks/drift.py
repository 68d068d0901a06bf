"""``drift``: the links change their rate while ``mode="auto"`` trains; does it find the new best?

The tuner settles at the first balance; then the links are shaped anew under the running job, and
the tuner, which is told nothing, must notice, search again and settle. What it keeps is then
measured side by side with a grid of fixed settings at the new rate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.errors import BenchmarkError
from benchmarks.job import Job, make_job, unique
from benchmarks.lab import Lab, open_lab
from benchmarks.report import Progress, console, track
from benchmarks.systems.ours import AutoSystem, PrioritySystem, remembered
from bytescheduler.simulate import profile_names

WORKERS = 2
LOOK_S = 0.5
SYSTEM_OF = {"priority": "bytescheduler", "fifo": "fifo", "barrier": "barrier"}
LARGE = {"mode": "barrier", "partition_size": 25 << 20, "credit_size": 50 << 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``drift``."""
    parser.add_argument("--profile", choices=profile_names(), default="vgg16")
    parser.add_argument("--before", type=float, default=0.25, help="exchange / compute")
    parser.add_argument("--after", type=float, default=2.0, help="exchange / compute")
    parser.add_argument("--compute", type=float, default=0.2, help="seconds per iteration")
    parser.add_argument("--repeats", type=int, default=3, help="of the grid")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Change the rate under a running job and report what was found."""
    for name in ("before", "after", "compute", "repeats"):
        if getattr(args, name) <= 0:
            raise BenchmarkError(f"--{name} must be positive, got {getattr(args, name)}")
    job = make_job(args.profile, WORKERS, compute_s=args.compute)
    with open_lab(WORKERS) as lab, track() as progress:
        history = _train(lab, job, args, progress)
        grid = _measure(lab, job, history[-1]["settings"], args.repeats, progress)
    result = _document(args, history, grid)
    console().print(_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


def _train(
    lab: Lab, job: Job, args: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    """Train over the change of rate; the settings of each iteration after it."""
    bar = progress.add_task("settling at the first rate", total=None)
    lab.shape(job.gradient_bytes / (args.before * args.compute))
    memory = Path(AutoSystem().environment({})["XDG_CACHE_HOME"])
    with ThreadPoolExecutor(1) as executor:
        training = executor.submit(lab.settle, AutoSystem.name, job, {}, times=2)
        while not remembered(memory) and not training.done():
            time.sleep(LOOK_S)
        lab.shape(job.gradient_bytes / (args.after * args.compute))
        changed = time.time()
        progress.update(bar, description="settling at the second rate")
        history = training.result()
    progress.remove_task(bar)
    return [entry for entry in history if entry["at"] > changed]


def _measure(
    lab: Lab, job: Job, found: dict[str, Any], repeats: int, progress: Progress
) -> list[dict[str, Any]]:
    """Fixed settings at the new rate, in turns; the first is what was found."""
    fixed = [{"mode": "priority", **settings} for settings in PrioritySystem().sweep(job)]
    grid = [{"settings": s, "runs": []} for s in unique([found, *fixed, LARGE])]
    bar = progress.add_task("grid", total=repeats * len(grid))
    for _ in range(repeats):
        for entry in grid:
            settings = dict(entry["settings"])
            system = SYSTEM_OF[settings.pop("mode")]
            entry["runs"].append(lab.measure(system, job, settings, warmup=3, iterations=8))
            progress.update(bar, advance=1)
    return grid


def _document(
    args: argparse.Namespace, history: Sequence[dict[str, Any]], grid: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    for entry in grid:
        entry["median_s"] = median(entry["runs"])
    best = min(grid, key=lambda entry: entry["median_s"])
    return {
        "profile": args.profile,
        "before": args.before,
        "after": args.after,
        "iterations": len(history),
        "samples": len(list(groupby(history, key=lambda entry: entry["settings"]))),
        "found": grid[0]["settings"],
        "of_best": grid[0]["median_s"] / best["median_s"],
        "grid": list(grid),
    }


def _table(result: dict[str, Any]) -> Table:
    title = f"{result['profile']}: balance {result['before']:g}, then {result['after']:g}"
    caption = (
        f"settled again after {result['iterations']} iterations and at most {result['samples']} "
        f"samples, at {result['of_best']:.3f} of the best of the grid"
    )
    table = Table(title=title, caption=caption)
    for heading in ("settings", "median ms"):
        table.add_column(heading, justify="right")
    for entry in sorted(result["grid"], key=lambda entry: entry["median_s"]):
        words = ", ".join(f"{key} {value}" for key, value in entry["settings"].items())
        mark = " (found)" if entry["settings"] == result["found"] else ""
        table.add_row(words + mark, f"{entry['median_s'] * 1e3:.0f}")
    return table
