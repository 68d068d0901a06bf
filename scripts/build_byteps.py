"""Build BytePS's wheel for this interpreter's torch, with a null GPU runtime, for our tests only.

For: `make byteps`, so that the BytePS transport is tested against a real scheduler, server and
workers on machines without a GPU. On GPU machines users install BytePS as its documentation says;
nothing of this is installed there, nor in `.venv`: the result lies in the user's cache and is used
by whoever puts it on PYTHONPATH (`scripts/run_byteps.py` does).

BytePS 0.2.5.post15 is published as source only and predates today's torch. What it takes, all of
it applied to the unpacked archive during the build:

- ps-lite first, by its own makefile, with the ZeroMQ archive that it ships instead of a download;
- CUDA's and NCCL's headers from the package registry, and two small libraries of our own under
  their names (`scripts/byteps/`), whose calls succeed and whose copies are `memmove`;
- C++20 and a few standard headers that older compilers included by themselves;
- its macro TORCH_VERSION renamed, since torch now has one; the new signature of torch's
  `include_paths`; a header TH/TH.h with forward declarations;
- threads that find nothing to do pause for 2 ms. BytePS's look again after a microsecond, and
  ps-lite's receivers at once, under the lock that senders need: thirty threads of two workers that
  keep two processors from all other work;
- `synchronize()` polls before it waits. Its wait keeps the GIL, and with today's torch dropping a
  tensor may need the GIL: BytePS's threads drop one that is done before the one that is waited
  for, and both wait for ever.

Considered and left out: stubs generated from the real libraries (hundreds of MB to download, and
nothing checks them), and a patch file (it would carry lines of BytePS).

Usage: .venv/bin/python scripts/build_byteps.py [--print-folder]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import zipfile
from pathlib import Path

import wheel_cache

VERSION = "0.2.5.post15"
REVISION = 3
"""Raised when this script builds something else, so that what is cached is not used any more."""

OUR_FILES = Path(__file__).resolve().parent / "byteps"

CUDA_HEADERS = (
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-nccl-cu12==2.21.5",
)
"""Packages of the registry whose headers the build needs; none of their libraries is used."""

PAUSE_US = 2000

PRE_INCLUDED = ("memory", "functional", "cstring", "limits", "algorithm")

LIBRARIES = {"cudart": "libcudart.so.13", "nccl": "libnccl.so.2"}
"""Name of each null library's source in `scripts/byteps/`, and the name that it is loaded by."""


def folder() -> Path:
    """Return where the build for this interpreter lies: the wheel, `site/` and `lib/`."""
    return wheel_cache.wheel_folder("byteps", VERSION, f"null-gpu-{REVISION}")


def build(work: Path, result: Path, log: Path) -> None:
    """Fill `result` with the wheel, its unpacked `site/` and the null libraries in `lib/`."""
    include = _download_headers(work, log)
    libraries = _compile_null_libraries(result / "lib", include, log)
    source = wheel_cache.unpack_source("byteps", VERSION, work, log)
    _adapt(source)
    _build_ps_lite(source, log)
    wheel = wheel_cache.build_wheel(source, result, log, _environment(include, libraries))
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(result / "site")]
    wheel_cache.run_logged([*pip, str(wheel)], log, cwd=work, env=os.environ)


def _download_headers(work: Path, log: Path) -> list[Path]:
    wheels = work / "headers"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    wheel_cache.run_logged([*pip, *CUDA_HEADERS], log, cwd=work, env=os.environ)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(wheels, [n for n in archive.namelist() if "/include/" in n])
        wheel.unlink()
    cuda = wheels / "nvidia" / "cu13" / "include"
    return [cuda, cuda / "cccl", wheels / "nvidia" / "nccl" / "include", OUR_FILES]


def _compile_null_libraries(folder: Path, include: list[Path], log: Path) -> Path:
    folder.mkdir()
    for name, shared in LIBRARIES.items():
        command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{shared}"]
        command += [f"-I{path}" for path in include]
        command += [str(OUR_FILES / f"null_{name}.c"), "-o", str(folder / shared)]
        wheel_cache.run_logged(command, log, cwd=folder, env=os.environ)
        (folder / f"lib{name}.so").symlink_to(shared)
    return folder


