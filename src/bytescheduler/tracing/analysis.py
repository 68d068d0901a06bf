"""Where a job's time goes, and what limits it.

An iteration reaches from the last gradient of one round to the last gradient of the next. In it
the training thread waits at gates, updates, or computes (all the rest). The network is busy while
any chunk is under way. A *bubble* is time in which the thread waits although the network is not
busy: latency and overhead, which smaller chunks or more credit may hide. Time in which it waits and
the network is busy is time the network is too slow for, or what is needed first comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from bytescheduler.tracing.timeline import Span, Timeline

__all__ = ["Iteration", "Summary", "bubbles", "explain", "iterations", "summarise"]

HIDDEN: Final = 0.03  # share of waiting below which communication counts as hidden
SATURATED: Final = 0.9  # share of the network's time above which it counts as the limit
NOTABLE: Final = 0.05
STRAGGLER: Final = 0.10  # of an iteration, by which the others wait longer

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """From ``begin`` to ``end`` (seconds), and what the time in between went to."""

    begin: float
    end: float
    wait_s: float
    update_s: float
    network_s: float
    bubble_s: float
    sent_bytes: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def compute_s(self) -> float:
        return self.seconds - self.wait_s - self.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One rank's median iteration.

    Attributes:
        iterations: how many there are.
        seconds: of an iteration.
        compute, wait, update, network, bubble: shares of it.
        bandwidth: bytes per second while the network is busy; 0 where nothing was sent.
        chunk_s: seconds that a chunk is under way.
        gates: where it waits, and what share of all waiting that is; longest first.
    """

    rank: int
    iterations: int
    seconds: float
    compute: float
    wait: float
    update: float
    network: float
    bubble: float
    bandwidth: float
    chunk_s: float
    gates: tuple[tuple[str, float], ...]


def iterations(timeline: Timeline) -> list[Iteration]:
    """The whole iterations of a timeline; the first, of which a part is not recorded, is left out.

    A round ends when every parameter has been posted once more.
    """
    rounds: list[float] = []
    seen: set[str] = set()
    for name, when in timeline.posted:
        seen.add(name)
        if len(seen) == len(timeline.parameters):
            rounds.append(when)
            seen = set()
    return [_iteration(timeline, begin, end) for begin, end in pairwise(rounds)]


def _iteration(timeline: Timeline, begin: float, end: float) -> Iteration:
    inside = {
        lane: _clip(timeline.lane(lane), begin, end) for lane in ("wait", "update", "network")
    }
    network = _union(inside["network"])
    sent = sum(span.nbytes for span in timeline.lane("network") if begin <= span.begin < end)
    return Iteration(
        begin=begin,
        end=end,
        wait_s=_length(_union(inside["wait"])),
        update_s=_length(_union(inside["update"])),
        network_s=_length(network),
        bubble_s=_length(_minus(_union(inside["wait"]), network)),
        sent_bytes=sent,
    )


def summarise(timeline: Timeline) -> Summary | None:
    """The median iteration; None where not one is whole."""
    found = iterations(timeline)
    if not found:
        return None
    busy = sum(item.network_s for item in found)
    chunks = [span.seconds for span in timeline.lane("network")]
    return Summary(
        rank=timeline.rank,
        iterations=len(found),
        seconds=median(item.seconds for item in found),
        compute=median(item.compute_s / item.seconds for item in found),
        wait=median(item.wait_s / item.seconds for item in found),
        update=median(item.update_s / item.seconds for item in found),
        network=median(item.network_s / item.seconds for item in found),
        bubble=median(item.bubble_s / item.seconds for item in found),
        bandwidth=sum(item.sent_bytes for item in found) / busy if busy else 0.0,
        chunk_s=median(chunks) if chunks else 0.0,
        gates=_gates(timeline),
    )


def _gates(timeline: Timeline) -> tuple[tuple[str, float], ...]:
    seconds: dict[str, float] = {}
    for span in timeline.lane("wait"):
        seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    total = sum(seconds.values())
    ranked = sorted(seconds.items(), key=lambda pair: -pair[1])
    return tuple((name, value / total) for name, value in ranked if total)


def explain(summaries: Sequence[Summary]) -> list[str]:
    """What limits the job, in words, for people who can change something."""
    slowest = max(summaries, key=lambda item: item.seconds)
    return [_limit(slowest), *_where(slowest), *_straggler(summaries)]


def _limit(item: Summary) -> str:
    if item.wait < HIDDEN:
        return (
            f"Computing limits the job: only {item.wait:.0%} of an iteration is waiting, "
            "communication is hidden. A faster network would not help."
        )
    if item.network >= SATURATED:
        return (
            f"The network limits the job: it is busy for {item.network:.0%} of an iteration, at "
            f"{item.bandwidth * 8e-9:.3g} Gbit/s of gradients. A faster network, or fewer bytes "
            "(a larger batch, a smaller dtype), helps; another order would not."
        )
    if item.bubble > item.wait / 2:
        return (
            f"Latency limits the job: it waits {item.wait:.0%} of an iteration, mostly while the "
            "network is idle. Larger chunks or more credit may help; bytescheduler tune finds out."
        )
    return (
        f"Order limits the job: it waits {item.wait:.0%} of an iteration while the network, busy "
        f"for {item.network:.0%}, brings what is needed first. Smaller chunks may help "
        "(bytescheduler tune finds out), unless one layer's gradient is that large."
    )


def _where(item: Summary) -> list[str]:
    lines: list[str] = []
    if item.wait >= HIDDEN and item.gates:
        names = ", ".join(f"{name} ({share:.0%})" for name, share in item.gates[:3])
        lines.append(f"It waits longest for: {names}.")
    if item.update >= NOTABLE:
        lines.append(f"Parameter updates take {item.update:.0%} of an iteration.")
    return lines


def _straggler(summaries: Sequence[Summary]) -> list[str]:
    if len(summaries) < 2:
        return []
    quickest = min(summaries, key=lambda item: item.wait)
    others = median(item.wait for item in summaries if item is not quickest)
    if others - quickest.wait < STRAGGLER:
        return []
    return [
        f"Rank {quickest.rank} is slower than the others: it waits {quickest.wait:.0%} of an "
        f"iteration and they wait {others:.0%}, partly for it."
    ]


def bubbles(timeline: Timeline, begin: float, end: float) -> list[Interval]:
    """When the thread waits although nothing is on the network, between two moments."""
    waits = _union(_clip(timeline.lane("wait"), begin, end))
    return _minus(waits, _union(_clip(timeline.lane("network"), begin, end)))


def _clip(spans: Iterable[Span], begin: float, end: float) -> list[Interval]:
    clipped = ((max(span.begin, begin), min(span.end, end)) for span in spans)
    return [(start, stop) for start, stop in clipped if stop > start]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _minus(minuend: Sequence[Interval], subtrahend: Sequence[Interval]) -> list[Interval]:
    """Both disjoint and sorted."""
    left: list[Interval] = []
    for begin, end in minuend:
        now = begin
        for start, stop in subtrahend:
            if stop <= now or start >= end:
                continue
            if start > now:
                left.append((now, start))
            now = stop
        if now < end:
            left.append((now, end))
    return left


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
