"""Start a command, and end it with all that it has started.

Launchers put workers into sessions of their own, and workers whose launcher died have lost their
parent; what they cannot lose is their environment. So besides the descendants, every process is
ended whose environment carries the mark that this command was given.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final

from bytescheduler._imports import require

__all__ = ["ENV_JOB", "started"]

ENV_JOB: Final = "BYTESCHEDULER_JOB"
GRACE_SECONDS: Final = 5.0  # from asking processes to end to ending them


@contextmanager
def started(
    command: Sequence[str], variables: Mapping[str, str], output: IO[bytes]
) -> Generator[subprocess.Popen[bytes]]:
    """Run ``command`` with ``variables`` added to the environment; end all of it on the way out.

    Args:
        output: where standard output and error go.

    Raises:
        MissingDependencyError: psutil is not installed.
        OSError: the command cannot be started.
    """
    require("psutil", extra="tune")
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        list(command),
        env={**os.environ, **variables, ENV_JOB: mark},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process, mark)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Ask all processes to end, then end them; interrupted meanwhile, end them at once."""
    known = _processes(process, mark)  # who loses both parent and mark is still one of these
    try:
        _send(known, "terminate")
    finally:
        _send(known | _processes(process, mark), "kill")
        process.wait(timeout=GRACE_SECONDS)


def _send(processes: set[Any], order: str) -> None:
    """Give the order to all, and wait for them."""
    psutil = require("psutil", extra="tune")
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            getattr(process, order)()
    psutil.wait_procs(processes, timeout=GRACE_SECONDS)


def _processes(process: subprocess.Popen[bytes], mark: str) -> set[Any]:
    psutil = require("psutil", extra="tune")
    found: set[Any] = {item for item in psutil.process_iter() if _carries(item, mark)}
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        found.update([parent, *parent.children(recursive=True)])
    return found


def _carries(process: Any, mark: str) -> bool:
    psutil = require("psutil", extra="tune")
    try:
        return process.environ().get(ENV_JOB) == mark
    except psutil.Error:  # gone meanwhile, or somebody else's
        return False
