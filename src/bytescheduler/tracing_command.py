"""``bytescheduler trace FILE...``: merge, check, explain and draw recorded timelines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bytescheduler._imports import require
from bytescheduler.exceptions import ConfigurationError
from bytescheduler.tracing.analysis import Summary, explain, summarise
from bytescheduler.tracing.checks import check
from bytescheduler.tracing.picture import draw
from bytescheduler.tracing.timeline import aligned, load, merge

__all__ = ["add_arguments", "run"]

EXTRA = "tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="timelines of one job, one per rank"
    )
    parser.add_argument(
        "--output", default="timeline.png", metavar="FILE", help="picture (default: %(default)s)"
    )
    parser.add_argument(
        "--merged", metavar="FILE", help="all ranks for Perfetto (default: beside the picture)"
    )
    parser.add_argument(
        "--iterations", type=int, default=3, help="drawn, the last ones (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print what limits the job; 0 if the timelines are consistent, else 1."""
    inputs = [Path(name) for name in args.files]
    picture = Path(args.output)
    merged = Path(args.merged) if args.merged else picture.with_suffix(".merged.json")
    _check_arguments(args.iterations, inputs, (picture, merged))
    timelines = [load(path) for path in inputs]
    problems = check(timelines)
    timelines = aligned(timelines)
    summaries = [item for item in map(summarise, timelines) if item is not None]
    if len(summaries) < len(timelines):
        raise ConfigurationError(
            "every timeline must hold a whole iteration; record three iterations or more"
        )
    merge(timelines, merged)
    draw(timelines, picture, args.iterations)
    _print(summaries, problems)
    print(f"picture: {picture}\nmerged for Perfetto: {merged}")
    return 1 if problems else 0


def _check_arguments(iterations: int, inputs: Sequence[Path], outputs: Sequence[Path]) -> None:
    if iterations < 1:
        raise ConfigurationError(f"--iterations must be at least 1, got {iterations}")
    for output in outputs:
        if output.resolve() in [path.resolve() for path in inputs]:
            raise ConfigurationError(f"{output} is read, so it cannot be written; name another")
        if output.is_dir() or not output.resolve().parent.is_dir():
            raise ConfigurationError(f"{output} cannot be written; name a file in a directory")


def _print(summaries: Sequence[Summary], problems: Sequence[str]) -> None:
    console = require("rich.console", extra=EXTRA).Console()
    console.print(_table(summaries))
    for line in explain(summaries):
        console.print(line, highlight=False)
    for problem in problems:
        console.print(f"Problem: {problem}.", style="red", highlight=False)


def _table(summaries: Sequence[Summary]) -> Any:
    table = require("rich.table", extra=EXTRA).Table(title="Median iteration")
    headings = "rank", "iterations", "ms", "computing", "waiting", "bubbles", "updating", "sending"
    for heading in headings:
        table.add_column(heading, justify="right")
    for item in summaries:
        shares = (item.compute, item.wait, item.bubble, item.update, item.network)
        table.add_row(
            str(item.rank),
            str(item.iterations),
            f"{item.seconds * 1e3:.1f}",
            *(f"{share:.0%}" for share in shares),
        )
    return table
