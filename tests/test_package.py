"""Importing the package is cheap and has no side effect; public names are listed and exist."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import bytescheduler
from bytescheduler import transports
from bytescheduler._imports import require
from bytescheduler.exceptions import ConfigurationError, MissingDependencyError
from bytescheduler.transports.base import Transport

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("torch", "tensorflow", "mxnet", "horovod", "mpi4py", "byteps", "skopt", "matplotlib")
CHEAP = (
    "bytescheduler",
    "bytescheduler.core",
    "bytescheduler.cli",
    "bytescheduler.exceptions",
    "bytescheduler.transports",
)

_PROBE = """
import importlib, json, os, sys, threading
before = set(os.listdir("/proc/self/fd")), set(os.listdir("."))
importlib.import_module(sys.argv[1])
after = set(os.listdir("/proc/self/fd")), set(os.listdir("."))
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "threads": threading.active_count(),
    "descriptors": sorted(after[0] - before[0]),
    "files": sorted(after[1] - before[1]),
}))
"""


def probe(module: str, folder: Path) -> dict:
    """What importing ``module`` in a new interpreter leaves behind."""
    command = [sys.executable, "-c", _PROBE, module]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, cwd=folder
    )
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.mark.parametrize("module", CHEAP)
def test_import_loads_no_framework_and_leaves_nothing_behind(module, tmp_path):
    seen = probe(module, tmp_path)
    assert [name for name in ENGINES if name in seen["modules"]] == []
    assert seen["threads"] == 1
    assert seen["descriptors"] == []
    assert seen["files"] == []


@pytest.mark.parametrize("name", ["mpi", "horovod", "byteps"])
def test_an_engine_is_imported_when_its_transport_opens_not_before(name, tmp_path):
    seen = probe(f"bytescheduler.transports.{name}", tmp_path)
    assert [engine for engine in ENGINES if engine in seen["modules"]] == []


def every_module() -> list[str]:
    found = pkgutil.walk_packages(
        bytescheduler.__path__, "bytescheduler.", onerror=lambda name: None
    )
    light = ("core", "transports", "simulate", "exceptions", "cli")
    return sorted(
        info.name
        for info in found
        if info.name.split(".")[1] in light and "__main__" not in info.name
    )


@pytest.mark.parametrize("name", every_module())
def test_every_name_in_all_exists_and_is_listed_once(name):
    module = importlib.import_module(name)
    listed = list(getattr(module, "__all__", []))
    assert len(listed) == len(set(listed))
    missing = [item for item in listed if not hasattr(module, item)]
    assert missing == []


@pytest.mark.parametrize("name", ["core", "transports", "exceptions"])
def test_public_packages_list_their_names(name):
    assert importlib.import_module(f"bytescheduler.{name}").__all__


def registered() -> dict[str, str]:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["entry-points"][transports.GROUP]


@pytest.mark.parametrize("name", ["torch", "horovod", "mpi", "byteps"])
def test_a_registered_transport_loads_and_keeps_the_contract(name):
    if name == "torch":
        pytest.importorskip("torch")
    entry = EntryPoint(name=name, value=registered()[name], group=transports.GROUP)
    assert issubclass(entry.load(), Transport)


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"got 'carrier pigeon'.*entry-point group"):
        transports.create("carrier pigeon")


def test_a_third_party_registers_a_transport_by_entry_point(tmp_path, monkeypatch):
    """A package installed next to ours is found by its metadata alone."""
    (tmp_path / "pigeon.py").write_text(
        "class Pigeon:\n    def __init__(self, birds=1):\n        self.birds = birds\n"
        "class Stray(Pigeon):\n    pass\n"
    )
    metadata = tmp_path / "pigeon-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{transports.GROUP}]\npigeon = pigeon:Pigeon\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pigeon = transports.create("pigeon", birds=3)
    assert pigeon.birds == 3  # type: ignore[attr-defined]
    assert transports.name_of(pigeon) == "pigeon"
    assert transports.name_of(sys.modules["pigeon"].Stray()) == "Stray"


def test_a_missing_engine_names_the_extra_to_install():
    with pytest.raises(MissingDependencyError, match=r"pip install 'bytescheduler\[mpi\]'"):
        require("no_such_engine_anywhere", extra="mpi")
