"""Bandwidths and durations as people write them: ``25Gbps``, ``1.5GB/s``, ``10us``."""

from __future__ import annotations

import re

from bytescheduler.exceptions import ConfigurationError

__all__ = ["format_duration", "parse_bandwidth", "parse_duration"]

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Bytes per second of ``text``: ``25Gbps``, ``25gbit``, ``100Mbit/s``, ``3GB/s``.

    Raises:
        ConfigurationError: it is not positive or has no known unit.
    """
    value, unit = _split(text)
    match = re.fullmatch(r"([kKmMgGtT]?)(bps|bit|bit/s|b/s|B/s|Bps)", unit)
    if match is None or value <= 0:
        raise ConfigurationError(
            f"a bandwidth is a positive number with a unit, got {text!r}; write 25Gbps or 3GB/s"
        )
    per_byte = 1.0 if "B" in match[2] else 8.0
    return value * _PREFIXES[match[1].lower()] / per_byte


def parse_duration(text: str) -> float:
    """Seconds of ``text``: ``10us``, ``0.3s``, ``250ms``; ``0`` needs no unit.

    Raises:
        ConfigurationError: it has no known unit.
    """
    value, unit = _split(text)
    if value == 0 and not unit:
        return 0.0
    if unit not in _SECONDS:
        raise ConfigurationError(
            f"a duration is a number with a unit, got {text!r}; write 10us, 250ms or 0.3s"
        )
    return value * _SECONDS[unit]


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    return (float(match[1]), match[2]) if match else (-1.0, "")


def format_duration(seconds: float) -> str:
    """``seconds`` with three digits and a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
