"""What an interface carries: read from the kernel, turned into rates and shares of time."""

from __future__ import annotations

import argparse
import socket

import pytest
from benchmarks.duplex import summary
from benchmarks.job import make_job
from benchmarks.link import Reading, Watch
from benchmarks.loopback import summarise

MEGABYTE = 1_000_000
BLOCK = 32_768  # fits a socket's buffer


def test_counts_what_is_sent_while_it_watches() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one, (other, _) = socket.create_connection(server.getsockname()), server.accept()
        with one, other, Watch("lo") as watch:
            for _ in range(8):
                one.sendall(bytes(BLOCK))
                assert len(other.recv(BLOCK, socket.MSG_WAITALL)) == BLOCK
    first, last = watch.readings[0], watch.readings[-1]
    assert last.sent - first.sent >= 8 * BLOCK
    assert last.received - first.received >= 8 * BLOCK


def test_an_unknown_interface_is_an_error() -> None:
    with pytest.raises(LookupError, match="no interface nosuch0"), Watch("nosuch0"):
        pass


def test_directions_that_are_in_use_together_are_told_from_turns() -> None:
    args = argparse.Namespace(profile="vgg16", balance=1.0)
    job = make_job("vgg16", 2)
    ticks = range(400)

    def share(pull_starts: int) -> float:
        """Push in the first half, pull for as long from ``pull_starts`` hundredths on."""
        out = [min(tick, 200) * MEGABYTE for tick in ticks]
        back = [min(max(tick - pull_starts, 0), 200) * MEGABYTE for tick in ticks]
        readings = [Reading(t / 100, back[t], out[t]) for t in ticks]
        return summary(args, job, 100.0 * MEGABYTE, 4.0, readings)["both"]

    assert share(200) == pytest.approx(0.0, abs=0.03)
    assert share(0) == pytest.approx(0.5, abs=0.03)


def test_loopback_compares_within_turns() -> None:
    result = summarise({"peer": [1.0, 2.0, 4.0], "ours": [1.1, 2.2, 4.4]})
    assert result["ours"]["of_peer"] == pytest.approx(1.1)
    assert result["ours"]["quartiles"] == pytest.approx([1.1, 1.1])
