"""Scheduled training gives the weights of the unwrapped Trainer, in real jobs on loopback."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import job

HERE = Path(__file__).resolve().parent
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-4},
    "adam": {"learning_rate": 0.01},
    "nag": {"learning_rate": 0.05, "momentum": 0.9},
}
SETTINGS = {"partition_size": 4096, "credit_size": 16384}

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="mxnet is not installed"),
]


def train(folder: Path, workers: int, cases: list[dict]) -> None:
    with job(folder, workers=workers) as running:
        names = [f"worker {number}" for number in range(workers)]
        for name in names:
            command = [sys.executable, str(HERE / "training.py"), str(folder), json.dumps(cases)]
            running.start(name, "worker", command)
        codes = running.wait(names)
        assert set(codes.values()) == {0}, "\n".join(running.output(name) for name in names)


def weights(folder: Path, name: str, rank: int) -> dict[str, np.ndarray]:
    stored = np.load(folder / f"{name}.{rank}.npz")
    return {key: stored[key] for key in stored if "running" not in key}  # each worker's own


@pytest.mark.parametrize("on_server", [False, True], ids=["on-worker", "on-server"])
@pytest.mark.parametrize("workers", [2, 3])
def test_same_weights_as_the_unwrapped_trainer_after_50_steps(workers, on_server, tmp_path):
    cases = [
        {
            "name": f"{optimizer}-{trainer}",
            "optimizer": optimizer,
            "options": options,
            "trainer": trainer,
            "on_server": on_server,
            "settings": SETTINGS,
        }
        for optimizer, options in OPTIMIZERS.items()
        for trainer in ("plain", "scheduled")
    ]
    if on_server:  # a server's optimizer outlives the trainer that sent it
        for trainer in ("plain", "scheduled"):
            train(tmp_path, workers, [case for case in cases if case["trainer"] == trainer])
    else:
        train(tmp_path, workers, cases)
    for optimizer in OPTIMIZERS:
        expected = weights(tmp_path, f"{optimizer}-plain", 0)
        for rank in range(workers):
            found = weights(tmp_path, f"{optimizer}-scheduled", rank)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                # with three workers the servers add in the order of arrival
                np.testing.assert_allclose(found[key], value, rtol=2e-4, atol=2e-5, err_msg=key)
