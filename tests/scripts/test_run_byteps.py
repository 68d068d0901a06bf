"""BytePS as built by `make byteps`: real scheduler, server and workers, right sums.

Skipped where it is not built or where this is not root: `scripts/run_byteps.py` says which.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RUN_BYTEPS = SCRIPTS / "run_byteps.py"
TIME_LIMIT_S = 150

pytestmark = [pytest.mark.multiprocess, pytest.mark.root]

WORKER = """
import sys
import torch
import byteps.torch as bps
from byteps.torch.ops import declare, push_pull_async_inplace, synchronize

bps.init()
rank, size = bps.rank(), bps.size()
assert size == int(sys.argv[1])
dtypes = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "i64": torch.int64}
lengths = (1, 7, 1000, 300_001)
kinds = [f"{dtype}.{length}" for dtype in dtypes for length in lengths]
# BytePS's server sends from the buffer that the next push of the same name overwrites, so a fast
# worker could spoil what a slow one still receives: two names for each tensor, in turn.
for name in [f"{kind}.{turn}" for turn in range(2) for kind in kinds]:
    declare(name)
for iteration in range(4):
    names = [f"{kind}.{iteration % 2}" for kind in kinds]
    tensors, handles = {}, {}
    # BytePS matches tensors by name: ranks may submit in different orders.
    for priority, name in enumerate(names if rank == 0 else reversed(names)):
        dtype, length, _ = name.split(".")
        values = torch.arange(int(length)) % 97 + rank + iteration
        tensors[name] = values.to(dtypes[dtype])
        handles[name] = push_pull_async_inplace(
            tensors[name], average=False, name=name, version=iteration, priority=-priority)
    for name in names:
        synchronize(handles[name])
        expected = (torch.arange(tensors[name].numel()) % 97 + iteration) * size
        expected += size * (size - 1) // 2
        assert torch.equal(tensors[name], expected.to(tensors[name].dtype)), name
print(f"worker {rank} of {size} is right", flush=True)
bps.shutdown()
"""


def why_not() -> str | None:
    """Return the reason that `run_byteps.py` gives for not running here, if any."""
    code = "import run_byteps; print(run_byteps.why_not() or '', end='')"
    reply = subprocess.run(
        [sys.executable, "-c", code],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        check=True,
        timeout=TIME_LIMIT_S,
    )
    return reply.stdout or None


@pytest.fixture(scope="module", autouse=True)
def _runnable() -> None:
    if reason := why_not():
        pytest.skip(reason)


def run_byteps(*arguments: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN_BYTEPS), "--workers", str(workers), *arguments],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_sums_are_right_whatever_the_order_of_submission(workers: int, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(WORKER)

    result = run_byteps("--", sys.executable, str(program), str(workers), workers=workers)

    assert result.returncode == 0, result.stderr
    for rank in range(workers):
        assert f"worker {rank} of {workers} is right" in result.stdout


def test_each_worker_has_shared_memory_and_sockets_of_its_own() -> None:
    code = (
        "import os; d = os.environ['BYTEPS_SOCKET_PATH']; "
        "print(os.readlink('/proc/self/ns/mnt'), os.stat('/dev/shm').st_dev, os.stat(d).st_dev)"
    )

    result = run_byteps("--", sys.executable, "-c", code)

    first, second = (line.split() for line in result.stdout.splitlines())
    device = str(os.stat("/dev/shm").st_dev)
    here = [os.readlink("/proc/self/ns/mnt"), device, device]
    for ours, one, other in zip(here, first, second, strict=True):
        assert len({ours, one, other}) == 3


def test_a_failing_worker_ends_the_others_and_gives_its_exit_code() -> None:
    code = (
        "import os, signal; rank = int(os.environ['DMLC_WORKER_ID']); "
        "os._exit(7) if rank == 1 else signal.pause()"
    )

    assert run_byteps("--", sys.executable, "-c", code).returncode == 7


def test_the_time_limit_ends_every_process() -> None:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"

    result = run_byteps("--timeout", "2", "--", sys.executable, "-c", code)

    assert result.returncode == 124
    for pid in map(int, result.stdout.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_end_with_the_launcher_even_when_it_is_killed() -> None:
    code = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    launcher = subprocess.Popen(
        [sys.executable, str(RUN_BYTEPS), "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    workers = [int(launcher.stdout.readline()) for _ in range(2)]
    handles = [os.pidfd_open(pid) for pid in workers]

    launcher.send_signal(signal.SIGKILL)
    launcher.wait(TIME_LIMIT_S)

    for handle in handles:
        ended, _, _ = select.select([handle], [], [], TIME_LIMIT_S)
        os.close(handle)
        assert ended
