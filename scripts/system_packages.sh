#!/bin/bash
# Install the few system packages that some engines need, where that is possible: as root, on
# Debian or a relative of it. Otherwise say what is missing; the tests that need it skip.
# Nothing here is needed for PyTorch, TensorFlow, MXNet, or Horovod over Gloo.
set -euo pipefail

declare -A package_of=(
    [mpirun]=openmpi-bin        # transport="mpi", and Horovod over MPI
    [mpicxx]=libopenmpi-dev
    [g++]=g++                   # builds Horovod, BytePS and the TensorFlow gate
    [ip]=iproute2               # shaped links in tests, demo and benchmarks
)

missing=()
for tool in "${!package_of[@]}"; do
    command -v "$tool" >/dev/null || missing+=("${package_of[$tool]}")
done
[[ -e /usr/include/numa.h ]] || missing+=(libnuma-dev)      # builds BytePS

if ((${#missing[@]} == 0)); then
    exit 0
fi
if ((EUID == 0)) && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
        exit 0
    fi
fi
echo "not installed: ${missing[*]}; tests that need them will be skipped" >&2
