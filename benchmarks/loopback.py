"""``loopback``: a small model without shaping, where there is nothing to gain and all to lose.

Two workers on this machine, iterations of 10 to 20 ms, a peer and ours in turns of a second: over
PyTorch a small network on digits, over parameter servers and TensorFlow a small emulated job.
No namespaces, so no root rights are needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.table import Table

from benchmarks.errors import BenchmarkError
from benchmarks.job import make_job
from benchmarks.lab import Lab
from benchmarks.network import LOOPBACK, Network
from benchmarks.report import console, track
from benchmarks.systems import find

WORKERS = 2
TASK = "small"
JOB = make_job("vgg16", WORKERS, scale=300.0, compute_s=0.02)
"""As many bytes as the network on digits has, 1.8 MB."""
BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {
        "ddp": {"bucket_bytes": 25 << 20},
        "bytescheduler": {},
        "barrier": {},
        "bytescheduler-auto": {},
    },
    "kvstore": {"kvstore": {"elements": 1_000_000}, "bytescheduler-ps": {}},
    "mirrored": {"mirrored": {"packs": 0}, "bytescheduler-tf": {}},
}
"""Each peer, with the settings of those that can be measured beside it: everybody's defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``loopback``."""
    parser.add_argument("--turns", type=int, default=25, help="of every system")
    parser.add_argument("--iterations", type=int, default=30, help="of a turn")
    parser.add_argument("--warmup", type=int, default=5, help="iterations before them")
    parser.add_argument(
        "--systems", default="ddp,bytescheduler", help=f"one of {', '.join(BESIDE)}, then ours"
    )
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Measure in turns and print ratios within each turn."""
    if args.turns < 2 or args.iterations < 1:
        raise BenchmarkError("--turns must be at least 2, --iterations at least 1")
    names = args.systems.split(",")
    offered = BESIDE.get(names[0], {})
    unknown = [name for name in names if name not in offered]
    if unknown:
        rules = "; ".join(", ".join(systems) for systems in BESIDE.values())
        raise BenchmarkError(
            f"--systems must begin with a peer and go on with what is beside it here ({rules}), "
            f"got {args.systems}"
        )
    systems = {name: offered[name] for name in names}
    together = len({find(name).engine for name in names}) == 1
    effort = {"warmup": args.warmup, "iterations": args.iterations}
    with _lab() as lab, track() as progress:
        progress.add_task("loopback", total=None)
        if together:
            contestants = {name: (name, settings) for name, settings in systems.items()}
            runs = lab.turns(contestants, TASK, turns=args.turns, **effort)
        else:
            runs = _one_by_one(lab, systems, args.turns, effort)
    result = summarise(runs)
    console().print(_table(result, names[0]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


def _one_by_one(
    lab: Lab, systems: dict[str, dict[str, Any]], turns: int, effort: dict[str, int]
) -> dict[str, list[float]]:
    """For engines that need processes of their own."""
    runs: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(turns):
        for name, settings in systems.items():
            runs[name].append(lab.measure(name, JOB, settings, **effort))
    return runs


@contextmanager
def _lab() -> Iterator[Lab]:
    lab = Lab(Network(hub=LOOPBACK, workers=(LOOPBACK,) * WORKERS))
    try:
        yield lab
    finally:
        lab.close()


def summarise(runs: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median ratio to the run of the first system in the same turn.

    ``quartiles`` are those of the ratios: of 25 turns, the median itself is off by a fifth of what
    lies between them.
    """
    peer = next(iter(runs.values()))
    ratios = {
        name: [own / other for own, other in zip(times, peer, strict=True)]
        for name, times in runs.items()
    }
    return {
        name: {
            "median_s": median(times),
            "of_peer": middle,
            "quartiles": [first, third],
            "runs": times,
        }
        for name, times in runs.items()
        for first, middle, third in [quantiles(ratios[name], n=4)]
    }


def _table(result: dict[str, Any], peer: str) -> Table:
    table = Table(title="a small network over loopback, two workers")
    table.add_column("system")
    table.add_column("median", justify="right")
    table.add_column(f"of {peer}, same turn", justify="right")
    table.add_column("quartiles", justify="right")
    for name, entry in result.items():
        first, third = entry["quartiles"]
        table.add_row(
            name,
            f"{entry['median_s'] * 1e3:.2f} ms",
            f"{entry['of_peer']:.3f}",
            f"{first:.3f}-{third:.3f}",
        )
    return table
