"""``bytescheduler doctor``: engines tried for real, those that break here reported, the gain."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from bytescheduler.cli import main
from bytescheduler.doctor.engines import ENGINES, Engine, examine
from bytescheduler.doctor.probe import measure
from bytescheduler.transports.fake import FakeNetwork, FakeTransport

pytest.importorskip("psutil")
pytest.importorskip("rich")


def engine(code: str, **changes: object) -> Engine:
    """One whose two ranks run ``code``."""
    command = [sys.executable, "-c", code]
    plain = Engine(
        name="made-up",
        modules=("json",),
        install="pip install made-up",
        commands=lambda: [(command, {}), (command, {})],
        rdma=lambda: "none",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_measures_latency_and_bandwidth_on_every_rank() -> None:
    results: dict[int, dict[str, float]] = {}

    def rank(transport: FakeTransport) -> None:
        results[transport.rank] = measure(transport, lambda size: np.zeros(size, np.float32))

    threads = [threading.Thread(target=rank, args=(item,)) for item in FakeNetwork(2).transports()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1]
    for result in results.values():
        assert result["world_size"] == 2
        assert result["latency_s"] > 0
        assert result["bandwidth_bytes_per_s"] > 0


def test_an_engine_that_is_not_installed_says_how_to_get_it() -> None:
    finding = examine(engine("", modules=("no_such_module",)), timeout=5)
    assert (finding.installed, finding.works) == (False, False)
    assert finding.install == "pip install made-up"


@pytest.mark.multiprocess
def test_an_engine_that_breaks_is_reported_with_its_error() -> None:
    finding = examine(engine("raise RuntimeError('no such device')"), timeout=60)
    assert (finding.installed, finding.works) == (True, False)
    assert "RuntimeError: no such device" in (finding.error or "")


@pytest.mark.multiprocess
def test_an_engine_that_hangs_is_ended() -> None:
    finding = examine(engine("import time; time.sleep(600)"), timeout=2)
    assert not finding.works
    assert "within 2 s" in (finding.error or "")


@pytest.mark.multiprocess
def test_tries_torch_for_real_and_predicts_a_gain(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    options = ["--engine", "torch", "--profile", "vgg16", "--bandwidth", "10Gbps"]
    assert main(["doctor", "--json", *options, "--compute", "250ms"]) == 0
    found = json.loads(capsys.readouterr().out)
    torch = found["engines"]["torch"]
    assert torch["works"]
    assert torch["latency_s"] > 0
    assert torch["bandwidth_bytes_per_s"] > 0
    assert "nccl" in torch["rdma"]
    assert found["packages"]["torch"]
    assert found["gain"]["scheduled_s"] <= found["gain"]["plain_s"]


@pytest.mark.multiprocess
def test_tries_an_engine_under_its_own_launcher() -> None:
    [mpi] = [item for item in ENGINES if item.name == "mpi"]
    if not mpi.installed:
        pytest.skip("mpi4py or mpirun is not installed")
    finding = examine(mpi, timeout=60)
    assert finding.works, finding.error
    assert finding.latency_s
    assert finding.bandwidth_bytes_per_s


@pytest.mark.parametrize("item", ENGINES, ids=lambda item: item.name)
def test_every_engine_says_what_it_would_use_for_rdma(item: Engine) -> None:
    assert item.rdma()
    assert item.install


@pytest.mark.parametrize(
    "options", [["--timeout", "0"], ["--workers", "1"], ["--bandwidth", "fast"]]
)
def test_bad_input_is_refused(
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined: list[str] = []

    def note(engine: Engine, timeout: float) -> None:
        examined.append(engine.name)

    monkeypatch.setattr("bytescheduler.doctor.command.examine", note)
    assert main(["doctor", *options]) == 2
    assert "got" in capsys.readouterr().err
    assert not examined
