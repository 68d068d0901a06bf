"""How the workers of each engine are started, and what must run beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count

from benchmarks.network import Host
from benchmarks.pool import Pool, helper, pool
from bytescheduler._ports import free_port

PORT = 29500
WORKER = ("-m", "benchmarks.worker")
Variables = dict[str, str]
GLOO_TIMEOUT_S = 24 * 3600
HEARTBEATS = frozenset({"mirrored"})
"""Engines that give up a worker which is silent for some seconds."""
_ports = count(PORT)  # several pools of an engine are up at once


@contextmanager
def engine_pool(
    engine: str, hub: Host, hosts: Sequence[Host], environment: Mapping[str, str]
) -> Iterator[Pool]:
    """Workers of ``engine`` on ``hosts``, its helpers on ``hub``."""
    with ExitStack() as stack:
        shared, each = _ENGINES[engine](stack, hub, hosts, environment)
        variables = {**shared, **environment, "BENCHMARK_ENGINE": engine}
        yield stack.enter_context(
            pool(hosts, WORKER, variables, each, stopping=engine not in HEARTBEATS)
        )


Prepared = tuple[Variables, list[Variables]]
Prepare = Callable[[ExitStack, Host, Sequence[Host], Mapping[str, str]], Prepared]


def _gloo(
    stack: ExitStack, hub: Host, hosts: Sequence[Host], environment: Mapping[str, str]
) -> Prepared:
    return {"MASTER_PORT": str(_free_port(hub))}, [{} for _ in hosts]


def _free_port(hub: Host) -> int:
    """A port for the rendezvous: the next in a namespace of our own, a free one on this machine."""
    return next(_ports) if hub.namespace is not None else free_port(hub.address)


def _horovod(
    stack: ExitStack, hub: Host, hosts: Sequence[Host], environment: Mapping[str, str]
) -> Prepared:
    """What ``horovodrun`` would set up: a rendezvous server and every rank's place."""
    places = [f"{host.address}:{rank}" for rank, host in enumerate(hosts)]
    server = stack.enter_context(
        helper(hub, ("-m", "benchmarks.horovod_rendezvous", *(h.address for h in hosts)), {})
    )
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hub.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": server.first_line(),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # Workers are stopped while others are measured; Horovod's waits for each other go on.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_S),
        "HOROVOD_SIZE": str(len(places)),
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_CROSS_SIZE": str(len(places)),
    }
    each = [
        {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_CROSS_RANK": str(rank),
            "HOROVOD_HOSTNAME": host.address,
            "HOROVOD_GLOO_IFACE": host.interface,
        }
        for rank, host in enumerate(hosts)
    ]
    return shared, each


def _parameter_server(
    stack: ExitStack, hub: Host, hosts: Sequence[Host], environment: Mapping[str, str]
) -> Prepared:
    """A server beside every worker."""
    return parameter_servers(stack, hub, hosts, hosts, environment)


def parameter_servers(
    stack: ExitStack,
    hub: Host,
    workers: Sequence[Host],
    servers: Sequence[Host],
    environment: Mapping[str, str],
) -> Prepared:
    """MXNet's scheduler on the hub and its servers, beside the workers or on other hosts."""
    shared = {
        "DMLC_PS_ROOT_URI": hub.address,
        "DMLC_PS_ROOT_PORT": str(_free_port(hub)),
        "DMLC_NUM_WORKER": str(len(workers)),
        "DMLC_NUM_SERVER": str(len(servers)),
    }
    place = {**shared, **environment}
    serve = ("-m", "benchmarks.parameter_server")
    stack.enter_context(helper(hub, serve, {**place, **_role("scheduler", hub)}))
    for host in servers:
        stack.enter_context(helper(host, serve, {**place, **_role("server", host)}))
    return shared, [_role("worker", host) for host in workers]


def _role(role: str, host: Host) -> Variables:
    return {
        "DMLC_ROLE": role,
        "DMLC_NODE_HOST": host.address,
        "DMLC_INTERFACE": host.interface,
    }


_tensorflow_ports = count(PORT + 1000, 100)  # several pools are up at once, on the same hosts


def _tensorflow(
    stack: ExitStack, hub: Host, hosts: Sequence[Host], environment: Mapping[str, str]
) -> Prepared:
    """``TF_CONFIG``, as TensorFlow's own multi-worker training wants it."""
    first = next(_tensorflow_ports) if hub.namespace is not None else _free_port(hub)
    workers = [f"{host.address}:{first + rank}" for rank, host in enumerate(hosts)]
    each = [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
            )
        }
        for rank in range(len(hosts))
    ]
    return {"TF_CPP_MIN_LOG_LEVEL": "2"}, each


_ENGINES: dict[str, Prepare] = {
    "gloo": _gloo,
    "horovod": _horovod,
    "kvstore": _parameter_server,
    "servers": _parameter_server,
    "tensorflow": _tensorflow,
    "mirrored": _tensorflow,
}
