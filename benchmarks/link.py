"""What an interface carries over time, from the kernel's counters of this network namespace."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

COUNTERS = Path("/proc/self/net/dev")
RECEIVED, SENT = 0, 8
"""Columns of the counters, in bytes."""
PERIOD_S = 0.01


class Reading(NamedTuple):
    """Bytes received and sent so far, at a time in seconds."""

    at: float
    received: int
    sent: int


class Watch:
    """Reads the counters of ``interface`` every 10 ms, from entering until leaving.

    Raises:
        LookupError: on entering, if there is no such interface here.
    """

    def __init__(self, interface: str) -> None:
        self.readings: list[Reading] = []
        self._interface = interface
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.readings.append(self._read())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self.readings.append(self._read())

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.readings.append(self._read())

    def _read(self) -> Reading:
        for line in COUNTERS.read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self._interface:
                columns = numbers.split()
                return Reading(time.perf_counter(), int(columns[RECEIVED]), int(columns[SENT]))
        raise LookupError(f"no interface {self._interface}")
