"""The Keras adapter: two workers run every check of ``checks.py`` in one launch."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from bytescheduler._ports import free_port, free_ports

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
EXAMPLE = HERE.parents[1] / "examples" / "tensorflow" / "keras_digits.py"
SERVE = "import numpy; numpy.bool = bool; import mxnet"
LIMIT = 600.0  # seconds for all checks; starting TensorFlow twice takes most of an idle minute

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(LIMIT + 60)]


def names(table: str) -> list[str]:
    """The checks of one table, without importing TensorFlow here."""
    tree = ast.parse((HERE / "checks.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table:
            assert isinstance(node.value, ast.Tuple)
            return [ast.unparse(element) for element in node.value.elts]
    raise AssertionError(f"checks.py has no {table}")


def launch(
    folder: Path, *command: str, limit: float = LIMIT, variables: Mapping[str, str] | None = None
) -> tuple[list[int], str]:
    """Run two workers under TF_CONFIG; kill each with its children at the end."""
    ports = free_ports(2)
    workers = [f"127.0.0.1:{port}" for port in ports]
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**environment(workers, rank), **(variables or {})},
            stdout=(folder / f"{rank}.txt").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    deadline = time.monotonic() + limit
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        for process in processes:
            kill(process)
    texts = [(folder / f"{rank}.txt").read_text("utf-8", "replace") for rank in range(2)]
    return codes, "\n".join(text[-4000:] for text in texts)


def kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def parameter_servers() -> Iterator[dict[str, str]]:
    """A scheduler and a server for two workers; yields the workers' variables."""
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    with ExitStack() as stack:
        for role in ("scheduler", "server"):
            environ = {**os.environ, **variables, "DMLC_ROLE": role}
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE], env=environ, start_new_session=True
            )
            stack.callback(kill, process)
        yield {**variables, "DMLC_ROLE": "worker"}


def environment(workers: list[str], rank: int) -> dict[str, str]:
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    return {
        **os.environ,
        "TF_CONFIG": json.dumps(config),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
    }


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("keras")
    _, output = launch(folder, str(HERE / "keras_worker.py"), "checks", str(folder))
    return folder, output


def report(folder: Path, rank: int) -> dict[str, str]:
    path = folder / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("check", names("TOGETHER"))
def test_on_every_rank(check: str, outcome: tuple[Path, str]) -> None:
    folder, output = outcome
    for rank in range(2):
        verdict = report(folder, rank).get(check, "not run: an earlier check failed")
        assert verdict == "ok", f"rank {rank}: {verdict}\n{output}"


@pytest.mark.parametrize("check", names("ALONE"))
def test_as_plain_keras(check: str, outcome: tuple[Path, str]) -> None:
    folder, output = outcome
    verdict = report(folder, 1).get(check, "not run: an earlier check failed")
    assert verdict == "ok", f"{verdict}\n{output}"


def test_strategies_and_a_late_import_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.json"
    done = subprocess.run(
        [sys.executable, str(HERE / "refused_worker.py"), str(path)],
        env=environment([f"127.0.0.1:{port}" for port in free_ports(2)], rank=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    verdicts = json.loads(path.read_text())
    assert len(verdicts) == 9
    assert {name: text for name, text in verdicts.items() if text != "ok"} == {}


def test_a_killed_worker_ends_the_others_within_15_seconds(tmp_path: Path) -> None:
    codes, output = launch(
        tmp_path, str(HERE / "keras_worker.py"), "victim", str(tmp_path), limit=240
    )
    ended = time.time()
    killed = float(report(tmp_path, 1)["killed"])
    told = report(tmp_path, 0)
    assert float(told["at"]) - killed < 15, output
    assert ended - killed < 15, output
    assert "lost contact with rank 1" in told["said"]
    assert codes[0] not in (0, -1), output


def test_over_parameter_servers_as_a_single_process(tmp_path: Path) -> None:
    if importlib.util.find_spec("mxnet") is None:
        pytest.skip("MXNet is not installed")
    command = (str(HERE / "keras_worker.py"), "servers", str(tmp_path))
    with parameter_servers() as variables:
        _, output = launch(tmp_path, *command, limit=300, variables=variables)
    for rank in range(2):
        assert report(tmp_path, rank).get("servers") == "ok", output


def test_the_example_learns_digits(tmp_path: Path) -> None:
    codes, output = launch(tmp_path, str(EXAMPLE), "--epochs", "4", limit=300)
    assert codes == [0, 0], output
    accuracy = float(output.split("accuracy ")[-1].split()[0])
    assert accuracy > 0.8
