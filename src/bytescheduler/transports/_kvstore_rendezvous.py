"""Joining a parameter-server job, which blocks inside MXNet until everybody has come.

A worker that waits long says so, and says who is missing as far as it can be seen from its host:
every process of the job keeps a connection to the scheduler, and on Linux a process's connections
and its ``DMLC_ROLE`` can be read from ``/proc`` by the same user.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bytescheduler import _mxnet_import
from bytescheduler._dmlc import PORT, ROLE, Job

__all__ = ["create_kvstore", "missing_roles"]

PATIENCE: Final = 10.0  # seconds until the first message
REMINDER: Final = 60.0  # seconds between the next ones
NO_SPLIT: Final = 1 << 30  # elements; chunks are split here, not by MXNet
BOUND: Final = "MXNET_KVSTORE_BIGARRAY_BOUND"
_ESTABLISHED: Final = "01"
_PROC: Final = Path("/proc")
_SOCKET: Final = "socket:["
_log = logging.getLogger("bytescheduler")


def create_kvstore(kind: str, job: Job) -> Any:
    """Collective, blocking: return ``mxnet.kv.create(kind)``, with messages while it waits."""
    mxnet = _mxnet_import.load()
    with _environment({BOUND: str(NO_SPLIT)}), _patience(job):
        return mxnet.kv.create(kind)


def missing_roles(job: Job) -> dict[str, int] | None:
    """How many of each role have not joined, or None where this host cannot tell."""
    if not _scheduler_is_here(job):
        return None
    present = _roles_present(job)
    expected = {"scheduler": 1, "server": job.servers, "worker": job.workers}
    return {role: number - present[role] for role, number in expected.items()}


def describe_missing(job: Job) -> str:
    """One sentence on who is missing."""
    missing = missing_roles(job)
    if missing is None:
        state = "answers" if _reachable(job) else "does not answer: it is missing, or unreachable"
        return (
            f"the scheduler at {job.host}:{job.port} {state}; {job.servers} servers and "
            f"{job.workers} workers are expected, and not all of them have joined"
        )
    names = [f"{number} {role}{'s' * (number > 1)}" for role, number in missing.items() if number]
    return "missing: " + (", ".join(names) or "nobody, they are about to start")


@contextmanager
def _patience(job: Job) -> Generator[None]:
    over = threading.Event()

    def remind() -> None:
        seconds, pause = 0.0, PATIENCE
        while not over.wait(pause):
            seconds += pause
            pause = REMINDER
            _log.warning(
                "bytescheduler: this worker has waited %.0f s for the parameter-server job at "
                "%s:%d to be complete; %s",
                seconds, job.host, job.port, describe_missing(job),
            )  # fmt: skip

    reminder = threading.Thread(target=remind, name="bytescheduler-patience", daemon=True)
    reminder.start()
    try:
        yield
    finally:
        over.set()
        reminder.join()


@contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _scheduler_is_here(job: Job) -> bool:
    """Whether the scheduler's address is one of this host's; only there all connections show."""
    if not _PROC.joinpath("net", "tcp").exists():
        return False
    try:
        with socket.socket() as probe:
            probe.bind((job.host, 0))
    except OSError:
        return False
    return True


def _reachable(job: Job) -> bool:
    try:
        socket.create_connection((job.host, job.port), timeout=2).close()
    except OSError:
        return False
    return True


def _roles_present(job: Job) -> Counter[str]:
    """Roles of the processes on this host that hold a connection to or as the scheduler."""
    sockets = _scheduler_sockets(job.port)
    roles: Counter[str] = Counter()
    for process in _PROC.iterdir():
        if process.name.isdecimal() and _sockets_of(process) & sockets:
            environment = _environment_of(process)
            if environment.get(PORT) == str(job.port):
                roles[environment.get(ROLE, "")] += 1
    return roles


def _scheduler_sockets(port: int) -> set[str]:
    """Inodes of sockets that listen on, or are connected with, ``port``."""
    wanted = f"{port:04X}"
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with _PROC.joinpath("net", table).open() as lines:
            next(lines)
            for line in lines:
                _, local, remote, state, *rest = line.split()
                ours = local.endswith(":" + wanted)
                if ours or (state == _ESTABLISHED and remote.endswith(":" + wanted)):
                    found.add(rest[5])
    return found


def _sockets_of(process: Path) -> set[str]:
    try:
        entries = list((process / "fd").iterdir())
    except OSError:
        return set()
    links = {_target(entry) for entry in entries}
    return {link[len(_SOCKET) : -1] for link in links if link.startswith(_SOCKET)}


def _target(link: Path) -> str:
    """Where a link leads, or nowhere when it has gone meanwhile, as the listing's own has."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _environment_of(process: Path) -> dict[str, str]:
    try:
        text = (process / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
