"""The cluster's numbers: published anchors, Optimus against its peers, scale.

    python -m benchmarks.cluster [--traces ../shared/data/pollux] [--seeds 10] [--jobs 9]

Prints one table per question and exits with 1 if a target is missed. Times are process time of one
core. "Optimus against its peers" replays the paper's manner of workload (nine jobs, one of each
kind, 13 servers, arrivals within 12,000 s, a decision every 10 minutes) for several seeds; peers
run jobs as requested, as they are published. ``drf-elastic``, which resizes jobs as Optimus does,
is shown as well because it is the harder peer, and so is Optimus with MXNet's parameter blocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bytescheduler.cluster import (
    POLICIES,
    Errors,
    GeneratorSettings,
    Node,
    PolicyEntry,
    Resources,
    Settings,
    generate,
    paper_nodes,
    read_workload,
    simulate,
    summarise,
)

DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "pollux"
ANCHORS = {"optimus-oracle": 5681.9, "tiresias": 4038.2}
PUBLISHED = {"optimus-oracle": "expected-optimus.json", "tiresias": "expected-tiresias.json"}
LEAST_RATIOS = {"drf": (2.0, 1.4), "tetris": (1.5, 1.1)}
MOST_ERROR_COST = 0.2
MOST_REPLAY_SECONDS = 15.0
MOST_DECISION_SECONDS = 5.0
BIG_JOBS, BIG_NODES = 4000, 16_000
DECISION_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Figures:
    """Mean JCT and makespan (s) of every seed."""

    jct: np.ndarray[Any, Any]
    makespan: np.ndarray[Any, Any]


def pollux_anchors(console: Console, folder: Path) -> bool:
    """Compare replays of all eight workloads with the published results."""
    table = Table("policy", "mean JCT (s)", "published", "jobs off (1 to 4)", "process time (s)")
    nodes = [Node(id=i, capacity=Resources(gpu=4)) for i in range(16)]
    good = True
    for policy, anchor in ANCHORS.items():
        published = json.loads((folder / PUBLISHED[policy]).read_text())["jct_seconds"]
        started, jcts, wrong = time.process_time(), [], 0
        for path in sorted((folder / "workloads").glob("workload-*.csv")):
            result = simulate(read_workload(path, folder / "traces"), nodes, POLICIES[policy])
            jcts += [job.jct for job in result.jobs]
            expected = published.get(path.stem, {})
            wrong += sum(expected.get(job.name, job.jct) != job.jct for job in result.jobs)
        seconds, mean = time.process_time() - started, float(np.mean(jcts))
        good &= wrong == 0 and abs(mean - anchor) < 0.05 and seconds <= MOST_REPLAY_SECONDS
        table.add_row(policy, f"{mean:,.1f}", f"{anchor:,.1f}", str(wrong), f"{seconds:.1f}")
    console.print("Pollux workloads", table)
    return good


def replay_paper(
    entry: PolicyEntry, seeds: int, jobs: int, errors: Errors | None = None
) -> Figures:
    """Replay the paper's manner of workload."""
    summaries = [
        summarise(
            simulate(
                generate(GeneratorSettings(jobs=jobs, seed=seed)),
                paper_nodes(),
                entry,
                Settings(decision_seconds=DECISION_SECONDS, errors=errors, seed=seed),
            )
        )
        for seed in range(seeds)
    ]
    return Figures(
        np.array([summary.mean_jct for summary in summaries]),
        np.array([summary.makespan for summary in summaries]),
    )


def against_peers(console: Console, seeds: int, jobs: int) -> bool:
    """Compare Optimus with its peers, and with itself under errors."""
    optimus = POLICIES["optimus"]
    base = replay_paper(optimus, seeds, jobs)
    variants: dict[str, Callable[[], Figures]] = {
        name: lambda name=name: replay_paper(POLICIES[name], seeds, jobs)
        for name in POLICIES
        if name != "optimus"
    }
    variants["optimus, MXNet's blocks"] = lambda: replay_paper(
        replace(optimus, balances_servers=False), seeds, jobs
    )
    figures = {name: run() for name, run in variants.items()}
    table = Table("policy", "mean JCT (s)", "JCT ratio", "(seeds)", "makespan (s)", "ratio")
    table.add_row(
        "optimus", f"{base.jct.mean():,.0f}", "1", "", f"{base.makespan.mean():,.0f}", "1"
    )
    for name, found in figures.items():
        ratios = found.jct / base.jct
        table.add_row(
            name,
            f"{found.jct.mean():,.0f}",
            f"{found.jct.mean() / base.jct.mean():.2f}",
            f"{ratios.min():.2f} to {ratios.max():.2f}",
            f"{found.makespan.mean():,.0f}",
            f"{found.makespan.mean() / base.makespan.mean():.2f}",
        )
    console.print(f"{jobs} jobs in the paper's manner, {seeds} seeds; ratios over Optimus", table)
    return _reaches(base, figures) & error_cost(console, seeds, jobs)


def _reaches(base: Figures, figures: Mapping[str, Figures]) -> bool:
    return all(
        figures[name].jct.mean() >= jct * base.jct.mean()
        and figures[name].makespan.mean() >= makespan * base.makespan.mean()
        for name, (jct, makespan) in LEAST_RATIOS.items()
    )


def error_cost(console: Console, seeds: int, jobs: int) -> bool:
    """Say what errors of 20 % in convergence and 10 % in speed cost."""
    exact = replay_paper(POLICIES["optimus"], seeds, jobs, Errors())
    wrong = replay_paper(POLICIES["optimus"], seeds, jobs, Errors(convergence=0.2, speed=0.1))
    cost = float(wrong.jct.mean() / exact.jct.mean() - 1)
    console.print(f"Errors of 20 % (convergence) and 10 % (speed) cost {cost:+.1%} mean JCT")
    return cost <= MOST_ERROR_COST


def scale(console: Console) -> bool:
    """Time one decision about 4,000 jobs on 16,000 nodes."""
    entries = generate(GeneratorSettings(jobs=BIG_JOBS, seed=1))
    started = [entry.start(balanced_servers=True) for entry in entries]
    jobs = [job.state(job.truth()) for job in started]
    nodes = [Node(id=i, capacity=Resources(cpu=16, memory=80)) for i in range(BIG_NODES)]
    before = time.process_time()
    placed = POLICIES["optimus"].decide(jobs, nodes, {}, 0.0)
    seconds = time.process_time() - before
    tasks = sum(sum(allocation.shape) for allocation in placed.values())
    console.print(
        f"{len(placed):,} jobs on {BIG_NODES:,} nodes decided in {seconds:.2f} s ({tasks:,} tasks)"
    )
    return seconds <= MOST_DECISION_SECONDS and len(placed) == BIG_JOBS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=9, help="in the paper's manner (default: 9)")
    args = parser.parse_args(arguments)
    console = Console(width=120)
    good = [scale(console), against_peers(console, args.seeds, args.jobs)]
    if args.traces.is_dir():
        good.append(pollux_anchors(console, args.traces))
    else:
        console.print(f"skipped the Pollux anchors: no folder {args.traces}")
    console.print("all targets reached" if all(good) else "a target is missed")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
