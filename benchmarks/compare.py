"""``compare``: one profile, several systems, side by side and against the physical limit.

What is measured, all in one run and on the same shaped links:

- ``compute_s``: forward, backward and update alone (``F + B``);
- ``exchange_s``: all gradients alone, in the fastest of some ways to send them at once (``C``);
  the rate of the links is chosen, and corrected once, so that ``C / (F + B)`` is the balance;
- every system's settings once each, briefly: the fastest stay (``sweep``);
- then the repeats: in each, every system runs once, so that noise hits all alike.

``limit_s`` is ``max(F + B, C)``; ``bound_s`` is the simulator's structural bound at these two, and
``predicted_s`` of a system the iteration time that the simulator gives for its settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.job import COMPUTE_S, Job, make_job
from benchmarks.lab import Lab, open_lab
from benchmarks.prediction import predict
from benchmarks.report import Progress, bars, comparison_table, console, track
from benchmarks.systems import REFERENCES, SYSTEMS, find
from benchmarks.systems.base import Settings
from bytescheduler.simulate import Network, bound_s, profile_names

DEFAULT_SYSTEMS = "ddp,horovod,p3,bytescheduler"
BALANCE_TOLERANCE = 0.02
Step = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: ``repeats`` of ``iterations``; settings that each system may try."""

    repeats: int = 5
    iterations: int = 5
    warmup: int = 3
    tries: int = 6
    sweep_iterations: int = 3


_USUAL = Effort()


@dataclass(slots=True, kw_only=True)
class Measured:
    """What is known of one system so far."""

    settings: Settings = field(default_factory=dict)
    sweep: list[dict[str, Any]] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "median_s": median(self.runs),
            "runs": self.runs,
            "settings": self.settings,
            "sweep": self.sweep,
        }


class Comparison:
    """One cell: a job, a balance, some systems."""

    def __init__(self, lab: Lab, job: Job, balance: float, effort: Effort, step: Step) -> None:
        self._lab = lab
        self._job = job
        self._balance = balance
        self._effort = effort
        self._step = step
        self._failed: dict[str, str] = {}

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Measure everything; the JSON document of the cell."""
        missing = {name: reason for name in names if (reason := SYSTEMS[name].missing())}
        rate = self._balance_links()
        measured = {name: Measured() for name in names if name not in missing}
        references = {name: Measured() for name in REFERENCES}
        for name, record in (references | measured).items():
            self._guarded(name, lambda name=name, record=record: self._choose(name, record))
        for repeat in range(self._effort.repeats):
            for name, record in (references | measured).items():
                self._step(f"repeat {repeat + 1}: {name}")
                self._guarded(name, lambda name=name, record=record: self._repeat(name, record))
        return self._document(rate, references, measured, missing)

    def _guarded(self, name: str, measure: Callable[[], None]) -> None:
        """A peer that fails is named and left out; without a reference there is no result."""
        if name in self._failed:
            return
        try:
            measure()
        except BenchmarkError as error:
            if name in REFERENCES:
                raise
            self._failed[name] = str(error)

    def _balance_links(self) -> float:
        """Choose the rate of the links by the balance, measure, and correct it once."""
        self._step("balance")
        compute = self._time("compute", {}, self._effort.sweep_iterations)
        wanted = self._balance * compute
        share = 2 * (self._lab.workers - 1) / self._lab.workers
        rate = share * self._job.gradient_bytes / wanted
        for _ in range(2):
            self._lab.shape(rate)
            actual = min(
                self._time("exchange", settings, self._effort.sweep_iterations)
                for settings in REFERENCES["exchange"].sweep(self._job)
            )
            if abs(actual / wanted - 1) < BALANCE_TOLERANCE:
                break
            rate *= actual / wanted
        self._lab.shape(rate)
        return rate

    def _choose(self, name: str, record: Measured) -> None:
        system = find(name)
        candidates = system.sweep(self._job)[: self._effort.tries]
        record.settings = candidates[0]
        if system.learns:
            self._step(f"settle: {name}")
            self._lab.settle(name, self._job, record.settings)
        if len(candidates) == 1:
            return
        for settings in candidates:
            self._step(f"sweep: {name}")
            seconds = self._time(name, settings, self._effort.sweep_iterations)
            record.sweep.append({"settings": settings, "seconds": seconds})
            self._lab.forget(name, settings)
        record.settings = min(record.sweep, key=lambda entry: entry["seconds"])["settings"]

    def _repeat(self, name: str, record: Measured) -> None:
        record.runs.append(self._time(name, record.settings, self._effort.iterations))

    def _time(self, name: str, settings: Settings, iterations: int) -> float:
        return self._lab.measure(
            name, self._job, settings, warmup=self._effort.warmup, iterations=iterations
        )

    def _document(
        self,
        rate: float,
        references: dict[str, Measured],
        measured: dict[str, Measured],
        missing: dict[str, str],
    ) -> dict[str, Any]:
        compute = median(references["compute"].runs)
        exchange = median(references["exchange"].runs)
        document: dict[str, Any] = {
            "profile": self._job.profile,
            "workers": self._lab.workers,
            "balance": self._balance,
            "limit_s": max(compute, exchange),
            "bound_s": structural_bound(self._job, compute, exchange),
            "compute_s": compute,
            "exchange_s": exchange,
            "bytes_per_second": rate,
            "scale": self._job.scale,
            "skew": self._job.skew,
            "gradient_bytes": self._job.gradient_bytes,
            "systems": {
                name: record.to_json()
                for name, record in measured.items()
                if record.runs and name not in self._failed
            },
            "missing": missing,
            "failed": self._failed,
        }
        for name, seconds in predict(document).items():
            document["systems"][name]["predicted_s"] = seconds
        return document


def structural_bound(job: Job, compute_s: float, exchange_s: float) -> float:
    """The simulator's bound for a job whose compute and exchange were measured."""
    network = Network(workers=2, bandwidth=job.gradient_bytes / exchange_s)
    return bound_s(job.as_profile(compute_s), network)


