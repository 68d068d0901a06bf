"""Timelines in and out: a profile from a recorded job, and a file for Perfetto.

A recorded timeline (``BYTESCHEDULER_TRACE``) says when each gradient was produced and when the
training thread stood at each gate. Between two gradients lies a layer's backward; between leaving
one gate and reaching the next lies a layer's forward. Time spent waiting at gates belongs to the
network and is left out, so that the profile can be replayed on another network. What lies between
the last gate and the first gradient (the last layer's forward, the loss, and the last layer's
backward) is split as 1 to 2. All times are medians over the recorded iterations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.simulate.model import Layer, Profile, Span
from bytescheduler.simulate.profiles import BACKWARD_TO_FORWARD

__all__ = ["load_trace", "write_timeline"]

GATE_LANES = ("wait", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Iteration:
    """One backward and the forward before it; seconds.

    Attributes:
        posted: when each parameter's gradient was there.
        gates: (module, begin, end) of the stops in the forward before, in order.
        update_s: seconds of updates in that forward, by module.
    """

    posted: dict[str, float]
    gates: list[tuple[str, float, float]]
    update_s: dict[str, float]


def load_trace(path: Path) -> Profile:
    """Derive a profile from a timeline that our adapter recorded in a job.

    Raises:
        ConfigurationError: the file is not such a timeline, or holds no whole iteration.
    """
    document = _read(path)
    try:
        sizes: dict[str, int] = document["metadata"]["plan"]["bytes"]
        order: list[str] = document["metadata"]["plan"]["order"]
        iterations = _iterations(document["traceEvents"], set(order))
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no timeline of this package ({error!r} is missing or wrong); "
            "record one with BYTESCHEDULER_TRACE=FILE"
        ) from error
    if not iterations:
        raise ConfigurationError(
            f"{path} must hold a whole iteration, got none; record at least three iterations"
        )
    layers = _layers(order, sizes, iterations)
    return Profile(name=path.stem, layers=layers)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the timeline {path}: {error}") from error


def _iterations(events: Sequence[Mapping[str, Any]], names: set[str]) -> list[_Iteration]:
    """Cut the events into iterations; keep those in which every parameter was posted."""
    timed = sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])
    found: list[_Iteration] = []
    current = _Iteration(posted={}, gates=[], update_s={})
    for event in timed:
        lane, name, begin = event.get("tid"), event["name"], event["ts"] * 1e-6
        if lane in GATE_LANES:
            if current.posted:
                found.append(current)
                current = _Iteration(posted={}, gates=[], update_s={})
            _stop(current, lane, name, begin, begin + event["dur"] * 1e-6)
        elif lane == "gradients":
            current.posted[name] = begin
    found.append(current)
    return [item for item in found if item.gates and names <= item.posted.keys()]


def _stop(iteration: _Iteration, lane: str, name: str, begin: float, end: float) -> None:
    """Note a stop at a gate; stops of the same module that follow each other are one."""
    gates = iteration.gates
    if gates and gates[-1][0] == name:
        gates[-1] = (name, gates[-1][1], end)
    else:
        gates.append((name, begin, end))
    if lane == "update":
        iteration.update_s[name] = iteration.update_s.get(name, 0.0) + end - begin


def _layers(
    order: Sequence[str], sizes: Mapping[str, int], iterations: Sequence[_Iteration]
) -> tuple[Layer, ...]:
    modules = list(dict.fromkeys(name for name, _, _ in iterations[-1].gates))
    owned: dict[str, list[str]] = {module: [] for module in modules}
    for parameter in order:
        owned[_owner(parameter, modules)].append(parameter)
    forward = _medians([_forward_seconds(item) for item in iterations])
    backward = _medians([_backward_seconds(item, owned) for item in iterations])
    update = _medians([item.update_s for item in iterations])
    return tuple(
        Layer(
            name=module or "root",
            forward_s=forward.get(module, 0.0),
            backward_s=backward.get(module, 0.0),
            update_s=update.get(module, 0.0),
            gradient_bytes=sum(sizes[name] for name in owned[module]),
        )
        for module in modules
    )


def _owner(parameter: str, modules: Sequence[str]) -> str:
    """The gate whose name is the longest prefix of the parameter's; the first one if none is."""
    fitting = [name for name in modules if not name or parameter.startswith(f"{name}.")]
    return max(fitting, key=len, default=modules[0])


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: median(row[name] for row in rows if name in row) for name in names}


def _turn(iteration: _Iteration) -> float:
    """Seconds from the last gate to the first gradient."""
    return max(0.0, min(iteration.posted.values()) - iteration.gates[-1][2])


def _forward_seconds(iteration: _Iteration) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for (name, _, end), (_, begin, _) in pairwise(iteration.gates):
        seconds[name] = seconds.get(name, 0.0) + max(0.0, begin - end)
    last = iteration.gates[-1][0]
    share = 1 / (1 + BACKWARD_TO_FORWARD)
    seconds[last] = seconds.get(last, 0.0) + share * _turn(iteration)
    return seconds


def _backward_seconds(
    iteration: _Iteration, owned: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Each module's time is that from the gradient before to its own last gradient."""
    done = {
        module: max(iteration.posted[name] for name in names)
        for module, names in owned.items()
        if names
    }
    last = min(iteration.posted.values())
    seconds: dict[str, float] = {}
    for module, end in sorted(done.items(), key=lambda pair: pair[1]):
        seconds[module] = end - last
        last = end
    first = min(done, key=lambda module: done[module])
    share = BACKWARD_TO_FORWARD / (1 + BACKWARD_TO_FORWARD)
    seconds[first] += share * _turn(iteration)
    return seconds


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
