"""The candidates: bounded, valid, with what must be among them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescheduler.core.config import Settings
from bytescheduler.tuning.space import MAX_CHUNKS, SCHEDULES, Space

SIZES = [0, 4, 1000, 3_000_000, 100_000_000, 10_000_000_000]


@pytest.mark.parametrize("total", SIZES)
def test_candidates_hold_the_anchors_and_differ(total: int) -> None:
    space = Space(total_bytes=total, base=Settings(trace="t"))
    candidates = space.candidates()
    assert set(space.anchors) <= set(candidates)
    assert len(set(candidates)) == len(candidates) <= 300
    assert {settings.mode for settings in candidates} == set(SCHEDULES)
    assert {settings.trace for settings in candidates} == {"t"}


@pytest.mark.parametrize("total", SIZES[3:5])
def test_no_candidate_cuts_into_too_many_chunks(total: int) -> None:
    smallest = min(
        item.partition_size for item in Space(total_bytes=total, base=Settings()).candidates()
    )
    assert total / smallest <= MAX_CHUNKS


@pytest.mark.parametrize("total", SIZES[3:])
def test_the_second_anchor_cuts_the_model_in_some_dozens(total: int) -> None:
    anchor = Space(total_bytes=total, base=Settings()).anchors[1]
    assert anchor.mode == "priority"
    assert 64 << 10 <= anchor.partition_size <= 4 << 20
    assert total / anchor.partition_size <= 32 or anchor.partition_size == 4 << 20


def test_the_users_sizes_are_a_candidate() -> None:
    mine = Settings(partition_size=3_000_000, credit_size=7_000_000, mode="auto")
    space = Space(total_bytes=100_000_000, base=mine)
    assert replace(mine, mode="priority") in space.candidates()
