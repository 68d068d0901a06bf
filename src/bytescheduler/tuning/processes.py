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
    """Ask all processes to end, then end them."""
    psutil = require("psutil", extra="tune")
    for order in ("terminate", "kill"):
        alive = _processes(process, mark)
        for item in alive:
            with suppress(psutil.NoSuchProcess):
                getattr(item, order)()
        psutil.wait_procs(alive, timeout=GRACE_SECONDS)
    process.wait(timeout=GRACE_SECONDS)


def _processes(process: subprocess.Popen[bytes], mark: str) -> list[Any]:
    psutil = require("psutil", extra="tune")
    found: list[Any] = []
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        found = [parent, *parent.children(recursive=True)]
    return list({*found, *(item for item in psutil.process_iter() if _carries(item, mark))})


def _carries(process: Any, mark: str) -> bool:
    psutil = require("psutil", extra="tune")
    try:
        return process.environ().get(ENV_JOB) == mark
    except psutil.Error:  # gone meanwhile, or somebody else's
        return False
