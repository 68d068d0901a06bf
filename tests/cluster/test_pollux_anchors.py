"""Replays of the eight Pollux workloads against the published results, to the second."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pytest

from bytescheduler.cluster.contract import Node, Resources
from bytescheduler.cluster.policies import find_policy
from bytescheduler.cluster.simulator import simulate
from bytescheduler.cluster.workload import read_workload

PUBLISHED = {"optimus-oracle": "expected-optimus.json", "tiresias": "expected-tiresias.json"}


@lru_cache
def replay(pollux: Path, number: int, policy: str) -> dict[str, float]:
    workload = read_workload(pollux / "workloads" / f"workload-{number}.csv", pollux / "traces")
    nodes = [Node(id=i, capacity=Resources(gpu=4)) for i in range(16)]
    return {job.name: job.jct for job in simulate(workload, nodes, find_policy(policy)).jobs}


@pytest.mark.parametrize("policy", PUBLISHED)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_every_job_completes_at_the_published_second(pollux, number, policy):
    published = json.loads((pollux / PUBLISHED[policy]).read_text())["jct_seconds"]
    assert replay(pollux, number, policy) == published[f"workload-{number}"]


@pytest.mark.parametrize(("policy", "mean"), [("optimus-oracle", 5681.9), ("tiresias", 4038.2)])
def test_mean_over_all_eight_workloads_is_the_published_one(pollux, policy, mean):
    jcts = [jct for number in range(1, 9) for jct in replay(pollux, number, policy).values()]
    assert sum(jcts) / len(jcts) == pytest.approx(mean, abs=0.05)
