"""How the ranks of each engine are started, with a time limit and no process left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import contract
import engines
import pytest
import worker

from bytescheduler._ports import free_port, free_ports
from bytescheduler.doctor.engines import program
from bytescheduler.transports.fake import FakeNetwork

HERE = Path(__file__).resolve().parent
WORKER = HERE / "worker.py"
SCRIPTS = HERE.parents[1] / "scripts"
SOURCE = HERE.parents[1] / "src"

Command = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a launch left behind: per rank its report, the launcher's exit code and words."""

    reports: Mapping[int, Mapping[str, str]]
    code: int
    output: str
    at: float = 0.0  # time.time() when the last process had ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One line of the contract suite.

    Attributes:
        opener: name in ``engines.OPENERS``.
        launch: starts the ranks with ``worker.py`` and these arguments.
        needs: modules and programs without which it is skipped.
        notices_leaving: a rank that closes while others go on makes them fail.
        launcher_ends_job: a dead rank makes the launcher end all others, before they notice.
    """

    name: str
    opener: str
    launch: Callable[[Sequence[str], Path, int, float], Ended]
    world_size: int = 2
    needs: tuple[str, ...] = ()
    needs_program: str | None = None
    launcher_ends_job: bool = False
    notices_leaving: bool = True
    limit: float = 150.0  # seconds for all checks together
    ready: Callable[[], str | None] = field(default=lambda: None)

    def skip_unless_available(self) -> None:
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{self.name}: {module} is not installed")
        if self.needs_program is not None and program(self.needs_program) is None:
            pytest.skip(f"{self.name}: {self.needs_program} is not installed")
        reason = self.ready()
        if reason is not None:
            pytest.skip(f"{self.name}: {reason}")

    def run(self, folder: Path, *probe: str, limit: float | None = None) -> Ended:
        arguments = [self.opener, str(folder), *probe]
        return self.launch(arguments, folder, self.world_size, limit or self.limit)


def environment(**variables: str) -> dict[str, str]:
    """This process's environment for children: our source first, one thread per library."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(SOURCE), str(HERE), *([inherited] if inherited else [])]
    binaries = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PATH": binaries}
    return {**os.environ, **fixed, **variables}


