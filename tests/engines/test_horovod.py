"""ScheduledOptimizer over Horovod beside Horovod's own: the rows of docs/horovod.md."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from launchers import Ended, environment, program, run_processes

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.transports.horovod import HorovodTransport

SCRIPT = Path(__file__).with_name("horovod_rows.py")
TABLE = Path(__file__).resolve().parents[2] / "docs" / "horovod.md"


def row_names() -> list[str]:
    """The rows, read without importing Horovod."""
    tree = ast.parse(SCRIPT.read_text())
    (rows,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROWS"
    )
    assert isinstance(rows, ast.DictComp)
    return [element.id for element in rows.generators[0].iter.elts]  # type: ignore[attr-defined]


def horovodrun(folder: Path, *options: str) -> Ended:
    command = [
        str(program("horovodrun")), "-np", "2", "-H", "localhost:2", *options,
        sys.executable, str(SCRIPT), str(folder),
    ]  # fmt: skip
    return run_processes([(command, environment())], folder, 170)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Ended:
    pytest.importorskip("horovod")
    pytest.importorskip("torch")
    return horovodrun(tmp_path_factory.mktemp("horovod"), "--gloo")


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
@pytest.mark.parametrize("row", row_names())
def test_row(row: str, ended: Ended) -> None:
    assert sorted(ended.reports) == [0, 1], ended.output[-4000:]
    for rank, report in ended.reports.items():
        verdict = report.get(row, "not run: an earlier row failed")
        assert verdict == "ok", f"rank {rank}: {verdict}\n{ended.output[-2000:]}"


@pytest.mark.parametrize("row", row_names())
def test_every_row_is_in_the_table_of_the_docs(row: str) -> None:
    assert f"`{row}`" in TABLE.read_text()


def test_an_elastic_job_is_refused_before_anything_starts(monkeypatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ConfigurationError, match=r"elastic .*HOROVOD_ELASTIC=1.*--min-np"):
        HorovodTransport()
