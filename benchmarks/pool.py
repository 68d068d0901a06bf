"""Worker processes, one per host, that stay up and obey one command after the other.

Starting a framework takes seconds, a measurement often less, so the processes are kept: a command
is a line of JSON to every worker's standard input, an answer a line from each. Processes that
wait for a command are stopped (SIGSTOP), so that several pools (one per engine) can take turns on
one machine without engines that poll, like Horovod's, disturbing the others. Engines that take a
stopped process for a lost one are left running.

Every process dies with its pool, and the pool with the ``with`` block; a worker that is silent
for too long, fails or dies ends the whole pool with an error that quotes its last words.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.errors import BenchmarkError
from benchmarks.network import Host
from benchmarks.processes import end_session, signal_session

ROOT = Path(__file__).parents[1]
STOP_TIMEOUT_S = 5.0
QUOTED_CHARACTERS = 1500


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of a pool."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    pending: bytearray = field(default_factory=bytearray)

    def line(self) -> str | None:
        """The next whole line that has arrived."""
        end = self.pending.find(b"\n")
        if end < 0:
            return None
        text = bytes(self.pending[:end]).decode()
        del self.pending[: end + 1]
        return text

    def first_line(self) -> str:
        """The first line that the process prints (a port, say)."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], STOP_TIMEOUT_S)
        line = self.process.stdout.readline().decode().strip() if ready else ""
        if not line:
            raise BenchmarkError(f"a helper process did not start: {self.last_words()}")
        return line

    def last_words(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-QUOTED_CHARACTERS:]


class Pool:
    """Workers of one engine; make it with :func:`pool`."""

    def __init__(self, members: Sequence[Member], *, stopping: bool = True) -> None:
        self._members = members
        self._stopping = stopping

    def call(self, command: Mapping[str, Any], timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Send ``command`` to every worker; return the answers by rank.

        Raises:
            BenchmarkError: a worker failed, died or did not answer in time.
        """
        message = (json.dumps(command) + "\n").encode()
        self._signal(signal.SIGCONT)
        for rank, member in enumerate(self._members):
            self._send(rank, member, message)
        answers = self._receive(time.monotonic() + timeout_s, timeout_s)
        if self._stopping:
            self._signal(signal.SIGSTOP)
        failed = [(rank, a["error"]) for rank, a in enumerate(answers) if "error" in a]
        if failed:
            raise BenchmarkError(f"worker {failed[0][0]}: {failed[0][1]}")
        return answers

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members:
            signal_session(member.process, number)

    def _send(self, rank: int, member: Member, message: bytes) -> None:
        assert member.process.stdin is not None
        try:
            member.process.stdin.write(message)
            member.process.stdin.flush()
        except BrokenPipeError as error:
            raise BenchmarkError(f"worker {rank} is gone: {member.last_words()}") from error

    def _receive(self, deadline: float, timeout_s: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, member in enumerate(self._members):
                selector.register(member.process.stdout, selectors.EVENT_READ, rank)  # type: ignore[arg-type]
            while len(answers) < len(self._members):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = sorted(set(range(len(self._members))) - answers.keys())
                    words = self._members[silent[0]].last_words()
                    raise BenchmarkError(
                        f"workers {silent} did not answer in {timeout_s:g} s: {words}"
                    )
                for key, _ in ready:
                    self._read(key.data, answers)
        return [answers[rank] for rank in range(len(self._members))]

    def _read(self, rank: int, answers: dict[int, dict[str, Any]]) -> None:
        member = self._members[rank]
        assert member.process.stdout is not None
        data = os.read(member.process.stdout.fileno(), 1 << 16)
        if not data:
            raise BenchmarkError(f"worker {rank} ended: {member.last_words()}")
        member.pending.extend(data)
        line = member.line()
        if line is not None:
            answers[rank] = json.loads(line)


@contextmanager
def pool(
    hosts: Sequence[Host],
    argv: Sequence[str],
    environment: Mapping[str, str],
    each: Sequence[Mapping[str, str]],
    *,
    stopping: bool = True,
    start_timeout_s: float = 300.0,
) -> Iterator[Pool]:
    """Start ``python argv`` on every host and wait until all are ready.

    Args:
        hosts: one worker on each, rank by rank.
        argv: arguments to Python.
        environment: variables of all workers.
        each: further variables of every rank.
        stopping: whether workers are stopped between commands.
        start_timeout_s: how long starting may take.
    """
    members: list[Member] = []
    try:
        for rank, host in enumerate(hosts):
            own = {**environment, **_identity(rank, hosts), **each[rank]}
            members.append(_start(host, argv, own))
        workers = Pool(members, stopping=stopping)
        workers.call({"do": "hello"}, start_timeout_s)
        yield workers
    finally:
        _stop(members)


@contextmanager
def helper(host: Host, argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[Member]:
    """Start ``python argv`` on a host, as something that workers need beside them."""
    member = _start(host, argv, {**environment, "BENCHMARK_ADDRESS": host.address})
    try:
        yield member
    finally:
        _stop([member])


def _identity(rank: int, hosts: Sequence[Host]) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].address,
        "GLOO_SOCKET_IFNAME": hosts[rank].interface,
        "BENCHMARK_ADDRESS": hosts[rank].address,
    }


def python_environment() -> dict[str, str]:
    """The environment of every process here: our own source, one thread per worker."""
    ours = ("BYTESCHEDULER_", "HOROVOD_", "DMLC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**kept, **threads, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _start(host: Host, argv: Sequence[str], environment: Mapping[str, str]) -> Member:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _stop
    process = subprocess.Popen(
        host.command([sys.executable, *argv]),
        env={**python_environment(), **environment},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    return Member(process=process, log=log)


def _stop(members: Sequence[Member]) -> None:
    """Close standard input, which ends an idle worker, then kill what is left of its session."""
    for member in members:
        signal_session(member.process, signal.SIGCONT)
        assert member.process.stdin is not None
        with suppress(BrokenPipeError):
            member.process.stdin.close()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for member in members:
        with suppress(subprocess.TimeoutExpired):
            member.process.wait(max(0.0, deadline - time.monotonic()))
    for member in members:
        end_session(member.process)
        member.log.close()
        if member.process.stdout is not None:
            member.process.stdout.close()
