"""``dist_async``: the servers take each gradient as it comes, and what cannot work is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import job

HERE = Path(__file__).resolve().parent
OPTIONS = {
    "sgd": {"learning_rate": 0.05, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
}
SETTINGS = {"partition_size": 4096, "credit_size": 16384}

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="mxnet is not installed"),
]


def test_two_workers_train_lose_no_push_and_are_told_what_cannot_work(tmp_path: Path) -> None:
    names = ["worker 0", "worker 1"]
    with job() as running:
        for name in names:
            command = [sys.executable, str(HERE / "asynchronous.py"), str(tmp_path)]
            running.start(name, "worker", command)
        codes = running.wait(names)
        for name in names:
            assert "fine" in running.output(name), running.output(name)
            assert codes[name] == 0, running.output(name)


def test_one_worker_gets_the_weights_of_the_unwrapped_trainer(tmp_path: Path) -> None:
    """With more than one, each run gives others."""
    cases = [
        {
            "name": f"{optimizer}-{trainer}",
            "optimizer": optimizer,
            "options": options,
            "trainer": trainer,
            "on_server": True,
            "settings": SETTINGS,
        }
        for trainer in ("scheduled", "plain")
        for optimizer, options in OPTIONS.items()
    ]
    command = [sys.executable, str(HERE / "training.py"), str(tmp_path), json.dumps(cases)]
    with job(workers=1) as running:
        running.start("worker 0", "worker", [*command, "dist_async"])
        assert running.wait(["worker 0"]) == {"worker 0": 0}, running.output("worker 0")
    for optimizer in OPTIONS:
        expected = np.load(tmp_path / f"{optimizer}-plain.0.npz")
        found = np.load(tmp_path / f"{optimizer}-scheduled.0.npz")
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-6, err_msg=key)
