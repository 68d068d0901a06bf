"""``real``: real compute on the CPU over a shaped link, beside DistributedDataParallel.

A convolutional network on digits and a small transformer on Python's documentation, two workers;
and on request a network so small that what each message costs the two processors counts as much as
the order of messages (``cnn-small``), and batches four times as large (``cnn-long``,
``transformer-long``): the same bytes beside four times the compute.
All take turns of seconds in the same processes, each with the best of a few settings.
The link gets the rate at which exchanging all gradients takes as long as computing them. The bound
comes from the simulator, with layer times measured here and ``C`` measured alone. Processors are
shared between computing and sending, as they are not on an accelerator, so nothing reaches it. What
is within reach on such processors is measured too: the compute beside an exchange of as many bytes
that no layer waits for.
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
ON_REQUEST = ("cnn-small", "cnn-long", "transformer-long")
CHUNKS_PER_MODEL = (32, 16)
NAMES = ("ddp", "bytescheduler")
WORKERS = 2
PIECES = {"pieces": 8}
COMPUTE: tuple[str, dict[str, Any]] = ("compute", {})
SIDE_BY_SIDE: tuple[str, dict[str, Any]] = ("side-by-side", PIECES)
WARMUP = 3
TRIES = 3
TRIAL_TURNS, TRIAL_ITERATIONS = 5, 6
EXCHANGES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``real``."""
    parser.add_argument("--task", choices=(*TASKS, *ON_REQUEST, "all"), default="all")
    parser.add_argument("--balance", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=15, help="of every system")
    parser.add_argument("--iterations", type=int, default=8, help="of a turn")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.balance <= 0 or args.turns < 1 or args.iterations < 1:
        raise BenchmarkError("--balance must be positive, --turns and --iterations at least 1")
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
        job = real_job(self._task, self._lab)
        self._shape(job)
        chosen = self._choose(job)
        contestants = {name: (name, chosen[name]) for name in NAMES}
        contestants |= {"compute": COMPUTE, "side-by-side": SIDE_BY_SIDE}
        before = self._exchange(job)
        runs = self._turns("measuring", contestants, args.turns, args.iterations)
        runs["exchange"] = [*before, *self._exchange(job)]
        return self._document(job, chosen, runs)

    def _shape(self, job: Job) -> None:
        compute = median(self._turns("computing", {"compute": COMPUTE}, 3, 10)["compute"])
        rate = job.gradient_bytes / compute / self._balance
        self._lab.shape(rate)
        exchange = median(self._exchange(job))
        self._lab.shape(rate * exchange / compute / self._balance)

    def _choose(self, job: Job) -> dict[str, dict[str, Any]]:
        """Each system's best settings, all tried in turns."""
        candidates = {
            f"{name} {number}": (name, settings)
            for name in NAMES
            for number, settings in enumerate(_candidates(name, job))
        }
        runs = self._turns("settings", candidates, TRIAL_TURNS, TRIAL_ITERATIONS)
        best: dict[str, str] = {}
        for label, (name, _) in candidates.items():
            best[name] = min(best.get(name, label), label, key=lambda item: median(runs[item]))
        return {name: candidates[label][1] for name, label in best.items()}

    def _turns(
        self,
        what: str,
        contestants: dict[str, tuple[str, dict[str, Any]]],
        turns: int,
        iterations: int,
    ) -> dict[str, list[float]]:
        bar = self._progress.add_task(f"{self._task}: {what}", total=None)
        effort = {"turns": turns, "warmup": WARMUP, "iterations": iterations}
        runs = self._lab.turns(contestants, self._task, **effort)
        self._progress.remove_task(bar)
        return runs

    def _exchange(self, job: Job) -> list[float]:
        return [self._lab.measure("exchange", job, PIECES, iterations=5) for _ in range(EXCHANGES)]

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
            "side_by_side_s": median(runs["side-by-side"]),
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


def _candidates(name: str, job: Job) -> list[dict[str, Any]]:
    """Settings to try; of ours the defaults, and fewer bytes in flight."""
    if name != "bytescheduler":
        return SYSTEMS[name].sweep(job)[:TRIES]
    sizes = [job.gradient_bytes // count for count in CHUNKS_PER_MODEL]
    return [{}, *({"partition_size": size, "credit_size": 2 * size} for size in sizes)]


def real_job(task: str, lab: Lab) -> Job:
    """The task's layers with times measured in the workers, as a job for the simulator."""
    rows = lab.layers_of(task)
    layers = tuple(EmulatedLayer(**row) for row in rows)
    full_size = 100 << 20  # what DistributedDataParallel's default bucket is made for
    size = 4 * sum(layer.numel for layer in layers)
    return Job(profile=task, workers=WORKERS, scale=full_size / size, layers=layers)
