"""Jobs of parameter servers for tests: started, watched, and killed with all their children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
SERVE = (sys.executable, "-c", "from bytescheduler._mxnet_import import load; load()")
LIMIT = 170.0  # seconds


class Job:
    """A scheduler, servers and workers on loopback.

    Args:
        folder: takes the output, one file per process.
    """

    def __init__(self, folder: Path, *, servers: int = 2, workers: int = 2) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(_free_port()),
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(workers),
        }
        self.start("scheduler", "scheduler", SERVE)
        for number in range(servers):
            self.start(f"server {number}", "server", SERVE)

    def start(self, name: str, role: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.txt").open("wb") as output:
            self.processes[name] = subprocess.Popen(
                list(command),
                env={**self._environment, "DMLC_ROLE": role},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text(errors="replace")

    def wait(self, names: Sequence[str], limit: float = LIMIT) -> dict[str, int]:
        deadline = time.monotonic() + limit
        return {
            name: self.processes[name].wait(max(0.1, deadline - time.monotonic())) for name in names
        }

    def wait_for(self, name: str, text: str, limit: float = LIMIT) -> None:
        deadline = time.monotonic() + limit
        while text not in self.output(name):
            assert self.processes[name].poll() is None, self.output(name)
            assert time.monotonic() < deadline, self.output(name)
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        try:
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.processes[name].wait()


@contextmanager
def job(folder: Path, *, servers: int = 2, workers: int = 2) -> Iterator[Job]:
    started = Job(folder, servers=servers, workers=workers)
    try:
        yield started
    finally:
        for name in started.processes:
            started.kill(name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
