"""The lab's namespaces: made, shaped, and always taken down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import network
from benchmarks.errors import BenchmarkError
from benchmarks.network import namespaces

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not()))


def _existing(pid: int) -> list[str]:
    names = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20
    ).stdout.split("\n")
    return [name for name in names if name.startswith(f"{network.PREFIX}-{pid}-")]


def test_refuses_politely_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BenchmarkError, match="need root"), namespaces(2):
        pass


@pytest.mark.root
@needs_root
def test_links_are_shaped_in_both_directions() -> None:
    with namespaces(2) as made:
        made.shape(1e6)
        for worker in made.workers:
            shown = _tc(worker)
            assert "tbf" in shown
            assert "rate 8Mbit" in shown
        assert _tc(made.hub).count("rate 8Mbit") == 2


def _tc(host: network.Host) -> str:
    return subprocess.run(
        host.command(["tc", "qdisc", "show"]),
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout


@pytest.mark.root
@needs_root
def test_taken_down_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="oops"):
        _fail_inside()
    assert _existing(os.getpid()) == []


def _fail_inside() -> None:
    with namespaces(2):
        assert len(_existing(os.getpid())) == 3
        raise RuntimeError("oops")


HOLD = """
from benchmarks.network import namespaces
from benchmarks.processes import terminate_as_interrupt
import sys
with terminate_as_interrupt(), namespaces(1):
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.mark.root
@pytest.mark.multiprocess
@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_taken_down_after_a_signal(number: signal.Signals) -> None:
    with _holder() as process:
        process.send_signal(number)
        process.wait(30)
        assert _existing(process.pid) == []


@pytest.mark.root
@pytest.mark.multiprocess
@needs_root
def test_the_next_lab_removes_what_a_killed_one_left() -> None:
    with _holder() as process:
        process.kill()
        process.wait(30)
        assert len(_existing(process.pid)) == 2
        with namespaces(1):
            assert _existing(process.pid) == []


def _holder() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process
