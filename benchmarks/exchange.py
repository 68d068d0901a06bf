"""``exchange``: one chunk after the other over Gloo, sent straight and by its ``all_reduce``.

Ranks are processes of this machine on loopback, three chunks are under way at a time, the two ways
take turns. What a chunk costs in processor time is what it takes from the compute beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.errors import BenchmarkError
from benchmarks.report import console

KIB = (16, 64, 256, 1024, 4096)
CHUNKS = 100
WINDOW = 3
TIMEOUT_S = 60

Rows = list[tuple[str, int, float, float]]  # way, KiB, microseconds, of processor time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``exchange``."""
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from bytescheduler.transports._direct import MOST_RANKS

    if not 2 <= args.workers <= MOST_RANKS or args.repeats < 1:
        raise BenchmarkError(f"--workers must be 2 to {MOST_RANKS}, --repeats at least 1")
    from torch import multiprocessing

    rows = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.workers, f"file://{folder}/store", args.repeats, rows)
        multiprocessing.spawn(_work, arguments, args.workers, daemon=True)
    console().print(_table(args.workers, rows.get()))
    return 0


def _work(rank: int, workers: int, meeting: str, repeats: int, rows: Any) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=workers)
    result = _compare(rank, workers, repeats)
    if rank == 0:
        rows.put(result)
    distributed.barrier()
    distributed.destroy_process_group()


def _compare(rank: int, workers: int, repeats: int) -> Rows:
    import torch
    from torch import distributed

    from bytescheduler.transports._direct import DirectAverage

    ring, straight = (distributed.new_group(backend="gloo") for _ in range(2))
    direct = DirectAverage(straight, rank, workers)
    average = distributed.AllreduceOptions()
    average.reduceOp = distributed.ReduceOp.AVG  # pyright: ignore[reportAttributeAccessIssue]

    def start_ring(chunk: torch.Tensor, _: int, done: Callable[[Any], None]) -> None:
        ring.allreduce([chunk], average).get_future().then(lambda _: done(None))

    ways = {"all_reduce": start_ring, "straight": direct.start}
    rows: Rows = []
    for kib in KIB:
        chunks = [torch.ones(kib << 8) for _ in range(CHUNKS)]
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, start in ways.items():
                distributed.barrier()
                times[way].append(_time(start, chunks))
        rows += [
            (way, kib, *(median(column) * 1e6 for column in zip(*seconds, strict=True)))
            for way, seconds in times.items()
        ]
    direct.close(TIMEOUT_S)
    return rows


def _time(start: Callable[..., None], chunks: list[Any]) -> tuple[float, float]:
    """Seconds per chunk, and seconds of this process's processor time."""
    room, arrived = threading.Semaphore(WINDOW), threading.Semaphore(0)

    def done(_: BaseException | None) -> None:
        room.release()
        arrived.release()

    used, begin = time.process_time(), time.perf_counter()
    for index, chunk in enumerate(chunks):
        room.acquire()
        start(chunk, index, done)
    for _ in chunks:
        arrived.acquire()
    seconds = time.perf_counter() - begin, time.process_time() - used
    return seconds[0] / len(chunks), seconds[1] / len(chunks)


def _table(workers: int, rows: Rows) -> Table:
    table = Table(title=f"one chunk over Gloo on loopback, {workers} workers")
    for name in ("KiB", "way", "us", "us of processor time per rank"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, kib, wall, used in rows:
        table.add_row(str(kib), way, f"{wall:.0f}", f"{used:.0f}")
    return table
