"""One trial: run a launch command under given settings, and read how fast it was.

The command's processes find their settings in the environment, and rank 0 appends its iterations
to a file that is named there (``report``). As soon as enough of them are known the command is
ended: a training script need not be shortened for tuning.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from bytescheduler.core.config import (
    ENV_CREDIT_SIZE,
    ENV_MODE,
    ENV_PARTITION_SIZE,
    Settings,
)
from bytescheduler.tuning.processes import started
from bytescheduler.tuning.report import ENV_REPORT, Report, read

__all__ = ["UNWRAPPED", "Trial", "run_trial"]

POLL_SECONDS: Final = 0.2
PATIENCE_SECONDS: Final = 5.0  # without an iteration, at least, before a job counts as hung
WARM_UP: Final = 8  # iterations
FEWEST: Final = 3  # iterations after that, of a command that ended by itself
WANTED: Final = 30  # iterations after that, at which a command is ended
HUNG: Final = 10  # iterations' time without one
UNWRAPPED: Final = "no optimizer was wrapped"
TAIL_BYTES: Final = 12_000  # all ranks that saw one fail write a traceback behind its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one run of the command showed.

    Attributes:
        settings: those that were asked for.
        report: what the adapter reported; None if no optimizer was wrapped.
        seconds: median iteration time; None if the trial failed.
        failure: why, in words, if it failed.
        output: the end of what it printed.
    """

    settings: Settings
    report: Report | None
    seconds: float | None
    failure: str | None = None
    output: str = ""


def run_trial(command: Sequence[str], settings: Settings, timeout: float) -> Trial:
    """Run ``command`` under ``settings`` for at most ``timeout`` seconds, then end all of it.

    Raises:
        FileNotFoundError, PermissionError: the command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="bytescheduler-") as folder:
        path, printed = Path(folder) / "report.jsonl", Path(folder) / "output"
        with (
            printed.open("wb") as output,
            started(command, _variables(settings, path), output) as process,
        ):
            failure = _follow(process, path, timeout)
            tail = _tail(printed)  # before the launcher complains of being ended
        return _judge(settings, read(path), failure, tail)


def _variables(settings: Settings, report: Path) -> dict[str, str]:
    return {
        ENV_PARTITION_SIZE: str(settings.partition_size),
        ENV_CREDIT_SIZE: str(settings.credit_size),
        ENV_MODE: settings.mode,
        ENV_REPORT: str(report),
    }


def _follow(process: subprocess.Popen[bytes], path: Path, timeout: float) -> str | None:
    """Wait until the command ends, has shown enough, or is late; what went wrong, if anything."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        code = _exit_code(process)
        if code is not None:
            return f"ended with exit code {code}" if code else None
        if len(_times(read(path))) >= WANTED:
            return None
    return _late(read(path), path, timeout)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _late(report: Report | None, path: Path, timeout: float) -> str | None:
    """A slow job may be late; one that stands still hangs."""
    if report is None:
        return f"{UNWRAPPED} within {timeout:g} s (a script that starts slower needs --timeout)"
    times = _times(report)
    if len(times) < FEWEST:
        return f"not enough iterations within {timeout:g} s"
    idle = time.time() - path.stat().st_mtime
    if idle > max(PATIENCE_SECONDS, HUNG * median(times)):
        return f"hung: no iteration ended in the last {idle:.0f} of {timeout:g} s"
    return None


def _times(report: Report | None) -> tuple[float, ...]:
    return report.seconds[WARM_UP:] if report else ()


def _tail(printed: Path) -> str:
    with printed.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()


def _judge(settings: Settings, report: Report | None, failure: str | None, tail: str) -> Trial:
    times = _times(report)
    if failure is None and report is None:
        failure = UNWRAPPED
    elif failure is None and len(times) < FEWEST:
        failure = f"too few iterations: {WARM_UP + FEWEST + 1} or more are needed"
    seconds = median(times) if failure is None else None
    return Trial(settings=settings, report=report, seconds=seconds, failure=failure, output=tail)
