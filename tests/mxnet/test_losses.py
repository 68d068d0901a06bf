"""A lost server, scheduler or worker ends every worker, with an error that names the role."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest
from jobs import job

HERE = Path(__file__).resolve().parent
WORKER = [sys.executable, str(HERE / "endless.py")]

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="mxnet is not installed"),
]


@pytest.mark.parametrize(
    ("victim", "role"),
    [("server 1", "server"), ("scheduler", "scheduler"), ("worker 1", "worker")],
)
def test_all_workers_end_within_15_seconds_and_name_the_role(victim, role):
    with job() as running:
        workers = ["worker 0", "worker 1"]
        for name in workers:
            running.start(name, "worker", WORKER)
        for name in workers:
            running.wait_for(name, "training")
        running.kill(victim)
        begin = time.monotonic()
        survivors = [name for name in workers if name != victim]
        codes = running.wait(survivors, limit=60)
        assert time.monotonic() - begin < 15
        for name in survivors:
            assert codes[name] == 1
            error = running.output(name).strip().splitlines()[-1]
            assert "PeerLostError" in error
            assert role in error.split(": ", 2)[-1]


def test_a_late_worker_is_waited_for_and_named_after_10_seconds():
    with job() as running:
        running.start("worker 0", "worker", WORKER)
        running.wait_for("worker 0", "missing: 1 worker")
        running.start("worker 1", "worker", WORKER)
        running.wait_for("worker 0", "training")
