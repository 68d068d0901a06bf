"""The systems under test, one file each; :data:`SYSTEMS` is what ``--systems`` offers."""

from __future__ import annotations

from benchmarks.systems.base import System
from benchmarks.systems.ddp import DistributedDataParallelSystem
from benchmarks.systems.dear import DearSystem
from benchmarks.systems.fsdp2 import Fsdp2System
from benchmarks.systems.horovod import HorovodSystem
from benchmarks.systems.kvstore import KVStoreSystem, P3System
from benchmarks.systems.ours import AutoSystem, BarrierSystem, FifoSystem, PrioritySystem
from benchmarks.systems.ours_horovod import PrioritySystemOverHorovod
from benchmarks.systems.ours_ps import PrioritySystemOverServers
from benchmarks.systems.reference import ComputeAlone, ComputeBesideExchange, ExchangeAlone
from benchmarks.systems.tensorflow import MirroredSystem, ScheduledKerasSystem

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        DistributedDataParallelSystem(),
        Fsdp2System(),
        HorovodSystem(),
        DearSystem(),
        FifoSystem(),
        BarrierSystem(),
        PrioritySystem(),
        AutoSystem(),
        PrioritySystemOverHorovod(),
        KVStoreSystem(),
        P3System(),
        PrioritySystemOverServers(),
        MirroredSystem(),
        ScheduledKerasSystem(),
    )
}
REFERENCES: dict[str, System] = {
    system.name: system for system in (ComputeAlone(), ExchangeAlone())
}
"""What every comparison measures beside its systems."""

_ALL: dict[str, System] = {
    system.name: system
    for system in (*SYSTEMS.values(), *REFERENCES.values(), ComputeBesideExchange())
}
OURS = frozenset(
    {
        "fifo",
        "barrier",
        "bytescheduler",
        "bytescheduler-auto",
        "bytescheduler-horovod",
        "bytescheduler-ps",
        "bytescheduler-tf",
    }
)
"""Everything else is a peer."""


def find(name: str) -> System:
    """A system or a reference by its name."""
    return _ALL[name]
