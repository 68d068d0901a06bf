"""``loopback``: a small model without shaping, where there is nothing to gain and all to lose.

Two workers on this machine, iterations of about 20 ms, a peer and ours in turns: over PyTorch a
small network on digits, over parameter servers and TensorFlow a small emulated job.
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
from benchmarks.job import make_job
from benchmarks.lab import Lab
from benchmarks.network import LOOPBACK, Network
from benchmarks.report import console, track
from benchmarks.systems import find
from benchmarks.systems.torch_base import TorchSystem

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
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument(
        "--systems", default="ddp,bytescheduler", help=f"one of {', '.join(BESIDE)}, then ours"
    )
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Measure in turns and print ratios within each turn."""
    names = args.systems.split(",")
    offered = BESIDE.get(names[0], {})
    unknown = [name for name in names if name not in offered]
    if unknown:
        rules = "; ".join(", ".join(systems) for systems in BESIDE.values())
        raise BenchmarkError(
            f"--systems must begin with a peer and go on with what is beside it here ({rules}), "
            f"got {args.systems}"
        )
    runs: dict[str, list[float]] = {name: [] for name in names}
    with _lab() as lab, track() as progress:
        bar = progress.add_task("loopback", total=args.repeats * len(names))
        for _ in range(args.repeats):
            for name in names:
                runs[name].append(_measure(lab, name, offered[name], args))
                progress.update(bar, advance=1, description=f"loopback: {name}")
    result = summarise(runs)
    console().print(_table(result, names[0]))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


def _measure(lab: Lab, name: str, settings: dict[str, Any], args: argparse.Namespace) -> float:
    system, effort = find(name), {"warmup": args.warmup, "iterations": args.iterations}
    if isinstance(system, TorchSystem) and system.engine == "gloo":
        return lab.measure_task(name, TASK, settings, settle=system.learns, **effort)
    return lab.measure(name, JOB, settings, **effort)


@contextmanager
def _lab() -> Iterator[Lab]:
    lab = Lab(Network(hub=LOOPBACK, workers=(LOOPBACK,) * WORKERS))
    try:
        yield lab
    finally:
        lab.close()


def summarise(runs: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median ratio to the run of the first system in the same turn."""
    peer = next(iter(runs.values()))
    return {
        name: {
            "median_s": median(times),
            "of_peer": median(x / y for x, y in zip(times, peer, strict=True)),
            "runs": times,
        }
        for name, times in runs.items()
    }


def _table(result: dict[str, Any], peer: str) -> Table:
    table = Table(title="a small network over loopback, two workers")
    table.add_column("system")
    table.add_column("median", justify="right")
    table.add_column(f"of {peer}, same turn", justify="right")
    for name, entry in result.items():
        table.add_row(name, f"{entry['median_s'] * 1e3:.2f} ms", f"{entry['of_peer']:.3f}")
    return table
