"""ScheduledOptimizer over BytePS beside BytePS's own optimizers; needs root and `make byteps`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import SCRIPTS, Ended, environment, run_processes, why_no_byteps

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.transports.byteps import BytePSTransport

SCRIPT = Path(__file__).with_name("byteps_rows.py")
ROWS = (
    "same_weights_as_one_process",
    "same_weights_as_byteps_own_optimizer",
    "clipping_which_cross_barrier_cannot_do",
    "same_weights_as_cross_barrier",
)
LIMIT = 160  # seconds


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Ended:
    reason = why_no_byteps()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("byteps")
    command = [
        sys.executable, str(SCRIPTS / "run_byteps.py"), "--workers", "2", "--timeout", str(LIMIT),
        "--", sys.executable, str(SCRIPT), str(folder),
    ]  # fmt: skip
    return run_processes([(command, environment())], folder, LIMIT + 20)


@pytest.mark.multiprocess
@pytest.mark.root
@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", ROWS)
def test_row(row: str, ended: Ended) -> None:
    assert sorted(ended.reports) == [0, 1], ended.output[-4000:]
    for rank, report in ended.reports.items():
        verdict = report.get(row, "not run: an earlier row failed")
        assert verdict == "ok", f"rank {rank}: {verdict}\n{ended.output[-2000:]}"


@pytest.mark.multiprocess
@pytest.mark.root
@pytest.mark.timeout(240)
def test_the_doctor_tries_it() -> None:
    reason = why_no_byteps()
    if reason is not None:
        pytest.skip(reason)
    code = (
        "import os, sys, run_byteps; "
        "doctor = [sys.executable, '-m', 'bytescheduler.cli', 'doctor']; "
        "options = ['--json', '--engine', 'byteps', '--timeout', '120']; "
        "os.execve(doctor[0], doctor + options, run_byteps.environment())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True, timeout=LIMIT
    )
    finding = json.loads(ended.stdout)["engines"]["byteps"]
    assert finding["works"], finding["error"]
    assert finding["bandwidth_bytes_per_s"] > 0


def test_credit_inside_byteps_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("BYTEPS_SCHEDULING_CREDIT", "4")
    with pytest.raises(ConfigurationError, match=r"must not be set, got 4.*use credit_size"):
        BytePSTransport()
