"""Averages sent straight to the other ranks: real Gloo groups, one per thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bytescheduler.transports import _direct
from bytescheduler.transports._direct import GRAIN, MOST_RANKS, DirectAverage

TIMEOUT = 20.0
RANKS = (2, 3, 5, MOST_RANKS)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@contextmanager
def ends(ranks: int) -> Iterator[list[DirectAverage]]:
    """Every rank's end of one group."""
    store = dist.HashStore()

    def open_end(rank: int) -> DirectAverage:
        group = dist.ProcessGroupGloo(store, rank, ranks, timeout=timedelta(seconds=TIMEOUT))
        return DirectAverage(group, rank, ranks)

    with ThreadPoolExecutor(ranks) as pool:
        opened = list(pool.map(open_end, range(ranks)))
    try:
        yield opened
    finally:
        for end in opened:
            end.close(TIMEOUT)


def averaged(ends_: list[DirectAverage], chunks: list[list[torch.Tensor]]) -> None:
    """Start ``chunks[rank]`` on every rank at once and wait for all of them."""
    errors: list[Any] = []
    arrived = threading.Semaphore(0)

    def done(error: BaseException | None) -> None:
        errors.append(error)
        arrived.release()

    def start(rank: int) -> None:
        for index, chunk in enumerate(chunks[rank]):
            ends_[rank].start(chunk, index, done)

    with ThreadPoolExecutor(len(ends_)) as pool:
        list(pool.map(start, range(len(ends_))))
    for _ in range(sum(map(len, chunks))):
        assert arrived.acquire(timeout=TIMEOUT)
    assert errors == [None] * len(errors)


def gradients(ranks: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


def mean_in_order(tensors: list[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, tensors) / len(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_the_mean_summed_in_the_order_of_the_ranks(
    ranks: int, dtype: torch.dtype
) -> None:
    sizes = (0, 1, ranks - 1, ranks + 1, 1000, 2 * GRAIN + 3)
    given = [gradients(ranks, size, dtype) for size in sizes]
    expected = [mean_in_order(tensors) for tensors in given]
    chunks = [[tensors[rank].clone() for tensors in given] for rank in range(ranks)]
    with ends(ranks) as opened:
        averaged(opened, chunks)
    for rank in range(ranks):
        for chunk, mean in zip(chunks[rank], expected, strict=True):
            assert torch.equal(chunk, mean)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mean_does_not_depend_on_where_gradients_are_cut(ranks: int) -> None:
    given = gradients(ranks, 4099)
    results: list[torch.Tensor] = []
    with ends(ranks) as opened:
        for step in (4099, 1024, 77):
            flat = [tensor.clone() for tensor in given]
            averaged(opened, [list(tensor.split(step)) for tensor in flat])
            results += flat
    assert all(torch.equal(result, results[0]) for result in results)


def test_memory_for_others_gradients_is_used_again() -> None:
    with ends(2) as opened:
        for _ in range(5):
            averaged(opened, [[torch.ones(1000)], [torch.ones(1000)]])
        assert [_kept(end) for end in opened] == [1, 1]
        opened[0].forget()
        assert _kept(opened[0]) == 0


@pytest.mark.parametrize("others", ["others are sent", "it is looked after"])
def test_what_another_rank_has_yet_to_send_does_not_hold_up_those_behind_it(
    monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    monkeypatch.setattr(_direct, "PATIENCE", 0.0)
    monkeypatch.setattr(_direct, "LEAST_PATIENCE", 0.0)
    first, second = threading.Event(), threading.Event()

    def sets(event: threading.Event) -> Callable[[BaseException | None], None]:
        return lambda error: event.set() if error is None else None

    with ends(2) as (fast, slow):
        fast.start(torch.ones(10), 0, sets(first))
        fast.start(torch.ones(10), 1, sets(second))
        slow.start(torch.ones(10), 1, sets(threading.Event()))
        deadline = time.monotonic() + TIMEOUT
        for tag in count(2):  # until a thread is found to be held up
            if second.wait(0.001) or time.monotonic() > deadline:
                break
            if others == "it is looked after":
                fast.look()
                continue
            for end in (fast, slow):
                end.start(torch.ones(10), tag, sets(threading.Event()))
        assert second.is_set()
        assert not first.is_set()
        slow.start(torch.ones(10), 0, sets(threading.Event()))
        assert first.wait(TIMEOUT)


def test_the_thread_ends_with_close() -> None:
    with ends(2) as opened:
        averaged(opened, [[torch.ones(3)], [torch.ones(3)]])
        threads = [watcher for end in opened for watcher in end._watchers]
    for thread in threads:
        assert not thread.is_alive()


def _kept(end: DirectAverage) -> int:
    return sum(map(len, end._spare.values()))
