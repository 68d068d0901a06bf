"""What goes wrong in a cluster: nodes that fail and come back, workers that straggle.

Times between events are exponential, drawn from one seeded generator per simulation, so equal
seeds give equal faults for every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytescheduler.cluster.contract import Node
from bytescheduler.exceptions import ConfigurationError

__all__ = ["FaultSettings", "NodeFailures", "Stragglers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSettings:
    """How often things go wrong; 0 means never.

    Attributes:
        node_mtbf_hours: mean time between failures of one node.
        repair_seconds: how long a failed node stays down.
        stragglers_per_hour: how often each worker becomes a straggler.
        straggler_slowdown: how many times slower it computes then.
        replace_stragglers: whether workers at half the median speed or less are replaced.

    Raises:
        ConfigurationError: a negative number, or a slowdown below 1.
    """

    node_mtbf_hours: float = 0.0
    repair_seconds: float = 600.0
    stragglers_per_hour: float = 0.0
    straggler_slowdown: float = 4.0
    replace_stragglers: bool = True

    def __post_init__(self) -> None:
        for name in ("node_mtbf_hours", "repair_seconds", "stragglers_per_hour"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.straggler_slowdown < 1:
            raise ConfigurationError(
                f"straggler_slowdown must be at least 1, got {self.straggler_slowdown}"
            )


class NodeFailures:
    """Which nodes are down when; the times do not depend on what the policy does."""

    def __init__(self, nodes: Sequence[Node], settings: FaultSettings, seed: int) -> None:
        self._settings = settings
        self._rng = np.random.default_rng([seed, 1])
        self._next_failure = {node.id: self._after(0.0) for node in nodes}
        self._up_again: dict[int, float] = {}

    def _after(self, now: float) -> float:
        if not self._settings.node_mtbf_hours:
            return float("inf")
        return now + float(self._rng.exponential(self._settings.node_mtbf_hours * 3600))

    def advance(self, now: float) -> set[int]:
        """Move to ``now``; return the nodes that failed since the last call."""
        self._up_again = {node: time for node, time in self._up_again.items() if time > now}
        failed = {node for node, time in self._next_failure.items() if time <= now}
        for node in sorted(failed):
            up = now + self._settings.repair_seconds
            self._up_again[node] = up
            self._next_failure[node] = self._after(up)
        return failed

    @property
    def down(self) -> frozenset[int]:
        """The nodes that are down now."""
        return frozenset(self._up_again)


class Stragglers:
    """Which workers become slow."""

    def __init__(self, settings: FaultSettings, seed: int) -> None:
        self._settings = settings
        self._rng = np.random.default_rng([seed, 2])

    def strike(self, workers: int, seconds: float) -> dict[int, float]:
        """Return rank and slowdown of each of the workers that became slow within ``seconds``."""
        rate = self._settings.stragglers_per_hour
        if not rate:
            return {}
        chance = 1 - np.exp(-rate * seconds / 3600)
        struck = np.flatnonzero(self._rng.random(workers) < chance)
        return {int(rank): self._settings.straggler_slowdown for rank in struck}
