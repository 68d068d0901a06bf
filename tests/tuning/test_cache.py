"""What tuning keeps: found again, shared safely, never trusted."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from bytescheduler.core.config import Settings
from bytescheduler.tuning.cache import Cache, JobKey, cache_directory

KEY = JobKey(signature="m", world_size=2, engine="torch", device="cpu", bandwidth=1e9)
FOUND = Settings(partition_size=1 << 17, credit_size=1 << 19, mode="fifo")


def test_settings_are_found_again_with_the_rest_from_the_user(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "not" / "there" / "yet")
    cache.store(KEY, FOUND, 0.1)
    assert cache.load(KEY, Settings(trace="t.json")) == replace(FOUND, trace="t.json")


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, signature="n"),
        replace(KEY, world_size=3),
        replace(KEY, engine="mpi"),
        replace(KEY, device="cuda"),
        replace(KEY, bandwidth=4e9),
        replace(KEY, bandwidth=None),
    ],
)
def test_another_job_does_not_find_them(tmp_path: Path, other: JobKey) -> None:
    cache = Cache(tmp_path)
    cache.store(KEY, FOUND, 0.1)
    assert cache.load(other, Settings()) is None


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.0])
def test_a_slightly_different_bandwidth_finds_them(tmp_path: Path, factor: float) -> None:
    cache = Cache(tmp_path)
    cache.store(KEY, FOUND, 0.1)
    assert cache.load(replace(KEY, bandwidth=1e9 * factor), Settings()) == FOUND


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"version": 99}',
        b"x" * (1 << 17),
        b"[" * 50_000,
    ],
)
def test_foreign_content_is_ignored_with_a_warning(tmp_path: Path, content: bytes) -> None:
    cache = Cache(tmp_path)
    cache.store(KEY, FOUND, 0.1)
    next(tmp_path.iterdir()).write_bytes(content)
    with pytest.warns(UserWarning, match="ignored"):
        assert cache.load(KEY, Settings()) is None


@pytest.mark.parametrize(
    "change",
    [{"partition_size": -1}, {"credit_size": 1}, {"mode": "auto"}, {"mode": 7}, {"key": {}}],
)
def test_values_that_break_a_rule_are_ignored_with_a_warning(
    tmp_path: Path, change: dict[str, object]
) -> None:
    cache = Cache(tmp_path)
    cache.store(KEY, FOUND, 0.1)
    path = next(tmp_path.iterdir())
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.warns(UserWarning, match="ignored"):
        assert cache.load(KEY, Settings()) is None


def test_a_directory_that_cannot_be_written_costs_a_warning_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
        Cache(blocked / "tuning").store(KEY, FOUND, 0.1)


def test_the_directory_follows_the_environment(tmp_path: Path) -> None:
    inside = cache_directory({"XDG_CACHE_HOME": str(tmp_path)})
    assert inside == tmp_path / "bytescheduler" / "tuning"
    assert cache_directory({"XDG_CACHE_HOME": "relative"}).is_absolute()


def _store_often(directory: Path, times: int) -> None:
    for _ in range(times):
        Cache(directory).store(KEY, FOUND, 0.1)


@pytest.mark.multiprocess
def test_jobs_that_end_together_leave_a_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_store_often, args=(tmp_path, 200)) for _ in range(3)]
    for job in jobs:
        job.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(job.is_alive() for job in jobs):
            assert Cache(tmp_path).load(KEY, Settings()) in (None, FOUND)
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
