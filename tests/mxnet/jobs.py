"""Jobs of parameter servers for tests: started, watched, and killed with all their children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bytescheduler._ports import free_port

SOURCE = Path(__file__).resolve().parents[2] / "src"
SERVE = (sys.executable, "-c", "from bytescheduler._mxnet_import import load; load()")
LIMIT = 170.0  # seconds


class Process:
    """A process of a job, and what it has said so far."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines: list[bytes] = []
        self._silent = False  # its output has ended
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return b"".join(self._lines).decode(errors="replace")

    def wait(self, limit: float) -> int:
        code = self._popen.wait(limit)
        self._reader.join(limit)
        return code

    def wait_for(self, text: str, limit: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: text in self.output or self._silent, limit)
        assert text in self.output, self.output

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as stream:
            for line in stream:
                self._heard(line)
        with self._changed:
            self._silent = True
            self._changed.notify_all()

    def _heard(self, line: bytes) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()


class Job:
    """A scheduler, servers and workers on loopback."""

    def __init__(self, *, servers: int = 2, workers: int = 2) -> None:
        self.processes: dict[str, Process] = {}
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(workers),
        }
        self.start("scheduler", "scheduler", SERVE)
        for number in range(servers):
            self.start(f"server {number}", "server", SERVE)

    def start(self, name: str, role: str, command: Sequence[str]) -> None:
        self.processes[name] = Process(command, {**self._environment, "DMLC_ROLE": role})

    def output(self, name: str) -> str:
        return self.processes[name].output

    def wait(self, names: Sequence[str], limit: float = LIMIT) -> dict[str, int]:
        deadline = time.monotonic() + limit
        return {
            name: self.processes[name].wait(max(0.1, deadline - time.monotonic())) for name in names
        }

    def wait_for(self, name: str, text: str, limit: float = LIMIT) -> None:
        self.processes[name].wait_for(text, limit)

    def kill(self, name: str) -> None:
        self.processes[name].kill()


@contextmanager
def job(*, servers: int = 2, workers: int = 2) -> Iterator[Job]:
    started = Job(servers=servers, workers=workers)
    try:
        yield started
    finally:
        for name in started.processes:
            started.kill(name)
