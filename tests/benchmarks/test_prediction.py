"""The simulator is given the settings that a system ran with, those it was left to choose too."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.job import make_job
from benchmarks.prediction import predict
from benchmarks.systems import SYSTEMS

EXCHANGE_S = 0.15


def cell(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "profile": "bert-base",
        "workers": 2,
        "scale": 25.0,
        "compute_s": 0.6,
        "exchange_s": EXCHANGE_S,
        "systems": {name: {"settings": own} for name, own in settings.items()},
    }


def test_defaults_are_sizes_that_follow_from_the_bandwidth() -> None:
    bandwidth = make_job("bert-base", 2, scale=25.0).gradient_bytes / EXCHANGE_S
    assert 64 << 20 < bandwidth < 128 << 20  # 10 ms of it are nearest to 1 MiB
    sizes = {"partition_size": 1 << 20, "credit_size": 3 << 20}
    chosen, given = (predict(cell({"bytescheduler": own})) for own in ({}, sizes))
    assert chosen == given
    assert 0.6 < chosen["bytescheduler"] < 0.8


@pytest.mark.parametrize("name", ["ddp", "dear", "fifo", "barrier", "bytescheduler"])
def test_whatever_a_sweep_tries_can_be_predicted(name: str) -> None:
    job = make_job("bert-base", 2, scale=25.0)
    for settings in SYSTEMS[name].sweep(job):
        assert predict(cell({name: settings}))[name] > 0.6
