"""The job that every system trains: a profile at the lab's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bytescheduler.simulate import Layer, Profile, load_profile

FLOAT32 = 4
COMPUTE_S = 0.6
TARGET_BYTES = 17 << 20
"""Bytes of gradients for two workers; the rest of the world gets fewer, see :func:`make_job`."""
MTU_OVERHEAD = 1.01
"""Bytes on the wire per byte of gradient, about; the rate is corrected by measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedLayer:
    """A layer that takes this long and has this many float32 parameters."""

    name: str
    numel: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one worker trains, layers in forward order.

    Attributes:
        scale: divided the model's sizes.
        skew: by up to this share a worker's iteration takes longer, at random.
    """

    profile: str
    workers: int
    scale: float
    layers: tuple[EmulatedLayer, ...]
    skew: float = 0.0

    @property
    def gradient_bytes(self) -> int:
        return sum(layer.numel for layer in self.layers) * FLOAT32

    def as_profile(self, compute_s: float) -> Profile:
        """For the simulator, at the compute time that was measured."""
        layers = tuple(
            Layer(
                name=layer.name,
                forward_s=layer.forward_s,
                backward_s=layer.backward_s,
                gradient_bytes=layer.numel * FLOAT32,
            )
            for layer in self.layers
        )
        return Profile(name=self.profile, layers=layers).with_compute(compute_s)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        layers = tuple(EmulatedLayer(**layer) for layer in data["layers"])
        return cls(**{**data, "layers": layers})


def make_job(
    name: str,
    workers: int,
    *,
    scale: float | None = None,
    compute_s: float = COMPUTE_S,
    skew: float = 0.0,
) -> Job:
    """A shipped profile with its sizes divided by ``scale``.

    All workers share one machine's processors, which copy every byte several times. The bytes of
    all links together are ``2 (n - 1)`` times the model, so by default the model shrinks with
    ``n - 1`` and the machine has the same load at any number of workers.
    """
    full = load_profile(name, compute_s=compute_s)
    if scale is None:
        scale = max(1.0, full.gradient_bytes / TARGET_BYTES) * max(1, workers - 1)
    return Job(
        profile=name,
        workers=workers,
        scale=scale,
        layers=tuple(_layer(layer) for layer in full.shrunk(scale).layers),
        skew=skew,
    )


def _layer(layer: Layer) -> EmulatedLayer:
    return EmulatedLayer(
        name=layer.name,
        numel=layer.gradient_bytes // FLOAT32,
        forward_s=layer.forward_s,
        backward_s=layer.backward_s,
    )


def nearest_power_of_two(size: float, *, low: int = 1 << 12) -> int:
    """For settings that follow the model's size."""
    power = low
    while power * 1.41 < size:
        power *= 2
    return power


def unique(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same settings without repetitions, in order."""
    return [item for index, item in enumerate(settings) if item not in settings[:index]]
