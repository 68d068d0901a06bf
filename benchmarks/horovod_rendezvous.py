"""Horovod's rendezvous server on a host of the lab, as ``horovodrun`` starts it for its workers.

``python -m benchmarks.horovod_rendezvous ADDRESS...`` prints its port and serves until standard
input closes.
"""

from __future__ import annotations

import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from benchmarks.processes import die_with_parent


def main() -> None:
    """Serve one job with a single slot on every address."""
    die_with_parent()
    addresses = sys.argv[1:]
    server = RendezvousServer()
    port = server.start()
    hosts = parse_hosts(",".join(f"{address}:1" for address in addresses))
    server.init(get_host_assignments(hosts, len(addresses)))
    print(port, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
