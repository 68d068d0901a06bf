"""The engines that the doctor knows: what each needs, how two of its ranks start, its RDMA.

Each is tried in processes of its own under a time limit, because an engine that does not fit here
crashes, hangs or prints, and none of that must reach the doctor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from bytescheduler import _byteps_roles
from bytescheduler._ports import free_port, free_ports
from bytescheduler.doctor.probe import MARK
from bytescheduler.tuning.processes import started

__all__ = ["ENGINES", "Engine", "Finding", "examine", "program"]

RANKS: Final = 2
ADDRESS: Final = "127.0.0.1"
TAIL_CHARACTERS: Final = 600
ERROR_LINE: Final = r"[\w.]+(?:Error|Exception): .*$"
INFINIBAND: Final = Path("/sys/class/infiniband")

Command = tuple[Sequence[str], Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found out about one engine.

    Attributes:
        installed: whether its packages are there.
        works: whether two ranks averaged rightly.
        error: why not, if they did not.
        latency_s: seconds of a small chunk.
        bandwidth_bytes_per_s: gradient bytes per second of a large chunk.
        install: what to run to get it, where it is missing.
        rdma: what it would use for RDMA.
    """

    installed: bool
    works: bool
    error: str | None
    latency_s: float | None
    bandwidth_bytes_per_s: float | None
    install: str | None
    rdma: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How to try one engine.

    Attributes:
        name: of the transport.
        modules: packages that it needs.
        program: executable that it needs, if any.
        install: how to get both.
        commands: processes that together are two ranks; the ones before ``ranks`` from the end
            serve until the others have ended.
        rdma: says what it would use for RDMA, in this environment.
        why_not: says what keeps two ranks from running on this machine, if anything does.
    """

    name: str
    modules: tuple[str, ...]
    install: str
    commands: Callable[[], list[Command]]
    rdma: Callable[[], str]
    ranks: int = RANKS
    program: str | None = None
    why_not: Callable[[], str | None] = lambda: None

    @property
    def installed(self) -> bool:
        """Whether packages and program are there."""
        found = all(importlib.util.find_spec(module) is not None for module in self.modules)
        return found and (self.program is None or program(self.program) is not None)


def examine(engine: Engine, timeout: float) -> Finding:
    """Try ``engine`` with two ranks on this machine, for at most ``timeout`` seconds."""
    result: dict[str, Any] = {}
    error: str | None = None
    if engine.installed:
        error = engine.why_not()
        if error is None:
            result, error = _try(engine, timeout)
    return Finding(
        installed=engine.installed,
        works=bool(result),
        error=error,
        latency_s=result.get("latency_s"),
        bandwidth_bytes_per_s=result.get("bandwidth_bytes_per_s"),
        install=None if engine.installed else engine.install,
        rdma=engine.rdma(),
    )


def _try(engine: Engine, timeout: float) -> tuple[dict[str, Any], str | None]:
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryFile() as output, ExitStack() as stack:
        processes = [
            stack.enter_context(started(command, variables, output))
            for command, variables in engine.commands()
        ]
        late = not all(_ended(process, deadline) for process in processes[-engine.ranks :])
        stack.close()
        return _read(output, f"no answer within {timeout:g} s" if late else None)


def _ended(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _read(output: IO[bytes], failure: str | None) -> tuple[dict[str, Any], str | None]:
    output.seek(0)
    text = output.read().decode(errors="replace")
    for line in text.splitlines():
        _, found, result = line.partition(MARK)
        if found:
            return json.loads(result), None
    return {}, f"{failure or 'the ranks ended without a result'}; {_cause(text)}"


def _cause(output: str) -> str:
    """The first error in the output, as later ones tend to follow from it; else the end of it."""
    error = re.search(ERROR_LINE, output, re.MULTILINE)
    if error is not None:
        return error[0].strip()
    return f"last output: {output.strip()[-TAIL_CHARACTERS:] or 'none'}"


def _probe(name: str) -> list[str]:
    return [sys.executable, "-m", "bytescheduler.doctor.probe", name]


def program(name: str) -> str | None:
    """Return the path of an executable of this environment, else of the system; None if missing."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))


# -- two ranks of each engine


