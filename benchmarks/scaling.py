"""``scaling``: curves past this machine, from the simulator, for ``docs/scaling.md``.

For 8 to 4,096 workers and 1 to 400 Gbit/s: the speed-up over DistributedDataParallel's order (its
best bucket), the distance from the structural bound, and which cost is the largest in it.
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.report import console, track
from bytescheduler.simulate import Network, Profile, best_schedule, load_profile, losses

WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GBITS = (1, 10, 25, 100, 400)
PROFILES = ("vgg16", "resnet50", "bert-base", "gpt2-small")
LATENCY_S = 10e-6
OVERHEAD_S = 15e-6
CONCURRENCY = 2
RING_WORKERS = 16
NOTABLE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the curves; sizes in bytes, times in seconds."""

    profile: str
    gbits: int
    workers: int
    collective: str
    ddp_s: float
    ours_s: float
    bound_s: float
    partition: int
    credit: int
    bottleneck: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``scaling``."""
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--latency-us", type=float, default=LATENCY_S * 1e6)
    parser.add_argument("--collective", choices=("auto", "ring", "tree", "ps"), default="auto")


def run(args: argparse.Namespace) -> int:
    """Compute all points; write ``scaling.csv`` and ``scaling.png``."""
    points: list[Point] = []
    with track() as progress:
        bar = progress.add_task("scaling", total=len(PROFILES) * len(GBITS) * len(WORKERS))
        for name in PROFILES:
            profile = load_profile(name)
            for gbits in GBITS:
                for workers in WORKERS:
                    network = _network(args, gbits, workers)
                    points.append(_point(profile, network, gbits))
                    progress.update(bar, advance=1)
    _write(points, args.output / "scaling.csv")
    _draw(points, args.output / "scaling.png")
    console().print(f"wrote {args.output / 'scaling.csv'} and scaling.png")
    return 0


def _network(args: argparse.Namespace, gbits: int, workers: int) -> Network:
    chosen = args.collective
    if chosen == "auto":
        chosen = "ring" if workers <= RING_WORKERS else "tree"
    return Network(
        workers=workers,
        bandwidth=gbits * 1e9 / 8,
        latency_s=args.latency_us * 1e-6,
        collective=chosen,
        overhead_s=OVERHEAD_S,
        concurrency=CONCURRENCY,
    )


def _point(profile: Profile, network: Network, gbits: int) -> Point:
    _, ddp = best_schedule(profile, network, "barrier", buckets=True)
    schedule, ours = best_schedule(profile, network, "priority")
    worst = losses(profile, network, schedule)[0]
    notable = worst.seconds > NOTABLE * ours.iteration_s
    return Point(
        profile=profile.name,
        gbits=gbits,
        workers=network.workers,
        collective=network.collective,
        ddp_s=ddp.iteration_s,
        ours_s=ours.iteration_s,
        bound_s=ours.bound_s,
        partition=schedule.partition_bytes,
        credit=schedule.credit_bytes,
        bottleneck=worst.cause if notable else "none",
    )


def _write(points: list[Point], path: Path) -> None:
    names = [item.name for item in fields(Point)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for point in points:
            values = (getattr(point, name) for name in names)
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def _draw(points: list[Point], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(PROFILES), figsize=(4 * len(PROFILES), 6), sharex=True, layout="constrained"
    )
    for column, name in enumerate(PROFILES):
        for gbits in GBITS:
            line = [p for p in points if p.profile == name and p.gbits == gbits]
            _curves(axes[0, column], axes[1, column], line, f"{gbits} Gbit/s")
        axes[0, column].set_title(name)
        axes[1, column].set_xlabel("workers")
    axes[0, 0].set_ylabel("times faster than DistributedDataParallel")
    axes[1, 0].set_ylabel("of the structural bound")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(speed: Any, bound: Any, line: list[Point], label: str) -> None:
    workers = [point.workers for point in line]
    speed.plot(workers, [p.ddp_s / p.ours_s for p in line], marker=".", label=label)
    bound.plot(workers, [p.ours_s / p.bound_s for p in line], marker=".", label=label)
    for axis in (speed, bound):
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
