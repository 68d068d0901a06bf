"""The types that policies see, and the check of what they answer."""

from __future__ import annotations

import pytest

from bytescheduler.cluster.contract import (
    Allocation,
    Node,
    Resources,
    ServiceRecord,
    Shape,
    check_allocations,
)
from bytescheduler.exceptions import UsageError

NODES = [Node(id=0, capacity=Resources(cpu=2)), Node(id=1, capacity=Resources(cpu=2))]


def test_count_is_limited_by_the_scarcest_resource():
    assert Resources(cpu=8, memory=10, gpu=4).count(Resources(cpu=1, memory=3, gpu=1)) == 3
    assert Resources(cpu=8).count(Resources(gpu=1)) == 0


def test_counts_survive_rounding_of_fractions():
    assert Resources(cpu=0.3).count(Resources(cpu=0.1)) == 3


def test_dominant_share_of_something_that_the_cluster_lacks_is_infinite():
    assert Resources(gpu=1).dominant_share(Resources(cpu=4)) == float("inf")
    assert Resources(cpu=1, gpu=1).dominant_share(Resources(cpu=4, gpu=2)) == 0.5


def test_scaled_keeps_the_requested_ratio_and_at_least_one_server(make_job):
    job = make_job(requested=Shape(4, 2))
    assert job.scaled(8) == Shape(8, 4)
    assert job.scaled(1) == Shape(1, 1)
    assert make_job(server=None, requested=Shape(4)).scaled(3) == Shape(3, 0)


def test_service_is_reached_at_the_first_noted_time_beyond_the_limit():
    service = ServiceRecord()
    for now, executed in ((60, 0), (120, 60), (180, 60), (240, 120)):
        service.note(now, executed)
    assert service.reached(60) == 120
    assert service.reached(61) == 240
    assert service.reached(121) is None
    assert service.executed == 120


@pytest.mark.parametrize(
    ("allocations", "message"),
    [
        ({"other": Allocation(workers=(0,), servers=(0,))}, "submitted, unfinished jobs"),
        ({"job": Allocation(workers=(0,))}, "whole or not at all"),
        ({"job": Allocation(workers=(), servers=(0,))}, "whole or not at all"),
        ({"job": Allocation(workers=(0,), servers=(7,))}, "nodes that are up"),
        ({"job": Allocation(workers=(0, 0), servers=(0,))}, "node 0 has"),
    ],
)
def test_a_broken_answer_is_named(make_job, allocations, message):
    with pytest.raises(UsageError, match=message):
        check_allocations([make_job()], NODES, allocations)


def test_a_good_answer_passes(make_job):
    check_allocations([make_job()], NODES, {"job": Allocation(workers=(0, 1), servers=(0, 1))})
