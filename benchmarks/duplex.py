"""``duplex``: what a worker's link carries in each direction while parameter servers add.

Two workers and two servers, each on a host of its own, so that a worker sends nothing but pushes
and receives nothing but pulls. The counters of its interface are read while it trains; the rates
are drawn, and compared with the time that pushes and pulls one after the other would take.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks.engines import WORKER, parameter_servers
from benchmarks.errors import BenchmarkError
from benchmarks.job import MTU_OVERHEAD, Job, make_job
from benchmarks.link import Reading
from benchmarks.network import Network, namespaces
from benchmarks.pool import pool
from benchmarks.report import console, track
from benchmarks.systems.ours_ps import PrioritySystemOverServers
from bytescheduler._imports import require
from bytescheduler.simulate import profile_names

WORKERS = SERVERS = 2
WARMUP, ITERATIONS = 3, 8
WINDOW_S = 0.05
"""Rates are means over this long, many times what a token bucket lets through at once."""
BUSY = 0.5
"""A direction that carries this share of its rate is in use."""
SHOWN = 3
"""Iterations in the picture."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``duplex``."""
    parser.add_argument("--profile", choices=profile_names(), default="vgg16")
    parser.add_argument("--balance", type=float, default=1.0, help="exchange / compute")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture of both directions")


def run(args: argparse.Namespace) -> int:
    """Train in the lab, watch a worker's link, and report."""
    if args.balance <= 0:
        raise BenchmarkError(f"--balance must be positive, got {args.balance}")
    job = make_job(args.profile, WORKERS)
    compute_s = sum(layer.forward_s + layer.backward_s for layer in job.layers)
    rate = job.gradient_bytes * MTU_OVERHEAD / (args.balance * compute_s)
    with track() as progress, namespaces(WORKERS + SERVERS) as network:
        bar = progress.add_task("training on parameter servers", total=None)
        network.shape(rate)
        seconds, readings = _train(network, job)
        progress.remove_task(bar)
    result = summary(args, job, rate, fmean(seconds), readings)
    console().print(_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if args.plot:
        _draw(result, args.plot)
    return 0


def _train(network: Network, job: Job) -> tuple[list[float], list[Reading]]:
    """Seconds of each iteration of the first worker, and its link meanwhile."""
    workers, servers = network.workers[:WORKERS], network.workers[WORKERS:]
    command = {
        "do": "measure",
        "system": PrioritySystemOverServers.name,
        "settings": {},
        "job": job.to_json(),
        "warmup": WARMUP,
        "iterations": ITERATIONS,
        "watch": workers[0].interface,
    }
    with ExitStack() as stack:
        shared, each = parameter_servers(stack, network.hub, workers, servers, {})
        variables = {**shared, "BENCHMARK_ENGINE": PrioritySystemOverServers.engine}
        answers = stack.enter_context(pool(workers, WORKER, variables, each)).call(command)
    return answers[0]["seconds"], [Reading(*reading) for reading in answers[0]["link"]]


def summary(
    args: argparse.Namespace,
    job: Job,
    rate: float,
    iteration_s: float,
    readings: Sequence[Reading],
) -> dict[str, Any]:
    """The JSON document: times, and shares of the time in which a direction was in use."""
    series = _rates(readings)
    out = [entry["sent"] > BUSY * rate for entry in series]
    back = [entry["received"] > BUSY * rate for entry in series]
    return {
        "profile": args.profile,
        "balance": args.balance,
        "iteration_s": iteration_s,
        "one_way_s": job.gradient_bytes * MTU_OVERHEAD / rate,
        "bytes_per_second": rate,
        "pushing": fmean(out),
        "pulling": fmean(back),
        "both": fmean(one and other for one, other in zip(out, back, strict=True)),
        "link": series,
    }


def _rates(readings: Sequence[Reading]) -> list[dict[str, float]]:
    """Bytes per second in each direction, window by window."""
    first = readings[0]
    marks = [first]
    for reading in readings:
        if reading.at - marks[-1].at >= WINDOW_S:
            marks.append(reading)
    return [
        {
            "at_s": before.at - first.at,
            "sent": (after.sent - before.sent) / (after.at - before.at),
            "received": (after.received - before.received) / (after.at - before.at),
        }
        for before, after in pairwise(marks)
    ]


def _table(result: dict[str, Any]) -> Table:
    title = f"{result['profile']}, balance {result['balance']:g}: a worker's link"
    caption = f"in use: more than {BUSY:.0%} of its rate, over windows of {WINDOW_S * 1e3:.0f} ms"
    table = Table(title=title, caption=caption, show_header=False)
    table.add_row("iteration", f"{result['iteration_s'] * 1e3:.0f} ms")
    table.add_row("pushing or pulling the model", f"{result['one_way_s'] * 1e3:.0f} ms")
    table.add_row("one after the other", f"{2e3 * result['one_way_s']:.0f} ms")
    for name in ("pushing", "pulling", "both"):
        table.add_row(f"{name} in use", f"{result[name]:.0%} of the time")
    return table


def _draw(result: dict[str, Any], path: Path) -> None:
    require("matplotlib", extra="tune").use("Agg")
    pyplot = require("matplotlib.pyplot", extra="tune")
    end = SHOWN * result["iteration_s"]
    shown = [entry for entry in result["link"] if entry["at_s"] <= end]
    figure, axis = pyplot.subplots(figsize=(10, 3), layout="constrained")
    times = [entry["at_s"] for entry in shown]
    for name, words, sign in (("sent", "push", 1), ("received", "pull", -1)):
        rates = [sign * entry[name] * 8e-6 for entry in shown]
        axis.fill_between(times, rates, step="post", label=words, alpha=0.7)
    for sign in (1, -1):
        axis.axhline(sign * result["bytes_per_second"] * 8e-6, color="black", linewidth=0.8)
    axis.set_xlabel("seconds")
    axis.set_ylabel("Mbit/s, out above, in below")
    axis.set_title(f"{result['profile']} on two servers: a worker's link, and its rate (lines)")
    axis.legend(loc="upper right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