def _build_ps_lite(source: Path, log: Path) -> None:
    zeromq = source / "zeromq-4.1.4.tar.gz"
    options = ["WGET=cp", f"ZMQ_URL={zeromq} .", "ADD_CFLAGS=-D_GLIBCXX_USE_CXX11_ABI=1"]
    command = ["make", f"-j{os.cpu_count() or 1}", "ps", *options]
    plain = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "CXX")}
    wheel_cache.run_logged(command, log, cwd=source / "3rdparty" / "ps-lite", env=plain)


def _adapt(source: Path) -> None:
    setup = source / "setup.py"
    for path in [setup, *(source / "byteps" / "torch").glob("*.cc")]:
        _replace(path, r"\bTORCH_VERSION\b", "BYTEPS_TORCH_VERSION", required=path == setup)
    _replace(setup, r"include_paths\(cuda=True\)", "include_paths('cuda')")
    ops = source / "byteps" / "torch" / "ops.py"
    _replace(ops, r"(?m)^import torch$", "import time\nimport torch")
    wait = "    c_lib.byteps_torch_wait_and_clear(handle)"
    poll = "    while not poll(handle):\n        time.sleep(0.001)\n"
    _replace(ops, re.escape(wait), poll + wait)
    pause = f"std::this_thread::sleep_for(std::chrono::microseconds({PAUSE_US}));"
    receiver = source / "3rdparty" / "ps-lite" / "src" / "zmq_van.h"
    unlocked = rf"\1            mu_.unlock(); {pause} mu_.lock();\n"
    _replace(receiver, r"(== EAGAIN\) \{[^\n]*\n)", unlocked)
    stages = source / "byteps" / "common" / "core_loops.cc"
    _replace(stages, r"std::this_thread::sleep_for\(std::chrono::nanoseconds\(1000\)\);", pause)
    # The tests speak TCP; RDMA libraries that happen to be here must not become a dependency.
    _replace(setup, r"return ret_code==0", "return False")


def _replace(path: Path, pattern: str, replacement: str, *, required: bool = True) -> None:
    text, count = re.subn(pattern, replacement, path.read_text())
    if required and not count:
        raise wheel_cache.BuildError(f"{path.name} has no {pattern!r}: not BytePS {VERSION}?")
    path.write_text(text)


def _environment(include: list[Path], libraries: Path) -> dict[str, str]:
    flags = ["-march=x86-64-v3", *(f"-I{path}" for path in include)]
    flags += [word for header in PRE_INCLUDED for word in ("-include", header)]
    return wheel_cache.compiler_environment(
        "c++20",
        BYTESCHEDULER_BUILD_FLAGS=" ".join(flags),
        BYTEPS_NCCL_HOME=str(libraries.parent),
        BYTEPS_NCCL_LINK="SHARED",
        BYTEPS_WITH_PYTORCH="1",
        BYTEPS_WITHOUT_TENSORFLOW="1",
        BYTEPS_WITHOUT_MXNET="1",
        LDFLAGS=f"-L{libraries} -Wl,--no-as-needed -lcudart -Wl,--as-needed",
    )


def _check_machine() -> None:
    missing = wheel_cache.missing_tools("gcc", "g++", "make", "tar")
    if not Path("/usr/include/numa.h").exists():
        missing.append("libnuma-dev")
    if missing:
        raise wheel_cache.BuildError(f"to build BytePS, install {', '.join(missing)} first")


def install() -> Path:
    """Build where necessary and return the folder that holds `site/` and `lib/`.

    Raises:
        BuildError: a tool or a system library is missing, or the build failed.
    """
    if not folder().is_dir():
        _check_machine()
        print(f"building BytePS {VERSION} once, several minutes, into {folder()}", flush=True)
    return wheel_cache.ensure_built(folder(), build)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Build BytePS with a null GPU runtime, for tests only."
    )
    parser.add_argument("--print-folder", action="store_true", help="print the build's folder only")
    if parser.parse_args().print_folder:
        print(folder())
        return 0
    return wheel_cache.report_failure(install)


if __name__ == "__main__":
    sys.exit(main())
