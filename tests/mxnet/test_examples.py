"""The two examples learn, with one scheduler, two servers, and two or three workers."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REMOTE_SHELL = Path(__file__).resolve().parents[1] / "remote_shell.py"

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("program", ["mxnet/digits.py", "torch/parameter_server.py"])
def test_an_example_reaches_its_accuracy(program, workers):
    _need("mxnet", "sklearn", program.split("/")[0])
    with job(workers=workers) as running:
        names = [f"worker {number}" for number in range(workers)]
        for name in names:
            running.start(name, "worker", [sys.executable, str(EXAMPLES / program)])
        codes = running.wait(names)
        said = "\n".join(running.output(name) for name in names)
        assert set(codes.values()) == {0}, said
        assert _best_accuracy(said) > 0.8, said


def test_the_launcher_trains_on_two_hosts():
    _need("mxnet", "sklearn", "torch")
    shell = shlex.join([sys.executable, str(REMOTE_SHELL)])
    command = str(Path(sys.executable).with_name("bytescheduler"))
    launch = [command, "launch", "--servers", "2", "--workers", "2"]
    program = [sys.executable, str(EXAMPLES / "torch" / "parameter_server.py")]
    hosts = ["--hosts", "127.0.0.2,127.0.0.3", "--ssh", shell]
    with subprocess.Popen(
        [*launch, *hosts, "--", *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            said, _ = launcher.communicate(timeout=200)
        finally:
            launcher.terminate()  # which ends all that it started
    assert launcher.returncode == 0, said
    assert _best_accuracy(said) > 0.8, said


def _need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def _best_accuracy(said: str) -> float:
    return max(float(number) for number in re.findall(r"accuracy ([\d.]+)", said))
