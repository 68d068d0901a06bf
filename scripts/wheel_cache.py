"""A cache of wheels that we build from source, shared by every checkout of one user.

For: Horovod and BytePS, whose registry releases are source only and whose builds take minutes.
A wheel depends on the interpreter and on the exact torch build that it was compiled against, so
both are part of its key, beside whatever the caller adds (with or without MPI, say).

Considered and left out: pip's own wheel cache. It keys a wheel by its source alone, so that a
wheel built against one torch would be reused with another and crash at import.

Builds are serialised by a file lock and a finished folder appears by one rename: two checkouts
that build at the same time get one wheel, and an interrupted build leaves none.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

BUILD_TIMEOUT_S = 45 * 60
"""Longest that one build command may run, in seconds."""

LOG_TAIL_LINES = 30

COMPILER_WRAPPER = Path(__file__).resolve().parent / "cxx_newer_standard.sh"
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


class BuildError(RuntimeError):
    """A build could not start or failed; the message says what to do."""


def cache_root() -> Path:
    """Return `$XDG_CACHE_HOME/bytescheduler`, `~/.cache/bytescheduler` by default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bytescheduler"


def wheel_folder(project: str, version: str, *variant: str) -> Path:
    """Return where the wheel of one project lies for this interpreter and torch build."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace(".", "_")
    parts = [f"{project}-{version}", f"torch{metadata.version('torch')}", python, platform]
    return cache_root() / "wheels" / "-".join([*parts, *variant])


def ensure_built(folder: Path, build: Callable[[Path, Path, Path], None]) -> Path:
    """Return `folder`, filled by `build(work_folder, result_folder, log_file)` where it is missing.

    Raises:
        BuildError: the build failed; its log is kept beside the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(_beside(folder, "lock")):
        if not folder.is_dir():
            _build_into(folder, build)
    return folder


def _build_into(folder: Path, build: Callable[[Path, Path, Path], None]) -> None:
    log, partial = _beside(folder, "log"), _beside(folder, "partial")
    log.write_text("")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with tempfile.TemporaryDirectory(prefix="bytescheduler-build-") as work:
        build(Path(work), partial, log)
    partial.rename(folder)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


@contextmanager
def _exclusive(lock: Path) -> Generator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_logged(command: list[str], log: Path, *, cwd: Path, env: Mapping[str, str]) -> None:
    """Run one build command with its output appended to `log`; stop all its children with it.

    Raises:
        BuildError: the command failed or ran longer than `BUILD_TIMEOUT_S`.
    """
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(BUILD_TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        raise BuildError(f"{command[0]} ended with status {code}; full log: {log}\n{tail}")


def unpack_source(project: str, version: str, work: Path, log: Path) -> Path:
    """Download the source distribution from the package registry; return its unpacked folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    pip += ["--no-build-isolation", f"{project}=={version}", "--dest", str(work)]
    # Some source distributions check for their build tools even when asked for metadata only.
    run_logged(pip, log, cwd=work, env=os.environ)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return work / archive.name.removesuffix(".tar.gz")


def build_wheel(source: Path, result: Path, log: Path, env: Mapping[str, str]) -> Path:
    """Build the wheel of an unpacked source tree against the packages of this interpreter."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--verbose"]
    run_logged([*pip, "--wheel-dir", str(result), str(source)], log, cwd=source, env=env)
    return wheel_in(result)


def wheel_in(folder: Path) -> Path:
    """Return the one wheel in `folder`."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def compiler_environment(standard: str, **extra: str) -> dict[str, str]:
    """Return this process's environment with the C++ compiler raised to `standard`."""
    return {
        **os.environ,
        "CXX": str(COMPILER_WRAPPER),
        "BYTESCHEDULER_BUILD_CXX": os.environ.get("CXX", "g++"),
        "BYTESCHEDULER_BUILD_STD": standard,
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        **extra,
    }


def missing_tools(*tools: str) -> list[str]:
    """Return those of `tools` that are not on the PATH."""
    return [tool for tool in tools if shutil.which(tool) is None]


def install(*requirements: str) -> None:
    """Install into this interpreter's environment, within our version constraints."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    subprocess.run([*pip, *requirements], check=True, timeout=BUILD_TIMEOUT_S)


def report_failure(step: Callable[[], object]) -> int:
    """Run one step of a command; return its exit code, with a failed build told on stderr.

    A SIGTERM ends the step as Ctrl-C does: with the processes that it started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        step()
    except (BuildError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
