"""``bytescheduler simulate`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescheduler.cli import main

JOB = ("simulate", "--profile", "vgg16", "--workers", "16", "--bandwidth", "10Gbps")


def test_answers_whether_it_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--compute", "400ms", "--latency", "10us"]) == 0
    shown = capsys.readouterr().out
    assert "structural bound" in shown
    assert "times faster" in shown


def test_says_when_it_would_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB[:-1], "100000Gbps", "--compute", "10s"]) == 0
    assert "would not help" in capsys.readouterr().out


def test_writes_json_and_a_timeline(tmp_path: Path) -> None:
    table, timeline = tmp_path / "table.json", tmp_path / "timeline.json"
    assert main([*JOB, "--json", str(table), "--timeline", str(timeline)]) == 0
    result = json.loads(table.read_text())
    assert result["systems"]["bytescheduler"]["iteration_s"] >= result["bound_s"]
    assert all(event["ph"] == "X" for event in json.loads(timeline.read_text())["traceEvents"])


@pytest.mark.parametrize(
    "wrong",
    [
        ("--bandwidth", "10"),
        ("--bandwidth", "0Gbps"),
        ("--latency", "10"),
        ("--workers", "0"),
        ("--credit-size", "1MiB"),
        ("--partition-size", "2MiB", "--credit-size", "1MiB"),
        ("--profile", "alexnet"),
        ("--compute", "fast"),
    ],
)
def test_bad_input_ends_with_2(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *wrong]) == 2
    assert capsys.readouterr().err.startswith("bytescheduler: ")


def test_a_file_that_is_no_timeline_ends_with_2(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    wanted = ["--trace", str(path), "--workers", "2", "--bandwidth", "1Gbps"]
    assert main(["simulate", *wanted]) == 2
