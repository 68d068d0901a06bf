"""The launcher: what it starts, what it forwards, and how it ends a job."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bytescheduler import launch
from bytescheduler.exceptions import ConfigurationError

TWO_HOSTS = (
    "--hosts", "127.0.0.2,127.0.0.3",
    "--ssh", shlex.join([sys.executable, str(Path(__file__).with_name("remote_shell.py"))]),
)  # fmt: skip
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


def start(script: str, *options: str, serve: str = SERVE_NOTHING) -> subprocess.Popen[str]:
    """Launch a job whose servers do nothing, so that MXNet is not needed."""
    code = (
        "import sys; from bytescheduler import launch, cli;"
        f"launch.SERVE = {serve!r}; launch.LINGER = 2.0; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [
        sys.executable, "-c", code, "launch", "--servers", "1", "--workers", "2", *options, "--",
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
def test_over_ssh_each_host_runs_its_share_in_the_same_folder():
    script = (
        "import os; e = os.environ;"
        "print(e['REMOTE_HOST'], e['DMLC_PS_ROOT_URI'], e['DMLC_PS_ROOT_PORT'], os.getcwd())"
    )
    job = start(script, *TWO_HOSTS)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    for number, host in enumerate(("127.0.0.2", "127.0.0.3")):
        place = f"{host} 127.0.0.2 {launch.FIRST_REMOTE_PORT} {os.getcwd()}"
        assert f"[worker {number}] {place}" in output


@pytest.mark.multiprocess
@pytest.mark.parametrize(("options", "where"), [((), ""), (TWO_HOSTS, " on 127.0.0.3")])
def test_one_failure_stops_all_and_is_named(options, where):
    script = (
        "import os, sys, time; os.environ['DMLC_WORKER_ID'] == '1' and sys.exit(7); time.sleep(60)"
    )
    begin = time.monotonic()
    job = start(script, *options)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 1, output
    assert f"worker 1{where} ended with status 7; stopping the others" in output
    assert time.monotonic() - begin < 55


@pytest.mark.multiprocess
@pytest.mark.parametrize(("script", "code"), [("pass", 0), ("import time; time.sleep(60)", 1)])
def test_servers_may_end_a_little_before_the_workers(script, code):
    job = start(script, serve="pass")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == code, output
    assert ("ended before the workers; stopping the others" in output) == bool(code)


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
