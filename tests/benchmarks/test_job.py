"""Jobs, devices and settings of the lab."""

from __future__ import annotations

import time

import pytest
from benchmarks import device
from benchmarks.compare import parse_systems, structural_bound
from benchmarks.device import Device
from benchmarks.errors import BenchmarkError
from benchmarks.job import Job, make_job
from benchmarks.matrix import gain_reached
from benchmarks.systems import OURS, SYSTEMS


def test_sizes_shrink_so_that_all_links_together_carry_the_same() -> None:
    two, four = make_job("vgg16", 2), make_job("vgg16", 4)
    assert two.gradient_bytes == pytest.approx(3 * four.gradient_bytes, rel=0.01)


def test_a_job_travels_as_json() -> None:
    job = make_job("resnet50", 2)
    assert Job.from_json(job.to_json()) == job


def test_bound_is_the_simulators() -> None:
    job = make_job("vgg16", 2)
    assert structural_bound(job, 1.0, 1.0) == pytest.approx(1.0, rel=0.01)
    assert structural_bound(job, 1.0, 3.0) == pytest.approx(3.0, rel=0.05)


def test_a_device_does_not_add_up_its_oversleeping() -> None:
    made = Device(make_job("vgg16", 2))
    begin = time.perf_counter()
    for _ in range(200):
        made.compute(0.0005)
    made.compute(0.01)
    elapsed = time.perf_counter() - begin - 0.11
    assert elapsed < 0.05  # 200 sleeps oversleep by 0.06 ms each or more: without care, all add up
    assert elapsed > -0.001


def test_a_skewed_device_takes_longer_by_the_iteration_and_alike_for_every_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(device.time, "sleep", slept.append)
    monkeypatch.setattr(device.time, "perf_counter", lambda: sum(slept))
    monkeypatch.setenv("RANK", "1")
    job = make_job("vgg16", 2, skew=0.2)
    calls = 2 * len(job.layers)

    def iterations() -> list[float]:
        slept.clear()
        made = Device(job)
        for _ in range(3 * calls):
            made.compute(1.0)
        return [sum(slept[begin : begin + calls]) / calls for begin in range(0, 3 * calls, calls)]

    first = iterations()
    assert first == pytest.approx(iterations())
    assert all(1.0 <= seconds <= 1.2 for seconds in first)
    assert len({round(seconds, 6) for seconds in first}) == 3
    monkeypatch.setenv("RANK", "0")
    assert iterations() != pytest.approx(first)


def test_every_system_has_settings_that_travel_as_json() -> None:
    job = make_job("vgg16", 2)
    for system in SYSTEMS.values():
        settings = system.sweep(job)
        assert settings
        assert all(isinstance(value, str) for value in system.environment(settings[0]).values())


def test_systems_are_named_or_refused() -> None:
    assert parse_systems("ddp,bytescheduler") == ["ddp", "bytescheduler"]
    assert set(parse_systems("all")) >= OURS
    with pytest.raises(BenchmarkError, match="no system is named byteps2"):
        parse_systems("ddp,byteps2")


def test_gain_is_measured_from_the_best_peer_to_the_bound() -> None:
    systems = {"ddp": 1.4, "horovod": 1.3, "fifo": 1.2, "bytescheduler": 1.05}
    result = {
        "bound_s": 1.0,
        "systems": {name: {"median_s": seconds} for name, seconds in systems.items()},
    }
    assert gain_reached(result) == pytest.approx(0.25 / 0.3)
