"""One rank's recorded timeline, and several of them on one clock.

Files are those of ``core.trace.TraceRecorder``: Chrome trace events in the lanes ``gradients``
(instants), ``network`` (one span per chunk), ``wait``, ``update`` and, where an adapter has it,
``compute``. Ranks stamp with their own machine's clock. A chunk of a collective ends everywhere at
about the same moment, so the median difference of those ends is the difference of the clocks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from bytescheduler.exceptions import ConfigurationError

__all__ = ["Span", "Timeline", "aligned", "load", "merge"]

SKEW: Final = 1e-3  # seconds of clock difference that are left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took from ``begin`` to ``end`` (seconds); ``chunk`` and ``nbytes`` if sent."""

    name: str
    begin: float
    end: float
    chunk: int = -1
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What one rank recorded; times in seconds, spans in order of their begin.

    Attributes:
        path: the file.
        rank, world_size: whose it is.
        parameters: bytes of each parameter's gradient, in forward order.
        partition_size: bytes per chunk, at the end.
        negotiated: whether the engine let the other ranks start chunks before rank 0.
        posted: (parameter, time) of each gradient.
        lanes: spans by lane.
    """

    path: Path
    rank: int
    world_size: int
    parameters: Mapping[str, int]
    partition_size: int
    negotiated: bool
    posted: tuple[tuple[str, float], ...]
    lanes: Mapping[str, tuple[Span, ...]]

    def lane(self, name: str) -> tuple[Span, ...]:
        """The spans of one lane, none if it was never used."""
        return self.lanes.get(name, ())

    def shifted(self, seconds: float) -> Timeline:
        """The same on a clock that is ``seconds`` ahead."""
        return replace(
            self,
            posted=tuple((name, when + seconds) for name, when in self.posted),
            lanes={
                lane: tuple(
                    replace(span, begin=span.begin + seconds, end=span.end + seconds)
                    for span in spans
                )
                for lane, spans in self.lanes.items()
            },
        )


def load(path: Path) -> Timeline:
    """Read one rank's file.

    Raises:
        ConfigurationError: it cannot be read, or is no timeline of this package.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the timeline {path}: {error}") from error
    try:
        return _parse(path, document)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is no timeline of one rank of this package ({error!r} is missing or wrong); "
            "record one with BYTESCHEDULER_TRACE=FILE"
        ) from error


def _parse(path: Path, document: Any) -> Timeline:
    metadata, events = document["metadata"], document["traceEvents"]
    plan = metadata["plan"]
    lanes: dict[str, list[Span]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append(_span(event))
    posted = [(event["name"], event["ts"] * 1e-6) for event in events if event["ph"] == "i"]
    return Timeline(
        path=path,
        rank=int(metadata["rank"]),
        world_size=int(metadata["world_size"]),
        parameters={name: int(plan["bytes"][name]) for name in plan["order"]},
        partition_size=int(plan["partition_size"]),
        negotiated=bool(plan.get("negotiated", False)),
        posted=tuple(sorted(posted, key=lambda pair: pair[1])),
        lanes={
            lane: tuple(sorted(spans, key=lambda span: span.begin)) for lane, spans in lanes.items()
        },
    )


def _span(event: Mapping[str, Any]) -> Span:
    detail = event.get("args", {})
    begin = event["ts"] * 1e-6
    return Span(
        name=event["name"],
        begin=begin,
        end=begin + event["dur"] * 1e-6,
        chunk=detail.get("chunk", -1),
        nbytes=detail.get("bytes", 0),
    )


def aligned(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The timelines, by rank, on the clock of the first rank."""
    ordered = sorted(timelines, key=lambda timeline: timeline.rank)
    first = ordered[0]
    others = [timeline.shifted(-_ahead(first, timeline)) for timeline in ordered[1:]]
    if first.negotiated and first.rank == 0:
        others = [_moving(timeline, first) for timeline in others]
    return [first, *others]


def _moving(timeline: Timeline, leader: Timeline) -> Timeline:
    """The same with chunks from when rank 0 starts them: nothing of them moves before."""
    begins = {key: span.begin for key, span in _by_turn(leader).items()}
    spans = tuple(
        replace(span, begin=min(max(span.begin, begins.get(key, span.begin)), span.end))
        for key, span in _by_turn(timeline).items()
    )
    network = tuple(sorted(spans, key=lambda span: span.begin))
    return replace(timeline, lanes={**timeline.lanes, "network": network})


def _by_turn(timeline: Timeline) -> dict[tuple[int, int], Span]:
    """What was sent, by chunk and its how many-eth turn."""
    turns: Counter[int] = Counter()
    spans: dict[tuple[int, int], Span] = {}
    for span in timeline.lane("network"):
        spans[span.chunk, turns[span.chunk]] = span
        turns[span.chunk] += 1
    return spans


def _ahead(reference: Timeline, other: Timeline) -> float:
    """Seconds that the clock of ``other`` is ahead; 0 if hardly, or if they share no chunk."""
    ours, theirs = _by_turn(reference), _by_turn(other)
    differences = [theirs[key].end - ours[key].end for key in ours.keys() & theirs.keys()]
    if not differences:
        return 0.0
    skew = median(differences)
    return skew if abs(skew) > SKEW else 0.0


def merge(timelines: Sequence[Timeline], path: Path) -> None:
    """Write all ranks into one file for Perfetto, a process per rank."""
    events = [event for timeline in timelines for event in _events(timeline)]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    temporary.replace(path)


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    rank = timeline.rank
    name = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    instants = [
        {"ph": "i", "s": "t", "pid": rank, "tid": "gradients", "name": who, "ts": when * 1e6}
        for who, when in timeline.posted
    ]
    spans = [
        {
            "ph": "X",
            "pid": rank,
            "tid": lane,
            "name": span.name,
            "ts": span.begin * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"chunk": span.chunk, "bytes": span.nbytes} if span.chunk >= 0 else {},
        }
        for lane, items in timeline.lanes.items()
        for span in items
    ]
    return [name, *instants, *spans]
