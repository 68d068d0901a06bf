"""Build Horovod's wheel for this interpreter's torch once, and install it here.

For: `make venv`. Horovod 0.28.1 is published as source only and predates today's torch, which
needs a newer C++ standard than Horovod's CMake files ask for; a compiler wrapper raises it, so
that no line of Horovod is changed. The wheel is kept in the user's cache (see `wheel_cache`).

Only its PyTorch part is built: the TensorFlow part does not compile against TensorFlow 2.21, the
MXNet part needs a NumPy that MXNet 1.9.1 no longer gets. Gloo is always inside; MPI where this
machine has its compiler (`scripts/system_packages.sh` installs it).

Usage: .venv/bin/python scripts/build_horovod.py [--print-folder]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import wheel_cache

VERSION = "0.28.1"


def has_mpi() -> bool:
    """Tell whether Horovod can be built and run with MPI here."""
    return not wheel_cache.missing_tools("mpicxx", "mpirun")


def folder() -> Path:
    """Return where the wheel for this interpreter lies once it is built."""
    return wheel_cache.wheel_folder("horovod", VERSION, "mpi" if has_mpi() else "gloo")


def build(work: Path, result: Path, log: Path) -> None:
    """Build the wheel into `result`; about 10 minutes on 2 cores."""
    source = wheel_cache.unpack_source("horovod", VERSION, work, log)
    wheel_cache.build_wheel(source, result, log, _environment())


def _environment() -> dict[str, str]:
    return wheel_cache.compiler_environment(
        "c++17",
        HOROVOD_WITH_PYTORCH="1",
        HOROVOD_WITHOUT_TENSORFLOW="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_GLOO="1",
        **{"HOROVOD_WITH_MPI" if has_mpi() else "HOROVOD_WITHOUT_MPI": "1"},
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    )


def _ensure_cmake() -> None:
    beside_python = Path(sys.executable).with_name("cmake")
    if shutil.which("cmake") is None and not beside_python.exists():
        wheel_cache.install("cmake")


def install() -> None:
    """Build where necessary and install into this interpreter's environment.

    Raises:
        BuildError: the build failed.
    """
    if not folder().is_dir():
        _ensure_cmake()
        print(f"building Horovod {VERSION} once, about 10 minutes, into {folder()}", flush=True)
    wheel_cache.install(str(wheel_cache.wheel_in(wheel_cache.ensure_built(folder(), build))))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Build Horovod's wheel for this interpreter's torch once, and install it here."
    )
    parser.add_argument("--print-folder", action="store_true", help="print the wheel's folder only")
    if parser.parse_args().print_folder:
        print(folder())
        return 0
    missing = wheel_cache.missing_tools("g++", "make")
    if missing and not folder().is_dir():
        print(f"Horovod is left out, its tests skip: to build it, install {' and '.join(missing)}")
        return 0
    return wheel_cache.report_failure(install)


if __name__ == "__main__":
    sys.exit(main())
