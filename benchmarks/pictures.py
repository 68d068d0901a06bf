"""``python -m benchmarks.pictures``: draws the pictures of the documentation.

``docs/schedules.png``, from the simulator: one job of five layers whose exchange takes as long as
its compute, under three schedules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytescheduler._imports import require
from bytescheduler.simulate import Layer, Network, Profile, Schedule, simulate

TITLES = {
    "barrier": "buckets, first produced first sent, barrier (DistributedDataParallel)",
    "fifo": "no barrier, first produced first sent",
    "priority": "no barrier, most urgent chunk first (ScheduledOptimizer)",
}
LAYERS = 5
MEGABYTE = 1_000_000


ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Draw and say what."""
    _schedules(ROOT / "docs" / "schedules.png")
    print("schedules.png")


def _schedules(path: Path) -> None:
    matplotlib = require("matplotlib", extra="tune")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", extra="tune")
    layers = tuple(
        Layer(name=f"layer {i + 1}", forward_s=0.02, backward_s=0.04, gradient_bytes=6 * MEGABYTE)
        for i in range(LAYERS)
    )
    profile = Profile(name="five layers", layers=layers)
    network = Network(workers=2, bandwidth=5 * 6 * MEGABYTE / 0.3, latency_s=1e-5)
    figure, rows = pyplot.subplots(len(TITLES), 1, figsize=(10, 5), sharex=True)
    for axis, policy in zip(rows, TITLES, strict=True):
        if policy == "barrier":
            schedule = Schedule(policy=policy, bucket_bytes=6 * MEGABYTE)
        else:
            schedule = Schedule(policy=policy, partition_bytes=MEGABYTE, credit_bytes=2 * MEGABYTE)
        _draw(axis, simulate(profile, network, schedule), TITLES[policy], pyplot)
    rows[-1].set_xlabel("seconds since the start of backward")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw(axis: Any, result: Any, title: str, pyplot: Any) -> None:
    colours = pyplot.get_cmap("viridis")
    for span in result.timeline:
        number = next((i for i in range(LAYERS) if f"layer {i + 1}" in span.name), None)
        row = 0 if span.track == "network" else 1
        axis.barh(
            row, span.end_s - span.start_s, left=span.start_s, height=0.8,
            color="0.6" if number is None else colours(number / (LAYERS - 1)),
            edgecolor="white", linewidth=0.4,
        )  # fmt: skip
    axis.set_yticks([0, 1], ["network", "compute"])
    axis.set_title(f"{title}: {result.iteration_s:.2f} s per iteration", fontsize=10, loc="left")


if __name__ == "__main__":
    main()
