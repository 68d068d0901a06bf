"""The two examples learn, with one scheduler, two servers, and two or three workers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from jobs import job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("program", ["mxnet/digits.py", "torch/parameter_server.py"])
def test_an_example_reaches_its_accuracy(program, workers):
    for module in ("mxnet", "sklearn", program.split("/")[0]):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    with job(workers=workers) as running:
        names = [f"worker {number}" for number in range(workers)]
        for name in names:
            running.start(name, "worker", [sys.executable, str(EXAMPLES / program)])
        codes = running.wait(names)
        said = "\n".join(running.output(name) for name in names)
        assert set(codes.values()) == {0}, said
        accuracies = [float(number) for number in re.findall(r"accuracy ([\d.]+)", said)]
        assert max(accuracies) > 0.8, said
