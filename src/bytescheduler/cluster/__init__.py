"""Many jobs on one cluster: Optimus, its peers, and a trace simulator to compare them.

``simulate`` replays a workload under a policy; a policy is a pure function that a real controller
can call as well (see ``contract``).
"""

from bytescheduler.cluster.contract import (
    Allocation,
    JobState,
    Node,
    Policy,
    Resources,
    ServiceRecord,
    Shape,
    check_allocations,
)
from bytescheduler.cluster.faults import FaultSettings
from bytescheduler.cluster.generators import GeneratorSettings, generate, paper_nodes
from bytescheduler.cluster.knowledge import Errors
from bytescheduler.cluster.parameter_blocks import assign_blocks
from bytescheduler.cluster.policies import POLICIES, PolicyEntry, find_policy
from bytescheduler.cluster.report import Summary, summarise
from bytescheduler.cluster.simulator import (
    JobResult,
    Settings,
    SimulationResult,
    Span,
    simulate,
)
from bytescheduler.cluster.workload import read_workload

__all__ = [
    "POLICIES",
    "Allocation",
    "Errors",
    "FaultSettings",
    "GeneratorSettings",
    "JobResult",
    "JobState",
    "Node",
    "Policy",
    "PolicyEntry",
    "Resources",
    "ServiceRecord",
    "Settings",
    "Shape",
    "SimulationResult",
    "Span",
    "Summary",
    "assign_blocks",
    "check_allocations",
    "find_policy",
    "generate",
    "paper_nodes",
    "read_workload",
    "simulate",
    "summarise",
]
