"""Ends of processes: none outlives the command that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
KILL_TIMEOUT_S = 20.0


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and "BENCHMARK_ADDRESS" in os.environ:
        sys.exit("the process that started this one has ended")


def signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process that leads a session, with all its children; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, with all its children.

    On a machine that is too busy to bury it in time it is left to the kernel: whoever cleans up
    must go on with the others.
    """
    signal_session(process, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that ``finally`` blocks run.

    Ctrl-C itself too, for a command that was started with SIGINT ignored, as shells do for ``&``.
    """

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
