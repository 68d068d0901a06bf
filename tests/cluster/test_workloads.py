"""Reading workloads: what is understood, and what bad input says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bytescheduler.cluster.contract import Node, Resources, Shape
from bytescheduler.cluster.generators import GeneratorSettings, arrival_times, generate
from bytescheduler.cluster.kinds import KINDS
from bytescheduler.cluster.workload import (
    ModelEntry,
    TraceEntry,
    check_workload,
    read_workload,
)
from bytescheduler.exceptions import ConfigurationError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "workload.csv"
PLAIN = "name,time,workers,servers,mode,speed,steps"
TRACE = "name,time,application,num_replicas,batch_size"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "jobs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_plain_rows_are_read_in_order_of_submission(tmp_path):
    path = write(
        tmp_path, PLAIN, "late,9,2,1,sync,1 0 0 0 0,100", "early,3,4,0,allreduce,1 0 0 0 0,5"
    )
    early, late = read_workload(path)
    assert isinstance(late, ModelEntry)
    assert (early.spec.name, late.spec.name) == ("early", "late")
    assert late.spec.requested == Shape(2, 1)
    assert late.spec.limit == Shape(8, 4)
    assert late.spec.server == Resources(cpu=1)
    assert early.spec.server is None
    assert early.spec.worker.gpu == 1


def test_the_example_is_a_workload():
    entries = read_workload(EXAMPLE)
    assert {entry.model.speed.mode for entry in entries} == {"sync", "async", "allreduce"}


def test_a_measured_workload_knows_its_limits(pollux):
    entries = read_workload(pollux / "workloads" / "workload-1.csv", pollux / "traces")
    assert len(entries) == 160
    by_kind = {entry.spec.kind: entry for entry in entries if isinstance(entry, TraceEntry)}
    assert by_kind["ncf"].spec.limit == Shape(1)
    cifar = by_kind["cifar10"]
    assert cifar.spec.limit == Shape(min(64, cifar.batch // 32))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a,0,2,1,sync,1 0 0 0 0", "line 2, column steps: expected 7 values"),
        ("a,-1,2,1,sync,1 0 0 0 0,9", "line 2, column time: expected a number of at least 0"),
        ("a,soon,2,1,sync,1 0 0 0 0,9", "column time: expected a number"),
        ("a,nan,2,1,sync,1 0 0 0 0,9", "column time: expected a number"),
        ("a,0,2.5,1,sync,1 0 0 0 0,9", "column workers: expected a whole number"),
        ("a,0,0,1,sync,1 0 0 0 0,9", "column workers: expected a whole number of at least 1"),
        ("a,0,2,0,sync,1 0 0 0 0,9", "column servers: expected a whole number of at least 1"),
        ("a,0,2,1,allreduce,1 0 0 0 0,9", "column servers: expected 0"),
        ("a,0,2,1,ring,1 0 0 0 0,9", "column mode: expected one of sync, async, allreduce"),
        ("a,0,2,1,sync,1 0 0,9", "column speed: expected 5 numbers"),
        ("a,0,2,1,async,1 0 0 -1,9", "column speed: expected 4 numbers of at least 0"),
        ("a,0,2,1,sync,0 0 0 0 0,9", "column speed: expected at least one coefficient above 0"),
        ("a,0,2,1,sync,1 0 0 0 0,0", "column steps: expected a number of at least 1"),
        (",0,2,1,sync,1 0 0 0 0,9", "column name: expected a text that is not empty"),
    ],
)
def test_bad_rows_name_file_line_column_and_what_was_expected(tmp_path, line, expected):
    path = write(tmp_path, PLAIN, line)
    with pytest.raises(ConfigurationError) as caught:
        read_workload(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([""], "expected a header"),
        ([PLAIN], "expected at least one row"),
        (["name,time,workers"], "missing: servers, mode, speed, steps"),
        ([PLAIN, *["a,0,2,1,sync,1 0 0 0 0,9"] * 2], "line 3, column name: .* line 2 already"),
    ],
)
def test_bad_files_are_named(tmp_path, lines, expected):
    with pytest.raises(ConfigurationError, match=expected):
        read_workload(write(tmp_path, *lines))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_workload(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a,0,gpt,1,32", "line 2, column application: expected one of bert, .*got 'gpt'"),
        ("a,0,ncf,1,33", "line 2, column batch_size: expected a batch size that was validated"),
        ("a,0,ncf,0,32768", "column num_replicas"),
        ("a,-5,ncf,1,32768", "column time"),
    ],
)
def test_bad_rows_of_measured_applications_are_named(pollux, tmp_path, line, expected):
    with pytest.raises(ConfigurationError, match=expected):
        read_workload(write(tmp_path, TRACE, line), pollux / "traces")


def test_measured_applications_need_their_traces(tmp_path):
    path = write(tmp_path, TRACE, "a,0,ncf,1,32768")
    with pytest.raises(ConfigurationError, match="--traces"):
        read_workload(path)
    with pytest.raises(ConfigurationError, match="folder of applications"):
        read_workload(path, tmp_path / "none")


def test_a_job_larger_than_the_cluster_is_refused(tmp_path):
    workload = read_workload(write(tmp_path, PLAIN, "a,0,2,2,sync,1 0 0 0 0,9"))
    check_workload(workload, [Node(id=0, capacity=Resources(cpu=4))])
    with pytest.raises(ConfigurationError, match="'a' is larger than the cluster"):
        check_workload(workload, [Node(id=0, capacity=Resources(cpu=3))])


def test_an_empty_workload_and_duplicate_names_are_refused():
    nodes = [Node(id=0, capacity=Resources(cpu=64, memory=256))]
    with pytest.raises(ConfigurationError, match="at least one job"):
        check_workload([], nodes)
    entry = generate(GeneratorSettings(jobs=1))[0]
    with pytest.raises(ConfigurationError, match="twice"):
        check_workload([entry, entry], nodes)


@pytest.mark.parametrize("arrivals", ["uniform", "poisson", "bursty"])
def test_generators_are_seeded_and_ordered(arrivals):
    settings = GeneratorSettings(jobs=45, arrivals=arrivals, seed=3)
    entries = generate(settings)
    assert entries == generate(settings)
    assert entries != generate(GeneratorSettings(jobs=45, arrivals=arrivals, seed=4))
    times = [entry.spec.submitted for entry in entries]
    assert times == sorted(times)
    assert {entry.spec.kind for entry in entries} == set(KINDS)


def test_arrivals_have_the_manner_that_they_are_named_after():
    def gaps(arrivals):
        settings = GeneratorSettings(jobs=400, span=40_000, arrivals=arrivals)
        return np.diff(arrival_times(settings, np.random.default_rng(0)))

    poisson, bursty = gaps("poisson"), gaps("bursty")
    assert np.std(poisson) == pytest.approx(np.mean(poisson), rel=0.2)
    assert np.std(bursty) > 1.5 * np.mean(bursty)


@pytest.mark.parametrize("bad", [{"jobs": 0}, {"span": -1.0}, {"arrivals": "never"}])
def test_impossible_generators_are_refused(bad):
    with pytest.raises(ConfigurationError):
        GeneratorSettings(**bad)
