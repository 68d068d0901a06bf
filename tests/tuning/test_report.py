"""Reports: written line by line, read at any moment; and what ``make_tuner`` makes of it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescheduler.core.config import Settings
from bytescheduler.tuning import ENV_REPORT, AutoTuner, IterationReport, make_tuner
from bytescheduler.tuning.report import read

SETTINGS = Settings(partition_size=1 << 18, credit_size=1 << 20, mode="fifo")


def report(path: Path, total_bytes: int = 1000) -> IterationReport:
    return IterationReport(path, settings=SETTINGS, total_bytes=total_bytes, world_size=2)


def test_nothing_is_known_before_an_optimizer_is_wrapped(tmp_path: Path) -> None:
    assert read(tmp_path / "r") is None


def test_iterations_are_differences_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "r"
    first = report(path)
    for now in (10.0, 10.5, 11.5):
        first.step(now)
    found = read(path)
    assert found is not None
    assert found.seconds == (0.5, 1.0)
    assert (found.settings, found.total_bytes, found.world_size) == (SETTINGS, 1000, 2)


def test_half_a_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "r"
    report(path)
    with path.open("a") as file:
        file.write('{"of": 0, "sec')
    found = read(path)
    assert found is not None
    assert found.seconds == ()


def test_of_several_optimizers_the_largest_counts(tmp_path: Path) -> None:
    path = tmp_path / "r"
    small, large = report(path, 10), report(path, 1000)
    for now in (0.0, 1.0, 2.0):
        small.step(now)
        large.step(10 * now)
    found = read(path)
    assert found is not None
    assert found.seconds == (10.0, 10.0)


def make(
    settings: Settings,
    world_size: int = 2,
    environ: dict[str, str] | None = None,
    total_bytes: int = 1000,
) -> object:
    return make_tuner(
        settings,
        signature="m",
        world_size=world_size,
        engine="torch",
        device="cpu",
        total_bytes=total_bytes,
        environ=environ or {},
    )


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_only_auto_with_several_ranks_is_tuned() -> None:
    assert isinstance(make(Settings(mode="auto")), AutoTuner)
    assert make(Settings(mode="auto"), world_size=1) is None
    assert make(Settings(mode="auto"), total_bytes=0) is None
    assert make(SETTINGS) is None


@pytest.mark.parametrize("mode", ["auto", "priority"])
def test_reports_where_the_environment_asks_for_it(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "r"
    settings = Settings(mode=mode)  # type: ignore[arg-type]
    tuner = make(settings, environ={ENV_REPORT: str(path)})
    answers = [tuner.step(0.1 * n) for n in range(30)]  # type: ignore[attr-defined]
    tuner.close()  # type: ignore[attr-defined]
    found = read(path)
    assert found is not None
    assert len(found.seconds) == 29
    assert any(answers) == (mode == "auto")
