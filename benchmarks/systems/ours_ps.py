"""This project over MXNet's parameter server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.job import Job
from benchmarks.systems.base import Session, Settings, System
from benchmarks.systems.torch_base import installed


class PrioritySystemOverServers(System):
    """Our core over the kvstore transport: chunks by priority, credit held by the leader."""

    name = "bytescheduler-ps"
    engine = "kvstore"

    def missing(self) -> str | None:
        return installed("mxnet") or installed("bytescheduler.transports.kvstore")

    def sweep(self, job: Job) -> list[Settings]:
        from benchmarks.systems.ours import PrioritySystem

        return PrioritySystem().sweep(job)

    def open(self, job: Job, settings: Mapping[str, Any]) -> Session:
        from benchmarks.systems.ours_ps_session import open_session

        return open_session(job, settings)
