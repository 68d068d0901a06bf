"""The simulation itself: one iteration of one job in its steady state.

A layer's exchange ends before its next forward, so it has ended before its next backward: when a
backward starts, nothing is in flight. The steady state is therefore reached at once, and one
cycle (backward, then the gated forward) is the whole truth; nothing needs to be run until it
settles. Moreover backward waits for nothing, so that all times of readiness are known beforehand
and the exchange can be played through first, the forward after it. That leaves one short event
loop, :func:`_send`, fast enough to be the objective of a search over thousands of settings.

A general process-based simulator was considered; it is a hundred times slower for a model whose
only queue is this one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from bytescheduler.core.plan import slices
from bytescheduler.simulate.model import Layer, Network, Profile, Result, Schedule, Span

__all__ = ["bound_s", "simulate"]


class _Chunk(NamedTuple):
    """A message: when it may go, before what else, and the layers [first, last] in it."""

    ready_s: float
    priority: float
    size: int
    first: int
    last: int


class _Sent(NamedTuple):
    start_s: float
    end_s: float


def simulate(profile: Profile, network: Network, schedule: Schedule) -> Result:
    """Predict a job's iteration time, with the timeline that leads to it.

    Args:
        profile: the job's layers.
        network: the engine and the links.
        schedule: order and pieces.
    """
    ready = _backward_ends(profile.layers)
    chunks = _cut(profile.layers, ready, schedule)
    sent, spans = _exchange(chunks, network, schedule, ready[0])
    arrival = _arrivals(profile.layers, chunks, sent, barrier=schedule.policy == "barrier")
    iteration, compute = _forward(profile.layers, ready[0], arrival)
    exchange = network.exchange_s(profile.gradient_bytes)
    return Result(
        iteration_s=iteration,
        bound_s=bound_s(profile, network),
        limit_s=max(profile.compute_s, exchange),
        compute_s=profile.compute_s,
        exchange_s=exchange,
        chunks=len(spans),
        timeline=(*_backward_spans(profile.layers, ready), *spans, *compute),
    )


def bound_s(profile: Profile, network: Network) -> float:
    """The structural bound in seconds per iteration.

    Priority order with infinitely small chunks and no overhead, each layer's exchange starting
    after its backward and ending before its next forward. Preemption makes the layer that became
    ready last the most urgent one, so that the ready layers form a stack.
    """
    ready = _backward_ends(profile.layers)
    arrival = [0.0] * len(ready)
    stack: list[tuple[int, float]] = []
    now = 0.0
    for layer in reversed(range(len(ready))):
        now = _drain(stack, now, ready[layer], arrival)
        stack.append((layer, network.exchange_s(profile.layers[layer].gradient_bytes)))
    _drain(stack, now, float("inf"), arrival)
    return _forward(profile.layers, ready[0], arrival)[0]


def _drain(stack: list[tuple[int, float]], now: float, until: float, arrival: list[float]) -> float:
    """Serve the top of the stack from ``now`` to ``until``; return ``until``."""
    while stack and now < until:
        layer, left = stack.pop()
        if now + left > until:
            stack.append((layer, left - (until - now)))
            return until
        now += left
        arrival[layer] = now
    return until


def _backward_ends(layers: Sequence[Layer]) -> list[float]:
    """Seconds from the start of backward to each layer's gradient, in forward order."""
    return list(accumulate(layer.backward_s for layer in reversed(layers)))[::-1]


def _cut(layers: Sequence[Layer], ready: Sequence[float], schedule: Schedule) -> list[_Chunk]:
    if schedule.bucket_bytes is not None:
        return _buckets(layers, ready, schedule.bucket_bytes)
    return _slices(layers, ready, schedule)


def _slices(layers: Sequence[Layer], ready: Sequence[float], schedule: Schedule) -> list[_Chunk]:
    """Slices of the flat buffer in forward order, as ``core.plan`` cuts it."""
    owners = [index for index, layer in enumerate(layers) if layer.gradient_bytes]
    ends = list(accumulate(layers[index].gradient_bytes for index in owners))
    by_offset = schedule.policy == "priority"
    chunks: list[_Chunk] = []
    total = ends[-1] if ends else 0
    for start, stop in slices(total, schedule.partition_bytes, growing=by_offset):
        first = owners[bisect_right(ends, start)]
        last = owners[bisect_right(ends, stop - 1)]
        priority = float(start) if by_offset else ready[first]
        chunks.append(_Chunk(ready[first], priority, stop - start, first, last))
    return chunks


def _buckets(layers: Sequence[Layer], ready: Sequence[float], limit: int) -> list[_Chunk]:
    """Whole layers, last one first, a bucket being closed once it holds ``limit`` bytes."""
    chunks: list[_Chunk] = []
    size, last = 0, len(layers) - 1
    for first in reversed(range(len(layers))):
        size += layers[first].gradient_bytes
        if size and (size >= limit or first == 0):
            chunks.append(_Chunk(ready[first], ready[first], size, first, last))
            size, last = 0, first - 1
    return chunks


