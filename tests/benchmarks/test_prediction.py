"""The simulator held against what the lab has measured, of which the files are kept."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
from benchmarks.job import make_job
from benchmarks.matrix import RESULTS, simulator_error, summary_table
from benchmarks.prediction import predict
from benchmarks.systems import SYSTEMS
from rich.console import Console

CELLS = [
    json.loads(path.read_text())
    for path in sorted([*RESULTS.glob("cells/*.json"), *RESULTS.glob("horovod-*.json")])
]


def test_the_simulator_is_within_a_tenth_of_the_lab() -> None:
    errors = [
        abs(seconds / cell["systems"][name]["median_s"] - 1)
        for cell in CELLS
        for name, seconds in predict(cell).items()
    ]
    assert len(errors) >= 2 * len(CELLS) > 0
    assert median(errors) < 0.10


def test_systems_without_a_schedule_are_left_out() -> None:
    cells = [json.loads(path.read_text()) for path in RESULTS.glob("tensorflow-*.json")]
    assert cells
    assert all(predict(cell) == {} for cell in cells)
    assert simulator_error(cells) is None


def test_the_summary_fits_a_terminal_and_names_every_cell() -> None:
    console = Console(width=100, record=True)
    console.print(summary_table(CELLS))
    text = console.export_text()
    for cell in CELLS:
        assert f"{cell['profile']}-w{cell['workers']}-b{cell['balance']:g}" in text


def cell_of(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "profile": "bert-base",
        "workers": 2,
        "scale": 25.0,
        "compute_s": 0.6,
        "exchange_s": 0.15,
        "systems": {name: {"settings": own} for name, own in settings.items()},
    }


def test_defaults_are_sizes_that_follow_from_the_bandwidth() -> None:
    cell = cell_of({"bytescheduler": {}})
    bandwidth = make_job("bert-base", 2, scale=cell["scale"]).gradient_bytes / cell["exchange_s"]
    assert 64 << 20 < bandwidth < 128 << 20  # 10 ms of it are nearest to 1 MiB
    sizes = {"partition_size": 1 << 20, "credit_size": 3 << 20}
    assert predict(cell) == predict(cell_of({"bytescheduler": sizes}))


@pytest.mark.parametrize("name", ["ddp", "dear", "fifo", "barrier", "bytescheduler"])
def test_whatever_a_sweep_tries_can_be_predicted(name: str) -> None:
    job = make_job("bert-base", 2, scale=25.0)
    for settings in SYSTEMS[name].sweep(job):
        assert predict(cell_of({name: settings}))[name] > 0.6
