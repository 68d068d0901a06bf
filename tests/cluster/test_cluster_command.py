"""``bytescheduler cluster`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescheduler.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
PLAIN = "name,time,workers,servers,mode,speed,steps\n"


def cluster(*arguments: str | Path) -> int:
    return main(["cluster", *map(str, arguments)])


def test_simulate_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    policies = ("optimus", "drf", "fifo")
    arguments = ["--nodes", "8", "--interval", "600", "--policy", ",".join(policies)]
    workload = EXAMPLES / "workload.csv"
    assert (
        cluster("simulate", "--workload", workload, *arguments, "--json", out, "--plot", picture)
        == 0
    )
    printed = capsys.readouterr().out
    for word in (
        *policies,
        "mean JCT",
        "median JCT",
        "p99 JCT",
        "makespan",
        "utilisation",
        "restarts",
    ):
        assert word in printed
    document = json.loads(out.read_text())
    assert list(document["policies"]) == list(policies)
    for found in document["policies"].values():
        assert len(found["jct_s"]) == 7
        assert found["mean_jct_s"] == pytest.approx(sum(found["jct_s"].values()) / 7)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_issues_command_reproduces_a_published_workload(pollux, tmp_path):
    out = tmp_path / "out.json"
    workload = pollux / "workloads" / "workload-3.csv"
    traces = ("--traces", pollux / "traces", "--nodes", 16, "--gpus", 4)
    policies = ("--policy", "optimus-oracle,tiresias")
    assert cluster("simulate", "--workload", workload, *traces, *policies, "--json", out) == 0
    found = json.loads(out.read_text())["policies"]
    for policy, file in (("optimus-oracle", "optimus"), ("tiresias", "tiresias")):
        published = json.loads((pollux / f"expected-{file}.json").read_text())
        assert found[policy]["jct_s"] == published["jct_seconds"]["workload-3"]


def test_generated_workloads_errors_and_faults_run_too(capsys):
    arguments = "--generate bursty --jobs 4 --nodes 6 --policy optimus --interval 600 --seed 2"
    faults = "--speed-error 0.1 --convergence-error 0.2 --node-mtbf 50 --stragglers 0.05"
    assert cluster("simulate", *arguments.split(), *faults.split()) == 0
    assert "optimus" in capsys.readouterr().out


def test_unequal_nodes_come_from_a_file(tmp_path):
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("cpu,memory,gpu,speed\n16,64,8,1\n32,128,8,0.5\n")
    workload = EXAMPLES / "workload.csv"
    assert cluster("simulate", "--workload", workload, "--cluster", nodes, "--policy", "fifo") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--policy lifo", "unknown policy 'lifo'"),
        ("--policy ,", "at least one"),
        ("--policy fifo,fifo", "each policy once"),
        ("--policy fifo --nodes 0", "--nodes must be at least 1"),
        ("--policy fifo --gpus -1", "--gpus must be at least 0"),
        ("--policy fifo --nodes 1 --cpus 2", "larger than the cluster"),
        ("--policy fifo --interval 90", "multiple of step_seconds"),
        ("--policy fifo --speed-error 2", "speed error must be in [0, 1)"),
        ("--policy fifo --seed -1", "--seed"),
        ("--policy fifo --json /nowhere/out.json", "cannot write"),
    ],
)
def test_wrong_usage_exits_with_two_before_anything_runs(capsys, arguments, message):
    workload = EXAMPLES / "workload.csv"
    assert cluster("simulate", "--workload", workload, *arguments.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,0,2,1,sync,1 0 0 0 0\n", "line 2, column steps"),
        ("a,-3,2,1,sync,1 0 0 0 0,9\n", "line 2, column time"),
        ("", "at least one row"),
        ("a,0,1,1,sync,1 0 0 0 0,9\n" * 2, "line 3, column name"),
        ("a,0,900,1,sync,1 0 0 0 0,9\n", "larger than the cluster"),
    ],
)
def test_bad_workloads_exit_with_two(tmp_path, capsys, rows, message):
    path = tmp_path / "jobs.csv"
    path.write_text(PLAIN + rows)
    assert cluster("simulate", "--workload", path, "--policy", "fifo") == 2
    assert message in capsys.readouterr().err


def test_fit_prints_speed_coefficients_and_draws(tmp_path, capsys):
    picture = tmp_path / "fit.png"
    assert cluster("fit", EXAMPLES / "speeds.csv", "--plot", picture) == 0
    printed = capsys.readouterr().out
    assert "sync" in printed
    assert "async" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_fit_prints_steps_left_with_an_interval(tmp_path, capsys):
    picture = tmp_path / "fit.png"
    assert cluster("fit", EXAMPLES / "losses.csv", "--plot", picture) == 0
    assert "90 %" in capsys.readouterr().out
    assert picture.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "expected the columns step,loss or workers,servers,step_time"),
        ("step,loss\n1,2\n1,1\n", "line 3, column step"),
        ("step,loss\n1,2\n2,-1\n", "line 3, column loss"),
        ("step,loss\n1,2\n", "at least 3"),
        ("workers,servers,step_time\n1,1,0\n", "line 2, column step_time"),
        ("workers,servers,step_time\n1,1,1\n2,0,1\n", "all with parameter servers"),
    ],
)
def test_bad_measurements_exit_with_two(tmp_path, capsys, text, message):
    path = tmp_path / "data.csv"
    path.write_text(text)
    assert cluster("fit", path) == 2
    assert message in capsys.readouterr().err
