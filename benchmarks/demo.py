"""``demo``: train a real model twice, without and with scheduling, and compare.

As root the two workers live in network namespaces whose link is shaped so that communication takes
about as long as computation; otherwise they talk over loopback, where there is nothing to gain.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks.engines import engine_pool
from benchmarks.network import LOOPBACK, Host, Network, namespaces, why_not
from benchmarks.pool import Pool
from benchmarks.report import console, track

WORKERS = 2
EPOCHS = 10
WARMUP_EPOCHS = 2
KINDS = {"ddp": "DistributedDataParallel", "scheduled": "ScheduledOptimizer"}
TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``demo``."""
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="timeline, picture")


def run(args: argparse.Namespace) -> int:
    """Train twice, print the table, leave timeline and picture."""
    args.output.mkdir(parents=True, exist_ok=True)
    trace = (args.output / "timeline.json").resolve()
    with tempfile.TemporaryDirectory() as folder, track() as progress:
        bar = progress.add_task("starting two workers", total=2 * args.epochs + 2)
        with _workers() as (pool, network):
            shaped = _shape(pool, network, progress, bar, Path(folder))
            results = {
                kind: _train(pool, kind, args.epochs, trace, progress, bar, Path(folder))
                for kind in KINDS
            }
        difference = _difference(Path(folder))
    console().print(_table(results))
    console().print(f"Largest difference between the two sets of weights: {difference:g}")
    console().print(_setting(shaped))
    _timeline(trace, args.output / "timeline.png")
    return 0


@contextmanager
def _workers() -> Iterator[tuple[Pool, Network | None]]:
    if why_not() is None:
        with (
            namespaces(WORKERS) as network,
            engine_pool("gloo", network.hub, network.workers, {}) as workers,
        ):
            yield workers, network
        return
    hosts: list[Host] = [LOOPBACK] * WORKERS
    with engine_pool("gloo", LOOPBACK, hosts, {}) as workers:
        yield workers, None


def _shape(
    pool: Pool, network: Network | None, progress: Progress, bar: TaskID, folder: Path
) -> dict[str, float] | None:
    """Time the computation alone, then give the link the rate that takes as long."""
    progress.update(bar, advance=1, description="timing the computation alone")
    if network is None:
        return None
    _command(pool, "begin", kind="alone")
    for _ in range(WARMUP_EPOCHS):
        answers = _command(pool, "epoch")
    size = _command(pool, "finish", path=str(folder / "alone.{rank}"))[0]["bytes"]
    compute = max(median(answer["seconds"]) for answer in answers)
    rate = 2 * (WORKERS - 1) / WORKERS * size / compute
    network.shape(rate)
    return {"compute_s": compute, "bytes": size, "rate": rate}


def _train(
    pool: Pool,
    kind: str,
    epochs: int,
    trace: Path,
    progress: Progress,
    bar: TaskID,
    folder: Path,
) -> dict[str, float]:
    progress.update(bar, description=f"training with {KINDS[kind]}")
    _command(pool, "begin", kind=kind, trace=str(trace))
    seconds: list[float] = []
    loss = 0.0
    for epoch in range(epochs):
        answers = _command(pool, "epoch")
        progress.update(bar, advance=1)
        loss = answers[0]["loss"]
        if epoch >= min(WARMUP_EPOCHS, epochs - 1):
            seconds += answers[0]["seconds"]
    end = _command(pool, "finish", path=str(folder / f"{kind}.{{rank}}"))
    return {"median_s": median(seconds), "loss": loss, "accuracy": end[0]["accuracy"]}


def _command(pool: Pool, what: str, **options: Any) -> list[dict[str, Any]]:
    return pool.call({"do": "train", "what": what, **options}, TIMEOUT_S)


def _difference(folder: Path) -> float:
    """Largest absolute difference between the two runs' weights, over all ranks."""
    import torch

    largest = 0.0
    for rank in range(WORKERS):
        one, other = (torch.load(folder / f"{kind}.{rank}") for kind in KINDS)
        differences = [float((one[name] - other[name]).abs().max()) for name in one]
        largest = max(largest, *differences)
    return largest


def _table(results: dict[str, dict[str, float]]) -> Table:
    table = Table(title="A small VGG on scikit-learn's digits, two workers")
    table.add_column("")
    for heading in ("median iteration", "speed-up", "final loss", "test accuracy"):
        table.add_column(heading, justify="right")
    baseline = results["ddp"]["median_s"]
    for kind, result in results.items():
        table.add_row(
            KINDS[kind],
            f"{result['median_s'] * 1e3:.1f} ms",
            f"{baseline / result['median_s']:.2f}",
            f"{result['loss']:.6f}",
            f"{result['accuracy']:.2%}",
        )
    return table


def _setting(shaped: dict[str, float] | None) -> str:
    if shaped is None:
        return (
            "This ran over loopback, where communication costs next to nothing: a gain is not to "
            f"be expected here. ({why_not()}.)"
        )
    return (
        f"The link between two network namespaces was shaped to {shaped['rate'] * 8 / 1e6:.0f} "
        f"Mbit/s: {shaped['bytes'] / 1e6:.1f} MB of gradients then take as long as the "
        f"computation, {shaped['compute_s'] * 1e3:.0f} ms."
    )


def _timeline(trace: Path, picture: Path) -> None:
    from bytescheduler.tracing import load
    from bytescheduler.tracing.picture import draw

    files = sorted(trace.parent.glob(f"{trace.stem}.rank*{trace.suffix}"))
    draw([load(file) for file in files], picture, 3)
    console().print(f"Timeline: {files[0]} (open it in Perfetto), picture: {picture}")
