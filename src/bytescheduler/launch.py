"""``bytescheduler launch``: start scheduler, servers and workers, here or over ssh, and watch them.

Every process gets the ``DMLC_*`` variables that ps-lite reads; a job that Kubernetes or another
tracker starts with the same variables needs no launcher. Output is forwarded line by line with the
role and number of its process. When one process fails, all others are stopped and it is named; when
all workers have ended, servers and scheduler follow.

Servers and scheduler run this package, not the user's program: they only have to import MXNet.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Final

from bytescheduler._dmlc import NUM_SERVER, NUM_WORKER, PORT, ROLE, URI
from bytescheduler._ports import free_port
from bytescheduler.exceptions import ConfigurationError

__all__ = ["Process", "add_arguments", "plan", "run"]

SERVE: Final = "from bytescheduler._mxnet_import import load; load()"
FIRST_REMOTE_PORT: Final = 9091
GRACE: Final = 5.0  # seconds from SIGTERM to SIGKILL
LINGER: Final = 10.0  # seconds that may pass between the ends of two processes of a job
LOCAL: Final = ("localhost", "127.0.0.1")
FAILED: Final = 1
INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Process:
    """One process of the job.

    Attributes:
        name: role and number, as the prefix of its output has it.
        host: where it runs; None for here.
        command, environment: what it runs, and the variables that it needs beside those it has.
    """

    name: str
    host: str | None
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def role(self) -> str:
        """``scheduler``, ``server`` or ``worker``."""
        return self.environment[ROLE]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--servers", type=int, required=True, metavar="N", help="how many servers")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many workers")
    parser.add_argument(
        "--hosts",
        metavar="HOST,...",
        help="names for ssh; workers and servers take turns on them, and the scheduler runs on the "
        "first (default: all on this machine)",
    )
    parser.add_argument(
        "--port", type=int, help="the scheduler's port (default: a free one, 9091 over ssh)"
    )
    parser.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="how to reach a host (default: ssh)"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what each worker runs"
    )


def run(args: argparse.Namespace) -> int:
    """Start everything; return 0 when all workers did, 1 when a process failed."""
    processes = plan(
        servers=args.servers,
        workers=args.workers,
        hosts=_hosts(args.hosts),
        port=args.port,
        program=args.program,
    )
    job = _Job(processes, shlex.split(args.ssh))
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return job.run()
    except KeyboardInterrupt:
        print("bytescheduler launch: interrupted, all processes stopped", file=sys.stderr)
        return INTERRUPTED
    finally:
        job.stop()


def plan(
    *,
    servers: int,
    workers: int,
    hosts: Sequence[str],
    port: int | None,
    program: Sequence[str],
) -> list[Process]:
    """What to start, where, with which variables.

    Raises:
        ConfigurationError: a number, a port or the program is missing or wrong.
    """
    words = tuple(program[1:] if program and program[0] == "--" else program)
    if not words:
        raise ConfigurationError(
            "launch needs the program that each worker runs, got none; put it behind '--', for "
            "example: bytescheduler launch --servers 2 --workers 4 -- python train.py"
        )
    for name, number in (("--servers", servers), ("--workers", workers)):
        if number < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {number}")
    if port is not None and not 1 <= port <= 65535:
        raise ConfigurationError(f"--port must be from 1 to 65535, got {port}")
    shared = {
        URI: _address(hosts),
        PORT: str(port or _default_port(hosts)),
        NUM_SERVER: str(servers),
        NUM_WORKER: str(workers),
        "PYTHONUNBUFFERED": "1",
    }
    serve = (sys.executable, "-c", SERVE)
    places = hosts or [None]
    return [
        Process(
            name="scheduler", host=places[0], command=serve, environment=_as(shared, "scheduler")
        ),
        *(
            Process(
                name=f"server {number}",
                host=places[number % len(places)],
                command=serve,
                environment=_as(shared, "server"),
            )
            for number in range(servers)
        ),
        *(
            Process(
                name=f"worker {number}",
                host=places[number % len(places)],
                command=words,
                environment={**_as(shared, "worker"), "DMLC_WORKER_ID": str(number)},
            )
            for number in range(workers)
        ),
    ]


def _as(shared: Mapping[str, str], role: str) -> dict[str, str]:
    return {**shared, ROLE: role}


def _hosts(text: str | None) -> list[str]:
    if text is None:
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(names) or any(name.startswith("-") for name in names):
        raise ConfigurationError(
            f"--hosts must be names separated by commas, got {text!r}; for example: node1,node2"
        )
    return names


def _address(hosts: Sequence[str]) -> str:
    if not hosts or hosts[0] in LOCAL:
        return "127.0.0.1"
    name = hosts[0].rpartition("@")[2]
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigurationError(
            f"--hosts names {name!r}, whose address cannot be found ({error}); use a name or an "
            "address that all hosts can reach"
        ) from error


def _default_port(hosts: Sequence[str]) -> int:
    return FIRST_REMOTE_PORT if hosts else free_port()


class _Job:
    """The processes of one job, and the threads that forward their output."""

    def __init__(self, processes: Sequence[Process], ssh: Sequence[str]) -> None:
        self._processes = processes
        self._ssh = ssh
        self._ended: SimpleQueue[tuple[Process, int]] = SimpleQueue()
        self._running: dict[Process, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        self._printing = threading.Lock()

    def run(self) -> int:
        """Start all, forward output, and return when the job has ended, well or not."""
        for process in self._processes:
            self._start(process)
        workers = sum(process.role == "worker" for process in self._processes)
        early: Process | None = None
        while workers:
            try:
                process, code = self._ended.get(timeout=LINGER if early else None)
            except Empty:
                assert early is not None
                return self._fail(early, "ended before the workers")
            if code != 0:
                return self._fail(process, _fate(code))
            if process.role == "worker":
                workers -= 1
            else:  # all roles leave together; this one was a little faster, or the workers hang
                early = process
        self._await_servers()
        return 0

    def stop(self) -> None:
        """Stop what still runs, with all children: ask, then kill."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in self._running.values():
                _signal(child, number)
            _wait(self._running.values(), GRACE)
        for thread in self._threads:
            thread.join(GRACE)

    def _start(self, process: Process) -> None:
        child = subprocess.Popen(
            self._command(process),
            env={**os.environ, **process.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running[process] = child
        for target in (self._forward, self._reap):
            thread = threading.Thread(target=target, args=(process, child), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _command(self, process: Process) -> list[str]:
        if process.host is None or process.host in LOCAL:
            return list(process.command)
        variables = [f"{name}={value}" for name, value in process.environment.items()]
        words = ["cd", os.getcwd(), "&&", "exec", "env", *variables, *process.command]
        text = " ".join(word if word == "&&" else shlex.quote(word) for word in words)
        return [*self._ssh, "-tt", process.host, text]  # a terminal: closing ssh ends what it runs

    def _forward(self, process: Process, child: subprocess.Popen[str]) -> None:
        stream: IO[str] | None = child.stdout
        for line in stream or ():
            with self._printing:
                print(f"[{process.name}] {line.rstrip()}", flush=True)

    def _reap(self, process: Process, child: subprocess.Popen[str]) -> None:
        self._ended.put((process, child.wait()))

    def _await_servers(self) -> None:
        _wait(self._running.values(), LINGER)

    def _fail(self, process: Process, fate: str) -> int:
        self._say(f"{process.name}{_where(process)} {fate}; stopping the others")
        return FAILED

    def _say(self, text: str) -> None:
        with self._printing:
            print(f"bytescheduler launch: {text}", file=sys.stderr, flush=True)


def _where(process: Process) -> str:
    return f" on {process.host}" if process.host is not None else ""


def _fate(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _signal(child: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a child and whatever it started."""
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _wait(children: Iterable[subprocess.Popen[str]], seconds: float) -> None:
    """Wait until all have ended, or ``seconds`` have passed."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(subprocess.TimeoutExpired):
        for child in children:
            child.wait(max(0.0, deadline - time.monotonic()))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
