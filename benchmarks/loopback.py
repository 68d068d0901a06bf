"""``loopback``: a small model without shaping, where there is nothing to gain and all to lose.

Two workers on this machine, iterations of about 20 ms, DistributedDataParallel and ours in turns.
No namespaces, so no root rights are needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.errors import BenchmarkError
from benchmarks.lab import Lab
from benchmarks.network import LOOPBACK, Network
from benchmarks.report import console, track
from benchmarks.systems import find

WORKERS = 2
TASK = "small"
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {"bucket_bytes": 25 << 20}),
    "bytescheduler": ("bytescheduler", {}),
    "barrier": ("barrier", {}),
    "bytescheduler-auto": ("bytescheduler-auto", {}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``loopback``."""
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--systems", default="ddp,bytescheduler")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Measure in turns and print ratios within each turn."""
    names = args.systems.split(",")
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or names[0] != "ddp":
        raise BenchmarkError(f"--systems must begin with ddp and name only {', '.join(SYSTEMS)}")
    runs: dict[str, list[float]] = {name: [] for name in names}
    with _lab() as lab, track() as progress:
        bar = progress.add_task("loopback", total=args.repeats * len(names))
        for _ in range(args.repeats):
            for name in names:
                system, settings = SYSTEMS[name]
                seconds = lab.measure_task(
                    system,
                    TASK,
                    settings,
                    warmup=args.warmup,
                    iterations=args.iterations,
                    settle=find(system).learns,
                )
                runs[name].append(seconds)
                progress.update(bar, advance=1, description=f"loopback: {name}")
    result = summarise(runs)
    console().print(_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


@contextmanager
def _lab() -> Iterator[Lab]:
    lab = Lab(Network(hub=LOOPBACK, workers=(LOOPBACK,) * WORKERS))
    try:
        yield lab
    finally:
        lab.close()


def summarise(runs: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median ratio to DistributedDataParallel's run of the same turn."""
    return {
        name: {
            "median_s": median(times),
            "of_ddp": median(x / y for x, y in zip(times, runs["ddp"], strict=True)),
            "runs": times,
        }
        for name, times in runs.items()
    }


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="a small network on digits over loopback, two workers")
    table.add_column("system")
    table.add_column("median", justify="right")
    table.add_column("of DistributedDataParallel, same turn", justify="right")
    for name, entry in result.items():
        table.add_row(name, f"{entry['median_s'] * 1e3:.2f} ms", f"{entry['of_ddp']:.3f}")
    return table
