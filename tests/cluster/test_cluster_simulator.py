"""The simulator on small jobs whose times can be worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bytescheduler.cluster.contract import Allocation, Node, Resources, Shape
from bytescheduler.cluster.faults import FaultSettings, NodeFailures
from bytescheduler.cluster.generators import GeneratorSettings, generate, paper_nodes
from bytescheduler.cluster.knowledge import Errors, Learner, with_errors
from bytescheduler.cluster.model_job import ModelJob, TrainingModel
from bytescheduler.cluster.models.speed import SpeedModel
from bytescheduler.cluster.policies import POLICIES, PolicyEntry
from bytescheduler.cluster.report import plot_results, summarise, to_json, write_json
from bytescheduler.cluster.simulated_job import JobSpec
from bytescheduler.cluster.simulator import Settings, simulate
from bytescheduler.cluster.workload import ModelEntry
from bytescheduler.exceptions import ConfigurationError, UsageError

CORE = Resources(cpu=1)
FIFO = POLICIES["fifo"]
NODES = [Node(id=i, capacity=Resources(cpu=4)) for i in range(2)]
ASKED = Shape(2, 2)
SPEED = SpeedModel(mode="sync", coefficients=(1.0, 0.0, 0.5, 0.0, 0.0), batch=4)


def on_first_node(jobs, nodes, previous, now) -> dict[str, Allocation]:
    """Put every job wholly on the first node that has room, in order of submission."""
    placed: dict[str, Allocation] = {}
    for job, node in zip(jobs, nodes, strict=False):
        workers, servers = job.requested
        placed[job.name] = previous.get(job.name) or Allocation(
            workers=(node.id,) * workers, servers=(node.id,) * servers
        )
    return placed


TOGETHER = PolicyEntry(decide=on_first_node, knowledge="nothing")


def entry(name="a", submitted=0.0, steps=100.0, shape=ASKED, **model) -> ModelEntry:
    spec = JobSpec(
        name=name,
        submitted=submitted,
        kind="test",
        requested=shape,
        limit=Shape(4, 4),
        worker=CORE,
        server=CORE,
    )
    return ModelEntry(spec=spec, model=TrainingModel(speed=SPEED, steps=steps, **model))


def jct(workload, policy=TOGETHER, nodes=NODES, **settings) -> dict[str, float]:
    result = simulate(workload, nodes, policy, Settings(**settings))
    return {job.name: job.jct for job in result.jobs}


def test_a_job_on_one_node_pays_waiting_restart_and_compute_only():
    """Decided at 60 s, 30 s of restart, 100 steps of 4/2 s, nothing over the network."""
    assert jct([entry()]) == {"a": 60 + 30 + 200}


def test_exchange_over_the_network_counts_where_tasks_are_apart():
    """One worker and one server per node: half of the traffic is remote, 0.25 s more per step."""
    nodes = [Node(id=i, capacity=Resources(cpu=2)) for i in range(2)]
    assert jct([entry()], policy=POLICIES["optimus"], nodes=nodes) == {"a": 60 + 30 + 225}


def test_completion_is_rounded_up_to_whole_seconds():
    assert jct([entry(steps=100.1)]) == {"a": 60 + 30 + 201}


def test_submission_between_steps_waits_for_the_next():
    assert jct([entry(submitted=61.0)]) == {"a": 120 + 30 + 200 - 61}


def test_the_second_job_waits_under_fifo():
    times = jct([entry("a", shape=Shape(4, 4)), entry("b", submitted=1.0)], policy=FIFO)
    assert times["b"] > times["a"]


def test_decisions_may_be_rarer_than_steps():
    assert jct([entry()], decision_seconds=600) == {"a": 600 + 30 + 200}


def test_restart_cost_is_paid_at_every_change():
    def alternate(jobs, nodes, previous, now):
        node = int(now // 60) % 2
        return {job.name: Allocation(workers=(node,) * 2, servers=(node,) * 2) for job in jobs}

    policy = PolicyEntry(decide=alternate, knowledge="nothing")
    result = simulate([entry()], NODES, policy)
    assert result.jobs[0].restarts == 6
    assert result.jobs[0].jct == 60 * 7 + 30 + 20


def test_slow_nodes_slow_their_jobs():
    slow = [replace(node, speed=0.5) for node in NODES]
    assert jct([entry()], nodes=slow) == {"a": 60 + 30 + 400}


def test_uneven_servers_slow_the_exchange():
    blocks = (900_000, 50_000, 50_000)
    nodes = [Node(id=i, capacity=Resources(cpu=1)) for i in range(4)]
    balanced = simulate([entry(blocks=blocks)], nodes, replace(FIFO, balances_servers=True))
    hashed = simulate([entry(blocks=blocks)], nodes, FIFO)
    assert hashed.jobs[0].jct > balanced.jobs[0].jct


def test_equal_seeds_give_equal_results():
    workload = generate(GeneratorSettings(seed=5))
    settings = Settings(
        decision_seconds=600,
        faults=FaultSettings(node_mtbf_hours=20, stragglers_per_hour=0.1),
        seed=7,
    )
    first, second = (
        simulate(workload, paper_nodes(), POLICIES["optimus"], settings) for _ in range(2)
    )
    assert first == second
    other = simulate(workload, paper_nodes(), POLICIES["optimus"], replace(settings, seed=8))
    assert first != other


def test_a_failed_node_throws_its_job_back_to_the_checkpoint():
    job = entry().start(balanced_servers=False)
    nodes = {node.id: node for node in NODES}
    job.place(Allocation(workers=(0, 0), servers=(0, 0)), nodes, 0)
    job.advance(0, 60)
    job.checkpoint()
    job.advance(60, 60)
    assert job.steps_done == 60
    job.fail()
    assert (job.steps_done, job.allocation) == (30, None)


def test_failing_nodes_cost_time_and_come_back():
    failing = FaultSettings(node_mtbf_hours=0.5, repair_seconds=300)
    alone = NODES[:1]
    quiet = jct([entry(steps=3000)], nodes=alone)["a"]
    noisy = jct([entry(steps=3000)], nodes=alone, faults=failing)["a"]
    assert noisy > quiet
    failures = NodeFailures(NODES, failing, seed=0)
    failed = {node for step in range(600) for node in failures.advance(60.0 * step)}
    assert failed == {0, 1}
    assert failures.advance(1e9) <= {0, 1}


def test_nodes_that_fail_faster_than_checkpoints_end_in_an_error():
    failing = FaultSettings(node_mtbf_hours=0.02, repair_seconds=60)
    with pytest.raises(UsageError, match="not done after"):
        jct([entry(steps=3000)], faults=failing, horizon_seconds=86_400)


def test_replacing_stragglers_pays():
    often = FaultSettings(stragglers_per_hour=2, straggler_slowdown=5)
    kept = jct([entry(steps=3000)], faults=replace(often, replace_stragglers=False))["a"]
    replaced = jct([entry(steps=3000)], faults=often)["a"]
    assert jct([entry(steps=3000)])["a"] < replaced < kept


def test_a_policy_that_places_nothing_is_an_error_not_an_endless_loop():
    idle = PolicyEntry(decide=lambda jobs, nodes, previous, now: {}, knowledge="nothing")
    with pytest.raises(UsageError, match="wait for ever"):
        simulate([entry()], NODES, idle)


def test_a_policy_that_overfills_a_node_is_caught():
    def overfill(jobs, nodes, previous, now):
        return {job.name: Allocation(workers=(0,) * 4, servers=(0,)) for job in jobs}

    with pytest.raises(UsageError, match="node 0 has"):
        simulate([entry()], NODES, PolicyEntry(decide=overfill, knowledge="nothing"))


@pytest.mark.parametrize(
    "bad",
    [{"step_seconds": 0}, {"decision_seconds": 90}, {"restart_seconds": -1}],
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigurationError):
        Settings(**bad)


@pytest.mark.parametrize("bad", [{"convergence": 1.0}, {"speed": -0.1}])
def test_impossible_errors_are_refused(bad):
    with pytest.raises(ConfigurationError):
        Errors(**bad)


def test_errors_are_exact_and_the_same_every_time():
    job = entry().start(balanced_servers=False)
    wrong = with_errors(job.truth(), "a", Errors(convergence=0.2, speed=0.1), seed=1)
    assert abs(wrong.remaining / 100 - 1) == pytest.approx(0.2)
    assert abs(wrong.step_time(2, 2) / SPEED.step_time(2, 2) - 1) == pytest.approx(0.1)
    again = with_errors(job.truth(), "a", Errors(convergence=0.2, speed=0.1), seed=1)
    assert (again.remaining, again.step_time(2, 2)) == (wrong.remaining, wrong.step_time(2, 2))


def test_a_learner_comes_close_to_the_truth():
    source = generate(GeneratorSettings(seed=2))[0]
    job = source.start(balanced_servers=True)
    assert isinstance(job, ModelJob)
    learner = Learner(job, seed=0)
    node = {0: Node(id=0, capacity=Resources(cpu=64, memory=256))}
    job.place(Allocation(workers=(0,) * 4, servers=(0,) * 4), node, 0)
    while job.steps_done < 0.6 * job.model.steps:
        job.advance(0, 60)
        learner.observe()
    known = learner.knowledge()
    tolerance = 0.1 * job.model.steps + job.model.steps_per_epoch
    assert abs(known.remaining - job.truth().remaining) <= tolerance
    assert known.step_time(8, 4) == pytest.approx(job.model.speed.step_time(8, 4), rel=0.25)


def test_paper_workload_reaches_the_issues_ratios():
    """Mean JCT 2 times better than DRF and 1.5 than Tetris, makespan 1.4 and 1.1, over 4 seeds."""
    found = {}
    for name in ("optimus", "drf", "tetris"):
        runs = [
            summarise(
                simulate(
                    generate(GeneratorSettings(seed=seed)),
                    paper_nodes(),
                    POLICIES[name],
                    Settings(decision_seconds=600, seed=seed),
                )
            )
            for seed in range(4)
        ]
        found[name] = [sum(r.mean_jct for r in runs), sum(r.makespan for r in runs)]
    for peer, (least_jct, least_makespan) in {"drf": (2, 1.4), "tetris": (1.5, 1.1)}.items():
        assert found[peer][0] >= least_jct * found["optimus"][0]
        assert found[peer][1] >= least_makespan * found["optimus"][1]


def test_report_counts_what_happened(tmp_path: Path):
    result = simulate([entry("a"), entry("b", submitted=30.0)], NODES, TOGETHER)
    summary = summarise(result)
    assert summary.mean_jct == (290 + 260) / 2
    assert summary.makespan == 290
    assert summary.restarts == 0
    assert summary.utilisation == pytest.approx(8 * 230 / (8 * 290))
    document = to_json({"fifo": result})["policies"]["fifo"]
    assert document["jct_s"] == {"a": 290, "b": 260}
    write_json({"fifo": result}, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())["policies"]["fifo"]
    assert {"mean_jct_s", "p99_jct_s", "makespan_s", "jct_s"} <= set(read)
    plot_results({"fifo": result}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match="picture"):
        plot_results({"fifo": result}, tmp_path / "out.nothing")
