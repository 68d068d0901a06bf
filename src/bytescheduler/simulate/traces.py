"""Timelines in and out: a profile from a recorded job, and a file for Perfetto.

A recorded timeline (``BYTESCHEDULER_TRACE``) says when each gradient was produced, and when the
training thread waited and updated. Between two gradients lies a layer's backward. Waiting belongs
to the network and is left out, so that the profile can be replayed on another network. What
remains between an iteration's last gradient and the next one's first is the forward and the
backward of the last layer; they are told apart by the usual ratio (a backward takes twice its
forward), and the forward is spread over the layers in proportion to their backward, for gates do
not stop where nothing has to be waited for. All times are medians over the recorded iterations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.simulate.model import Layer, Profile, Span
from bytescheduler.simulate.profiles import BACKWARD_TO_FORWARD

__all__ = ["load_trace", "write_timeline"]


@dataclass(slots=True, kw_only=True)
class _Round:
    """One backward: when each parameter's gradient was there, and stops since then; seconds."""

    posted: dict[str, float] = field(default_factory=dict)
    wait_s: float = 0.0
    update_s: float = 0.0


def load_trace(path: Path) -> Profile:
    """Derive a profile from a timeline that our adapter recorded in a job.

    Raises:
        ConfigurationError: the file is not such a timeline, or holds no whole iteration.
    """
    document = _read(path)
    try:
        sizes: dict[str, int] = document["metadata"]["plan"]["bytes"]
        order: list[str] = document["metadata"]["plan"]["order"]
        rounds = _rounds(document["traceEvents"], set(order))
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no timeline of this package ({error!r} is missing or wrong); "
            "record one with BYTESCHEDULER_TRACE=FILE"
        ) from error
    if len(rounds) < 2:
        raise ConfigurationError(
            f"{path} must hold two whole iterations, got {len(rounds)}; record a longer run"
        )
    return Profile(name=path.stem, layers=_layers(order, sizes, rounds))


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the timeline {path}: {error}") from error


def _rounds(events: Sequence[Mapping[str, Any]], names: set[str]) -> list[_Round]:
    """Cut the events into rounds; keep those in which every parameter was posted."""
    rounds = [_Round()]
    for event in sorted((e for e in events if "ts" in e), key=lambda event: event["ts"]):
        lane = event.get("tid")
        if lane == "gradients":
            if event["name"] in rounds[-1].posted:
                rounds.append(_Round())
            rounds[-1].posted[event["name"]] = event["ts"] * 1e-6
        elif lane == "wait":
            rounds[-1].wait_s += event["dur"] * 1e-6
        elif lane == "update":
            rounds[-1].update_s += event["dur"] * 1e-6
    return [item for item in rounds if names <= item.posted.keys()]


def _layers(
    order: Sequence[str], sizes: Mapping[str, int], rounds: Sequence[_Round]
) -> tuple[Layer, ...]:
    """One layer per module, in forward order; the last one has what the first gradient hides."""
    modules = [(name, list(group)) for name, group in groupby(order, key=_module)]
    backward = _backward_seconds([names for _, names in modules], rounds)
    rest = median(_rest(one, other) for one, other in pairwise(rounds))
    last = max(0.0, (rest - sum(backward) / BACKWARD_TO_FORWARD) / (1 + 1 / BACKWARD_TO_FORWARD))
    backward[-1] += last
    ratio = (rest - last) / sum(backward) if sum(backward) else 0.0
    update_s = median(item.update_s for item in rounds) / max(1, sum(sizes.values()))
    return tuple(
        Layer(
            name=name,
            forward_s=seconds * ratio,
            backward_s=seconds,
            update_s=sum(sizes[parameter] for parameter in names) * update_s,
            gradient_bytes=sum(sizes[parameter] for parameter in names),
        )
        for (name, names), seconds in zip(modules, backward, strict=True)
    )


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def _backward_seconds(modules: Sequence[Sequence[str]], rounds: Sequence[_Round]) -> list[float]:
    """Seconds from the gradient before to each module's last one, in forward order."""
    rows = [_gaps(modules, item.posted) for item in rounds]
    return [median(column) for column in zip(*rows, strict=True)]


def _gaps(modules: Sequence[Sequence[str]], posted: Mapping[str, float]) -> list[float]:
    ends = [max(posted[name] for name in names) for names in modules]
    before = dict(pairwise(sorted({min(posted.values()), *ends})))
    began = {end: begin for begin, end in before.items()}
    return [end - began.get(end, end) for end in ends]


def _rest(one: _Round, other: _Round) -> float:
    """Seconds from a round's last gradient to the next one's first, without waiting and updates."""
    between = min(other.posted.values()) - max(one.posted.values())
    return max(0.0, between - one.wait_s - one.update_s)


def write_timeline(spans: Iterable[Span], path: Path) -> None:
    """Write ``spans`` as Chrome trace JSON, which Perfetto opens."""
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": span.track,
            "name": span.name,
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        for span in spans
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
