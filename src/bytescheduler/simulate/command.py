"""``bytescheduler simulate``: would scheduling help this job, before anybody rents a machine?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bytescheduler._imports import require
from bytescheduler.core.config import format_size, parse_size
from bytescheduler.exceptions import ConfigurationError
from bytescheduler.simulate.engine import simulate
from bytescheduler.simulate.model import (
    COLLECTIVES,
    Collective,
    Network,
    Policy,
    Profile,
    Result,
    Schedule,
)
from bytescheduler.simulate.profiles import DEFAULT_FLOPS, load_profile, profile_names
from bytescheduler.simulate.search import best_schedule, losses
from bytescheduler.simulate.traces import load_trace, write_timeline
from bytescheduler.simulate.units import format_duration, parse_bandwidth, parse_duration

__all__ = ["add_arguments", "run"]

ROWS: tuple[tuple[str, Policy, bool], ...] = (
    ("DistributedDataParallel", "barrier", True),
    ("chunks, first in first out", "fifo", False),
    ("DeAR", "dear", False),
    ("bytescheduler", "priority", False),
)
NOTABLE = 0.01
RING_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the table."""

    system: str
    schedule: Schedule
    result: Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--profile", metavar="NAME", help=f"one of {', '.join(profile_names())}")
    job.add_argument("--trace", metavar="FILE", help="a timeline recorded in your own job")
    parser.add_argument("--workers", type=int, required=True, help="workers that train together")
    parser.add_argument("--bandwidth", required=True, help="of each worker's link, e.g. 25Gbps")
    parser.add_argument("--latency", default="20us", help="of one message (default: %(default)s)")
    parser.add_argument(
        "--collective",
        choices=("auto", *COLLECTIVES),
        default="auto",
        help=f"auto: ring for up to {RING_WORKERS} workers, tree beyond, as engines choose",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=2,
        help="collectives that the engine works on at once (default: %(default)s)",
    )
    parser.add_argument("--servers", type=int, help="parameter servers (default: one per worker)")
    parser.add_argument("--compute", metavar="TIME", help="forward and backward, e.g. 250ms")
    parser.add_argument(
        "--batch", type=int, help="samples per worker, where --compute is not given"
    )
    parser.add_argument(
        "--flops",
        type=float,
        default=DEFAULT_FLOPS,
        help="sustained operations per second, where --compute is not given (default: %(default)g)",
    )
    parser.add_argument("--partition-size", metavar="SIZE", help="default: the best of a grid")
    parser.add_argument("--credit-size", metavar="SIZE", help="default: four partitions")
    parser.add_argument(
        "--overhead", default="20us", help="host time to start a chunk (default: %(default)s)"
    )
    parser.add_argument("--announcement", metavar="TIME", help="leader to last follower")
    parser.add_argument("--timeline", metavar="FILE", help="write our timeline, for Perfetto")
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate, print a table and what it means."""
    profile, network = _profile(args), _network(args)
    sizes = _sizes(args)
    outcomes = [_outcome(row, profile, network, sizes) for row in ROWS]
    _print(profile, network, outcomes)
    if args.timeline:
        write_timeline(outcomes[-1].result.timeline, Path(args.timeline))
    if args.json:
        Path(args.json).write_text(json.dumps(_as_json(profile, network, outcomes), indent=1))
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    compute_s = parse_duration(args.compute) if args.compute else None
    if args.trace:
        profile = load_trace(Path(args.trace))
        return profile if compute_s is None else profile.with_compute(compute_s)
    return load_profile(args.profile, compute_s=compute_s, batch=args.batch, flops=args.flops)


def _network(args: argparse.Namespace) -> Network:
    return Network(
        workers=args.workers,
        bandwidth=parse_bandwidth(args.bandwidth),
        latency_s=parse_duration(args.latency),
        collective=_collective(args),
        concurrency=args.concurrency,
        servers=args.servers,
        overhead_s=parse_duration(args.overhead),
        announcement_s=parse_duration(args.announcement) if args.announcement else None,
    )


def _collective(args: argparse.Namespace) -> Collective:
    if args.collective != "auto":
        return args.collective
    return "ring" if args.workers <= RING_WORKERS else "tree"


def _sizes(args: argparse.Namespace) -> tuple[int, int] | None:
    if args.partition_size is None:
        if args.credit_size is not None:
            raise ConfigurationError(
                f"--credit-size needs --partition-size, got {args.credit_size} alone; pass both"
            )
        return None
    partition = parse_size(args.partition_size, name="--partition-size")
    credit = parse_size(args.credit_size or 4 * partition, name="--credit-size")
    return partition, credit


def _outcome(
    row: tuple[str, Policy, bool],
    profile: Profile,
    network: Network,
    sizes: tuple[int, int] | None,
) -> Outcome:
    system, policy, buckets = row
    if sizes is None or buckets:
        schedule, result = best_schedule(profile, network, policy, buckets=buckets)
    else:
        schedule = Schedule(policy=policy, partition_bytes=sizes[0], credit_bytes=sizes[1])
        result = simulate(profile, network, schedule)
    return Outcome(system=system, schedule=schedule, result=result)


def _print(profile: Profile, network: Network, outcomes: list[Outcome]) -> None:
    console = require("rich.console", extra="tune").Console(highlight=False)
    ours = outcomes[-1].result
    console.print(
        f"{profile.name}: {network.workers} workers, {profile.gradient_bytes / 1e6:.1f} MB of "
        f"gradients; computes for {format_duration(ours.compute_s)}, exchanges for "
        f"{format_duration(ours.exchange_s)} per iteration"
    )
    console.print(_table(outcomes))
    for sentence in _words(profile, network, outcomes):
        console.print(sentence)


def _table(outcomes: list[Outcome]) -> Any:
    table = require("rich.table", extra="tune").Table()
    table.add_column("system")
    for heading in ("iteration", "speed-up", "pieces of", "credit"):
        table.add_column(heading, justify="right")
    baseline = outcomes[0].result.iteration_s
    for outcome in outcomes:
        seconds = outcome.result.iteration_s
        pieces, credit = _pieces(outcome.schedule)
        table.add_row(
            outcome.system, format_duration(seconds), f"{baseline / seconds:.2f}", pieces, credit
        )
    bound = outcomes[-1].result.bound_s
    table.add_row("structural bound", format_duration(bound), f"{baseline / bound:.2f}", "", "")
    return table


def _pieces(schedule: Schedule) -> tuple[str, str]:
    if schedule.bucket_bytes is not None:
        return format_size(schedule.bucket_bytes), ""
    return format_size(schedule.partition_bytes), format_size(schedule.credit_bytes)


def _words(profile: Profile, network: Network, outcomes: list[Outcome]) -> list[str]:
    """What the table means, in sentences."""
    peer, ours = outcomes[0].result, outcomes[-1]
    gain = peer.iteration_s / ours.result.iteration_s
    sentences = [_verdict(gain)]
    if ours.result.bound_s > ours.result.limit_s * (1 + NOTABLE):
        heaviest = max(profile.layers, key=lambda layer: layer.gradient_bytes)
        lost = format_duration(ours.result.bound_s - ours.result.limit_s)
        sentences.append(
            f"No order can hide everything: {lost} stay bare, {heaviest.name} "
            f"({heaviest.gradient_bytes / 1e6:.1f} MB) being the largest layer."
        )
    sentences.extend(
        f"{loss.cause.capitalize()} cost {format_duration(loss.seconds)} per iteration."
        for loss in losses(profile, network, ours.schedule)
        if loss.seconds > NOTABLE * ours.result.iteration_s
    )
    return sentences


def _verdict(gain: float) -> str:
    if gain < 1 - NOTABLE:
        return "Scheduling would not help: chunks cost more here than their order gains."
    if gain < 1 + NOTABLE:
        return "Scheduling would not help much: little is left to hide."
    return f"Scheduling would make each iteration {gain:.2f} times faster."


def _as_json(profile: Profile, network: Network, outcomes: list[Outcome]) -> dict[str, Any]:
    ours = outcomes[-1].result
    return {
        "profile": profile.name,
        "network": asdict(network),
        "compute_s": ours.compute_s,
        "exchange_s": ours.exchange_s,
        "limit_s": ours.limit_s,
        "bound_s": ours.bound_s,
        "systems": {
            outcome.system: {
                "iteration_s": outcome.result.iteration_s,
                "schedule": asdict(outcome.schedule),
            }
            for outcome in outcomes
        },
    }
