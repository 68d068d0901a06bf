"""``python -m benchmarks COMMAND``; each command is a module with ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "src")
COMMANDS = {
    "compare": "one profile: every system side by side, and the limit",
    "matrix": "profiles x balances x workers, to benchmarks/results/",
    "real": "real compute on the CPU over a shaped link",
    "drift": "the links change their rate while mode auto trains",
    "duplex": "pushes and pulls on a worker's link, beside each other",
    "core": "our own overhead: time per chunk, memory",
    "loopback": "a small model without shaping, where there is nothing to gain",
    "exchange": "one chunk over Gloo: sent straight, and by all_reduce",
    "scaling": "curves to thousands of workers, from the simulator",
    "demo": "train on digits, without and with scheduling",
    "cluster": "many jobs on one cluster",
}


def main() -> int:
    """Run one command; 2 for wrong usage, 1 for a benchmark that could not go on."""
    if SOURCE not in sys.path:
        sys.path.insert(0, SOURCE)
    from benchmarks.errors import BenchmarkError
    from benchmarks.processes import terminate_as_interrupt

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=summary.capitalize())
        if name in sys.argv[1:2]:
            module = importlib.import_module(f"benchmarks.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args()
    try:
        with terminate_as_interrupt():
            return int(args.run(args))
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks: interrupted; everything was taken down", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
