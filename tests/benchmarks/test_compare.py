"""``python -m benchmarks``: a whole comparison, small, and the simulator held against it."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest
from benchmarks import network
from commands import benchmarks

NAMES = "ddp,fifo,bytescheduler"
KEYS = {"profile", "workers", "balance", "limit_s", "bound_s", "compute_s", "exchange_s", "systems"}
TIMEOUT_S = 240
pytestmark = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.timeout(TIMEOUT_S + 30),
    pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not())),
]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compare")
    files = ("--json", str(folder / "r.json"), "--plot", str(folder / "r.png"))
    effort = ("--repeats", "3", "--iterations", "3", "--tries", "1")
    done = benchmarks(
        "compare", "--profile", "vgg16", "--systems", NAMES, *effort, *files, timeout_s=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "r.png").stat().st_size > 0
    return json.loads((folder / "r.json").read_text())


def test_json_holds_what_is_promised(result: dict[str, Any]) -> None:
    assert set(result) >= KEYS
    assert result["limit_s"] == max(result["compute_s"], result["exchange_s"])
    assert result["bound_s"] >= result["limit_s"] * 0.999
    for entry in result["systems"].values():
        assert entry["median_s"] == median(entry["runs"])
    assert set(result["systems"]) == set(NAMES.split(","))


def test_simulator_predicts_the_lab(result: dict[str, Any]) -> None:
    """Within 10 percent, by the median over the systems (on a machine that is not busy)."""
    errors = [
        abs(entry["predicted_s"] / entry["median_s"] - 1) for entry in result["systems"].values()
    ]
    assert median(errors) < 0.10, result


def test_wrong_usage_starts_nothing() -> None:
    for wrong in (("--systems", "nothing"), ("--workers", "1"), ("--balance", "0")):
        done = benchmarks("compare", *wrong, timeout_s=TIMEOUT_S)
        assert done.returncode != 0
        assert "benchmarks: " in done.stderr
