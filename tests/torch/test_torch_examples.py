"""The example scripts run under torchrun, and learn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torch"
LIMIT = 150  # seconds


def launch(script: str, *arguments: str) -> str:
    """Output of ``script`` on two ranks; it and all its children are gone afterwards."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLES / script), *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BYTESCHEDULER_CHECK": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{script} did not end within {LIMIT} s:\n{output}")
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("loaders", ["0", "1"], ids=["no loader", "forked loaders"])
def test_digits_are_learned(loaders):
    output = launch("digits.py", "--epochs", "2", "--loaders", loaders)
    accuracies = [float(value) for value in re.findall(r"accuracy ([\d.]+)%", output)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 85


@pytest.mark.parametrize("options", [[], ["--bf16", "--checkpoint"]], ids=["plain", "bf16"])
def test_the_language_model_learns(options):
    output = launch("language_model.py", "--epochs", "2", "--steps", "20", *options)
    bits = [float(value) for value in re.findall(r"([\d.]+) bits", output)]
    assert len(bits) == 2
    assert bits[1] < bits[0] < 6
