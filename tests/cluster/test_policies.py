"""One contract suite for every policy, and what each promises beyond it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescheduler.cluster.contract import (
    Allocation,
    JobState,
    Node,
    Resources,
    ServiceRecord,
    Shape,
    check_allocations,
)
from bytescheduler.cluster.model_job import transfer_units
from bytescheduler.cluster.models.speed import SpeedModel
from bytescheduler.cluster.policies import POLICIES, find_policy
from bytescheduler.cluster.policies._fewest import even_split, place_on_fewest
from bytescheduler.cluster.policies.optimus import allocate
from bytescheduler.exceptions import ConfigurationError

SLOTS = [Node(id=i, capacity=Resources(cpu=3)) for i in range(3)]

amounts = st.integers(0, 4)
capacities = st.builds(Resources, st.integers(1, 12), st.integers(0, 16), st.integers(0, 4))
demands = st.builds(Resources, st.integers(1, 3), st.integers(0, 2), st.integers(0, 1))


@st.composite
def job_states(draw: st.DrawFn, number: int) -> JobState:
    all_reduce = draw(st.booleans())
    asked = Shape(draw(st.integers(1, 5)), 0 if all_reduce else draw(st.integers(1, 4)))
    coefficients = tuple(draw(st.floats(0.01, 2)) for _ in range(5))
    mode = "allreduce" if all_reduce else "sync"
    service = ServiceRecord()
    service.note(60, draw(st.integers(0, 80_000)))
    return JobState(
        name=f"job-{number}",
        submitted=float(number),
        worker=draw(demands),
        server=None if all_reduce else draw(demands),
        requested=asked,
        limit=Shape(asked.workers + 4, 0 if all_reduce else asked.servers + 4),
        remaining=draw(st.floats(1, 1e5)),
        step_time=SpeedModel(mode=mode, coefficients=coefficients, batch=32).step_time,
        progress=draw(st.floats(0, 1)),
        service=service,
        rescalable=draw(st.integers(0, 4)) > 0,
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[JobState], list[Node]]:
    jobs = [draw(job_states(number)) for number in range(draw(st.integers(0, 7)))]
    nodes = [Node(id=i, capacity=draw(capacities)) for i in range(draw(st.integers(1, 6)))]
    return jobs, nodes


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12, deadline=None)
@given(situation=situations(), lost=st.integers(0, 6))
def test_contract(name, situation, lost):
    """Never more than a node has, gang or nothing, no unknown node; the same answer every time.

    The second decision is about the first one's allocations after a job finished and a node failed.
    """
    jobs, nodes = situation
    decide = POLICIES[name].decide
    first = decide(jobs, nodes, {}, 60.0)
    check_allocations(jobs, nodes, first)
    assert decide(jobs, nodes, {}, 60.0) == first
    jobs = jobs[1:]
    up = [node for node in nodes if node.id != lost]
    names = {job.name for job in jobs}
    held = {n: a for n, a in first.items() if n in names and lost not in a.nodes}
    before = dict(held)
    second = decide(jobs, up, held, 120.0)
    check_allocations(jobs, up, second)
    assert held == before
    assert decide(jobs, up, held, 120.0) == second


@pytest.mark.parametrize("name", [n for n, entry in POLICIES.items() if entry.starvation_free])
@settings(max_examples=12, deadline=None)
@given(situation=situations())
def test_the_oldest_job_runs_where_starvation_is_excluded(name, situation):
    """Of jobs that can run alone the oldest always runs, so everybody runs in the end.

    FIFO never stops what runs, so there the oldest is first in line from the start.
    """
    jobs, nodes = situation
    decide, held = POLICIES[name].decide, {}
    jobs = [replace(job, rescalable=True) for job in jobs]
    jobs = [job for job in jobs if decide([job], nodes, {}, 0.0)]
    for now in range(60, 60 * 2 * (len(jobs) + 1), 60):
        held = decide(jobs, nodes, held, float(now))
        assert not jobs or jobs[0].name in held
        held = {name: a for name, a in held.items() if name != jobs[0].name} if jobs else {}
        jobs = jobs[1:]
        if name == "fifo":
            held = {}


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_to_decide_gives_nothing(name):
    assert POLICIES[name].decide([], SLOTS, {}, 0.0) == {}


@pytest.mark.parametrize("name", POLICIES)
def test_an_unchanged_situation_keeps_every_job_where_it_is(name, make_job):
    jobs = [make_job(f"job-{i}", submitted=float(i)) for i in range(2)]
    first = POLICIES[name].decide(jobs, SLOTS, {}, 60.0)
    assert POLICIES[name].decide(jobs, SLOTS, first, 120.0) == first


def test_unknown_policy_names_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"unknown policy 'lifo'.*optimus.*tiresias"):
        find_policy("lifo")


# Optimus


def test_the_papers_placement_example_costs_three_three_and_two_units():
    """2 servers and 4 workers on 3 nodes of 3 slots (Optimus, figure 10)."""
    three_nodes = Allocation(workers=(0, 1, 2, 2), servers=(0, 1))
    uneven = Allocation(workers=(0, 1, 1, 1), servers=(0, 0))
    even = Allocation(workers=(0, 0, 1, 1), servers=(0, 1))
    assert [transfer_units(a) for a in (three_nodes, uneven, even)] == [3, 3, 2]


def test_the_papers_best_placement_is_chosen(make_job):
    job = make_job(requested=Shape(4, 2), limit=Shape(4, 2))
    placed = place_on_fewest([(job, Shape(4, 2))], SLOTS, {}, [job])["job"]
    assert placed == Allocation(workers=(0, 0, 1, 1), servers=(0, 1))
    assert transfer_units(placed) == 2


def test_even_split_puts_what_does_not_divide_on_opposite_ends():
    assert even_split(Shape(3, 3), 2) == [Shape(2, 1), Shape(1, 2)]


def test_a_job_that_does_not_fit_gets_a_smaller_size(make_job):
    job = make_job()
    placed = place_on_fewest([(job, Shape(8, 8))], SLOTS, {}, [job])["job"]
    assert placed.shape == Shape(4, 4)


def test_everybody_gets_one_before_anybody_gets_two(make_job):
    jobs = [make_job("long", remaining=1e6), make_job("short", remaining=1.0)]
    shapes = allocate(jobs, Resources(cpu=5), {})
    assert shapes["short"] == Shape(1, 1)
    assert sum(shapes["long"]) == 3


def test_growth_stops_where_nothing_is_gained(make_job):
    job = make_job(step_time=lambda workers, servers: 1.0 + 0.1 * (workers + servers))
    assert allocate([job], Resources(cpu=100), {}) == {"job": Shape(1, 1)}


def test_growth_passes_over_a_dip_in_speed(make_job):
    times = {1: 1.0, 2: 0.5, 3: 0.6, 4: 0.25}
    job = make_job(
        server=None,
        requested=Shape(1),
        limit=Shape(4),
        step_time=lambda workers, servers: times[workers],
    )
    assert allocate([job], Resources(cpu=4), {}) == {"job": Shape(4)}


def test_gain_counts_per_dominant_share(make_job):
    """Equal gains, but one job's tasks are three times as large."""
    big = make_job("big", worker=Resources(cpu=3), server=Resources(cpu=3))
    shapes = allocate([big, make_job("small")], Resources(cpu=11), {})
    assert shapes["big"] == Shape(1, 1)
    assert sum(shapes["small"]) == 5


