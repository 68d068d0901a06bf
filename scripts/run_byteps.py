"""Run a program on several BytePS workers of this host.

For: tests of the BytePS transport on a machine without a GPU. BytePS shares memory and sockets
among the processes of one host under fixed names, so two workers on one host would write into
each other's gradients. Here each worker has a mount namespace with a `/dev/shm` of its own, and a
socket folder of its own: it sees itself alone on its host, which needs root. What runs is real:
scheduler, server and workers over TCP; only the GPU runtime is null (`build_byteps.py`).

BytePS's own launcher (`bpslaunch`) starts one worker per GPU that it finds and no namespaces.

No credit is set for BytePS itself, so that its scheduler and ours do not fight.

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
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import build_byteps

from bytescheduler._ports import free_port

EXIT_USAGE = 2
EXIT_TIMEOUT = 124
SERVER_GRACE_S = 10
"""How long scheduler and server may take to end by themselves after the last worker."""

DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
OWN_SHARED_MEMORY = (
    *("unshare", "--mount", "--propagation", "private", "sh", "-c"),
    'mount -t tmpfs tmpfs /dev/shm && exec "$@"',
    "sh",
)


def why_not() -> str | None:
    """Return what keeps BytePS from running here and what to do about it, or None."""
    if not build_byteps.folder().is_dir():
        return "BytePS is not built: run `make byteps`"
    if os.geteuid() != 0:
        return "several BytePS workers on one host need root, for a mount namespace each"
    missing = [tool for tool in ("setpriv", "unshare", "mount") if shutil.which(tool) is None]
    return f"missing {', '.join(missing)}: install util-linux" if missing else None


def run(command: Sequence[str], *, workers: int, timeout_s: float) -> int:
    """Run `command` on `workers` workers; return 0, the first failing exit code, or 124.

    The first worker that fails, the time limit and an exception all end every process.
    """
    with tempfile.TemporaryDirectory(prefix="byteps-") as scratch, _processes() as processes:
        common = _common_environment(workers)
        backends = [_start_backend(role, common) for role in ("scheduler", "server")]
        processes.extend(backends)
        for rank in range(workers):
            sockets = Path(scratch, str(rank))
            sockets.mkdir()
            processes.append(_start_worker(command, rank, sockets, common))
        deadline = time.monotonic() + timeout_s
        code = _wait(processes[len(backends) :], deadline)
        if code == 0:
            _wait(backends, min(deadline, time.monotonic() + SERVER_GRACE_S))
    return code


def _common_environment(workers: int) -> dict[str, str]:
    built = build_byteps.folder()
    return {
        **os.environ,
        "PYTHONPATH": _prepend(built / "site", "PYTHONPATH"),
        "LD_LIBRARY_PATH": _prepend(built / "lib", "LD_LIBRARY_PATH"),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "BYTEPS_FORCE_DISTRIBUTED": "1",
    }


def _prepend(folder: Path, variable: str) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get(variable)]))


def _start_backend(role: str, common: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return _start([sys.executable, "-c", "import byteps.server"], {**common, "DMLC_ROLE": role})


def _start_worker(
    command: Sequence[str], rank: int, sockets: Path, common: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    environment = {
        **common,
        "DMLC_ROLE": "worker",
        "DMLC_WORKER_ID": str(rank),
        "BYTEPS_LOCAL_RANK": "0",
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SOCKET_PATH": str(sockets),
    }
    return _start([*OWN_SHARED_MEMORY, *command], environment)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*DIE_WITH_PARENT, *command], env=environment, start_new_session=True)


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
