"""The timeline as a picture: a group of lanes per rank, bubbles marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from bytescheduler._imports import require
from bytescheduler.tracing.analysis import bubbles, iterations
from bytescheduler.tracing.timeline import Timeline

__all__ = ["draw"]

SENDING: Final = "#4878d0"
COLOURS: Final = {"compute": "#6acc64", "wait": "#bbbbbb", "update": "#956cb4"}
BUBBLE: Final = "#d65f5f"
MAX_RANKS: Final = 8
LANE_INCHES: Final = 0.45


def draw(timelines: Sequence[Timeline], path: Path, shown: int) -> Path:
    """Draw the last ``shown`` iterations of up to eight ranks and return ``path``."""
    matplotlib = require("matplotlib", extra="tune")
    matplotlib.use("Agg")
    pyplot = require("matplotlib.pyplot", extra="tune")
    ranks = timelines[:MAX_RANKS]
    begin, end = _window(ranks[0], shown)
    figure, axes = pyplot.subplots(
        figsize=(14, 1.6 + 2 * LANE_INCHES * len(ranks)), layout="constrained"
    )
    labels: list[str] = []
    for row, timeline in zip(count(step=2), ranks, strict=False):
        _thread(axes, timeline, row, begin, end)
        _network(axes, timeline, row + 1, begin, end)
        labels += [f"rank {timeline.rank}", "network"]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel("milliseconds")
    _legend(figure, axes)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _window(timeline: Timeline, shown: int) -> tuple[float, float]:
    found = iterations(timeline)[-shown:]
    return found[0].begin, found[-1].end


def _thread(axes: Any, timeline: Timeline, row: int, begin: float, end: float) -> None:
    """Computing is what is neither waiting nor updating, so it is drawn below both."""
    axes.broken_barh([(0, (end - begin) * 1e3)], (row - 0.4, 0.8), color=COLOURS["compute"])
    for lane in ("wait", "update"):
        bars = [
            ((span.begin - begin) * 1e3, span.seconds * 1e3)
            for span in timeline.lane(lane)
            if span.end > begin and span.begin < end
        ]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[lane])
    empty = [
        ((start - begin) * 1e3, (stop - start) * 1e3)
        for start, stop in bubbles(timeline, begin, end)
    ]
    axes.broken_barh(empty, (row - 0.4, 0.8), color=BUBBLE)


def _network(axes: Any, timeline: Timeline, row: int, begin: float, end: float) -> None:
    bars = [
        ((span.begin - begin) * 1e3, span.seconds * 1e3)
        for span in timeline.lane("network")
        if span.end > begin and span.begin < end
    ]
    axes.broken_barh(
        bars, (row - 0.4, 0.8), facecolor=SENDING, alpha=0.6, edgecolor="white", linewidth=0.2
    )


def _legend(figure: Any, axes: Any) -> None:
    patches = require("matplotlib.patches", extra="tune")
    names = {
        "computing": COLOURS["compute"],
        "waiting": COLOURS["wait"],
        "bubble: waiting while nothing is sent": BUBBLE,
        "updating": COLOURS["update"],
        "sending": SENDING,
    }
    handles = [patches.Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