def _exchange(
    chunks: Sequence[_Chunk], network: Network, schedule: Schedule, backward_end: float
) -> tuple[list[_Sent], list[Span]]:
    """When each chunk's exchange starts and ends, and the spans to draw."""
    if schedule.policy != "dear":
        sent = _send(chunks, network, schedule, share=1.0)
        return sent, _network_spans(sent, "all-reduce")
    scattered = _send(chunks, network, schedule, share=0.5)
    begin = max([backward_end, *(part.end_s for part in scattered)])
    gathers = [chunk._replace(ready_s=begin, priority=chunk.first) for chunk in chunks]
    gathered = _send(gathers, network, schedule, share=0.5)
    spans = _network_spans(scattered, "reduce-scatter") + _network_spans(gathered, "all-gather")
    return gathered, spans


def _send(
    chunks: Sequence[_Chunk], network: Network, schedule: Schedule, *, share: float
) -> list[_Sent]:
    """Play the queue: ready chunks by (priority, index) while the credit lasts.

    A started chunk costs the dispatcher ``overhead_s``, passes the network's stages behind the
    chunks before it, and is back ``alpha_s`` later; credit returns then. ``share`` is the part of
    an all-reduce that is sent here.
    """
    in_buckets = schedule.bucket_bytes is not None
    announce = 0.0 if in_buckets else network.announce_s
    credit = float("inf") if in_buckets else float(schedule.credit_bytes)
    slots = network.concurrency or len(chunks)
    stages = [rate * share for rate in network.stage_s_per_byte]
    latency, overhead = network.alpha_s * share, network.overhead_s
    free = [0.0] * len(stages)
    urgent = chunks and schedule.policy == "priority"
    clear = chunks[0].ready_s if urgent else 0.0  # see core/foresight.py
    sent = [_Sent(0.0, 0.0)] * len(chunks)
    coming = sorted(range(len(chunks)), key=lambda index: -chunks[index].ready_s)
    waiting: list[tuple[float, int]] = []
    flying: deque[tuple[float, int]] = deque()
    now = 0.0
    while coming or waiting:
        while coming and chunks[coming[-1]].ready_s <= now:
            index = coming.pop()
            heapq.heappush(waiting, (chunks[index].priority, index))
        while flying and flying[0][0] <= now:
            credit += flying.popleft()[1]
        if waiting:
            size = chunks[waiting[0][1]].size
            fits = size <= credit and len(flying) < slots
            in_time = now >= clear or free[0] + size * stages[0] <= clear
            if not flying or (fits and in_time):
                index = heapq.heappop(waiting)[1]
                credit -= size
                now += overhead
                begin = end = max(now + announce, free[0])
                for stage, rate in enumerate(stages):
                    end = free[stage] = max(end, free[stage]) + size * rate
                sent[index] = _Sent(begin, end + latency)
                flying.append((end + latency, size))
                continue
        ready_next = chunks[coming[-1]].ready_s if coming else float("inf")
        now = min(ready_next, flying[0][0] if flying else float("inf"))
    return sent


def _arrivals(
    layers: Sequence[Layer], chunks: Sequence[_Chunk], sent: Sequence[_Sent], *, barrier: bool
) -> list[float]:
    """When each layer's last chunk is back; with a barrier, when everything is."""
    if barrier:
        return [max((part.end_s for part in sent), default=0.0)] * len(layers)
    arrival = [0.0] * len(layers)
    for chunk, part in zip(chunks, sent, strict=True):
        for index in range(chunk.first, chunk.last + 1):
            if layers[index].gradient_bytes:
                arrival[index] = max(arrival[index], part.end_s)
    return arrival


def _forward(
    layers: Sequence[Layer], begin: float, arrival: Sequence[float]
) -> tuple[float, list[Span]]:
    """Run the forward from ``begin``, each layer gated by its arrival; its end and its spans."""
    now = begin
    spans: list[Span] = []
    for layer, gate in zip(layers, arrival, strict=True):
        start = max(now, gate)
        now = start + layer.update_s + layer.forward_s
        spans.append(Span(track="compute", name=f"forward {layer.name}", start_s=start, end_s=now))
    return now, spans


def _backward_spans(layers: Sequence[Layer], ready: Sequence[float]) -> list[Span]:
    return [
        Span(
            track="compute",
            name=f"backward {layer.name}",
            start_s=end - layer.backward_s,
            end_s=end,
        )
        for layer, end in zip(reversed(layers), reversed(ready), strict=True)
    ]


def _network_spans(sent: Sequence[_Sent], kind: str) -> list[Span]:
    return [
        Span(track="network", name=f"{kind} {index}", start_s=part.start_s, end_s=part.end_s)
        for index, part in enumerate(sent)
    ]
