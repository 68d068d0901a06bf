"""The launcher: what it starts, what it forwards, and how it ends a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from bytescheduler import launch
from bytescheduler.exceptions import ConfigurationError

SERVE_NOTHING = "import time; time.sleep(60)"


def plan(**changes):
    arguments = {
        "servers": 2,
        "workers": 3,
        "hosts": [],
        "port": 9000,
        "program": ["--", "p", "-x"],
    }
    return launch.plan(**{**arguments, **changes})


def test_every_process_gets_its_role_and_the_same_job():
    processes = plan()
    assert [process.role for process in processes] == [
        "scheduler",
        *["server"] * 2,
        *["worker"] * 3,
    ]
    jobs = {
        tuple(process.environment[name] for name in (launch.URI, launch.PORT, launch.NUM_SERVER))
        for process in processes
    }
    assert jobs == {("127.0.0.1", "9000", "2")}
    assert [process.command for process in processes[3:]] == [("p", "-x")] * 3


def test_hosts_take_turns_and_the_scheduler_is_on_the_first():
    processes = plan(hosts=["127.0.0.1", "localhost"])
    assert [process.host for process in processes] == [
        "127.0.0.1",
        *["127.0.0.1", "localhost"],
        *["127.0.0.1", "localhost", "127.0.0.1"],
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"program": []}, "--"),
        ({"servers": 0}, "--servers"),
        ({"workers": -1}, "--workers"),
        ({"port": 70_000}, "--port"),
    ],
)
def test_wrong_input_is_named_before_anything_starts(changes, named):
    with pytest.raises(ConfigurationError, match=named):
        plan(**changes)


def start(script: str, *, workers: int = 2) -> subprocess.Popen[str]:
    """Launch a job whose servers do nothing, so that MXNet is not needed."""
    code = (
        "import sys; from bytescheduler import launch, cli;"
        f"launch.SERVE = {SERVE_NOTHING!r}; launch.LINGER = 0.2; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [
        sys.executable, "-c", code, "launch", "--servers", "1", "--workers", str(workers), "--",
        sys.executable, "-c", script,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.multiprocess
def test_output_is_forwarded_with_prefixes_and_success_is_zero():
    job = start("import os; print('hello', os.environ['DMLC_ROLE'])")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert "[worker 0] hello worker" in output
    assert "[worker 1] hello worker" in output


@pytest.mark.multiprocess
def test_one_failure_stops_all_and_is_named():
    script = (
        "import os, sys, time; os.environ['DMLC_WORKER_ID'] == '1' and sys.exit(7); time.sleep(60)"
    )
    begin = time.monotonic()
    job = start(script)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 1, output
    assert "worker 1 ended with status 7; stopping the others" in output
    assert time.monotonic() - begin < 55


@pytest.mark.multiprocess
def test_the_launcher_ends_its_children_when_it_is_terminated():
    job = start("import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)")
    assert job.stdout is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = job.stdout.readline()
        assert line, f"the launcher ended: {job.poll()}"
        if " pid " in line:
            pids.append(int(line.split()[-1]))
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == launch.INTERRUPTED
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
