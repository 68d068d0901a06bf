"""The broadcast of initial parameters is timed on every rank, and always happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bytescheduler.core import Settings
from bytescheduler.transports.fake import FakeNetwork, FakeTransport
from bytescheduler.tuning import settings_of_rank_0, timed_broadcast

SECONDS = 0.1


def rates(ranks: int, values: int, late: float = 0.0) -> list[float | None]:
    """What each rank sees; the last one comes ``late`` seconds after the others."""
    found: dict[int, float | None] = {}

    def rank(transport: FakeTransport) -> None:
        buffer = np.full(values, transport.rank, np.float32)

        def broadcast() -> None:
            time.sleep(SECONDS)
            transport.broadcast(buffer)

        if transport.rank == ranks - 1:
            time.sleep(late)
        found[transport.rank] = timed_broadcast(transport, broadcast, buffer.nbytes)
        assert not buffer.any()

    _together([lambda end=end: rank(end) for end in FakeNetwork(ranks).transports()])
    return [found[number] for number in range(ranks)]


def _together(actions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_a_rank_that_comes_late_does_not_count_as_a_slow_network(late: float) -> None:
    size = 8 << 20
    for rate in rates(2, size // 4, late):
        assert rate is not None
        assert size / (5 * SECONDS) < rate <= size / SECONDS


def test_too_little_tells_no_bandwidth() -> None:
    assert rates(2, 1000) == [None, None]


def test_a_short_transfer_counts_without_its_first_connection() -> None:
    delays = iter([0.04, 0.001, 0.001])

    def rank(transport: FakeTransport, found: list[float | None]) -> None:
        buffer = np.zeros(1 << 20, np.float32)

        def broadcast() -> None:
            if transport.rank == 0:
                time.sleep(next(delays))
            transport.broadcast(buffer)

        found.append(timed_broadcast(transport, broadcast, buffer.nbytes))

    found: list[float | None] = []
    _together([lambda end=end: rank(end, found) for end in FakeNetwork(2).transports()])
    assert found[0] == found[1]
    assert found[0] is not None
    assert found[0] > (4 << 20) / 0.02


def test_settings_are_those_of_rank_0_but_for_the_path_of_the_trace() -> None:
    found: dict[int, Settings] = {}
    wanted = [
        Settings(partition_size=8, credit_size=16, mode="barrier", trace="a"),
        Settings(partition_size=9, credit_size=90, mode="auto", trace="b"),
    ]

    def rank(transport: FakeTransport) -> None:
        found[transport.rank] = settings_of_rank_0(transport, wanted[transport.rank])

    _together([lambda end=end: rank(end) for end in FakeNetwork(2).transports()])
    assert found == {0: wanted[0], 1: replace(wanted[0], trace="b")}


def test_alone_there_is_nothing_to_time() -> None:
    assert rates(1, 1 << 20) == [None]
