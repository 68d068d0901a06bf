"""Run the benches' command line as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """``python -m benchmarks`` with ``arguments``, its output kept."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