def test_a_job_that_used_up_its_restarts_keeps_its_size(make_job):
    job = make_job(rescalable=False)
    held = {"job": Allocation(workers=(0,), servers=(0,))}
    assert POLICIES["optimus"].decide([job], SLOTS, held, 60.0) == held


def test_a_size_that_does_not_win_back_its_restart_is_kept(make_job):
    held = {"job": Allocation(workers=(0,), servers=(0,))}
    nearly_done = make_job(remaining=1.0)
    assert POLICIES["optimus"].decide([nearly_done], SLOTS, held, 60.0) == held
    far_from_done = make_job(remaining=1e4)
    assert POLICIES["optimus"].decide([far_from_done], SLOTS, held, 60.0) != held


# the peers


def test_drf_equalises_dominant_shares(make_job):
    """The DRF paper's example: 9 CPUs and 18 GB, demands (1, 4) and (3, 1) get 3 and 2 tasks."""
    nodes = [Node(id=0, capacity=Resources(cpu=9, memory=18))]
    job = {"server": None, "requested": Shape(9), "limit": Shape(9)}
    jobs = [
        make_job("a", worker=Resources(cpu=1, memory=4), **job),
        make_job("b", worker=Resources(cpu=3, memory=1), **job),
    ]
    placed = POLICIES["drf"].decide(jobs, nodes, {}, 0.0)
    assert {name: a.shape.workers for name, a in placed.items()} == {"a": 3, "b": 2}