def _torch() -> list[Command]:
    port = str(free_port(ADDRESS))
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": ADDRESS, "MASTER_PORT": port}
    return [
        (_probe("torch"), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]


def _tensorflow() -> list[Command]:
    workers = [f"{ADDRESS}:{port}" for port in free_ports(RANKS, ADDRESS)]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return [
        (
            _probe("tensorflow"),
            {
                **quiet,
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                ),
            },
        )
        for rank in range(RANKS)
    ]


def _horovod() -> list[Command]:
    launcher = [str(program("horovodrun")), "--gloo", "-np", str(RANKS)]
    return [([*launcher, "-H", f"localhost:{RANKS}", *_probe("horovod")], {})]


def _mpi() -> list[Command]:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    launcher = [str(program("mpirun")), *as_root, "--oversubscribe", "-np", str(RANKS)]
    return [([*launcher, *_probe("mpi")], {})]


def _kvstore() -> list[Command]:
    shared = {
        "DMLC_PS_ROOT_URI": ADDRESS,
        "DMLC_PS_ROOT_PORT": str(free_port(ADDRESS)),
        "DMLC_NUM_WORKER": str(RANKS),
        "DMLC_NUM_SERVER": "1",
    }
    serve = [sys.executable, "-c", "from bytescheduler._mxnet_import import load; load()"]
    roles = [("scheduler", serve), ("server", serve), *[("worker", _probe("kvstore"))] * RANKS]
    return [(command, {**shared, "DMLC_ROLE": role}) for role, command in roles]


def _byteps() -> list[Command]:
    return _byteps_roles.roles(_probe("byteps"), RANKS)


# -- what each would use for RDMA


def _devices() -> str:
    names = sorted(entry.name for entry in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return f"here: {', '.join(names)}" if names else "no InfiniBand or RoCE device here"


def _set(*names: str) -> str:
    return ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in names)


def _torch_rdma() -> str:
    variables = _set("NCCL_IB_DISABLE", "NCCL_IB_HCA")
    return f"the nccl backend uses verbs by itself ({variables}), gloo uses TCP; {_devices()}"


def _tensorflow_rdma() -> str:
    return f"NCCL between GPUs ({_set('NCCL_IB_DISABLE')}), gRPC over TCP otherwise; {_devices()}"


def _horovod_rdma() -> str:
    return f"what it was built with: NCCL, or MPI with UCX; Gloo uses TCP; {_devices()}"


def _mpi_rdma() -> str:
    variables = _set("UCX_TLS", "UCX_NET_DEVICES")
    return f"Open MPI with UCX (mpirun --mca pml ucx; {variables}); {_devices()}"


def _kvstore_rdma() -> str:
    return "the stock wheel's ps-lite uses TCP only (ZeroMQ)"


def _byteps_rdma() -> str:
    return f"ps-lite's verbs van ({_set('DMLC_ENABLE_RDMA')}) on every role; {_devices()}"


ENGINES: Final = (
    Engine(
        name="torch",
        modules=("torch",),
        install="pip install 'bytescheduler[torch]'",
        commands=_torch,
        rdma=_torch_rdma,
    ),
    Engine(
        name="horovod",
        modules=("horovod", "torch"),
        program="horovodrun",
        install="pip install 'bytescheduler[horovod]', built for torch (docs/horovod.md)",
        commands=_horovod,
        rdma=_horovod_rdma,
        ranks=1,
    ),
    Engine(
        name="mpi",
        modules=("mpi4py",),
        program="mpirun",
        install="pip install 'bytescheduler[mpi]' and an MPI (Debian: apt-get install openmpi-bin)",
        commands=_mpi,
        rdma=_mpi_rdma,
        ranks=1,
    ),
    Engine(
        name="tensorflow",
        modules=("tensorflow",),
        install="pip install 'bytescheduler[tensorflow]'",
        commands=_tensorflow,
        rdma=_tensorflow_rdma,
    ),
    Engine(
        name="kvstore",
        modules=("mxnet",),
        install="pip install 'bytescheduler[mxnet]'",
        commands=_kvstore,
        rdma=_kvstore_rdma,
    ),
    Engine(
        name="byteps",
        modules=("byteps", "torch"),
        install="as BytePS's documentation says (docs/transports.md)",
        commands=_byteps,
        rdma=_byteps_rdma,
        why_not=_byteps_roles.why_not,
    ),
)
