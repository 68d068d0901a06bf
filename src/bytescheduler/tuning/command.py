"""``bytescheduler tune [options] -- COMMAND...``: find the best settings for a launch command."""

from __future__ import annotations

import argparse
import shutil
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from bytescheduler._imports import require
from bytescheduler.core.config import format_size
from bytescheduler.exceptions import ConfigurationError
from bytescheduler.tuning.offline import Outcome, Study, describe, environment_lines
from bytescheduler.tuning.picture import draw_surface

__all__ = ["add_arguments", "run"]

EXTRA = "tune"
ENDING = (signal.SIGTERM, signal.SIGHUP)
NEEDED = ("skopt", "psutil", "rich", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.usage = "bytescheduler tune [--trials N] [--timeout T] [--output FILE] -- COMMAND..."
    parser.add_argument(
        "--trials", type=int, default=15, metavar="N", help="runs of the command (default: 15)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="T",
        help="seconds after which a run is ended (default: 120); it ends earlier once measured",
    )
    parser.add_argument(
        "--output",
        default="bytescheduler-tune.json",
        metavar="FILE",
        help="trials and result, as JSON; an existing one is gone on with (default: %(default)s)",
    )
    parser.add_argument(
        "launch",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND...",
        help="what starts the job, e.g. torchrun --nproc-per-node 2 train.py",
    )


def run(args: argparse.Namespace) -> int:
    """Run the trials, print a table and the lines to set; 0 if a trial succeeded, else 1."""
    command = _command(args)
    for module in NEEDED:
        require(module, extra=EXTRA)
    study = Study.open(Path(args.output), command)
    try:
        with _ending_interrupts():
            _run_trials(study, args.trials, args.timeout)
    except KeyboardInterrupt:
        _print_result(study)
        print(f"interrupted; the same command goes on after {len(study.outcomes)} trials")
        raise
    _print_result(study)
    return 0 if study.best else 1


def _command(args: argparse.Namespace) -> Sequence[str]:
    launch = list(args.launch)
    command = launch[1:] if launch[:1] == ["--"] else launch
    if not command:
        raise ConfigurationError(
            "tune needs the command that starts the job, got none; "
            "write: bytescheduler tune -- torchrun --nproc-per-node 2 train.py"
        )
    if args.trials < 1:
        raise ConfigurationError(f"--trials must be at least 1, got {args.trials}; 15 is usual")
    if not args.timeout > 0:
        raise ConfigurationError(f"--timeout must be positive, got {args.timeout:g}; pass seconds")
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"the command {command[0]!r} is not found or not executable; "
            "check its name and PATH, or start it with python"
        )
    return command


@contextmanager
def _ending_interrupts() -> Generator[None]:
    """Let SIGTERM, or the terminal that goes away, end the running trial as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_trials(study: Study, trials: int, timeout: float) -> None:
    progress = require("rich.progress", extra=EXTRA)
    if study.outcomes:
        print(f"going on after {len(study.outcomes)} trials in {study.path}")
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    ) as bar:
        task = bar.add_task("trials", total=trials, completed=len(study.outcomes))
        for settings, outcome in study.run(trials, timeout):
            if outcome is None:
                bar.update(task, description=describe(settings))
            else:
                bar.console.print(_line(outcome), markup=False, highlight=False)
                bar.advance(task)


def _line(outcome: Outcome) -> str:
    result = f"{outcome.seconds * 1e3:.1f} ms" if outcome.seconds else f"failed: {outcome.failure}"
    return f"{describe(outcome.settings)}: {result}"


def _print_result(study: Study) -> None:
    best = study.best
    if not study.outcomes:
        return
    console = require("rich.console", extra=EXTRA).Console()
    console.print(_table(study))
    if best is None:
        console.print("no trial succeeded")
        return
    picture = draw_surface(study, study.path.with_suffix(".png"))
    console.print(f"trials: {study.path}\nsurface: {picture}", highlight=False, soft_wrap=True)
    console.print("\nThe lines to set:", highlight=False)
    for line in environment_lines(best.settings):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(study: Study) -> Any:
    table = require("rich.table", extra=EXTRA).Table(title="Trials")
    for heading in ("", "schedule", "partition", "credit", "ms per iteration"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for number, outcome in enumerate(study.outcomes, start=1):
        best = outcome is study.best
        table.add_row(
            str(number),
            outcome.settings.mode,
            format_size(outcome.settings.partition_size),
            format_size(outcome.settings.credit_size),
            f"{outcome.seconds * 1e3:.1f}" if outcome.seconds else "failed",
            style="bold" if best else None,
        )
    return table
