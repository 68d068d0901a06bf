"""A command is ended with everything it has started, whatever its children do to escape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bytescheduler.tuning import processes

psutil = pytest.importorskip("psutil")

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
LAUNCH = f"""
import subprocess, sys, time
child = [sys.executable, "-c", {STUBBORN!r}]
stray = subprocess.Popen(child, env={{}}, start_new_session=True)
open(sys.argv[1] + "/new", "w").write(str(stray.pid))
time.sleep(600)
"""


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended, reaped or not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_and_leave(folder: Path) -> int:
    """Run a command whose child has a session and an environment of its own; the child's id."""
    command = [sys.executable, "-c", LAUNCH, str(folder)]
    written = folder / "new"
    with (folder / "output").open("wb") as output, processes.started(command, {}, output) as job:
        for _ in range(300):
            if written.exists() and written.read_text():
                break
            with pytest.raises(subprocess.TimeoutExpired):
                job.wait(0.1)
        stray = int(written.read_text())
        assert runs(stray)
    return stray


@pytest.mark.multiprocess
def test_a_child_that_keeps_neither_parent_nor_mark_nor_heeds_a_signal_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    stray = start_and_leave(tmp_path)
    assert not runs(stray)


@pytest.mark.multiprocess
def test_an_interruption_while_ending_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = psutil.wait_procs
    calls: list[float] = []

    def interrupted(found: object, timeout: float) -> object:
        calls.append(timeout)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return wait(found, timeout=timeout)

    monkeypatch.setattr(psutil, "wait_procs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_and_leave(tmp_path)
    assert not runs(int((tmp_path / "new").read_text()))
