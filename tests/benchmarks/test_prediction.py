"""The simulator held against what the lab has measured, of which the files are kept."""

from __future__ import annotations

import json
from statistics import median

from benchmarks.matrix import RESULTS, simulator_error, summary_table
from benchmarks.prediction import predict
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