def count_steps(job: Job, names: Sequence[str], effort: Effort) -> int:
    """Steps that a comparison reports, for the progress bar."""
    present = [name for name in names if SYSTEMS[name].missing() is None]
    systems = [*REFERENCES.values(), *(SYSTEMS[name] for name in present)]
    tries = [len(system.sweep(job)[: effort.tries]) for system in systems]
    sweeps = sum(count for count in tries if count > 1)
    learning = sum(system.learns for system in systems)
    return 1 + sweeps + learning + effort.repeats * len(systems)


def parse_systems(text: str) -> list[str]:
    """Names out of ``ddp,bytescheduler``; ``all`` is every system.

    Raises:
        BenchmarkError: one of them is unknown.
    """
    names = list(SYSTEMS) if text == "all" else list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise BenchmarkError(
            f"no system is named {', '.join(unknown)}; pick from {', '.join(SYSTEMS)}"
        )
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``compare``."""
    parser.add_argument("--profile", choices=profile_names(), default="vgg16")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--balance", type=float, default=1.0, help="exchange / compute")
    parser.add_argument("--systems", default=DEFAULT_SYSTEMS, help="comma-separated, or: all")
    parser.add_argument("--repeats", type=int, default=_USUAL.repeats)
    parser.add_argument("--iterations", type=int, default=_USUAL.iterations, help="per repeat")
    parser.add_argument("--tries", type=int, default=_USUAL.tries, help="settings per system")
    parser.add_argument("--scale", type=float, help="divides the layers' sizes")
    parser.add_argument(
        "--compute", type=float, default=COMPUTE_S, help="seconds of forward and backward"
    )
    parser.add_argument(
        "--skew", type=float, default=0.0, help="share by which a rank's iterations vary, at random"
    )
    parser.add_argument("--json", type=Path, help="write the result")
    parser.add_argument("--plot", type=Path, help="draw the result")


def _check(args: argparse.Namespace) -> None:
    for name, least in (("workers", 2), ("repeats", 1), ("iterations", 1), ("tries", 1)):
        if getattr(args, name) < least:
            raise BenchmarkError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    for name in ("balance", "compute", "scale"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise BenchmarkError(f"--{name} must be positive, got {value:g}")
    if args.skew < 0:
        raise BenchmarkError(f"--skew must not be negative, got {args.skew:g}")


def run(args: argparse.Namespace) -> int:
    """Compare and report."""
    _check(args)
    names = parse_systems(args.systems)
    effort = Effort(repeats=args.repeats, iterations=args.iterations, tries=args.tries)
    job = make_job(
        args.profile, args.workers, scale=args.scale, compute_s=args.compute, skew=args.skew
    )
    with open_lab(args.workers) as lab, track() as progress:
        result = compare(lab, job, args.balance, names, effort, progress)
    console().print(comparison_table(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))
    if args.plot:
        bars([result], args.plot)
    return 0


def compare(
    lab: Lab, job: Job, balance: float, names: Sequence[str], effort: Effort, progress: Progress
) -> dict[str, Any]:
    """Measure one cell under a progress bar."""
    title = f"{job.profile}, {job.workers} workers, balance {balance:g}"
    bar = progress.add_task(title, total=count_steps(job, names, effort))

    def step(what: str) -> None:
        progress.update(bar, advance=1, description=f"{title}: {what}")

    try:
        return Comparison(lab, job, balance, effort, step).run(names)
    finally:
        progress.remove_task(bar)
