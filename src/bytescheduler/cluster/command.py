"""``bytescheduler cluster simulate`` and ``bytescheduler cluster fit``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bytescheduler._imports import require
from bytescheduler.cluster import fitting
from bytescheduler.cluster.contract import Node, Resources
from bytescheduler.cluster.faults import FaultSettings
from bytescheduler.cluster.generators import ARRIVALS, GeneratorSettings, generate
from bytescheduler.cluster.knowledge import Errors
from bytescheduler.cluster.policies import POLICIES, find_policy
from bytescheduler.cluster.report import plot_results, print_table, results_table, write_json
from bytescheduler.cluster.simulator import Settings, SimulationResult, simulate
from bytescheduler.cluster.tables import read_table
from bytescheduler.cluster.workload import Workload, check_workload, read_workload
from bytescheduler.exceptions import ConfigurationError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_simulate(actions.add_parser("simulate", help="replay a workload under several policies"))
    _add_fit(actions.add_parser("fit", help="fit convergence or speed models to measurements"))


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand; return its exit code."""
    return _simulate(args) if args.action == "simulate" else fitting.run(args.file, args.plot)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", type=Path, metavar="FILE", help="CSV file of jobs")
    source.add_argument("--generate", choices=ARRIVALS, help="generate arrivals instead")
    parser.add_argument("--jobs", type=int, default=9, help="generated jobs (default: 9)")
    parser.add_argument(
        "--span", type=float, default=12_000, help="seconds of generated arrivals (default: 12000)"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="measured applications")
    _add_cluster(parser)
    parser.add_argument(
        "--policy",
        required=True,
        metavar="NAME,...",
        help=f"policies to compare: {', '.join(POLICIES)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw JCTs and Gantt pictures")
    _add_settings(parser)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument("--nodes", type=int, default=16, help="number of nodes (default: 16)")
    group.add_argument("--gpus", type=int, default=4, help="GPUs per node (default: 4)")
    group.add_argument("--cpus", type=float, default=16, help="cores per node (default: 16)")
    group.add_argument("--memory", type=float, default=64, help="GiB per node (default: 64)")
    group.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="CSV file of unequal nodes: cpu,memory,gpu,speed",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--step", type=int, default=60, help="seconds per step (default: 60)")
    group.add_argument(
        "--interval", type=int, default=60, help="seconds between decisions (default: 60)"
    )
    group.add_argument(
        "--restart-cost", type=int, default=30, help="seconds lost when placed anew (default: 30)"
    )
    group.add_argument(
        "--checkpoint", type=int, default=600, help="seconds between checkpoints (default: 600)"
    )
    group.add_argument(
        "--convergence-error", type=float, metavar="E", help="injected error of steps left, 0 to 1"
    )
    group.add_argument(
        "--speed-error", type=float, metavar="E", help="injected error of speeds, 0 to 1"
    )
    group.add_argument(
        "--node-mtbf", type=float, default=0, metavar="HOURS", help="nodes fail (default: never)"
    )
    group.add_argument(
        "--repair", type=float, default=600, metavar="S", help="until a node is back (default: 600)"
    )
    group.add_argument(
        "--stragglers", type=float, default=0, metavar="RATE", help="per worker and hour"
    )


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="CSV file of losses or of step times")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the fit against the data")


def _simulate(args: argparse.Namespace) -> int:
    names = _policy_names(args.policy)
    nodes = _nodes(args)
    settings = _settings(args)
    _check_outputs([args.json, args.plot])
    workload = _workload(args)
    check_workload(workload, nodes)
    results = _run_policies(names, workload, nodes, settings)
    print_table(results_table(results))
    if args.json is not None:
        write_json(results, args.json)
    if args.plot is not None:
        plot_results(results, args.plot)
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    if args.workload is not None:
        return read_workload(args.workload, args.traces)
    return generate(
        GeneratorSettings(jobs=args.jobs, span=args.span, arrivals=args.generate, seed=args.seed)
    )


def _policy_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"--policy must name at least one of {', '.join(POLICIES)}")
    for name in names:
        find_policy(name)
    if len(set(names)) < len(names):
        raise ConfigurationError(f"--policy must name each policy once, got {text}")
    return names


def _nodes(args: argparse.Namespace) -> list[Node]:
    if args.cluster is not None:
        return _read_nodes(args.cluster)
    if args.nodes < 1:
        raise ConfigurationError(f"--nodes must be at least 1, got {args.nodes}")
    for flag in ("gpus", "cpus", "memory"):
        if getattr(args, flag) < 0:
            raise ConfigurationError(f"--{flag} must be at least 0, got {getattr(args, flag)}")
    capacity = Resources(cpu=args.cpus, memory=args.memory, gpu=args.gpus)
    return [Node(id=number, capacity=capacity) for number in range(args.nodes)]


def _read_nodes(path: Path) -> list[Node]:
    nodes: list[Node] = []
    for number, row in enumerate(read_table(path, ("cpu", "memory", "gpu"))):
        speed = row.number("speed", least=0, default="1")
        if speed == 0:
            raise row.error("speed", "a number above 0")
        amounts = (row.number(column, least=0) for column in ("cpu", "memory", "gpu"))
        nodes.append(Node(id=number, capacity=Resources(*amounts), speed=speed))
    return nodes


def _settings(args: argparse.Namespace) -> Settings:
    errors = None
    if args.convergence_error is not None or args.speed_error is not None:
        errors = Errors(convergence=args.convergence_error or 0.0, speed=args.speed_error or 0.0)
    if args.seed < 0:
        raise ConfigurationError(f"--seed must be at least 0, got {args.seed}")
    return Settings(
        step_seconds=args.step,
        decision_seconds=args.interval,
        checkpoint_seconds=args.checkpoint,
        restart_seconds=args.restart_cost,
        errors=errors,
        faults=FaultSettings(
            node_mtbf_hours=args.node_mtbf,
            repair_seconds=args.repair,
            stragglers_per_hour=args.stragglers,
        ),
        seed=args.seed,
    )


def _check_outputs(paths: Sequence[Path | None]) -> None:
    for path in paths:
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigurationError(f"cannot write {path}: not a file in an existing folder")


def _run_policies(
    names: Sequence[str], workload: Workload, nodes: Sequence[Node], settings: Settings
) -> dict[str, SimulationResult]:
    progress = require("rich.progress", extra="cluster")
    console = require("rich.console", extra="cluster").Console(stderr=True)
    results: dict[str, SimulationResult] = {}
    with progress.Progress(console=console) as bar:
        tasks = {name: bar.add_task(name, total=len(workload)) for name in names}
        for name in names:

            def show(finished: int, total: int, name: str = name) -> None:
                bar.update(tasks[name], completed=finished, total=total)

            results[name] = simulate(workload, nodes, find_policy(name), settings, show)
    return results
