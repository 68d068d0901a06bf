"""Observers: who wants to know what happens, asks here; the algorithm itself logs nothing.

``TraceRecorder`` is the one that ships: it keeps events in memory and writes a timeline in the
Chrome trace format, which Perfetto opens and ``bytescheduler trace`` merges. Times are microseconds
of the machine's clock, so that ranks on synchronised hosts line up.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Final, Protocol

from bytescheduler.core.plan import Chunk, Layout, Plan

__all__ = ["ComputeLane", "Observer", "TraceRecorder"]

EVENT_LIMIT: Final = 1_000_000  # the newest are kept


class Observer(Protocol):
    """Called from the threads where things happen; must be quick and must not raise."""

    def planned(self, layout: Layout, plan: Plan, *, negotiated: bool = False) -> None:
        """The buffers were cut."""

    def posted(self, parameter: int) -> None:
        """A gradient is in the buffer."""

    def started(self, chunk: Chunk) -> None:
        """A chunk was handed to the transport."""

    def completed(self, chunk: Chunk) -> None:
        """A chunk came back."""

    def span(self, lane: str, name: str, begin: float, end: float) -> None:
        """The training thread computed, waited or updated from ``begin`` to ``end``.

        Times are ``time.perf_counter()`` seconds; ``lane`` is ``compute``, ``wait`` or ``update``.
        """


class ComputeLane:
    """Turns "now this begins" into the spans of the training thread's compute lane."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._name = ""
        self._since = 0.0

    def begin(self, name: str) -> None:
        """What ran before ends, and ``name`` begins."""
        self.end()
        self._name = name
        self._since = time.perf_counter()

    def end(self) -> None:
        """What runs, if anything, ends; the thread waits or does something else."""
        if self._name:
            self._observer.span("compute", self._name, self._since, time.perf_counter())
            self._name = ""


class TraceRecorder:
    """Records a timeline and writes it as Chrome trace JSON.

    Args:
        path: file to write; ``{rank}`` is replaced, and without it ``.rank<N>`` is inserted before
            the suffix when there are several ranks.
    """

    def __init__(self, path: str | Path, rank: int, world_size: int) -> None:
        self.path = _path_of_rank(str(path), rank, world_size)
        self._rank = rank
        self._world_size = world_size
        self._names: tuple[str, ...] = ()
        self._plan: dict[str, Any] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=EVENT_LIMIT)
        self._begun: dict[Chunk, float] = {}
        self._lock = threading.Lock()
        self._epoch = time.time() - time.perf_counter()

    def planned(self, layout: Layout, plan: Plan, *, negotiated: bool = False) -> None:
        self._names = tuple(spec.name for spec in layout.specs)
        self._plan = {
            "partition_size": plan.partition_size,
            "order": [self._names[index] for index in layout.order],
            "negotiated": negotiated,
            "bytes": {spec.name: spec.numel * spec.itemsize for spec in layout.specs},
        }

    def posted(self, parameter: int) -> None:
        now = self._microseconds(time.perf_counter())
        self._add(
            {"ph": "i", "s": "t", "tid": "gradients", "name": self._name(parameter), "ts": now}
        )

    def started(self, chunk: Chunk) -> None:
        self._begun[chunk] = time.perf_counter()

    def completed(self, chunk: Chunk) -> None:
        begin = self._begun.pop(chunk, None)
        if begin is not None:
            detail = {"chunk": chunk.index, "bytes": chunk.nbytes}
            self._complete("network", self._describe(chunk), begin, time.perf_counter(), detail)

    def span(self, lane: str, name: str, begin: float, end: float) -> None:
        self._complete(lane, name, begin, end, {})

    def write(self) -> Path:
        """Write the file atomically and return its path."""
        with self._lock:
            events = list(self._events)
        document = {
            "traceEvents": [self._process_name(), *events],
            "displayTimeUnit": "ms",
            "metadata": {"rank": self._rank, "world_size": self._world_size, "plan": self._plan},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(document))
        temporary.replace(self.path)
        return self.path

    def _complete(
        self, lane: str, name: str, begin: float, end: float, detail: dict[str, Any]
    ) -> None:
        self._add(
            {
                "ph": "X",
                "tid": lane,
                "name": name,
                "ts": self._microseconds(begin),
                "dur": (end - begin) * 1e6,
                "args": detail,
            }
        )

    def _add(self, event: dict[str, Any]) -> None:
        event["pid"] = self._rank
        with self._lock:
            self._events.append(event)

    def _process_name(self) -> dict[str, Any]:
        name = {"name": f"rank {self._rank}"}
        return {"ph": "M", "pid": self._rank, "name": "process_name", "args": name}

    def _describe(self, chunk: Chunk) -> str:
        first, last = chunk.spans[0].parameter, chunk.spans[-1].parameter
        name = self._name(first)
        return name if first == last else f"{name} … {self._name(last)}"

    def _name(self, parameter: int) -> str:
        return self._names[parameter] if self._names else str(parameter)

    def _microseconds(self, counter: float) -> float:
        return (self._epoch + counter) * 1e6


def _path_of_rank(path: str, rank: int, world_size: int) -> Path:
    if "{rank}" in path:
        return Path(path.replace("{rank}", str(rank)))
    plain = Path(path)
    return plain if world_size == 1 else plain.with_suffix(f".rank{rank}{plain.suffix or '.json'}")
