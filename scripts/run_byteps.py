"""Run a program on several BytePS workers of this host.

For: tests of the BytePS transport on a machine without a GPU. What runs is real: scheduler, server
and workers over TCP, each worker in a mount namespace of its own; only the GPU runtime is null
(`build_byteps.py`). BytePS's own launcher (`bpslaunch`) starts one worker per GPU that it finds
and no namespaces.

Usage: .venv/bin/python scripts/run_byteps.py --workers 2 -- .venv/bin/python train.py
"""

from __future__ import annotations

import argparse
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import build_byteps

from bytescheduler import _byteps_roles

EXIT_USAGE = 2
EXIT_TIMEOUT = 124
SERVER_GRACE_S = 10
"""How long scheduler and server may take to end by themselves after the last worker."""

DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")


def why_not() -> str | None:
    """Return what keeps BytePS from running here and what to do about it, or None."""
    if not build_byteps.folder().is_dir():
        return "BytePS is not built: run `make byteps`"
    if shutil.which(DIE_WITH_PARENT[0]) is None:
        return "missing setpriv: install util-linux"
    return _byteps_roles.why_not()


def run(command: Sequence[str], *, workers: int, timeout_s: float) -> int:
    """Run `command` on `workers` workers; return 0, the first failing exit code, or 124.

    The first worker that fails, the time limit and an exception all end every process.
    """
    built = environment()
    with _processes() as processes:
        for role, variables in _byteps_roles.roles(command, workers):
            processes.append(_start(role, {**built, **variables}))
        deadline = time.monotonic() + timeout_s
        ranks = processes[-workers:]
        code = _wait(ranks, deadline)
        for rank, process in enumerate(ranks):
            if process.returncode:
                print(f"rank {rank} failed with exit code {code}", file=sys.stderr)
        if code == 0:
            _wait(processes[:-workers], min(deadline, time.monotonic() + SERVER_GRACE_S))
    return code


def environment() -> dict[str, str]:
    """Return this process's variables with those by which the build is found."""
    built = build_byteps.folder()
    return {
        **os.environ,
        "PYTHONPATH": _prepend(built / "site", "PYTHONPATH"),
        "LD_LIBRARY_PATH": _prepend(built / "lib", "LD_LIBRARY_PATH"),
    }


def _prepend(folder: Path, variable: str) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*DIE_WITH_PARENT, *command], env=variables, start_new_session=True)


@contextmanager
def _processes() -> Generator[list[subprocess.Popen[bytes]]]:
    """Yield a list; on leaving, kill every process in it that still runs, with its children."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> int:
    """Wait until all have ended well, one has failed, or the deadline has passed."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, process)
        try:
            return _wait_for_each(selector, deadline)
        finally:
            for key in list(selector.get_map().values()):
                os.close(key.fd)


def _wait_for_each(selector: selectors.BaseSelector, deadline: float) -> int:
    while selector.get_map():
        ended = selector.select(max(0.0, deadline - time.monotonic()))
        if not ended:
            return EXIT_TIMEOUT
        for key, _ in ended:
            selector.unregister(key.fd)
            os.close(key.fd)
            if (code := key.data.wait()) != 0:
                return code if code > 0 else 128 - code
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run a program on several BytePS workers of this host."
    )
    parser.add_argument("--workers", type=int, default=2, help="number of workers (2)")
    parser.add_argument("--timeout", type=float, default=120, help="time limit in seconds (120)")
    parser.add_argument("command", nargs="+", help="after --: the program and its arguments")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return EXIT_USAGE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run(args.command, workers=args.workers, timeout_s=args.timeout)


if __name__ == "__main__":
    sys.exit(main())
