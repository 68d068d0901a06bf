"""``bytescheduler tune`` over small commands that report as an adapter does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import left_behind

from bytescheduler.cli import main

pytest.importorskip("skopt")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

TRAIN = """
import os, subprocess, sys, time
from bytescheduler.core.config import resolve_settings
from bytescheduler.tuning import make_tuner

settings = resolve_settings()
tuner = make_tuner(settings, signature="m", world_size=2, engine="e", device="cpu",
                   total_bytes=8 << 20)
{special}
seconds = 0.5 if settings.mode == "barrier" else 0.1 + settings.partition_size / 1e8
for iteration in range(100):
    tuner.step(seconds * iteration)
"""

HANG = """
if settings.mode == "barrier":
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(child, start_new_session=True)
    time.sleep(600)
"""
CRASH = """
if settings.mode == "barrier":
    sys.exit("no barrier today")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def script(folder: Path, special: str = "") -> list[str]:
    path = folder / "train.py"
    path.write_text(TRAIN.format(special=special))
    return [sys.executable, str(path)]


def tune(folder: Path, *options: str, command: list[str]) -> int:
    output = str(folder / "tuned.json")
    return main(["tune", "--output", output, *options, "--", *command])


def result(folder: Path) -> dict[str, object]:
    return json.loads((folder / "tuned.json").read_text())


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        ((), [], "needs the command"),
        (("--trials", "0"), ["python3"], "at least 1"),
        (("--timeout", "0"), ["python3"], "must be positive"),
        ((), ["no-such-command-at-all"], "not found"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    command: list[str],
    message: str,
) -> None:
    assert tune(folder, *options, command=command) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "tuned.json").exists()


@pytest.mark.parametrize("name", ["missing/tuned.json", "."])
def test_an_output_that_cannot_be_written_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command = ["tune", "--output", str(folder / name), "--", *script(folder)]
    assert main(command) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_foreign_output_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tuned.json").write_text("my notes")
    assert tune(folder, command=script(folder)) == 2
    assert "holds no trials" in capsys.readouterr().err
    assert (folder / "tuned.json").read_text() == "my notes"


@pytest.mark.multiprocess
def test_finds_the_fastest_settings_and_says_what_to_set(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(folder, "--trials", "5", command=script(folder)) == 0
    printed = capsys.readouterr().out
    found = result(folder)
    trials = found["trials"]
    assert isinstance(trials, list)
    assert len(trials) == 5
    fastest = min(trials, key=lambda trial: trial["iteration_s"])
    assert found["best"] == fastest
    assert f"export BYTESCHEDULER_PARTITION_SIZE={fastest['partition_size']}" in printed
    assert f"export BYTESCHEDULER_MODE={fastest['mode']}" in printed
    assert (folder / "tuned.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.multiprocess
def test_goes_on_where_it_was_interrupted(folder: Path) -> None:
    command = script(folder)
    assert tune(folder, "--trials", "2", command=command) == 0
    before = result(folder)["trials"]
    assert tune(folder, "--trials", "4", command=command) == 0
    after = result(folder)["trials"]
    assert isinstance(before, list)
    assert isinstance(after, list)
    assert after[:2] == before
    assert len(after) == 4


@pytest.mark.multiprocess
def test_trials_of_another_command_are_not_gone_on_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(folder, "--trials", "1", command=script(folder)) == 0
    assert tune(folder, "--trials", "2", command=[sys.executable, "-c", "1"]) == 2
    assert "another command" in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.parametrize(("special", "reason"), [(HANG, "iterations"), (CRASH, "no barrier today")])
def test_a_trial_that_fails_is_counted_and_all_its_processes_are_ended(
    folder: Path, special: str, reason: str
) -> None:
    options = ("--trials", "3", "--timeout", "12")
    assert tune(folder, *options, command=script(folder, special)) == 0
    trials = result(folder)["trials"]
    assert isinstance(trials, list)
    failed = [trial for trial in trials if trial["iteration_s"] is None]
    assert [trial["mode"] for trial in failed] == ["barrier"]
    assert reason in failed[0]["failure"]
    assert not left_behind(folder / "cache")


@pytest.mark.multiprocess
def test_a_script_that_wraps_no_optimizer_is_told_what_to_add(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(folder, command=[sys.executable, "-c", "print(1)"]) == 2
    assert "ScheduledOptimizer(optimizer, model)" in capsys.readouterr().err
    assert not (folder / "tuned.json").exists()


@pytest.mark.multiprocess
def test_a_script_that_sets_its_own_sizes_is_told_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = script(folder)
    path = Path(command[1])
    path.write_text(path.read_text().replace("resolve_settings()", "resolve_settings(mode='fifo')"))
    assert tune(folder, command=command) == 2
    assert "sets its own" in capsys.readouterr().err


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_trial_and_keeps_what_there_is(folder: Path, number: int) -> None:
    command = script(folder, HANG)
    output = folder / "tuned.json"
    launch = [sys.executable, "-m", "bytescheduler.cli", "tune", "--output", str(output), "--"]
    process = subprocess.Popen([*launch, *command], stdout=subprocess.DEVNULL, env=os.environ)
    deadline = time.monotonic() + 120
    while not output.exists() and time.monotonic() < deadline:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    assert not left_behind(folder / "cache")
    assert result(folder)["best"] is not None
