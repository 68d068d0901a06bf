"""Who takes part: rank and addresses, from ``TF_CONFIG`` or from the launcher's variables.

TensorFlow's collectives run between gRPC servers that every process starts when its runtime
starts, so the cluster has to be *declared* before the first tensor exists; afterwards it is too
late (variables made earlier are on a device that vanishes). ``bytescheduler.tensorflow`` therefore
declares it on import. Declaring opens nothing: TensorFlow itself opens the port with its first
operation. A cluster that ``MultiWorkerMirroredStrategy`` has already started is used as it is.

Considered instead: a strategy object of our own (starts a health thread with 30 s periods and
reduces gradients by itself in Keras), a second runtime beside the first (twice the memory, copies
between them).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bytescheduler._imports import require
from bytescheduler.exceptions import ConfigurationError, UsageError

__all__ = ["Cluster", "current", "declare", "read_cluster"]

ENV_TF_CONFIG: Final = "TF_CONFIG"
EXAMPLE: Final = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
)
# rank, world size, ranks on this host, host and port that are known to be free for the job
_LAUNCHERS: Final = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "horovodrun": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers of one job.

    Attributes:
        addresses: ``host:port`` of each rank.
        rank: the one that this process is.
        chief: whether rank 0 is TensorFlow's ``chief`` and not the first ``worker``.
    """

    addresses: tuple[str, ...]
    rank: int
    chief: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.addresses)

    def task(self, rank: int) -> str:
        """TensorFlow's name of ``rank``."""
        job, index = self._job(rank)
        return f"/job:{job}/replica:0/task:{index}"

    def server_def(self) -> Any:
        """The description of this process's server, as TensorFlow wants it."""
        tf = require("tensorflow", extra="tensorflow")
        protobuf = require("tensorflow.core.protobuf.tensorflow_server_pb2", extra="tensorflow")
        workers = list(self.addresses[1:] if self.chief else self.addresses)
        jobs = {"worker": workers} | ({"chief": [self.addresses[0]]} if self.chief else {})
        job, index = self._job(self.rank)
        definition = protobuf.ServerDef(
            cluster=tf.train.ClusterSpec(jobs).as_cluster_def(),
            job_name=job,
            task_index=index,
            protocol="grpc",
        )
        definition.default_session_config.experimental.collective_group_leader = self.task(0)
        return definition

    def _job(self, rank: int) -> tuple[str, int]:
        if self.chief:
            return ("chief", 0) if rank == 0 else ("worker", rank - 1)
        return "worker", rank


def read_cluster(environ: Mapping[str, str] | None = None) -> Cluster | None:
    """Read ``TF_CONFIG``, else what torchrun or horovodrun set; None where nothing is set.

    Raises:
        ConfigurationError: what is set does not describe a cluster.
    """
    env = os.environ if environ is None else environ
    if env.get(ENV_TF_CONFIG):
        return _from_tf_config(env[ENV_TF_CONFIG])
    for launcher, names in _LAUNCHERS.items():
        if all(env.get(name) for name in names):
            return _from_launcher(launcher, names, env)
    return None


def declare() -> None:
    """Declare the environment's cluster to TensorFlow, if there is one and it is not too late.

    Never raises for a bad environment: ``current`` does, where the cluster is needed.
    """
    try:
        cluster = read_cluster()
    except ConfigurationError:
        return
    if cluster is None or cluster.world_size == 1 or _is_declared():
        return
    context = _context()
    try:
        context.configure_collective_ops(collective_leader=cluster.task(0))
    except RuntimeError:  # the runtime has already started
        return
    context.enable_collective_ops(cluster.server_def())


def current() -> Cluster:
    """Return the cluster that this process takes part in.

    Raises:
        ConfigurationError: none is described, or wrongly.
        UsageError: TensorFlow had started before ``bytescheduler.tensorflow`` was imported.
    """
    cluster = read_cluster()
    if cluster is None:
        raise ConfigurationError(
            f"the workers must be named by {ENV_TF_CONFIG}, which is not set; set it on every "
            f"worker, for example {EXAMPLE}, or start the job with torchrun or horovodrun"
        )
    if cluster.world_size > 1 and not _is_declared():
        raise UsageError(
            "the cluster must be declared before TensorFlow starts; import "
            f"bytescheduler.tensorflow (with {ENV_TF_CONFIG} set) before the first tensor, "
            "variable or model is made"
        )
    return cluster


def _is_declared() -> bool:
    """Whether this process has a server description, ours or a strategy's; TF has no getter."""
    return _context()._collective_ops_server_def is not None


def _context() -> Any:
    return require("tensorflow.python.eager.context", extra="tensorflow").context()


def _from_tf_config(text: str) -> Cluster:
    try:
        config = json.loads(text)
        jobs, task = config["cluster"], config["task"]
        kind, index = task["type"], int(task["index"])
        unknown = sorted(set(jobs) - {"chief", "worker"})
        chief = [str(address) for address in jobs.get("chief", ())]
        workers = [str(address) for address in jobs.get("worker", ())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _wrong(f"it must be JSON with 'cluster' and 'task' ({error!r})", text) from error
    if unknown:
        raise _wrong(f"only chief and worker take part in a collective, not {unknown}", text)
    addresses = (*chief, *workers)
    rank = index + len(chief) if kind == "worker" else index
    limit = {"chief": len(chief), "worker": len(workers)}.get(kind, 0)
    if not 0 <= index < limit:
        raise _wrong(f"task {kind}:{index} is not in the cluster", text)
    if len(chief) > 1 or len(set(addresses)) < len(addresses):
        raise _wrong("every task needs its own address, and there is one chief at most", text)
    if any(not _is_address(address) for address in addresses):
        raise _wrong("every address must read host:port", text)
    return Cluster(addresses=addresses, rank=rank, chief=bool(chief))


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


def _wrong(rule: str, text: str) -> ConfigurationError:
    return ConfigurationError(f"{ENV_TF_CONFIG} is wrong: {rule}, got {text!r}; write {EXAMPLE}")


def _from_launcher(launcher: str, names: tuple[str, ...], env: Mapping[str, str]) -> Cluster:
    try:
        rank, size, local_size, port = (int(env[names[position]]) for position in (0, 1, 2, 4))
    except ValueError as error:
        raise ConfigurationError(
            f"{', '.join(names)} must be numbers as {launcher} sets them ({error})"
        ) from error
    if local_size != size:
        raise ConfigurationError(
            f"under {launcher} on several hosts ({local_size} of {size} ranks here) the other "
            f"hosts' addresses are unknown; set {ENV_TF_CONFIG} on every worker, for example "
            f"{EXAMPLE}"
        )
    host = env[names[3]]
    addresses = tuple(f"{host}:{port + 1 + index}" for index in range(size))
    return Cluster(addresses=addresses, rank=rank)
