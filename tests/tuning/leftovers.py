"""Who is still there after a tune command."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescheduler.tuning.processes import ENV_JOB

psutil = pytest.importorskip("psutil")


def left_behind(cache: Path) -> list[str]:
    """Processes of trials that ran with this cache directory."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if ENV_JOB in environment and environment.get("XDG_CACHE_HOME") == str(cache):
            found.append(process.name())
    return found
