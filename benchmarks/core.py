"""``core``: what scheduling itself costs: Python per chunk, chunks per second, memory.

Ranks exchange through the fake transport that ships with the core, so that no engine hides our own
work. The processor time of all threads is divided by the chunks of all ranks; the fake transport's
averaging is measured alone and taken off. One rank in its process is what a job has; two ranks in
one process share an interpreter lock, and their threads' fight for it is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.errors import BenchmarkError
from benchmarks.report import console
from bytescheduler.core import Exchange, Layout, ParameterSpec, Settings
from bytescheduler.transports.fake import FakeNetwork

PARAMETERS = 64
ELEMENTS = 4096
PARTITION = 1024
CREDIT_CHUNKS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``core``."""
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.iterations < 1:
        raise BenchmarkError(f"--iterations must be at least 1, got {args.iterations}")
    result = measure(args.iterations)
    result["us_per_chunk_two_ranks_one_lock"] = measure(args.iterations, ranks=2)["us_per_chunk"]
    console().print(_table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


def measure(iterations: int, ranks: int = 1) -> dict[str, float]:
    """Microseconds of Python per chunk and rank, chunks per second, bytes per chunk at rest."""
    layout = _layout()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ends = _exchanges(layout, ranks)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    chunks = len(layout.cut(PARTITION).chunks)
    gradients = ranks * sum(layout.sizes.values()) * 4
    try:
        _everywhere(ends, _iterate, 2)
        cpu, wall = _clocked(lambda: _everywhere(ends, _iterate, iterations))
    finally:
        _everywhere(ends, lambda rank, _: rank.close(), 0)
    count = chunks * iterations
    fake = _fake_seconds(ranks, chunks)
    return {
        "chunks": chunks,
        "us_per_chunk": (cpu / count - fake) / ranks * 1e6,
        "us_per_chunk_with_fake_transport": cpu / count / ranks * 1e6,
        "chunks_per_s": count / wall,
        "bytes_per_chunk": (after - before - gradients) / ranks / chunks,
        "buffers_per_gradient": gradients / (ranks * PARAMETERS * ELEMENTS * 4),
    }


def _layout() -> Layout:
    return Layout(
        [ParameterSpec(name=f"p{index}", numel=ELEMENTS, itemsize=4) for index in range(PARAMETERS)]
    )


def _exchanges(layout: Layout, ranks: int) -> list[Exchange]:
    settings = Settings(partition_size=PARTITION, credit_size=CREDIT_CHUNKS * PARTITION)
    return [
        Exchange(
            layout,
            {name: np.zeros(size, np.float32) for name, size in layout.sizes.items()},
            transport,
            settings,
        )
        for transport in FakeNetwork(ranks).transports()
    ]


def _iterate(rank: Exchange, iterations: int) -> None:
    """Post last layers first, wait for first layers first, as training does."""
    order = list(range(PARAMETERS))
    for _ in range(iterations):
        for parameter in reversed(order):
            rank.post(parameter)
        rank.step()
        for parameter in order:
            rank.wait((parameter,))


def _everywhere(
    ranks: Sequence[Exchange], work: Callable[[Exchange, int], None], iterations: int
) -> None:
    threads = [Thread(target=work, args=(rank, iterations)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _clocked(work: Callable[[], None]) -> tuple[float, float]:
    """Processor seconds of all threads, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def _fake_seconds(ranks: int, chunks: int) -> float:
    """Processor seconds that the fake transport needs to average one chunk for all ranks."""
    ends = FakeNetwork(ranks).transports()
    buffer = np.zeros(PARTITION // 4, np.float32)
    handles = [end.prepare(0, buffer.copy()) for end in ends]
    rounds = 20 * chunks

    def play() -> None:
        for _ in range(rounds):
            for end, handle in zip(ends, handles, strict=True):
                end.start(handle, 0, _ignore)

    return _clocked(play)[0] / rounds


def _ignore(_: Any) -> None:
    pass


def _table(result: dict[str, float]) -> Table:
    table = Table(title=f"core alone, {result['chunks']:.0f} chunks per iteration")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("Python per chunk and rank", f"{result['us_per_chunk']:.1f} us")
    shared = result["us_per_chunk_two_ranks_one_lock"]
    table.add_row("the same, two ranks in one process", f"{shared:.1f} us")
    whole = result["us_per_chunk_with_fake_transport"]
    table.add_row("with the fake transport", f"{whole:.1f} us")
    table.add_row("chunks per second, all in one process", f"{result['chunks_per_s']:.0f}")
    table.add_row("memory of a chunk's plan", f"{result['bytes_per_chunk']:.0f} B")
    share = result["buffers_per_gradient"]
    table.add_row("flat buffers, in sizes of the gradients", f"{share:.3f}")
    return table
