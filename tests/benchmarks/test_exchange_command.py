"""``python -m benchmarks exchange``, and what it shows: sent straight, a chunk costs less."""

from __future__ import annotations

import pytest
from commands import benchmarks

TIMEOUT_S = 120
pytestmark = pytest.mark.multiprocess


def test_sent_straight_a_chunk_takes_less_of_the_processor() -> None:
    done = benchmarks("exchange", "--repeats", "3", timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    small = {row[3]: int(row[7]) for row in rows if row[1:2] == ["64"]}
    assert 0 < small["straight"] < small["all_reduce"]


def test_more_workers_than_send_straight_are_refused() -> None:
    done = benchmarks("exchange", "--workers", "9", timeout_s=TIMEOUT_S)
    assert done.returncode == 1
    assert "--workers must be 2 to 8" in done.stderr
