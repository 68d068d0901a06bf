"""The command line: ``bytescheduler COMMAND ...``.

Each command lives in a module of its own with ``add_arguments(parser)`` and ``run(args) -> int``;
only the module of the command that is called gets imported, so that ``--help`` is quick and a
missing extra hurts only the command that needs it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from bytescheduler.exceptions import ByteSchedulerError

__all__ = ["main"]

# name: (module, what it does)
_COMMANDS = {
    "tune": ("bytescheduler.tuning.command", "find the best settings for a launch command"),
    "doctor": ("bytescheduler.doctor", "say what is installed, what works and what to expect"),
    "trace": ("bytescheduler.tracing_command", "merge, check and draw recorded timelines"),
    "simulate": ("bytescheduler.simulate.command", "predict iteration times: would it help me?"),
    "launch": ("bytescheduler.launch", "start parameter servers and workers"),
    "cluster": ("bytescheduler.cluster.command", "replay many jobs on one cluster"),
}
USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code (2 for wrong usage or bad input)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="bytescheduler", description="Faster distributed training by scheduled communication."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    name = next((word for word in arguments if not word.startswith("-")), None)
    for command, (module, summary) in _COMMANDS.items():
        subparser = commands.add_parser(command, help=summary, description=summary.capitalize())
        if command == name:
            implementation = importlib.import_module(module)
            implementation.add_arguments(subparser)
            subparser.set_defaults(run=implementation.run)
    try:
        args = parser.parse_args(arguments)
        return int(args.run(args))
    except ByteSchedulerError as error:
        print(f"bytescheduler: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
