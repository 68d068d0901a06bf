"""``bytescheduler tune`` over real launchers, real workers and the real adapter."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from leftovers import left_behind

from bytescheduler.cli import main
from bytescheduler.doctor.engines import program

pytest.importorskip("torch")
for module in ("skopt", "rich", "matplotlib"):
    pytest.importorskip(module)

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A command that starts two ranks, and what a script does under it.

    Attributes:
        needs: package without which it is skipped.
        command: what stands before the script.
        joins: lines that make the process a rank, with ``rank`` set.
        transport: keyword arguments of ``ScheduledOptimizer``.
        stray: keyword arguments of ``Popen`` for a process that a rank leaves behind.
    """

    needs: str
    command: list[str]
    joins: str
    transport: str = ""
    stray: str = ""


LAUNCHERS = {
    "torchrun": Launcher(
        needs="torch",
        command=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        joins="""
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
""",
    ),
    "horovodrun": Launcher(
        needs="horovod",
        command=["--gloo", "-np", "2", "-H", "localhost:2", sys.executable],
        joins="""
import horovod.torch as hvd
hvd.init()
rank = hvd.rank()
""",
        transport=', transport="horovod"',
        # It waits for the pipes of its ranks, whoever holds them.
        stray=", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL",
    ),
    "mpirun": Launcher(
        needs="mpi4py",
        command=["--oversubscribe", "-np", "2", sys.executable],
        joins="""
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
""",
        transport=', transport="mpi"',
    ),
}

TRAIN = """
import subprocess, sys
import torch
import bytescheduler.torch as bs
%s
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = bs.ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model%s)
if optimizer.settings.mode == "barrier" and rank == 1:
    stray = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", stray], start_new_session=True%s)
    sys.exit("no barrier on this rank")
while True:
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
"""


def command_of(name: str) -> list[str]:
    """The launcher of this environment, or of the system."""
    launcher = LAUNCHERS[name]
    pytest.importorskip(launcher.needs)
    if name == "torchrun":
        return [sys.executable, *launcher.command]
    executable = program(name)
    if executable is None:
        pytest.skip(f"{name} is not installed")
    as_root = ["--allow-run-as-root"] if name == "mpirun" and os.geteuid() == 0 else []
    return [executable, *as_root, *launcher.command]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", LAUNCHERS)
def test_an_endless_job_is_tuned_and_a_crash_of_one_rank_counts_as_a_failed_trial(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, launcher = command_of(name), LAUNCHERS[name]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    script, output = tmp_path / "train.py", tmp_path / "tuned.json"
    script.write_text(TRAIN % (launcher.joins, launcher.transport, launcher.stray))
    options = ["--trials", "2", "--output", str(output)]
    assert main(["tune", *options, "--", *command, str(script)]) == 0
    found = json.loads(output.read_text())
    works, fails = found["trials"]
    assert (works["mode"], fails["mode"]) == ("priority", "barrier")
    assert 0 < works["iteration_s"] < 60
    assert fails["iteration_s"] is None
    assert "no barrier on this rank" in fails["failure"]
    assert found["best"] == works
    assert found["total_bytes"] == 4 * (64 * 64 + 64)
    assert not left_behind(tmp_path)
