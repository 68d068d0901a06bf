"""Several hosts on one machine: a network namespace each, joined by links of a given rate.

Every worker has a namespace with one interface, ``eth0``, that leads to a bridge. A token bucket
limits the worker's own end and another the bridge's end of that cable, so that both directions
have the same rate. The bridge sits in a namespace too, the *hub*, where rendezvous and parameter
server schedulers may run unshaped. Nothing has a way out of these namespaces.

``netem`` would add latency as well, but few kernels ship it. Control groups cannot shape traffic
per direction. So: token buckets, and the kernel's own few microseconds as latency.

A namespace has its own ``/etc/hosts`` too (a file that ``ip netns exec`` mounts), in which the
machine's name stands for the worker's address: Horovod and others look it up to choose where to
listen.

Names carry the process id of the command that made them. Leaving :func:`namespaces` takes them
down, whatever happened; those of a command that was killed are removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchmarkError

PREFIX = "bslab"
FILES = Path("/etc/netns")
COMMAND_TIMEOUT_S = 20.0
BURST_BYTES = 128 << 10
BURST_S = 0.004
"""A bucket holds this much of its rate and at least ``BURST_BYTES``: with less, a busy machine that
serves the bucket late loses rate for good (measured: up to a third)."""
QUEUE_BYTES = 1 << 20
# Reno: few kernels allow cubic in a namespace, and BBR's probing of the rate adds noise.
SYSCTLS = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a process runs: ``namespace`` (None is the machine itself) and its address."""

    namespace: str | None
    address: str
    interface: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` so that it runs on this host."""
        if self.namespace is None:
            return list(argv)
        return ["ip", "netns", "exec", self.namespace, *argv]


LOOPBACK = Host(namespace=None, address="127.0.0.1", interface="lo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The hosts of a lab: one per worker, and the hub."""

    hub: Host
    workers: tuple[Host, ...]

    def shape(self, bytes_per_second: float) -> None:
        """Give every link this rate in both directions."""
        for index, worker in enumerate(self.workers):
            _shape(worker.namespace, "eth0", bytes_per_second)
            _shape(self.hub.namespace, f"port{index}", bytes_per_second)


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root; run this command as root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} must be installed (package iproute2)"
    return None


@contextmanager
def namespaces(workers: int) -> Iterator[Network]:
    """Make a lab for ``workers`` workers, and take it down again.

    Raises:
        BenchmarkError: namespaces cannot be made here.
    """
    reason = why_not()
    if reason is not None:
        raise BenchmarkError(reason)
    _remove_stale()
    stem = f"{PREFIX}-{os.getpid()}"
    hub = Host(namespace=f"{stem}-hub", address="10.77.0.254", interface="br0")
    hosts = tuple(
        Host(namespace=f"{stem}-w{index}", address=f"10.77.0.{index + 1}", interface="eth0")
        for index in range(workers)
    )
    try:
        _make_hub(hub)
        for index, host in enumerate(hosts):
            _make_worker(hub, host, index)
        yield Network(hub=hub, workers=hosts)
    finally:
        _remove([host.namespace for host in (hub, *hosts) if host.namespace])


def _make_hub(hub: Host) -> None:
    _ip("netns", "add", str(hub.namespace))
    _ip("-n", str(hub.namespace), "link", "set", "lo", "up")
    _ip("-n", str(hub.namespace), "link", "add", "br0", "type", "bridge")
    _ip("-n", str(hub.namespace), "addr", "add", f"{hub.address}/24", "dev", "br0")
    _ip("-n", str(hub.namespace), "link", "set", "br0", "up")


def _make_worker(hub: Host, host: Host, index: int) -> None:
    name, port = str(host.namespace), f"port{index}"
    _ip("netns", "add", name)
    _write_hosts(name, host.address)
    for setting in SYSCTLS:
        key, value = setting.split("=")
        _run(host.command(["sh", "-c", f"echo {value} > /proc/sys/{key.replace('.', '/')}"]))
    peer = ("peer", "name", port, "netns", str(hub.namespace))
    _ip("-n", name, "link", "add", "eth0", "type", "veth", *peer)
    _ip("-n", str(hub.namespace), "link", "set", port, "master", "br0", "up")
    _ip("-n", name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "link", "set", "eth0", "up")


def _write_hosts(namespace: str, address: str) -> None:
    folder = FILES / namespace
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")


def _shape(namespace: str | None, device: str, bytes_per_second: float) -> None:
    rate = f"{max(8, round(bytes_per_second * 8))}bit"
    burst = max(BURST_BYTES, round(bytes_per_second * BURST_S))
    bucket = ("rate", rate, "burst", str(burst), "limit", str(QUEUE_BYTES + burst))
    place = ("ip", "netns", "exec", str(namespace))
    _run([*place, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *bucket])


def _remove_stale() -> None:
    """Remove the namespaces of commands that are gone."""
    listed = _run(["ip", "netns", "list"])
    names = re.findall(rf"^({PREFIX}-(\d+)-\w+)", listed, re.MULTILINE)
    _remove([name for name, pid in names if not os.path.exists(f"/proc/{pid}")])


def _remove(names: Sequence[str]) -> None:
    """End what runs in the namespaces and delete them; go on if one is gone already."""
    for name in names:
        pids = subprocess.run(
            ["ip", "netns", "pids", name],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        ).stdout.split()
        if pids:
            subprocess.run(["kill", "-KILL", *pids], check=False, timeout=COMMAND_TIMEOUT_S)
        subprocess.run(
            ["ip", "netns", "delete", name],
            capture_output=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        )
        shutil.rmtree(FILES / name, ignore_errors=True)


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done.stdout
