"""What a simulation is given and what it returns.

Symbols, as in design.md: ``F`` and ``B`` are the seconds of a job's forward and backward pass,
``C`` the seconds of wire time that exchanging all its gradients takes, ``U`` those of its
parameter update. A *chunk* is the unit that is sent; *credit* is the bytes in flight at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from bytescheduler.exceptions import ConfigurationError

__all__ = ["POLICIES", "Layer", "Network", "Policy", "Profile", "Result", "Schedule", "Span"]

Policy = Literal["barrier", "fifo", "priority", "dear"]
Collective = Literal["ring", "tree", "ps"]
POLICIES: tuple[Policy, ...] = ("barrier", "fifo", "priority", "dear")
COLLECTIVES: tuple[Collective, ...] = ("ring", "tree", "ps")


def _require(holds: bool, rule: str, value: object, remedy: str) -> None:
    if not holds:
        raise ConfigurationError(f"{rule}, got {value}; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One step of the forward pass and the gradients that it owns.

    Attributes:
        name: for people.
        forward_s, backward_s: seconds of compute.
        gradient_bytes: bytes of its parameters' gradients; 0 for a layer without parameters.
        update_s: seconds that updating its parameters takes.
    """

    name: str
    forward_s: float
    backward_s: float
    gradient_bytes: int
    update_s: float = 0.0

    def __post_init__(self) -> None:
        seconds = (self.forward_s, self.backward_s, self.update_s)
        valid = all(math.isfinite(value) and value >= 0 for value in seconds)
        _require(valid, "seconds must be finite and not negative", seconds, f"check {self.name}")
        _require(
            self.gradient_bytes >= 0,
            "gradient_bytes must not be negative",
            self.gradient_bytes,
            f"check {self.name}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A job's layers in forward order."""

    name: str
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        _require(bool(self.layers), "a profile needs a layer", 0, "name at least one")

    @property
    def compute_s(self) -> float:
        """``F + B``, update included, seconds."""
        return sum(x.forward_s + x.backward_s + x.update_s for x in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.gradient_bytes for layer in self.layers)

    def with_compute(self, seconds: float) -> Profile:
        """The same profile with all compute scaled so that ``compute_s`` is ``seconds``."""
        _require(self.compute_s > 0, "compute_s must be positive", self.compute_s, "add compute")
        return self._scaled(time=seconds / self.compute_s, size=1.0)

    def shrunk(self, scale: float) -> Profile:
        """The same profile with gradient sizes divided by ``scale`` (whole float32 values)."""
        _require(scale > 0, "scale must be positive", scale, "pass 1 to keep the sizes")
        return self._scaled(time=1.0, size=1.0 / scale)

    def _scaled(self, *, time: float, size: float) -> Profile:
        layers = tuple(
            Layer(
                name=layer.name,
                forward_s=layer.forward_s * time,
                backward_s=layer.backward_s * time,
                update_s=layer.update_s * time,
                gradient_bytes=_shrunk_bytes(layer.gradient_bytes, size),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)


def _shrunk_bytes(size: int, factor: float) -> int:
    """``size * factor`` in whole float32 values; a layer with parameters keeps at least one."""
    if size == 0 or factor == 1.0:
        return size
    return max(1, round(size * factor / 4)) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """An alpha-beta model of the engine that moves chunks.

    Attributes:
        workers: ranks that exchange gradients.
        bandwidth: bytes per second of each worker's link, the same in both directions.
        latency_s: seconds of one message between two workers (alpha).
        collective: ``ring`` all-reduce, ``tree`` (double binary trees) or ``ps`` (push to
            parameter servers, then pull).
        servers: parameter servers that share the load; as many as workers by default.
        overhead_s: host seconds that starting one chunk takes; one after the other.
        announcement_s: seconds from the leader's start of a chunk to the followers'; by default
            a broadcast down a binary tree, ``latency_s * ceil(log2(workers))``.
        concurrency: chunks that the engine works on at once (threads of Gloo, say); no limit by
            default.
    """

    workers: int
    bandwidth: float
    latency_s: float = 0.0
    collective: Collective = "ring"
    servers: int | None = None
    overhead_s: float = 0.0
    announcement_s: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        _require(self.workers >= 1, "workers must be at least 1", self.workers, "count the ranks")
        _require(
            self.bandwidth > 0,
            "bandwidth must be positive",
            self.bandwidth,
            "pass bytes per second and worker",
        )
        for name in ("latency_s", "overhead_s", "announcement_s"):
            seconds = getattr(self, name)
            valid = seconds is None or (math.isfinite(seconds) and seconds >= 0)
            _require(valid, f"{name} must not be negative", seconds, "pass seconds")
        for name in ("servers", "concurrency"):
            count = getattr(self, name)
            _require(count is None or count >= 1, f"{name} must be at least 1", count, "or None")
        _require(
            self.collective in COLLECTIVES,
            "collective must be one of " + ", ".join(COLLECTIVES),
            repr(self.collective),
            "pick one",
        )

    @property
    def hops(self) -> int:
        """Levels of a binary tree over the workers."""
        return math.ceil(math.log2(self.workers)) if self.workers > 1 else 0

    @property
    def announce_s(self) -> float:
        """Seconds that an announcement takes to reach the last follower."""
        if self.announcement_s is not None:
            return self.announcement_s
        return self.latency_s * self.hops

    @property
    def alpha_s(self) -> float:
        """Seconds of latency in one all-reduce, whatever its size."""
        messages = {"ring": 2 * (self.workers - 1), "tree": 2 * self.hops, "ps": 2}
        return self.latency_s * messages[self.collective]

    @property
    def stage_s_per_byte(self) -> tuple[float, ...]:
        """Seconds of link time per byte, for each part of the network that a chunk occupies.

        An all-reduce loads both directions of a link at once: one stage. A push and a pull load
        one direction each, so that chunks pass through them like through a pipeline: two stages.
        """
        if self.collective == "ps":
            if self.workers == 1:
                return (0.0, 0.0)
            load = max(1.0, self.workers / (self.servers or self.workers))
            return (load / self.bandwidth, load / self.bandwidth)
        return (2 * (self.workers - 1) / self.workers / self.bandwidth,)

    def exchange_s(self, size: float) -> float:
        """``C``: wire seconds for ``size`` bytes in infinitely many chunks, without latency."""
        return size * max(self.stage_s_per_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """In which order, and in what pieces, gradients are sent.

    Attributes:
        policy: ``barrier`` (first ready first sent; the next forward waits for everything),
            ``fifo`` (the same order without the barrier), ``priority`` (what the next forward
            needs first goes first) or ``dear`` (reduce-scatter during backward, all-gather in
            forward order during the next forward).
        partition_bytes: bytes per chunk.
        credit_bytes: bytes in flight at most.
        bucket_bytes: if given, whole layers are gathered into buckets of about this size as
            DistributedDataParallel does, instead of being cut into chunks, all are sent as soon
            as they are full, and nothing is announced. For ``barrier`` only.
    """

    policy: Policy = "priority"
    partition_bytes: int = 4 << 20
    credit_bytes: int = 16 << 20
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.policy in POLICIES,
            "policy must be one of " + ", ".join(POLICIES),
            repr(self.policy),
            "pick one",
        )
        size, credit = self.partition_bytes, self.credit_bytes
        _require(size >= 1, "partition_bytes must be positive", size, "pass bytes")
        _require(
            credit >= size,
            "credit_bytes must be at least partition_bytes",
            f"{credit} below {size}",
            "raise the credit or cut smaller chunks",
        )
        bucket = self.bucket_bytes
        _require(bucket is None or bucket >= 1, "bucket_bytes must be positive", bucket, "or None")
        _require(
            bucket is None or self.policy == "barrier",
            "bucket_bytes needs policy 'barrier'",
            repr(self.policy),
            "leave bucket_bytes out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of the timeline: ``track`` (``compute`` or ``network``) is busy with ``name``."""

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One iteration in the steady state, from the start of backward to the next one.

    Attributes:
        iteration_s: seconds per iteration.
        bound_s: the structural bound: seconds per iteration in the best order with infinitely
            small chunks and no overhead.
        limit_s: ``max(F + B + U, C)``, which ignores what depends on what.
        compute_s: ``F + B + U``.
        exchange_s: ``C``, without latency and overhead.
        chunks: messages that were sent.
        timeline: what ran when; times count from the start of backward.
    """

    iteration_s: float
    bound_s: float
    limit_s: float
    compute_s: float
    exchange_s: float
    chunks: int
    timeline: tuple[Span, ...]
