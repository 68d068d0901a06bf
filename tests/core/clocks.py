"""Time that passes when a test says so."""

from __future__ import annotations


class Clock:
    """Seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now
