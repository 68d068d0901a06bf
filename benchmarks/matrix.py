"""``matrix``: the whole table, to ``benchmarks/results/``: JSON, CSV and one picture.

Cells are profiles x balances x workers. Each is written when it is measured, so that an
interrupted run goes on where it stopped; ``--fresh`` starts over. The default cut is chosen to
fit in 90 minutes on two cores, ``--quick`` in five; ``--full`` is everything.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.compare import Effort, compare, parse_systems
from benchmarks.errors import BenchmarkError
from benchmarks.job import make_job
from benchmarks.lab import Lab, open_lab
from benchmarks.report import Progress, bars, best_peer, console, track
from benchmarks.systems import OURS

RESULTS = Path(__file__).parent / "results"
PROFILES = ("vgg16", "resnet50", "bert-base", "gpt2-small", "mobilenet_v2", "recommender")
BALANCES = (0.25, 0.5, 1.0, 2.0, 4.0)
WORKERS = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One comparison of the table."""

    workers: int
    profile: str
    balance: float

    @property
    def stem(self) -> str:
        return f"{self.profile}-w{self.workers}-b{self.balance:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Which cells, which systems and how carefully."""

    cells: tuple[Cell, ...]
    systems: str
    effort: Effort
    compute_s: float = 0.6


def _cells(
    profiles: Iterable[str], balances: Iterable[float], workers: Iterable[int]
) -> tuple[Cell, ...]:
    balances, workers = tuple(balances), tuple(workers)
    return tuple(
        Cell(workers=count, profile=profile, balance=balance)
        for count in workers
        for profile in profiles
        for balance in balances
    )


QUICK = Cut(
    cells=_cells(("vgg16", "bert-base"), (1.0,), (2,)),
    systems="ddp,bytescheduler",
    effort=Effort(repeats=3, iterations=4, warmup=3, tries=2),
)
DEFAULT = Cut(
    cells=(
        *_cells(PROFILES, (1.0,), (2,)),
        *_cells(("vgg16", "resnet50", "bert-base"), (1.0,), (4,)),
        *_cells(("vgg16",), (1.0,), (8,)),
        *_cells(("vgg16", "bert-base"), (2.0, 0.5, 4.0, 0.25), (2,)),
    ),
    systems="ddp,dear,bytescheduler",
    effort=Effort(repeats=3, iterations=4, warmup=3, tries=3),
)
FULL = Cut(cells=_cells(PROFILES, BALANCES, WORKERS), systems="all", effort=Effort())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``matrix``."""
    cut = parser.add_mutually_exclusive_group()
    cut.add_argument("--quick", action="store_true", help="two cells, within five minutes")
    cut.add_argument("--full", action="store_true", help="every cell, every system")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--systems", help="comma-separated, instead of the cut's own")


def run(args: argparse.Namespace) -> int:
    """Measure the cells that are not there yet; write all of them."""
    cut = QUICK if args.quick else FULL if args.full else DEFAULT
    names = parse_systems(args.systems or cut.systems)
    folder = args.output / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [cell for cell in cut.cells if args.fresh or not _path(folder, cell).exists()]
    failed = _measure(wanted, names, cut, folder)
    results = list(_read(folder))
    if results:
        _write(results, args.output)
        console().print(summary_table(results))
    for cell, reason in failed.items():
        console().print(f"{cell.stem} failed: {reason}")
    return 1 if failed else 0


def _path(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.stem}.json"


def _measure(cells: list[Cell], names: list[str], cut: Cut, folder: Path) -> dict[Cell, str]:
    """Measure cells, one lab per number of workers; what failed and why."""
    failed: dict[Cell, str] = {}
    with track() as progress:
        whole = progress.add_task("cells", total=len(cells))
        for workers, group in groupby(cells, key=lambda cell: cell.workers):
            with open_lab(workers) as lab:
                for cell in group:
                    try:
                        result = _measure_cell(lab, cell, names, cut, progress)
                        _path(folder, cell).write_text(json.dumps(result, indent=1))
                    except BenchmarkError as error:
                        failed[cell] = str(error)
                    progress.update(whole, advance=1)
    return failed


def _measure_cell(
    lab: Lab, cell: Cell, names: list[str], cut: Cut, progress: Progress
) -> dict[str, Any]:
    job = make_job(cell.profile, cell.workers, compute_s=cut.compute_s)
    return compare(lab, job, cell.balance, names, cut.effort, progress)


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    order = {name: index for index, name in enumerate(PROFILES)}
    yield from sorted(results, key=lambda r: (r["workers"], order[r["profile"]], r["balance"]))


def _write(results: list[dict[str, Any]], output: Path) -> None:
    (output / "matrix.json").write_text(json.dumps(results, indent=1))
    rows = [_row(result, name) for result in results for name in result["systems"]]
    with (output / "matrix.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    bars(results, output / "matrix.png")


def _row(result: dict[str, Any], name: str) -> dict[str, Any]:
    kept = ("profile", "workers", "balance", "compute_s", "exchange_s", "limit_s", "bound_s")
    seconds = result["systems"][name]["median_s"]
    return {
        **{key: result[key] for key in kept},
        "system": name,
        "median_s": seconds,
        "of_bound": seconds / result["bound_s"],
        "predicted_s": result["systems"][name].get("predicted_s"),
    }


def gain_reached(result: dict[str, Any]) -> float | None:
    """Our best system's share of what the bound allows to gain over the best peer."""
    peer = best_peer(result)
    ours = [entry["median_s"] for name, entry in result["systems"].items() if name in OURS]
    if peer is None or not ours:
        return None
    peer_s = result["systems"][peer]["median_s"]
    possible = peer_s - result["bound_s"]
    return (peer_s - min(ours)) / possible if possible > 0 else None


def simulator_error(results: Iterable[dict[str, Any]]) -> float | None:
    """How far the simulator is off: the median over all systems of all cells, as a share."""
    errors = [
        abs(entry["predicted_s"] / entry["median_s"] - 1)
        for result in results
        for entry in result["systems"].values()
        if "predicted_s" in entry
    ]
    return median(errors) if errors else None


def summary_table(results: list[dict[str, Any]]) -> Table:
    """A line per cell: best peer, ours, bound, and the part of the gain that is reached."""
    error = simulator_error(results)
    caption = "times in ms" + ("" if error is None else f"; simulator off by {error:.1%} (median)")
    table = Table(title="matrix", caption=caption)
    table.add_column("cell")
    for heading in ("bound", "peer", "", "ours", "of bound", "of peer", "gain reached"):
        table.add_column(heading, justify="right")
    for result in results:
        stem = Cell(**{key: result[key] for key in ("workers", "profile", "balance")}).stem
        table.add_row(stem, *_summary(result))
    return table


def _summary(result: dict[str, Any]) -> list[str]:
    systems, bound = result["systems"], result["bound_s"]
    peer = best_peer(result)
    ours = min(
        (name for name in systems if name in OURS),
        key=lambda name: systems[name]["median_s"],
        default=None,
    )
    peer_s = systems[peer]["median_s"] if peer else None
    ours_s = systems[ours]["median_s"] if ours else None
    gain = gain_reached(result)
    return [
        f"{bound * 1e3:.0f}",
        f"{peer_s * 1e3:.0f}" if peer_s else "-",
        peer or "",
        f"{ours_s * 1e3:.0f}" if ours_s else "-",
        f"{ours_s / bound:.3f}" if ours_s else "-",
        f"{ours_s / peer_s:.3f}" if ours_s and peer_s else "-",
        f"{gain:.0%}" if gain is not None else "-",
    ]
