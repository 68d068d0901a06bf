"""``real``: real compute on the CPU over a shaped link, beside DistributedDataParallel.

A convolutional network on digits and a small transformer on Python's documentation, two workers;
and on request (``cnn-small``) a network so small that what each message costs the two processors
counts as much as the order of messages.
The link gets the rate at which exchanging all gradients takes as long as computing them. The bound
comes from the simulator, with layer times measured here and ``C`` measured alone. Processors are
shared between computing and sending, as they are not on an accelerator, so nothing reaches it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare import structural_bound
from benchmarks.errors import BenchmarkError
from benchmarks.job import EmulatedLayer, Job
from benchmarks.lab import Lab, open_lab
from benchmarks.report import Progress, comparison_table, console, track
from benchmarks.systems import SYSTEMS

TASKS = ("cnn", "transformer")
ON_REQUEST = ("cnn-small",)
CHUNKS_PER_MODEL = (32, 16)
NAMES = ("ddp", "bytescheduler")
WORKERS = 2
WARMUP = 6
TRIES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``real``."""
    parser.add_argument("--task", choices=(*TASKS, *ON_REQUEST, "all"), default="all")
    parser.add_argument("--balance", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.balance <= 0 or args.repeats < 1 or args.iterations < 1:
        raise BenchmarkError("--balance must be positive, --repeats and --iterations at least 1")
    tasks = TASKS if args.task == "all" else (args.task,)
    with open_lab(WORKERS) as lab, track() as progress:
        results = [RealComparison(lab, task, args.balance, progress).run(args) for task in tasks]
    for result in results:
        console().print(comparison_table(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1))
    return 0


class RealComparison:
    """One real task, the systems over PyTorch."""

    def __init__(self, lab: Lab, task: str, balance: float, progress: Progress) -> None:
        self._lab = lab
        self._task = task
        self._balance = balance
        self._progress = progress

    def run(self, args: argparse.Namespace) -> dict[str, Any]:
        bar = self._progress.add_task(self._task, total=args.repeats * (len(NAMES) + 2) + TRIES)
        job = real_job(self._task, self._lab)
        self._shape(job)
        chosen = {name: self._choose(name, job) for name in NAMES}
        runs: dict[str, list[float]] = {name: [] for name in (*NAMES, "compute", "exchange")}
        for _ in range(args.repeats):
            for name, times in runs.items():
                times.append(self._time(name, chosen.get(name, {}), job, args.iterations))
                self._progress.update(bar, advance=1, description=f"{self._task}: {name}")
        return self._document(job, chosen, runs)

    def _shape(self, job: Job) -> None:
        compute = self._time("compute", {}, job, 10)
        rate = job.gradient_bytes / compute / self._balance
        self._lab.shape(rate)
        exchange = self._time("exchange", {}, job, 5)
        self._lab.shape(rate * exchange / compute / self._balance)

    def _choose(self, name: str, job: Job) -> dict[str, Any]:
        candidates = _ours(job) if name == "bytescheduler" else SYSTEMS[name].sweep(job)[:TRIES]
        times = [self._time(name, settings, job, 8) for settings in candidates]
        return candidates[times.index(min(times))]

    def _time(self, name: str, settings: dict[str, Any], job: Job, iterations: int) -> float:
        if name == "exchange":
            return self._lab.measure(name, job, {"pieces": 8}, iterations=5)
        return self._lab.measure_task(
            name, self._task, settings, warmup=WARMUP, iterations=iterations
        )

    def _document(
        self, job: Job, chosen: dict[str, dict[str, Any]], runs: dict[str, list[float]]
    ) -> dict[str, Any]:
        compute, exchange = median(runs["compute"]), median(runs["exchange"])
        return {
            "profile": f"real {self._task}",
            "workers": WORKERS,
            "balance": self._balance,
            "limit_s": max(compute, exchange),
            "bound_s": structural_bound(job, compute, exchange),
            "compute_s": compute,
            "exchange_s": exchange,
            "systems": {
                name: {
                    "median_s": median(runs[name]),
                    "runs": runs[name],
                    "settings": chosen[name],
                }
                for name in NAMES
            },
            "missing": {},
            "failed": {},
        }


def _ours(job: Job) -> list[dict[str, Any]]:
    """The defaults, and fewer bytes in flight."""
    sizes = [job.gradient_bytes // count for count in CHUNKS_PER_MODEL]
    return [{}, *({"partition_size": size, "credit_size": 2 * size} for size in sizes)]


def real_job(task: str, lab: Lab) -> Job:
    """The task's layers with times measured in the workers, as a job for the simulator."""
    rows = lab.layers_of(task)
    layers = tuple(EmulatedLayer(**row) for row in rows)
    full_size = 100 << 20  # what DistributedDataParallel's default bucket is made for
    size = 4 * sum(layer.numel for layer in layers)
    return Job(profile=task, workers=WORKERS, scale=full_size / size, layers=layers)