def run_processes(
    commands: Sequence[tuple[Command, Mapping[str, str]]], folder: Path, limit: float
) -> Ended:
    """Run all commands until they end, or for ``limit`` seconds; kill each with its children."""
    log = folder / "output.txt"
    with log.open("ab") as output:
        processes = [
            subprocess.Popen(
                command, env=env, stdout=output, stderr=output, start_new_session=True, cwd=folder
            )
            for command, env in commands
        ]
        timer = threading.Timer(limit, lambda: [_kill(process) for process in processes])
        timer.start()
        try:
            codes = [process.wait() for process in processes]
        finally:
            timer.cancel()
            for process in processes:
                _kill(process)
    return Ended(
        reports=read_reports(folder),
        code=max(map(abs, codes)),
        output=log.read_text("utf-8", "replace"),
        at=time.time(),
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def read_reports(folder: Path) -> dict[int, dict[str, str]]:
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


# -- one function per way of starting


def threads(arguments: Sequence[str], folder: Path, world_size: int, limit: float) -> Ended:
    """Ranks as threads of this process, over fake networks shuffled by seed."""
    networks: dict[int, FakeNetwork] = {}
    lock = threading.Lock()

    class Networks:
        def __getitem__(self, number: int) -> FakeNetwork:
            with lock:
                if number not in networks:
                    networks[number] = FakeNetwork(world_size, seed=number)
                return networks[number]

    benches = [engines.fake(rank, world_size, Networks()) for rank in range(world_size)]
    reports: dict[int, dict[str, str]] = {}

    def body(bench: contract.Bench) -> None:
        if len(arguments) > 2:
            reports[bench.rank] = worker.run_probe(bench, arguments[2], int(arguments[3]))
        else:
            worker.run_checks(bench, lambda report: reports.update({bench.rank: dict(report)}))

    ranks = [threading.Thread(target=body, args=(bench,), daemon=True) for bench in benches]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(limit)
    return Ended(reports=reports, code=0, output="")


def torchrun_like(arguments: Sequence[str], folder: Path, world_size: int, limit: float) -> Ended:
    """Processes with the variables of ``env://``, which torchrun would set."""
    port = str(free_port())
    commands = [
        (
            [sys.executable, str(WORKER), *arguments],
            environment(
                RANK=str(rank),
                WORLD_SIZE=str(world_size),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
        )
        for rank in range(world_size)
    ]
    return run_processes(commands, folder, limit)


def tf_config(arguments: Sequence[str], folder: Path, world_size: int, limit: float) -> Ended:
    """Processes with ``TF_CONFIG``."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(world_size)]
    commands = [
        (
            [sys.executable, str(WORKER), *arguments],
            environment(
                TF_CPP_MIN_LOG_LEVEL="2",
                TF_CONFIG=json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                ),
            ),
        )
        for rank in range(world_size)
    ]
    return run_processes(commands, folder, limit)


def mpirun(arguments: Sequence[str], folder: Path, world_size: int, limit: float) -> Ended:
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    command = [
        str(program("mpirun")), *as_root, "--oversubscribe", "-np", str(world_size),
        sys.executable, str(WORKER), *arguments,
    ]  # fmt: skip
    variables = environment(OMPI_MCA_btl_base_warn_component_unused="0")
    return run_processes([(command, variables)], folder, limit)


def horovodrun(arguments: Sequence[str], folder: Path, world_size: int, limit: float) -> Ended:
    command = [
        str(program("horovodrun")), "--gloo", "-np", str(world_size),
        "-H", f"localhost:{world_size}", sys.executable, str(WORKER), *arguments,
    ]  # fmt: skip
    return run_processes([(command, environment())], folder, limit)


SERVE = "from bytescheduler._mxnet_import import load; load()"


def parameter_servers(
    arguments: Sequence[str], folder: Path, world_size: int, limit: float
) -> Ended:
    """A scheduler and two servers beside the ranks; they are killed when the ranks have ended."""
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "2",
        "DMLC_NUM_WORKER": str(world_size),
    }
    worker_command = [sys.executable, str(WORKER), *arguments]
    with ExitStack() as stack:
        for role in ("scheduler", "server", "server"):
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE],
                env=environment(DMLC_ROLE=role, **variables),
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(_kill, process)
        ranks = [(worker_command, environment(DMLC_ROLE="worker", **variables))] * world_size
        return run_processes(ranks, folder, limit)


def byteps(arguments: Sequence[str], folder: Path, world_size: int, limit: float) -> Ended:
    """Scheduler, server and workers, each worker in a mount namespace of its own."""
    command = [
        sys.executable, str(SCRIPTS / "run_byteps.py"), "--workers", str(world_size),
        "--timeout", str(limit), "--", sys.executable, str(WORKER), *arguments,
    ]  # fmt: skip
    return run_processes([(command, environment())], folder, limit + 20)


def why_no_byteps() -> str | None:
    script = importlib.util.spec_from_file_location("run_byteps", SCRIPTS / "run_byteps.py")
    assert script is not None
    assert script.loader is not None
    sys.path.insert(0, str(SCRIPTS))
    try:
        module = importlib.util.module_from_spec(script)
        script.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module.why_not()


ENGINES: tuple[Engine, ...] = (
    Engine(name="fake", opener="fake", launch=threads, world_size=3),
    Engine(name="fake-alone", opener="fake", launch=threads, world_size=1),
    Engine(name="torch", opener="torch", launch=torchrun_like, needs=("torch",)),
    Engine(
        name="kvstore",
        opener="kvstore",
        launch=parameter_servers,
        world_size=3,
        needs=("mxnet",),
    ),
    Engine(
        name="kvstore-torch",
        opener="kvstore-torch",
        launch=parameter_servers,
        needs=("mxnet", "torch"),
    ),
    Engine(
        name="tensorflow",
        opener="tensorflow",
        launch=tf_config,
        needs=("tensorflow", "keras"),
        limit=240.0,
    ),
    Engine(
        name="mpi",
        opener="mpi",
        launch=mpirun,
        world_size=3,
        needs=("mpi4py",),
        needs_program="mpirun",
        launcher_ends_job=True,
    ),
    Engine(
        name="mpi-torch",
        opener="mpi-torch",
        launch=mpirun,
        needs=("mpi4py", "torch"),
        needs_program="mpirun",
        launcher_ends_job=True,
    ),
    Engine(
        name="horovod",
        opener="horovod",
        launch=horovodrun,
        needs=("horovod", "torch"),
        launcher_ends_job=True,
    ),
    Engine(
        name="horovod-mpi",
        opener="horovod",
        launch=mpirun,
        needs=("horovod", "torch", "mpi4py"),
        needs_program="mpirun",
        launcher_ends_job=True,
    ),
    Engine(
        name="byteps",
        opener="byteps",
        launch=byteps,
        needs=("torch",),
        ready=why_no_byteps,
        launcher_ends_job=True,
        notices_leaving=False,
    ),
)
