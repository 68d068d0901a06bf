"""The scheduling policies, one per file, all under the contract of ``cluster.contract``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bytescheduler.cluster.contract import Policy
from bytescheduler.cluster.policies.drf import drf, drf_elastic
from bytescheduler.cluster.policies.fifo import fifo
from bytescheduler.cluster.policies.optimus import optimus
from bytescheduler.cluster.policies.optimus_oracle import optimus_oracle
from bytescheduler.cluster.policies.srtf import srtf
from bytescheduler.cluster.policies.tetris import tetris
from bytescheduler.cluster.policies.tiresias import tiresias
from bytescheduler.exceptions import ConfigurationError

__all__ = ["POLICIES", "PolicyEntry", "find_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """A policy and what it comes with.

    Attributes:
        decide: the pure function.
        knowledge: what it is told of steps left and step times: nothing, what was learned while
            the job runs, or the truth.
        balances_servers: whether its parameter blocks are assigned by Optimus' rule.
        starvation_free: whether every job is promised to run in the end.
    """

    decide: Policy
    knowledge: Literal["nothing", "learned", "truth"]
    balances_servers: bool = False
    starvation_free: bool = False


POLICIES: dict[str, PolicyEntry] = {
    "optimus": PolicyEntry(
        decide=optimus, knowledge="learned", balances_servers=True, starvation_free=True
    ),
    "optimus-oracle": PolicyEntry(decide=optimus_oracle, knowledge="truth", balances_servers=True),
    "drf": PolicyEntry(decide=drf, knowledge="nothing", starvation_free=True),
    "drf-elastic": PolicyEntry(decide=drf_elastic, knowledge="nothing", starvation_free=True),
    "tetris": PolicyEntry(decide=tetris, knowledge="learned"),
    "fifo": PolicyEntry(decide=fifo, knowledge="nothing", starvation_free=True),
    "srtf": PolicyEntry(decide=srtf, knowledge="learned"),
    "tiresias": PolicyEntry(decide=tiresias, knowledge="nothing"),
}


def find_policy(name: str) -> PolicyEntry:
    """Return the policy of that name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]