def test_drf_stops_at_the_request_and_its_elastic_form_at_the_limit(make_job):
    nodes = [Node(id=0, capacity=Resources(cpu=100))]
    assert POLICIES["drf"].decide([make_job()], nodes, {}, 0.0)["job"].shape == Shape(2, 2)
    assert POLICIES["drf-elastic"].decide([make_job()], nodes, {}, 0.0)["job"].shape == Shape(8, 8)


def test_drf_spreads_over_the_least_allocated_nodes(make_job):
    placed = POLICIES["drf"].decide([make_job(requested=Shape(2, 1))], SLOTS, {}, 0.0)["job"]
    assert len(placed.nodes) == 3


def test_fifo_does_not_let_a_small_job_overtake(make_job):
    jobs = [make_job("first"), make_job("large", requested=Shape(4, 4)), make_job("small")]
    assert set(POLICIES["fifo"].decide(jobs, SLOTS, {}, 0.0)) == {"first"}


def test_srtf_preempts_for_a_shorter_job(make_job):
    long, short = make_job("long", requested=Shape(4, 4)), make_job("short", remaining=1.0)
    held = POLICIES["srtf"].decide([long], SLOTS, {}, 0.0)
    assert set(held) == {"long"}
    assert set(POLICIES["srtf"].decide([long, short], SLOTS, held, 60.0)) == {"short"}


def test_tetris_packs_by_alignment(make_job):
    """A CPU task goes where CPU is free, a memory task where memory is."""
    nodes = [
        Node(id=0, capacity=Resources(cpu=8, memory=8)),
        Node(id=1, capacity=Resources(cpu=8, memory=8)),
    ]
    one = {"server": None, "requested": Shape(1), "step_time": lambda workers, servers: 1.0}
    filler = make_job("filler", worker=Resources(cpu=6, memory=1), **one)
    hungry = make_job("hungry", worker=Resources(cpu=1, memory=6), remaining=1e5, **one)
    held = {"filler": Allocation(workers=(0,))}
    placed = POLICIES["tetris"].decide([filler, hungry], nodes, held, 0.0)
    assert placed["hungry"].workers == (1,)


def test_tetris_prefers_little_remaining_work(make_job):
    jobs = [make_job("large", requested=Shape(4, 4)), make_job("small", remaining=10.0)]
    assert set(POLICIES["tetris"].decide(jobs, SLOTS, {}, 0.0)) == {"small"}


def test_tiresias_demotes_in_order_of_reaching_the_limit(make_job):
    """Sixteen hours on one worker; who got there first runs first, new jobs before both."""
    late, early = ServiceRecord([100.0], [60_000.0]), ServiceRecord([50.0], [60_000.0])
    one = {"server": None, "requested": Shape(5)}
    jobs = [
        make_job("late", service=ServiceRecord([100.0], [16 * 3600.0]), **one),
        make_job("early", service=early, **one),
    ]
    assert late.reached(16 * 3600 / 5) == 100
    assert set(POLICIES["tiresias"].decide(jobs, SLOTS, {}, 0.0)) == {"early"}
    jobs.append(make_job("new", **one))
    assert set(POLICIES["tiresias"].decide(jobs, SLOTS, {}, 0.0)) == {"new"}
