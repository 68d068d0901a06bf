"""The doctor's command line: packages, engines, expected gain, advice; for people or as JSON."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from bytescheduler import __version__
from bytescheduler._imports import require
from bytescheduler.doctor.engines import ENGINES, Finding, examine
from bytescheduler.exceptions import ConfigurationError
from bytescheduler.simulate import Network, best_schedule, load_profile, profile_names
from bytescheduler.simulate.units import format_duration, parse_bandwidth, parse_duration

__all__ = ["add_arguments", "run"]

PACKAGES: Final = (
    "bytescheduler", "numpy", "torch", "tensorflow-cpu", "tensorflow", "mxnet", "horovod",
    "byteps", "mpi4py", "scikit-optimize", "psutil", "rich", "matplotlib",
)  # fmt: skip
WORTH_IT: Final = 0.02  # gain from which we recommend it
OVERHEAD_S: Final = 50e-6  # host time to start a chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What the simulator expects for a model.

    Attributes:
        plain_s, scheduled_s, bound_s: seconds per iteration: buckets with a barrier at their best
            size, ours at its best sizes, and the structural bound.
        gain: how much faster, 0.25 for a quarter.
    """

    profile: str
    workers: int
    bandwidth_bytes_per_s: float
    latency_s: float
    compute_s: float
    plain_s: float
    scheduled_s: float
    bound_s: float
    gain: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--engine",
        action="append",
        choices=[engine.name for engine in ENGINES],
        help="try this one only; may be repeated (default: all)",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds per engine (default: %(default)g)"
    )
    parser.add_argument(
        "--profile", choices=profile_names(), help="the model that a gain is predicted for"
    )
    parser.add_argument("--workers", type=int, default=2, help="of that job (default: 2)")
    parser.add_argument("--compute", metavar="TIME", help="its forward and backward, e.g. 250ms")
    parser.add_argument(
        "--bandwidth", help="its network, e.g. 25Gbps (default: measured on this machine)"
    )


def run(args: argparse.Namespace) -> int:
    """Examine, print; 0 if at least one engine works."""
    if not args.timeout > 0:
        raise ConfigurationError(f"--timeout must be positive, got {args.timeout:g}; pass seconds")
    if args.workers < 2:
        raise ConfigurationError(f"--workers must be at least 2, got {args.workers}")
    bandwidth = parse_bandwidth(args.bandwidth) if args.bandwidth else None
    compute_s = parse_duration(args.compute) if args.compute else None
    require("psutil", extra="tune")
    findings = _examine(args.engine, args.timeout, quiet=args.json)
    gain = _gain(args.profile, args.workers, compute_s, bandwidth, findings)
    if args.json:
        print(json.dumps(_as_json(findings, gain), indent=1))
    else:
        _print(findings, gain)
    return 0 if any(finding.works for finding in findings.values()) else 1


def _examine(wanted: Sequence[str] | None, timeout: float, *, quiet: bool) -> dict[str, Finding]:
    console = require("rich.console", extra="tune").Console(stderr=True, quiet=quiet)
    findings: dict[str, Finding] = {}
    for engine in ENGINES:
        if wanted is None or engine.name in wanted:
            with console.status(f"trying {engine.name}"):
                findings[engine.name] = examine(engine, timeout)
    return findings


def _gain(
    profile: str | None,
    workers: int,
    compute_s: float | None,
    bandwidth: float | None,
    findings: Mapping[str, Finding],
) -> Gain | None:
    """The prediction for ``profile`` on the fastest engine that works, or the given network."""
    if profile is None:
        return None
    working = [finding for finding in findings.values() if finding.works]
    fastest = max(working, key=lambda item: item.bandwidth_bytes_per_s or 0.0, default=None)
    measured = fastest.bandwidth_bytes_per_s if fastest else None
    rate = bandwidth or measured
    if rate is None:
        return None
    latency = (fastest.latency_s if fastest else None) or 0.0
    job = load_profile(profile, compute_s=compute_s)
    network = Network(
        workers=workers,
        bandwidth=rate,
        latency_s=latency / 2,  # a chunk between two ranks is two messages
        overhead_s=OVERHEAD_S,
    )
    _, plain = best_schedule(job, network, "barrier", buckets=True)
    _, scheduled = best_schedule(job, network, "priority")
    return Gain(
        profile=profile,
        workers=workers,
        bandwidth_bytes_per_s=rate,
        latency_s=latency / 2,
        compute_s=job.compute_s,
        plain_s=plain.iteration_s,
        scheduled_s=scheduled.iteration_s,
        bound_s=scheduled.bound_s,
        gain=plain.iteration_s / scheduled.iteration_s - 1,
    )


def _packages() -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _advice(findings: Mapping[str, Finding], gain: Gain | None) -> list[str]:
    lines = [
        f"{name} is not installed: {finding.install}"
        for name, finding in findings.items()
        if finding.install
    ]
    lines += [
        f"{name} is installed and does not work here: see its error"
        for name, finding in findings.items()
        if finding.installed and not finding.works
    ]
    if gain is not None:
        lines.append(_gain_words(gain))
    return lines


def _gain_words(gain: Gain) -> str:
    where = f"{gain.profile} on {gain.workers} workers at {_gigabits(gain.bandwidth_bytes_per_s)}"
    if gain.gain < WORTH_IT:
        return f'{where}: no gain to be expected; mode="auto" keeps the plain order there'
    return (
        f"{where}: {gain.gain:.0%} faster to be expected ({format_duration(gain.plain_s)} becomes "
        f"{format_duration(gain.scheduled_s)}, the bound is {format_duration(gain.bound_s)})"
    )


def _gigabits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.3g} Gbit/s"


def _as_json(findings: Mapping[str, Finding], gain: Gain | None) -> dict[str, Any]:
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "engines": {name: asdict(finding) for name, finding in findings.items()},
        "gain": asdict(gain) if gain else None,
        "advice": _advice(findings, gain),
    }


def _print(findings: Mapping[str, Finding], gain: Gain | None) -> None:
    console = require("rich.console", extra="tune").Console()
    there = [f"{name} {number}" for name, number in _packages().items() if number]
    console.print(f"Python {platform.python_version()}; {', '.join(there)}", highlight=False)
    console.print(_table(findings))
    for name, finding in findings.items():
        console.print(f"RDMA, {name}: {finding.rdma}", highlight=False, markup=False)
    for name, finding in findings.items():
        if finding.error:
            console.print(f"{name}: {finding.error}", markup=False, highlight=False)
    for line in _advice(findings, gain):
        console.print(line, highlight=False, markup=False)
    if gain is None:
        console.print("Add --profile NAME --bandwidth RATE to see what gain is to be expected.")


def _table(findings: Mapping[str, Finding]) -> Any:
    title = "Engines, two ranks on this machine"
    table = require("rich.table", extra="tune").Table(title=title)
    table.add_column("engine")
    table.add_column("state")
    table.add_column("bandwidth", justify="right")
    table.add_column("latency", justify="right")
    for name, finding in findings.items():
        state = "works" if finding.works else "fails" if finding.installed else "not installed"
        rate = finding.bandwidth_bytes_per_s
        latency = finding.latency_s
        table.add_row(
            name,
            state,
            _gigabits(rate) if rate else "",
            format_duration(latency) if latency else "",
        )
    return table
