"""The layer profiles that ship with the package.

They were derived by ``benchmarks/make_profiles.py`` from model definitions: gradient bytes are
exact, compute is proportional to the forward's multiply-accumulates, and a backward takes twice
its forward. How long an iteration computes depends on the accelerator; pass what you measured.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from bytescheduler.exceptions import ConfigurationError
from bytescheduler.simulate.model import Layer, Profile

__all__ = ["BACKWARD_TO_FORWARD", "DEFAULT_FLOPS", "load_profile", "profile_names"]

BACKWARD_TO_FORWARD = 2.0
DEFAULT_FLOPS = 20e12
"""Sustained operations per second taken for an accelerator where none is given."""


def profile_names() -> tuple[str, ...]:
    """Names that :func:`load_profile` takes."""
    folder = resources.files("bytescheduler.simulate") / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_profile(
    name: str,
    *,
    compute_s: float | None = None,
    batch: int | None = None,
    flops: float = DEFAULT_FLOPS,
) -> Profile:
    """Load a profile that ships with the package.

    Args:
        name: one of :func:`profile_names`.
        compute_s: seconds that one iteration's forward and backward take together; by default
            6 operations for every multiply-accumulate of ``batch`` forwards, at ``flops``.
        batch: samples per worker; the model's usual number by default.
        flops: sustained operations per second of one worker.

    Raises:
        ConfigurationError: there is no such profile, or a value is not positive.
    """
    names = profile_names()
    if name not in names:
        raise ConfigurationError(f"no profile is named {name!r}; pick one of {', '.join(names)}")
    if flops <= 0 or (batch is not None and batch <= 0):
        raise ConfigurationError(f"flops and batch must be positive, got {flops:g} and {batch}")
    path = resources.files("bytescheduler.simulate") / "profiles" / f"{name}.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    second_per_mac = 2 * (batch or described["batch"]) / flops
    layers = tuple(_layer(row, second_per_mac) for row in described["layers"])
    profile = Profile(name=name, layers=layers)
    return profile if compute_s is None else profile.with_compute(compute_s)


def _layer(row: dict[str, Any], second_per_mac: float) -> Layer:
    forward_s = row["forward_macs"] * second_per_mac
    return Layer(
        name=row["name"],
        forward_s=forward_s,
        backward_s=forward_s * BACKWARD_TO_FORWARD,
        gradient_bytes=row["gradient_bytes"],
    )
