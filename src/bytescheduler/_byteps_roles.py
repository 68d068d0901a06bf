"""A whole BytePS job on one host, each worker as if it were alone on a host of its own.

BytePS shares memory and sockets among the processes of one host under fixed names, so two workers
beside each other would write into each other's gradients. Each therefore gets a mount namespace
with a ``/dev/shm`` of its own, where its sockets lie too. That takes root, or a kernel that lets
ordinary users make namespaces. Scheduler, server and workers are BytePS's own, over TCP.

No credit is set inside BytePS, so that its scheduler and ours do not fight.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from bytescheduler._ports import free_port

__all__ = ["roles", "why_not"]

ADDRESS: Final = "127.0.0.1"
SHARED_MEMORY: Final = "/dev/shm"
TRY_TIMEOUT: Final = 10.0  # seconds
TOOLS: Final = ("unshare", "mount")


def why_not() -> str | None:
    """Return what keeps several workers from running on this host and the remedy, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"missing {', '.join(missing)}: install util-linux"
    try:
        tried = subprocess.run([*_alone(), "true"], capture_output=True, timeout=TRY_TIMEOUT)
    except subprocess.TimeoutExpired:
        tried = None
    if tried is not None and tried.returncode == 0:
        return None
    return (
        "two BytePS workers on one host need a mount namespace each, which this user may not make "
        "here: run it as root, or with one worker per host"
    )


def roles(command: Sequence[str], workers: int) -> list[tuple[Sequence[str], Mapping[str, str]]]:
    """Return each process's command and its variables: scheduler, server, then the workers.

    Args:
        command: what every worker runs.
        workers: how many.
    """
    shared = {
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": ADDRESS,
        "DMLC_PS_ROOT_PORT": str(free_port(ADDRESS)),
        "DMLC_NODE_HOST": ADDRESS,
        "BYTEPS_FORCE_DISTRIBUTED": "1",
    }
    worker = {
        **shared,
        "DMLC_ROLE": "worker",
        "BYTEPS_LOCAL_RANK": "0",
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SOCKET_PATH": SHARED_MEMORY,
    }
    serve = [sys.executable, "-c", "import byteps.server"]
    alone = [*_alone(), *command]
    return [
        *((serve, {**shared, "DMLC_ROLE": role}) for role in ("scheduler", "server")),
        *((alone, {**worker, "DMLC_WORKER_ID": str(rank)}) for rank in range(workers)),
    ]


def _alone() -> list[str]:
    """What to put before a command so that it has a ``/dev/shm`` of its own."""
    as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = f'mount -t tmpfs tmpfs {SHARED_MEMORY} && exec "$@"'
    return ["unshare", *as_user, "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
