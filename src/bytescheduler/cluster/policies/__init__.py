"""The scheduling policies, one per file, all under the contract of ``cluster.contract``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bytescheduler.cluster.contract import Policy
from bytescheduler.cluster.policies.optimus_oracle import optimus_oracle
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
    "optimus-oracle": PolicyEntry(decide=optimus_oracle, knowledge="truth", balances_servers=True),
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
