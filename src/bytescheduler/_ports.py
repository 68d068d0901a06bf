"""Ports for processes that this machine starts and that meet each other."""

from __future__ import annotations

import socket
from contextlib import ExitStack

__all__ = ["free_port", "free_ports"]


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return ``count`` different ports of ``address`` that nothing listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((address, 0))
        return [probe.getsockname()[1] for probe in probes]


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of ``address`` that nothing listens on now."""
    return free_ports(1, address)[0]
