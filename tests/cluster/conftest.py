"""Shared pieces of the cluster tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bytescheduler.cluster.contract import JobState, Node, Resources, ServiceRecord, Shape
from bytescheduler.cluster.models.speed import SpeedModel

POLLUX = Path(__file__).resolve().parents[3] / "shared" / "data" / "pollux"
SLOT = Resources(cpu=1)


@pytest.fixture(scope="session")
def pollux() -> Path:
    """The published traces and results; tests skip where they are absent."""
    if not POLLUX.is_dir():
        pytest.skip(f"needs the Pollux traces in {POLLUX}")
    return POLLUX


@pytest.fixture
def gpu_nodes() -> list[Node]:
    """Pollux's cluster: 16 nodes of 4 GPUs."""
    return [Node(id=i, capacity=Resources(gpu=4)) for i in range(16)]


@pytest.fixture
def make_job() -> Callable[..., JobState]:
    """Make job states with one slot (a core) per task."""

    def make(name: str = "job", **changes: object) -> JobState:
        speed = SpeedModel(mode="sync", coefficients=(1.0, 0.1, 0.5, 0.01, 0.01), batch=16)
        fields: dict[str, object] = {
            "name": name,
            "submitted": 0.0,
            "worker": SLOT,
            "server": SLOT,
            "requested": Shape(2, 2),
            "limit": Shape(8, 8),
            "remaining": 1000.0,
            "step_time": speed.step_time,
            "progress": 0.5,
            "service": ServiceRecord(),
        }
        return JobState(**{**fields, **changes})  # type: ignore[arg-type]

    return make
